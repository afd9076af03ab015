"""The tensor-core product of few rows against fp64, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.dot_linear import DotTile, dot_linear

ONE_STEP, STEPS = DotTile(8, 128, 1, 2), DotTile(16, 32, 2, 3)
# Sums are fp32; bf16 results near a rounding boundary may round either way (the interpreter truncates).
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-7}


class Inputs:
    def __init__(self, device, dtype, rows: int, out_features: int, in_features: int, has_bias: bool) -> None:
        generator = torch.Generator(device).manual_seed(rows)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(dtype)

        self.x = random(rows, in_features)
        self.weight = random(out_features, in_features)
        self.bias = random(out_features) if has_bias else None

    def check(self, actual: torch.Tensor) -> None:
        """That it is x W^T + b."""
        expected = self.x.double() @ self.weight.double().T
        expected = expected if self.bias is None else expected + self.bias.double()
        limit = TOLERANCES[self.x.dtype]
        assert actual.dtype == self.x.dtype
        torch.testing.assert_close(actual.double(), expected, atol=8 * limit, rtol=limit)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("tile", [ONE_STEP, STEPS], ids=["one-step", "steps"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_equals_the_exact_product(device, dtype, rows, tile, has_bias):
    t = Inputs(device, dtype, rows, 21, 100, has_bias)
    t.check(dot_linear(t.x, t.weight, t.bias, tile=tile))


@pytest.mark.parametrize("tile", [ONE_STEP, STEPS])
def test_what_lies_beside_rows_is_neither_read_nor_written(device, tile, monkeypatch):
    t = Inputs(device, torch.float32, 3, 21, 90, False)

    def within_nan(x: torch.Tensor) -> torch.Tensor:
        wide = torch.full((x.shape[0] + 2, x.shape[1] + 6), float("nan"), device=device)
        view = wide[: x.shape[0], : x.shape[1]]
        view.copy_(x)
        return view

    x, weight = within_nan(t.x), within_nan(t.weight)
    memory = torch.full((20 * 32,), float("nan"), device=device)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda shape, **kwargs: memory[: 3 * 21].view(shape))
        out = dot_linear(x, weight, tile=tile)
    t.check(out)
    assert memory[3 * 21 :].isnan().all()


@pytest.mark.parametrize("tile", [ONE_STEP, STEPS])
def test_a_row_does_not_depend_on_the_others(device, tile):
    t = Inputs(device, torch.float32, 4, 50, 300, False)
    together = dot_linear(t.x, t.weight, tile=tile)
    for row in range(4):
        assert torch.equal(dot_linear(t.x[row : row + 1], t.weight, tile=tile)[0], together[row])


def test_shapes_that_do_not_fit_are_named(device):
    t = Inputs(device, torch.float32, 5, 8, 16, False)
    for x, weight, bias, message in (
        (torch.zeros(17, 16, device=device), t.weight, None, "x has 17 rows, the limit is 16"),
        (t.x[:0], t.weight, None, "x has 0 rows, the limit is 16"),
        (t.x, t.weight, t.weight[0], r"bias must be \[8\], got shape \(16,\)"),
        (t.x[:, :8], t.weight, None, r"x must have 16 features, as weight has, got shape \(5, 8\)"),
        (t.x, t.weight.half(), None, r"weight must be torch\.float32, as x is, got torch\.float16"),
        (t.x[:, :8], t.weight.T[:8], None, r"weight must have contiguous rows, got strides \(1, 16\)"),
        (t.x.T[:5, :5], t.weight[:, :5], None, r"x must have contiguous rows, got strides \(1, 16\)"),
    ):
        with pytest.raises(ValueError, match=message):
            dot_linear(x, weight, bias, tile=STEPS)


def test_tiles_that_cannot_run_are_named():
    with pytest.raises(ValueError, match="block_k is 48, expected a power of two"):
        DotTile(8, 48, 1, 3)
    with pytest.raises(ValueError, match="block_n must be at least 8"):
        DotTile(4, 64, 1, 3)
