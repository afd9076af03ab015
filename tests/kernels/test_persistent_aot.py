"""All layers in one launch compile for GPUs that are not here; weights are on their way before a program waits."""

from __future__ import annotations

import dataclasses

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

# Bytes a thread: what is the same in all layers, put aside where the weights in flight fill the registers. By compute
# capability: Ampere keeps in registers what later GPUs have in uniform ones.
MAX_SPILLED = {80: 160, 90: 96, 120: 96}

TYPES = {torch.bfloat16: ("bf16", tl.bfloat16), torch.float32: ("fp32", tl.float32)}


def launch(shape: LayerShape, rows: int, dtype: torch.dtype = torch.bfloat16) -> Launch:
    tile = LayerTile.of(shape.head_dim, dtype)
    name, dot_dtype = TYPES[dtype]
    return Launch(
        kernel="kernels.persistent.kernel:layers_kernel",
        types={
            **dict.fromkeys(("stream_ptr", "kv_cache_ptr", "qkv_ptr", "heads_ptr", "gated_ptr"), f"*{name}"),
            **dict.fromkeys(("addresses_ptr", "positions_ptr", "slot_mapping_ptr"), "*i64"),
            **dict.fromkeys(("cos_sin_ptr", "partial_ptr", "lse_ptr"), "*fp32"),
            **dict.fromkeys(("block_table_ptr", "context_lens_ptr", "counter_ptr"), "*i32"),
            **dict.fromkeys(("eps", "scale_log2"), "fp32"),
        },
        constexprs=layer_constexprs(shape, tile, rows, 16, dtype) | {"DOT_DTYPE": dot_dtype, "PHASE": -1},
        num_warps=tile.num_warps,
        num_stages=1,
        label=f"{shape.hidden_size} x {rows} {name}",
    )


def check(launches: list[Launch], capabilities: tuple[int, ...]) -> None:
    for report in compile_launches(launches, capabilities):
        report.check(MAX_SPILLED[report.capability])
        lines = [
            line.strip() for line in report.ptx.splitlines() if line.strip() and "//" not in line.strip()[:2]
        ]
        code = [line for line in lines if not line.startswith((".loc", "$", "{", "}"))]
        releases = [
            i for i, line in enumerate(code) if "atom.global.gpu.release" in line or "red.release.gpu" in line
        ]
        assert len(releases) == len(range(6)), f"{report}: a release a phase"
        for i in releases:
            before = code[max(0, i - 12) : i]
            assert any("bar.sync" in line for line in before), f"{report}: all threads' stores come before it"
        # Each phase but the merge of heads has its first loads on their way before it polls.
        polls = [
            i
            for i, line in enumerate(code)
            if "ld.global.gpu.acquire" in line or "atom.global.gpu.acquire" in line
        ]
        constexprs = report.launch.constexprs
        itemsize = 4 if "fp32" in report.launch.label else 2
        loads = constexprs["HIDDEN_N"] * constexprs["HIDDEN_K"] * itemsize // (8 * 32 * 16)
        start, early = 0, []
        for i in polls:
            early.append(sum("evict_first" in line and ".v4.b32" in line for line in code[start:i]))
            start = i + 1
        assert len(polls) == 12, f"{report}: a poll and its loop's for each of six phases"
        # Two tiles: of qkv, o, gate_up and down; what else is counted between belongs to the loops of products.
        assert early[0] == 2 * loads, f"{report}: two tiles of weights, 16 bytes a load"
        assert sum(count >= 2 * loads for count in early) >= 4, f"{report}: {early}"


def test_compile_for_an_h200():
    check([launch(SMALL, 1)], (90,))


@pytest.mark.slow
def test_compile_for_every_gpu():
    launches = [launch(SMALL, 1), launch(MIDDLE, 2), launch(LARGE, 1), launch(LLAMA, 2)]
    check([*launches, launch(SMALL, 1, torch.float32)], (80, 90, 120))
