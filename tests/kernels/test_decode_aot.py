"""Every Triton kernel of decode attention compiles for A100, H100/H200 and RTX 50, and fits them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.decode.contract import DecodeProblem
from kernels.decode.launch import group_constexprs
from kernels.decode.planner import SHARED_PER_SM, SHARED_RESERVED, TileShape, head_rows, padded_dim
from kernels.decode.shared_prefix import query_rows
from kernels.decode.split_kv import shape_of as split_kv_shape
from kernels.decode.split_kv_fused import NONCE, NONCE_BITS, merge_constexprs
from kernels.decode.split_kv_tma import chunk_constexprs
from kernels.decode.split_kv_tma import shape_of as tma_shape
from kernels.decode.stream_k import CHUNK
from kernels.triton_support import tl
from tests.kernels.aot import SHARED_LIMIT, Launch, compile_launches

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
    launch = grouped("split_kv:_attend_split", f"fp8 {label}", p, DIRECT=False, PREFETCH=prefetch)
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


def stream_k(label: str, p: DecodeProblem, rows: int) -> list[Launch]:
    constexprs = {"ROWS": rows, "SLOT_HEADS": min(p.group_size, head_rows(p))}
    share = grouped("stream_k:_attend_share", label, p, **constexprs)
    merged = {k: v for k, v in share.constexprs.items() if k not in ("BLOCK_SIZE", "DOT_DTYPE")}
    types = dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32") | {
        "context_lens_ptr": "*i32",
        "out_ptr": f"*{ELEMENT[p.dtype]}",
    }
    return [
        share,
        Launch("kernels.decode.stream_k:_merge_shares", types, merged | {"CHUNK": CHUNK}, label=label),
    ]


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
        "stream_k": [
            launch
            for label in HARD
            for launch in stream_k(label, PROBLEMS[label], 256 if "p16" in label else 16)
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


# Bytes a thread that may spill, where not 0: two registers of addresses on sm_120.
MAX_SPILLED = {"shared_prefix": 16}


@pytest.mark.parametrize("kernel", launches())
def test_compiles_and_fits(kernel: str) -> None:
    capabilities = (90, 120) if "tma" in kernel or "fp8" in kernel else tuple(SHARED_LIMIT)
    for report in compile_launches(launches()[kernel], capabilities):
        print(report)
        report.check(MAX_SPILLED.get(kernel, 0))


def test_planned_programs_run_at_once() -> None:
    """As many programs an SM as the planner counts on: registers and shared memory of an H200 hold them all."""
    found = compile_launches(launches()["split_kv"][: len(PROBLEMS)], capabilities=(90,))
    for report, p in zip(found, PROBLEMS.values(), strict=True):
        warps = report.launch.num_warps
        by_registers = 65536 // (32 * warps * (-(-report.registers // 8) * 8))
        by_shared = SHARED_PER_SM // (report.shared + SHARED_RESERVED)
        planned = split_kv_shape(p).programs_per_sm(p)
        assert planned <= min(by_registers, by_shared, 64 // warps), report


def test_an_a100_cannot_read_fp8() -> None:
    """The reason for the refusal of kernels/fp8_cache.py: should this compile one day, the refusal can go."""
    with pytest.raises(RuntimeError, match="fp8e4nv not supported in this architecture"):
        compile_launches([split_kv_fp8("qwen3", FP8_PROBLEMS["qwen3_bf16_p16"])], capabilities=(80,))
