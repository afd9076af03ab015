"""The products on the residual stream against fp64, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.fused_linear import DotTile, Norm, add_linear, dot_linear
from tests.kernels.fused_linear_case import Case

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "tile"), [(1, ONE_STEP), (2, None), (5, STEPS), (16, None)])
def test_norm_and_activation_inside_are_as_near_to_fp64_as_separate_kernels(device, dtype, rows, tile):
    """Neither features nor columns fill the last tile."""
    Case(device, dtype, rows, 2 * 21, 100, bias=rows == 5).check(tile)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("stream", [0.01, 2000.0])
def test_a_norm_inside_takes_streams_of_any_size(device, dtype, stream):
    """In fp16 too, whose largest number x times the norm's weight, or x's square, would pass."""
    case = Case(device, dtype, 4, 42, 100, stream=stream)
    case.norm.weight.mul_(30)
    if stream == 2000.0:
        case.x[1, 7] = 60000.0
    case.check(STEPS, options=((True, False), (True, True)))


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "norm"])
def test_gated_takes_gate_first_then_up(device, normed):
    t = Inputs(device, torch.float32, 3, 2 * 21, 100, True)
    weight, bias = t.weight / 10, t.bias
    norm = Norm(t.weight[0], 1e-6) if normed else None
    gate, up = dot_linear(t.x, weight, bias, norm=norm, tile=STEPS).chunk(2, 1)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(dot_linear(t.x, weight, bias, norm=norm, gated=True, tile=STEPS), expected)


def test_eps_counts(device):
    t = Inputs(device, torch.float32, 2, 8, 100, False)
    small, large = (dot_linear(t.x, t.weight, norm=Norm(t.weight[0], eps), tile=STEPS) for eps in (1e-9, 3.0))
    mean = t.x.square().mean(1, keepdim=True)
    torch.testing.assert_close(large, small * (mean / (mean + 3.0)).sqrt())


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
        # The norm's weight too ends where NaN begins.
        norm = torch.full((96,), float("nan"), device=device)
        norm[:90] = 1.0
        options = {"norm": Norm(norm[:90], 1e-6), "tile": tile}
        for gated in (False, True):
            x, weight = t.x, t.weight[:20]
            expected = dot_linear(x, weight, gated=gated, **options)
            actual = dot_linear(within_nan(x), within_nan(weight), gated=gated, **options)
            assert torch.equal(actual, expected)
            assert actual.isfinite().all()


@pytest.mark.parametrize("tile", [ONE_STEP, STEPS])
def test_a_row_does_not_depend_on_the_others(device, tile):
    t = Inputs(device, torch.float32, 4, 50, 300, False)
    together = t.residual.clone()
    add_linear(t.x, t.weight, together, tile=tile)
    norm = Norm(t.weight[0], 1e-6)
    normed = dot_linear(t.x, t.weight, norm=norm, gated=True, tile=tile)
    for row in range(4):
        assert torch.equal(
            dot_linear(t.x[row : row + 1], t.weight, norm=norm, gated=True, tile=tile)[0], normed[row]
        )
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
    with pytest.raises(ValueError, match="weight must have an even number of rows to be gated, got 7"):
        dot_linear(t.x, t.weight[:7], gated=True)
    for weight, match in (
        (t.x[0, :8], r"norm\.weight must be \[16\], got shape \(8,\)"),
        (t.x[0].half(), r"norm\.weight must be torch\.float32, as x is, got torch\.float16"),
        (
            torch.ones(16, 2, device=device)[:, 0],
            r"norm\.weight must have contiguous rows, got strides \(2,\)",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            dot_linear(t.x, t.weight, norm=Norm(weight, 1e-6))
    with pytest.raises(ValueError, match=r"norm\.eps must be at least 0, got -1\.0"):
        dot_linear(t.x, t.weight, norm=Norm(t.x[0], -1.0))
    with pytest.raises(ValueError, match="block_k is 48, expected a power of two"):
        DotTile(8, 48, 1, 3)
    with pytest.raises(ValueError, match="block_n must be at least 8"):
        DotTile(4, 64, 1, 3)
