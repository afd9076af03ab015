"""Every Triton kernel of decode attention compiles for A100, H100/H200 and RTX 50, fits, and spills nothing."""

from __future__ import annotations

import pytest
import torch

from kernels.decode.contract import DecodeProblem
from kernels.decode.planner import TileShape, head_rows, head_tiles, padded_dim
from kernels.triton_support import tl
from tests.kernels.aot import Launch, compile_launches

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
    "bf16_mqa_d256": problem(heads=(64, 1), head_dim=256),
    "fp32_d128": problem(torch.float32),
    "fp32_mqa_d128": problem(torch.float32, (64, 1)),
    "fp32_mqa_d256": problem(torch.float32, (64, 1), 256),
    "fp32_d64": problem(torch.float32, (16, 8), 64),
}


def split_kv(label: str, p: DecodeProblem, direct: bool) -> Launch:
    pointer = f"*{ELEMENT[p.dtype]}"
    shape = TileShape.of(p)
    return Launch(
        kernel="kernels.decode.split_kv:_attend_split",
        types=dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), pointer)
        | dict.fromkeys(("table_ptr", "context_lens_ptr"), "*i32")
        | dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32")
        | {"scale_log2": "fp32"},
        constexprs={
            "NUM_KV_HEADS": p.num_kv_heads,
            "GROUP": p.group_size,
            "HEADS": head_rows(p),
            "HEAD_TILES": head_tiles(p),
            "HEAD_DIM": p.head_dim,
            "DIM": padded_dim(p.head_dim),
            "BLOCK_SIZE": p.block_size,
            "TILE": shape.tile,
            "DIRECT": direct,
            "DOT_DTYPE": DOT[p.dtype],
        },
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        label=f"{label}{'_direct' if direct else ''}",
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
        "split_kv": [split_kv(label, p, direct=False) for label, p in PROBLEMS.items()]
        + [split_kv("qwen3_bf16_p16", PROBLEMS["qwen3_bf16_p16"], direct=True)],
        "single_pass": [single_pass(label, p) for label, p in PROBLEMS.items()],
        "merge": [
            merge(label, PROBLEMS[label], chunk)
            for label in ("qwen3_bf16_p16", "bf16_group1_d80", "fp32_mqa_d256")
            for chunk in (16, 32, 64)
        ],
    }


@pytest.mark.parametrize("kernel", launches())
def test_compiles_fits_and_does_not_spill(kernel: str) -> None:
    for report in compile_launches(launches()[kernel]):
        print(report)
        report.check()
