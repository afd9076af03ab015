"""Every Triton kernel of decode attention compiles for an H200, and with `slow` for A100 and RTX 50, and fits them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.decode.contract import DecodeProblem
from kernels.decode.launch import group_constexprs
from kernels.decode.planner import (
    REGISTERS_PER_SM,
    SHARED_PER_SM,
    SHARED_RESERVED,
    WARPS_PER_SM,
    TileShape,
    head_rows,
    head_tiles,
    padded_dim,
)
from kernels.decode.shared_prefix import query_rows
from kernels.decode.shares import merge_warps, merged_heads, padded_rows, slot_heads
from kernels.decode.split_kv import shape_of as split_kv_shape
from kernels.decode.split_kv_fused import NONCE, NONCE_BITS, merge_constexprs
from kernels.decode.split_kv_tma import chunk_constexprs
from kernels.decode.split_kv_tma import shape_of as tma_shape
from kernels.decode.stream_k_tma import StreamKTmaDecode, programs_per_sm
from kernels.triton_support import tl
from tests.kernels.aot import EXTENT, SHARED_LIMIT, Launch, Report, compile_launches

# The shapes that come nearest to the limits of registers and shared memory.
HARD = ("qwen3_bf16_p16", "bf16_mqa_d256", "fp32_mqa_d256")

ELEMENT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
DOT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def problem(dtype=torch.bfloat16, heads=(64, 8), head_dim=128, block_size=16) -> DecodeProblem:
    return DecodeProblem(8, *heads, head_dim, block_size, 4096, dtype, torch.device("cpu"))


PROBLEMS = {
    "qwen3_bf16_p16": problem(),
    "qwen3_bf16_p64": problem(block_size=64),
    "qwen3_bf16_p256": problem(block_size=256),
    "fp16_group7_d64": problem(torch.float16, (14, 2), 64),
    "bf16_group1_d80": problem(heads=(8, 8), head_dim=80),
    "bf16_group3_d96": problem(heads=(9, 3), head_dim=96),
    "bf16_group8_d256": problem(heads=(16, 2), head_dim=256),
    "bf16_mqa_d256": problem(heads=(64, 1), head_dim=256),
    "fp32_d128": problem(torch.float32),
    "fp32_mqa_d128": problem(torch.float32, (64, 1)),
    "fp32_mqa_d256": problem(torch.float32, (64, 1), 256),
    "fp32_d64": problem(torch.float32, (16, 8), 64),
}
# With caches in fp8.
FP8_PROBLEMS = {
    label: PROBLEMS[label]
    for label in ("qwen3_bf16_p16", "qwen3_bf16_p64", "fp16_group7_d64", "bf16_group1_d80", "fp32_d64")
}


def grouped(kernel: str, label: str, p: DecodeProblem, **constexprs: Any) -> Launch:
    """A kernel that packs the heads of a group, in the shape that the planner gives it."""
    shape = TileShape.of(p)
    if kernel.startswith("split_kv:"):
        shape = split_kv_shape(p)
        constexprs = {"PREFETCH": shape.prefetch, "k_scale_ptr": None, "v_scale_ptr": None} | constexprs
    return Launch(
        kernel=f"kernels.decode.{kernel}",
        types=dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{ELEMENT[p.dtype]}")
        | dict.fromkeys(("table_ptr", "context_lens_ptr"), "*i32")
        | dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32")
        | {"scale_log2": "fp32"}
        | ({"counter_ptr": "*i64"} if "NONCE" in constexprs else {}),
        constexprs=group_constexprs(p, shape.tile) | {"DOT_DTYPE": DOT[p.dtype]} | constexprs,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        label=f"{label} {constexprs.get('DIRECT', '')}",
    )


def split_kv_fp8(label: str, p: DecodeProblem, prefetch: bool = False) -> Launch:
    launch = grouped("split_kv:_attend_split", f"{label} fp8", p, DIRECT=False, PREFETCH=prefetch)
    scales = ("k_scale_ptr", "v_scale_ptr")
    types = dict.fromkeys(("k_ptr", "v_ptr"), "*fp8e4nv") | dict.fromkeys(scales, "*fp32")
    return replace(
        launch,
        types={**launch.types, **types},
        constexprs={k: v for k, v in launch.constexprs.items() if k not in scales},
    )


def split_kv_fused(label: str, p: DecodeProblem, cooperative: bool = False) -> Launch:
    return grouped(
        "split_kv_fused:_attend_and_merge",
        label,
        p,
        **merge_constexprs(p, TileShape.of(p).num_warps),
        HEAD_CHUNK=32,
        COOPERATIVE=cooperative,
        NONCE=NONCE,
        NONCE_BITS=NONCE_BITS,
    )


def stream_k(label: str, p: DecodeProblem, rows: int) -> Launch:
    return grouped("stream_k:_attend_share", label, p, ROWS=rows, SLOT_HEADS=slot_heads(p))


def stream_k_tma(
    label: str,
    p: DecodeProblem,
    rows: int = 64,
    tile: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> Launch:
    shape = tma_shape(p, tile, num_warps, num_stages)
    element = ELEMENT[p.dtype]
    return Launch(
        kernel="kernels.decode.stream_k_tma:_attend_line_share",
        types=dict.fromkeys(("q_ptr", "out_ptr"), f"*{element}")
        | dict.fromkeys(("k_desc", "v_desc"), f"tensordesc<{element}[1, {shape.tile}, 1, {p.head_dim}]>")
        | dict.fromkeys(("table_ptr", "context_lens_ptr"), "*i32")
        | dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32")
        | {"scale_log2": "fp32"},
        constexprs=group_constexprs(p, shape.tile)
        | {"DOT_DTYPE": DOT[p.dtype], "ROWS": rows, "SLOT_HEADS": slot_heads(p)},
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        label=f"{label} rows{rows} t{shape.tile}w{shape.num_warps}s{shape.num_stages}",
    )


def merge_shares(label: str, p: DecodeProblem, parts: int, line_items: int = 1) -> Launch:
    heads, chunk = merged_heads(p, parts)
    return Launch(
        kernel="kernels.decode.shares:_merge_shares",
        types=dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32")
        | {"context_lens_ptr": "*i32", "out_ptr": f"*{ELEMENT[p.dtype]}"},
        constexprs={
            "GROUP": p.group_size,
            "HEADS": head_rows(p),
            "HEAD_TILES": head_tiles(p),
            "HEAD_DIM": p.head_dim,
            "DIM": padded_dim(p.head_dim),
            "TILE": 16,
            "ROWS": padded_rows(p.batch_size),
            "SLOT_HEADS": slot_heads(p),
            "LINE_ITEMS": line_items,
            "MERGED_HEADS": heads,
            "CHUNK": chunk,
        },
        num_warps=merge_warps(p, heads, chunk),
        label=f"{label} {heads} heads {chunk} parts",
    )


def shared_prefix(label: str, p: DecodeProblem) -> Launch:
    queries = query_rows(p)
    launch = grouped("shared_prefix:_attend_prefix", label, p, QUERIES=queries, ROWS=16)
    return replace(
        launch,
        types={k: v for k, v in launch.types.items() if k != "out_ptr"},
        constexprs={k: v for k, v in launch.constexprs.items() if k not in ("HEADS", "HEAD_TILES")},
        num_warps=8 if queries * padded_dim(p.head_dim) > 4096 else launch.num_warps,
    )


def single_pass(label: str, p: DecodeProblem) -> Launch:
    return Launch(
        kernel="kernels.decode.single_pass:_attend_sequence",
        types=dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{ELEMENT[p.dtype]}")
        | dict.fromkeys(("table_ptr", "context_lens_ptr"), "*i32")
        | {"scale_log2": "fp32"},
        constexprs={
            "GROUP": p.group_size,
            "HEAD_DIM": p.head_dim,
            "DIM": padded_dim(p.head_dim),
            "BLOCK_SIZE": p.block_size,
            "TILE": 16,
        },
        label=label,
    )


def split_kv_tma(label: str, p: DecodeProblem, direct: bool = False, **shape: int) -> Launch:
    own = tma_shape(p)
    tile, warps, stages = (
        shape.get(field, getattr(own, field)) for field in ("tile", "num_warps", "num_stages")
    )
    element = ELEMENT[p.dtype]
    return Launch(
        kernel="kernels.decode.split_kv_tma:_attend_chunks",
        types=dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{element}")
        | dict.fromkeys(("k_desc", "v_desc"), f"tensordesc<{element}[1, {tile}, 1, {p.head_dim}]>")
        | dict.fromkeys(("table_ptr", "context_lens_ptr"), "*i32")
        | dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32")
        | {"scale_log2": "fp32"},
        constexprs=chunk_constexprs(p, tile) | {"DOT_DTYPE": DOT[p.dtype], "DIRECT": direct},
        num_warps=warps,
        num_stages=stages,
        label=f"{label} t{tile}w{warps}s{stages}",
    )


def merge(label: str, p: DecodeProblem, chunk: int) -> Launch:
    return Launch(
        kernel="kernels.decode.merge:_merge_splits",
        types={"partial_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": f"*{ELEMENT[p.dtype]}"},
        constexprs={
            "NUM_HEADS": p.num_q_heads,
            "HEAD_DIM": p.head_dim,
            "DIM": padded_dim(p.head_dim),
            "CHUNK": chunk,
        },
        label=f"{label} chunk {chunk}",
    )


def launches() -> dict[str, list[Launch]]:
    return {
        "split_kv": [
            grouped("split_kv:_attend_split", label, p, DIRECT=False) for label, p in PROBLEMS.items()
        ]
        + [grouped("split_kv:_attend_split", "direct", PROBLEMS["qwen3_bf16_p16"], DIRECT=True)]
        + [
            replace(  # all stages hold keys and values: two are one tile in flight
                grouped(
                    "split_kv:_attend_split",
                    f"prefetch {label}",
                    PROBLEMS[label],
                    DIRECT=False,
                    PREFETCH=True,
                ),
                num_stages=2,
            )
            for label in HARD
        ],
        "split_kv_fp8": [split_kv_fp8(label, p) for label, p in FP8_PROBLEMS.items()]
        + [split_kv_fp8("prefetch", FP8_PROBLEMS["qwen3_bf16_p16"], prefetch=True)],
        "split_kv_fused": [split_kv_fused(label, PROBLEMS[label]) for label in HARD]
        + [split_kv_fused("cooperative", PROBLEMS["qwen3_bf16_p16"], cooperative=True)],
        "stream_k": [stream_k(label, PROBLEMS[label], 256 if "p16" in label else 16) for label in HARD],
        "stream_k_tma": [
            stream_k_tma(label, PROBLEMS[label])
            for label in (
                *("qwen3_bf16_p16", "qwen3_bf16_p64", "qwen3_bf16_p256"),
                *("bf16_group8_d256", "fp16_group7_d64", "fp32_mqa_d128"),
            )
        ]
        + [stream_k_tma("many rows", PROBLEMS["qwen3_bf16_p16"], rows=1024)],
        "merge_shares": [
            merge_shares(label, replace(PROBLEMS[label], batch_size=rows), parts, line_items)
            for label in HARD
            for rows, parts, line_items in ((1, 117, 1), (4, 30, 8), (16, 9, 1), (256, 3, 1))
        ],
        "shared_prefix": [shared_prefix(label, PROBLEMS[label]) for label in (*HARD, "qwen3_bf16_p64")],
        "split_kv_tma": [
            split_kv_tma(label, PROBLEMS[label])
            for label in (
                *("qwen3_bf16_p16", "qwen3_bf16_p64", "qwen3_bf16_p256"),
                *("bf16_group8_d256", "fp16_group7_d64", "fp32_mqa_d128"),
            )
        ]
        + [split_kv_tma("direct", PROBLEMS["qwen3_bf16_p16"], direct=True)],
        "single_pass": [single_pass(label, PROBLEMS[label]) for label in HARD],
        "merge": [
            merge(label, PROBLEMS[label], chunk)
            for label in ("qwen3_bf16_p16", "bf16_group1_d80", "fp32_mqa_d256")
            for chunk in (16, 32, 64)
        ],
    }


# Bytes a thread that may spill, where not 0: two registers of addresses on sm_120; three scalars on sm_90, outside the
# loop over tiles, where ptxas gives two warps no more than 168 registers.
MAX_SPILLED = {"shared_prefix": 16, "stream_k_tma": 16}


# By default what measurements run, the shapes nearest to the limits, and each other way in which a kernel is compiled.
USUAL = ("qwen3_bf16_p16", "fp32_mqa", "direct", "prefetch", "cooperative", "many rows")


@pytest.mark.parametrize("everything", EXTENT)
@pytest.mark.parametrize("kernel", launches())
def test_compiles_and_fits(kernel: str, everything: bool) -> None:
    chosen, capabilities = launches()[kernel], (90, 120)
    if not everything:
        chosen, capabilities = [each for each in chosen if each.label.startswith(USUAL)], (90,)
    elif "tma" not in kernel and "fp8" not in kernel:
        capabilities = tuple(SHARED_LIMIT)
    reports = compile_launches(chosen, capabilities)
    assert reports
    for report in reports:
        print(report)
        report.check(MAX_SPILLED.get(kernel, 0))


def programs_held(report: Report) -> int:
    """Programs that an SM of an H200 holds at once, by what the compiler reports."""
    warps = report.launch.num_warps
    by_registers = REGISTERS_PER_SM // (32 * warps * (-(-report.registers // 8) * 8))
    by_shared = SHARED_PER_SM // (report.shared + SHARED_RESERVED)
    return min(by_registers, by_shared, WARPS_PER_SM // warps)


@pytest.mark.parametrize("everything", EXTENT)
def test_planned_programs_run_at_once(everything: bool) -> None:
    """As many programs an SM as the planner counts on: registers and shared memory of an H200 hold them all."""
    problems = {k: p for k, p in PROBLEMS.items() if everything or k.startswith(USUAL)}
    planned = [grouped("split_kv:_attend_split", label, p, DIRECT=False) for label, p in problems.items()]
    for report, p in zip(compile_launches(planned, (90,)), problems.values(), strict=True):
        assert split_kv_shape(p).programs_per_sm(p) <= programs_held(report), report


@pytest.mark.parametrize("everything", EXTENT)
def test_stream_k_tma_fills_an_sm(everything: bool) -> None:
    """Its default grid is what runs at once, no program more; at head_dim 64 and 128 in bf16 none less either."""
    exact = [
        problem(heads=(8 * group, 8), head_dim=head_dim, block_size=block_size)
        for group in ((2, 4, 8) if everything else (8,))
        for head_dim in (64, 128)
        for block_size in (16, 64)
    ]
    others = [p for p in PROBLEMS.values() if everything and StreamKTmaDecode().supports(p) is None]
    others += [problem(heads=(64, 2)), problem(heads=(64, 1))]
    shapes = [(p, tma_shape(p)) for p in exact + others]
    shapes += [
        (p, tma_shape(p, tile, None, stages))
        for p, tile, stages in [(exact[-2], 16, 3), (exact[-1], 16, 4), (exact[-1], 64, 2), (exact[0], 16, 3)]
    ]
    found = compile_launches(
        [stream_k_tma("", p, 64, s.tile, s.num_warps, s.num_stages) for p, s in shapes], capabilities=(90,)
    )
    for report, (p, shape) in zip(found, shapes, strict=True):
        assert programs_per_sm(p, shape) <= programs_held(report), report
        assert (
            p not in exact or shape != tma_shape(p) or programs_per_sm(p, shape) == programs_held(report)
        ), report


def test_an_a100_cannot_read_fp8() -> None:
    """The reason for the refusal of kernels/fp8_cache.py: should this compile one day, the refusal can go."""
    with pytest.raises(RuntimeError, match="fp8e4nv not supported in this architecture"):
        compile_launches([split_kv_fp8("qwen3", FP8_PROBLEMS["qwen3_bf16_p16"])], capabilities=(80,))
