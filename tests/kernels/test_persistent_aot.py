"""All layers in one launch compile for GPUs that are not here; weights are on their way before a program waits."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from kernels.persistent.layers import LayerShape, LayerTile, layer_constexprs  # noqa: E402
from tests.kernels.aot import Launch, compile_launches  # noqa: E402

SMALL = LayerShape(
    1024, 3072, 16, 8, 128, 1e-6, qk_norm=True, attention_bias=False, mlp_bias=False
)  # Qwen3-0.6B
MIDDLE = dataclasses.replace(SMALL, hidden_size=4096, intermediate_size=12288, num_q_heads=32)  # 8B
LARGE = dataclasses.replace(SMALL, hidden_size=5120, intermediate_size=25600, num_q_heads=64)  # 32B
LLAMA = LayerShape(2048, 8192, 32, 8, 64, 1e-5, qk_norm=False, attention_bias=True, mlp_bias=True)

# Bytes a thread: what is the same in all layers, put aside where the weights in flight fill the registers.
MAX_SPILLED = 96


def launch(shape: LayerShape, rows: int) -> Launch:
    constexprs = layer_constexprs(shape, LayerTile.of_rows(rows), rows, 16, torch.bfloat16)
    return Launch(
        kernel="kernels.persistent.kernel:layers_kernel",
        types={
            **dict.fromkeys(("stream_ptr", "kv_cache_ptr", "qkv_ptr", "heads_ptr", "gated_ptr"), "*bf16"),
            **dict.fromkeys(("addresses_ptr", "positions_ptr", "slot_mapping_ptr"), "*i64"),
            **dict.fromkeys(("cos_sin_ptr", "partial_ptr", "lse_ptr"), "*fp32"),
            **dict.fromkeys(("block_table_ptr", "context_lens_ptr", "counter_ptr"), "*i32"),
            **dict.fromkeys(("eps", "scale_log2"), "fp32"),
        },
        constexprs=constexprs | {"DOT_DTYPE": tl.bfloat16, "PHASE": -1},
        num_warps=8,
        num_stages=1,
        label=f"{shape.hidden_size} x {rows}",
    )


def check(launches: list[Launch], capabilities: tuple[int, ...]) -> None:
    for report in compile_launches(launches, capabilities):
        report.check(MAX_SPILLED)
        first_wait = report.ptx.index("ld.global.gpu.acquire")
        early = re.findall(r"ld\.global\.L1::evict_first\S*\.v4\.b32", report.ptx[:first_wait])
        loads = report.launch.constexprs["HIDDEN_N"] * report.launch.constexprs["HIDDEN_K"] // (8 * 32 * 8)
        assert len(early) == 2 * loads, f"{report}: two tiles of weights, 16 bytes a load"


def test_compile_for_an_h200():
    check([launch(SMALL, 1)], (90,))


@pytest.mark.slow
def test_compile_for_every_gpu():
    check([launch(SMALL, 1), launch(MIDDLE, 2), launch(LARGE, 1), launch(LLAMA, 4)], (80, 90, 120))
