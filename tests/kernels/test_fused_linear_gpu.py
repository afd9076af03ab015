"""Products on the residual stream on a GPU: a chain of them, as they follow in a decode step, captured and replayed,
and norms and activation inside them against the separate kernels."""

from __future__ import annotations

import pytest
import torch

from kernels.activation import silu_mul
from kernels.fused_linear import Norm, add_linear, dot_linear
from kernels.norm import rms_norm
from tests.kernels.fused_linear_case import Case

pytestmark = pytest.mark.gpu

EPS = 1e-6
LAYERS = 24


def chain(x: torch.Tensor, layers: list[tuple[torch.Tensor, ...]], inside: bool) -> torch.Tensor:
    """Every kernel reads what the one before wrote, and scratch is handed out again while the chain runs."""
    stream = x.clone()
    for norm_weight, up, down in layers:
        if inside:
            gated = dot_linear(stream, up, norm=Norm(norm_weight, EPS), gated=True)
        else:
            gate_up = dot_linear(rms_norm(stream, norm_weight, EPS, use_triton=True), up)
            gated = silu_mul(gate_up, use_triton=True)
        add_linear(gated, down, stream)
    return stream


@pytest.mark.parametrize("inside", [False, True], ids=["epilogue", "inside"])
@pytest.mark.parametrize("rows", [2, 4, 16])
@pytest.mark.parametrize(("hidden", "inner"), [(128, 96), (1024, 3072)])
def test_replays_give_the_bits_of_eager_calls(device, rows, hidden, inner, inside):
    torch.manual_seed(rows)

    def random(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k, device=device, dtype=torch.bfloat16) * k**-0.5

    ones = torch.ones(hidden, device=device, dtype=torch.bfloat16)
    layers = [(ones, random(2 * inner, hidden), random(hidden, inner)) for _ in range(LAYERS)]
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    assert chain(x, layers, inside).isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x, layers, inside)
    for _ in range(10):
        x.normal_()
        graph.replay()
        assert torch.equal(out, chain(x, layers, inside))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [2, 3, 16])
@pytest.mark.parametrize(("out_features", "in_features"), [(6144, 4096), (1024, 1024), (4096 + 20, 5120)])
def test_inside_is_as_near_to_fp64_as_the_separate_kernels(device, dtype, rows, out_features, in_features):
    """The shapes of 8B's qkv, of one that takes the narrow tile, and of one whose last tile is not full."""
    Case(device, dtype, rows, out_features, in_features, bias=rows == 3).check()
