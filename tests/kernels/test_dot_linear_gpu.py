"""Tensor-core products on a GPU: a chain of them, as they follow in a decode step, captured and replayed."""

from __future__ import annotations

import pytest
import torch

from kernels.activation import silu_mul
from kernels.dot_linear import DotTile, dot_linear
from kernels.norm import add_rms_norm

pytestmark = pytest.mark.gpu

EPS = 1e-6
LAYERS = 24
TILE = DotTile(16, 256, 2, 6)


def chain(x: torch.Tensor, layers: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """Every kernel reads what the one before wrote, and scratch is handed out again while the chain runs."""
    hidden, residual = torch.zeros_like(x), x
    for norm_weight, up, down in layers:
        normed, residual = add_rms_norm(hidden, residual, norm_weight, EPS, use_triton=True)
        gate_up = dot_linear(normed, up, tile=TILE)
        hidden = dot_linear(silu_mul(gate_up, use_triton=True), down, tile=TILE)
    return residual + hidden


@pytest.mark.parametrize("rows", [2, 4, 16])
@pytest.mark.parametrize(("hidden", "inner"), [(128, 96), (1024, 3072)])
def test_replays_give_the_bits_of_eager_calls(device, rows, hidden, inner):
    torch.manual_seed(rows)

    def random(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k, device=device, dtype=torch.bfloat16) * k**-0.5

    ones = torch.ones(hidden, device=device, dtype=torch.bfloat16)
    layers = [(ones, random(2 * inner, hidden), random(hidden, inner)) for _ in range(LAYERS)]
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    assert chain(x, layers).isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x, layers)
    for _ in range(10):
        x.normal_()
        graph.replay()
        assert torch.equal(out, chain(x, layers))
