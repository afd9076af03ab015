"""The products on the residual stream against fp64, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.fused_linear import DotTile, add_linear, dot_linear

ONE_STEP, STEPS = DotTile(8, 128, 1, 2), DotTile(16, 32, 2, 3)
# Roundings of the result alone (the interpreter truncates): sums are fp32, and what comes before rounds alike.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-7}


class Inputs:
    def __init__(self, device, dtype, rows: int, out_features: int, in_features: int, has_bias: bool) -> None:
        generator = torch.Generator(device).manual_seed(rows)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(dtype)

        self.x = random(rows, in_features)
        self.weight = random(out_features, in_features)
        self.residual = random(rows, out_features)
        self.bias = random(out_features) if has_bias else None

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b, rounded once, as fp64."""
        out = x.double() @ self.weight.double().T
        out = out if self.bias is None else out + self.bias.double()
        return out.to(x.dtype).double()


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    limit = TOLERANCES[actual.dtype]
    # A product near a rounding boundary may round either way, and the sum again.
    torch.testing.assert_close(actual.double(), expected, atol=8 * limit, rtol=2 * limit)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def inputs(request, device):
    return lambda *shape: Inputs(device, request.param, *shape)


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("tile", [ONE_STEP, STEPS, None], ids=["one-step", "steps", "default"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_add_linear_adds_in_place(inputs, rows, tile, has_bias):
    t = inputs(rows, 21, 100, has_bias)
    expected = t.product(t.x) + t.residual.double()
    add_linear(t.x, t.weight, t.residual, t.bias, tile=tile)
    check(t.residual, expected)


@pytest.mark.parametrize("rows", [1, 7, 16])
def test_dot_linear(inputs, rows):
    t = inputs(rows, 40, 96, rows == 7)
    check(dot_linear(t.x, t.weight, t.bias, tile=STEPS), t.product(t.x))


def test_what_lies_beside_rows_is_neither_read_nor_written(device):
    t = Inputs(device, torch.float32, 3, 21, 90, False)

    def within_nan(x: torch.Tensor) -> torch.Tensor:
        wide = torch.full((x.shape[0] + 2, x.shape[1] + 6), float("nan"), device=device)
        view = wide[: x.shape[0], : x.shape[1]]
        view.copy_(x)
        return view

    for tile in (ONE_STEP, STEPS):
        residual = within_nan(t.residual)
        add_linear(within_nan(t.x), within_nan(t.weight), residual, tile=tile)
        check(residual, t.product(t.x) + t.residual.double())
        beside = torch.ones(5, 27, dtype=torch.bool)
        beside[:3, :21] = False
        whole = residual.as_strided((5, 27), (27, 1))
        assert whole.isnan().cpu().equal(beside)


@pytest.mark.parametrize("tile", [ONE_STEP, STEPS])
def test_a_row_does_not_depend_on_the_others(device, tile):
    t = Inputs(device, torch.float32, 4, 50, 300, False)
    together = t.residual.clone()
    add_linear(t.x, t.weight, together, tile=tile)
    for row in range(4):
        alone = t.residual[row : row + 1].clone()
        add_linear(t.x[row : row + 1], t.weight, alone, tile=tile)
        assert torch.equal(alone[0], together[row])


def test_shapes_that_do_not_fit_are_named(device):
    t = Inputs(device, torch.float32, 5, 8, 16, False)
    with pytest.raises(ValueError, match="x has 17 rows, the limit is 16"):
        dot_linear(torch.zeros(17, 16, device=device), t.weight)
    with pytest.raises(ValueError, match=r"bias must be \[8\]"):
        dot_linear(t.x, t.weight, t.weight[0])
    with pytest.raises(ValueError, match="x must have 16 features"):
        add_linear(t.x[:, :8], t.weight, t.residual)
    with pytest.raises(ValueError, match=r"residual must be \[4, 8\], got shape \(5, 8\)"):
        add_linear(t.x[:4], t.weight, t.residual)
    with pytest.raises(ValueError, match=r"weight must be torch\.float32, as x is, got torch\.float16"):
        dot_linear(t.x, t.weight.half())
    with pytest.raises(ValueError, match="weight must have contiguous rows"):
        dot_linear(t.x[:, :8], t.weight.T[:8])
    with pytest.raises(ValueError, match="block_k is 48, expected a power of two"):
        DotTile(8, 48, 1, 3)
    with pytest.raises(ValueError, match="block_n must be at least 8"):
        DotTile(4, 64, 1, 3)
