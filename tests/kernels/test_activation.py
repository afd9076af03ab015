"""SiLU * up: the torch path bit for bit against Transformers' formula, the Triton path against the torch path."""

from __future__ import annotations

import pytest
import torch

from kernels.activation import silu_mul

# Two roundings, of silu and of the product, either of which another exponential may tip. (Triton's
# interpreter always cuts bf16 off instead of rounding it.)
TWO_ULP = {torch.float32: 1e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def gate_up(tokens, intermediate, dtype):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(tokens, 2 * intermediate, generator=generator) * 4).to(dtype)


@pytest.mark.parametrize("dtype", TWO_ULP)
def test_torch_path_equals_transformers(dtype):
    x = gate_up(5, 96, dtype)
    expected = torch.nn.SiLU()(x[:, :96]) * x[:, 96:]
    assert torch.equal(silu_mul(x, use_triton=False), expected)


@pytest.mark.parametrize("dtype", TWO_ULP)
@pytest.mark.parametrize(("tokens", "intermediate"), [(1, 1), (5, 96), (3, 1024), (2, 3000)])
def test_triton_path_equals_torch_path(tokens, intermediate, dtype, device):
    x = gate_up(tokens, intermediate, dtype).to(device)
    out = silu_mul(x, use_triton=True)
    assert out.dtype == dtype
    torch.testing.assert_close(out, silu_mul(x, use_triton=False), atol=TWO_ULP[dtype], rtol=TWO_ULP[dtype])


@pytest.mark.parametrize("use_triton", [False, True])
def test_extremes_views_and_no_tokens(use_triton, device):
    x = torch.tensor([[100.0, -100.0, 3e38, -3e38, 1.0, 1.0, 0.5, 1.0]], device=device)
    out = silu_mul(x, use_triton=use_triton)
    torch.testing.assert_close(out.cpu(), torch.tensor([[100.0, 0.0, 1.5e38, 0.0]]), atol=1e-30, rtol=1e-6)
    wide = gate_up(4, 64, torch.float32).to(device)
    before = wide.clone()
    view = wide[::2, 32:96]
    expected = torch.nn.functional.silu(view[:, :32]) * view[:, 32:]
    torch.testing.assert_close(silu_mul(view, use_triton=use_triton), expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(wide, before)
    assert silu_mul(wide[:0], use_triton=use_triton).shape == (0, 64)


@pytest.mark.parametrize("shape", [(2, 7), (8,), (2, 2, 4)])
def test_bad_shapes_are_named(shape):
    with pytest.raises(ValueError, match="gate_up must be"):
        silu_mul(torch.ones(shape), use_triton=False)
