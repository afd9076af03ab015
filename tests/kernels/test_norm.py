"""RMSNorm: the torch path bit for bit against Transformers, the Triton path against the torch path."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.norm import _launch, add_rms_norm, rms_norm

EPS = 1e-6
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Two roundings, of the normalised value and of the product, and sums in another order may tip either: two
# units in the last place. (Triton's interpreter always cuts bf16 off instead of rounding it.)
TWO_ULP = {torch.float32: 1e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def transformers_norm(x, weight):
    norm = LlamaRMSNorm(x.shape[-1], EPS)
    norm.weight.data = weight
    return norm(x).detach()


def inputs(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return x * 3, residual, (1 + 0.2 * torch.randn(shape[-1], generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_path_equals_transformers(dtype):
    x, residual, weight = inputs((7, 96), dtype)
    assert torch.equal(rms_norm(x, weight, EPS, use_triton=False), transformers_norm(x, weight))
    normed, new_residual = add_rms_norm(x, residual, weight, EPS, use_triton=False)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(normed, transformers_norm(x + residual, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 64), (7, 96), (3, 1024), (2, 5120), (5, 3, 128), (2, 3, 2, 64), (130, 16)]
)
def test_triton_path_equals_torch_path(shape, dtype, device):
    x, residual, weight = (t.to(device) for t in inputs(shape, dtype))
    close = {"atol": TWO_ULP[dtype], "rtol": TWO_ULP[dtype]}
    expected = rms_norm(x, weight, EPS, use_triton=False)
    torch.testing.assert_close(rms_norm(x, weight, EPS, use_triton=True), expected, **close)
    normed, new_residual = add_rms_norm(x, residual, weight, EPS, use_triton=True)
    expected, expected_residual = add_rms_norm(x, residual, weight, EPS, use_triton=False)
    torch.testing.assert_close(new_residual, expected_residual, **close)
    torch.testing.assert_close(normed, expected, **close)


@pytest.mark.parametrize("use_triton", [False, True])
def test_heads_inside_packed_qkv(use_triton, device):
    """QK-norm reads its heads where the projection left them, and leaves them as they are."""
    qkv = inputs((9, 8 * 64), torch.float32)[0].to(device)
    weight = inputs((64,), torch.float32)[2].to(device)
    before = qkv.clone()
    k = qkv.view(9, 8, 64)[:, 4:6]
    out = rms_norm(k, weight, EPS, use_triton=use_triton)
    assert out.shape == k.shape
    torch.testing.assert_close(out.cpu(), transformers_norm(k.cpu(), weight.cpu()), atol=1e-6, rtol=1e-6)
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("hidden", [96, 1024])
@pytest.mark.parametrize(("rows", "num_warps"), [(1, 1), (1, 8), (2, 4), (4, 2)])
def test_every_tile_and_layout(rows, num_warps, hidden, device):
    """Any tile, over x and residual as flat as the results, or either inside something wider: one answer."""
    x, residual, weight = (t.to(device) for t in inputs((5, hidden), torch.float32))
    expected = add_rms_norm(x, residual, weight, EPS, use_triton=False)
    padding = torch.full_like(x, float("nan"))
    wide_x, wide_residual = (torch.cat([padding, t], 1)[:, hidden:] for t in (x, residual))
    for first, second in ((x, residual), (wide_x, residual), (x, wide_residual), (wide_x, wide_residual)):
        actual = _launch(first, second, weight, EPS, rows, num_warps)
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
        alone = _launch(first, None, weight, EPS, rows, num_warps)[0]
        wanted = rms_norm(x, weight, EPS, use_triton=False)
        torch.testing.assert_close(alone, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("use_triton", [False, True])
def test_inputs_are_left_alone_and_transposed_views_work(use_triton, device):
    x, residual, weight = (t.to(device) for t in inputs((64, 64), torch.float32))
    before = x.clone(), residual.clone()
    add_rms_norm(x, residual, weight, EPS, use_triton=use_triton)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    out = rms_norm(x.T, weight, EPS, use_triton=use_triton)
    torch.testing.assert_close(out.cpu(), transformers_norm(x.T.cpu(), weight.cpu()), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("use_triton", [False, True])
def test_residual_keeps_its_own_dtype(use_triton, device):
    """An fp32 residual stream is not rounded to bf16 on the way."""
    x, _, weight = (t.to(device) for t in inputs((4, 64), torch.bfloat16))
    residual = inputs((4, 64), torch.float32, seed=1)[1].to(device)
    normed, new_residual = add_rms_norm(x, residual, weight, EPS, use_triton=use_triton)
    assert new_residual.dtype == torch.float32
    assert torch.equal(new_residual, x.float() + residual)
    expected = transformers_norm(new_residual.cpu(), weight.cpu())
    assert normed.dtype == expected.dtype
    torch.testing.assert_close(normed.cpu(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("use_triton", [False, True])
def test_no_rows_and_rows_of_zeros(use_triton, device):
    weight = torch.ones(64, device=device)
    assert rms_norm(torch.empty(0, 64, device=device), weight, EPS, use_triton=use_triton).shape == (0, 64)
    assert (rms_norm(torch.zeros(2, 64, device=device), weight, EPS, use_triton=use_triton) == 0).all()


@pytest.mark.parametrize("use_triton", [False, True])
def test_rows_do_not_mix(use_triton, device):
    """A row of NaN, as an unwritten padding row may be, stays alone; rows share Triton programs here."""
    x = inputs((9, 64), torch.float32)[0].to(device)
    x[4] = float("nan")
    out = rms_norm(x, torch.ones(64, device=device), EPS, use_triton=use_triton)
    assert out.isnan().any(1).tolist() == [row == 4 for row in range(9)]


@pytest.mark.parametrize("use_triton", [False, True])
def test_bad_shapes_are_named(use_triton):
    x = torch.ones(2, 64)
    with pytest.raises(ValueError, match=r"weight has shape \(32,\), x's last dimension is 64"):
        rms_norm(x, torch.ones(32), EPS, use_triton=use_triton)
    with pytest.raises(ValueError, match="residual has shape"):
        add_rms_norm(x, torch.ones(1, 64), torch.ones(64), EPS, use_triton=use_triton)
