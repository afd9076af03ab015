"""Dependent launch on a GPU: chains of kernels that all hang on one another, as they follow in a decode step."""

from __future__ import annotations

import pytest
import torch

from kernels.activation import silu_mul
from kernels.dependent_launch import supports_pdl
from kernels.fused_linear import add_linear, dot_linear, gated_linear, norm_linear
from kernels.norm import rms_norm

pytestmark = pytest.mark.gpu

EPS = 1e-6
LAYERS = 24


@pytest.fixture
def pdl_device(device: torch.device) -> torch.device:
    if not supports_pdl(device):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    return device


def weights(device: torch.device, hidden: int, inner: int) -> list[tuple[torch.Tensor, ...]]:
    def random(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k, device=device, dtype=torch.bfloat16) * k**-0.5

    ones = torch.ones(hidden, device=device, dtype=torch.bfloat16)
    return [(ones, random(2 * inner, hidden), random(hidden, inner)) for _ in range(LAYERS)]


def chain(
    x: torch.Tensor, layers: list[tuple[torch.Tensor, ...]], *, prologues: bool, pdl: bool
) -> torch.Tensor:
    """Every kernel reads what the one before wrote, and scratch is handed out again while the chain runs."""
    stream = x.clone()
    for norm_weight, up, down in layers:
        if prologues:
            gate_up = norm_linear(stream, norm_weight, EPS, up, pdl=pdl)
            gated_linear(gate_up, down, stream, pdl=pdl)
        else:
            gate_up = dot_linear(rms_norm(stream, norm_weight, EPS, use_triton=True, pdl=pdl), up, pdl=pdl)
            add_linear(silu_mul(gate_up, use_triton=True, pdl=pdl), down, stream, pdl=pdl)
    return stream


@pytest.mark.parametrize(("rows", "prologues"), [(1, True), (2, True), (1, False), (4, False), (16, False)])
@pytest.mark.parametrize(("hidden", "inner"), [(128, 96), (1024, 3072)])
def test_replays_give_the_bits_of_kernels_that_do_not_overlap(pdl_device, rows, prologues, hidden, inner):
    torch.manual_seed(rows)
    layers = weights(pdl_device, hidden, inner)
    x = torch.randn(rows, hidden, device=pdl_device, dtype=torch.bfloat16)
    expected = chain(x, layers, prologues=prologues, pdl=False)
    assert expected.isfinite().all()
    assert torch.equal(chain(x, layers, prologues=prologues, pdl=True), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x, layers, prologues=prologues, pdl=True)
    for _ in range(50):
        x.normal_()
        graph.replay()
        assert torch.equal(out, chain(x, layers, prologues=prologues, pdl=False))
