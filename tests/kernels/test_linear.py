"""The few-rows product against fp64, in the interpreter or on a GPU, and compiled for GPUs that are not here."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from kernels.linear import MAX_ROWS, RowTile, choose_tile, few_rows_linear, linear  # noqa: E402
from kernels.product_choice import ProductChoice  # noqa: E402
from tests.kernels.aot import EXTENT, Launch, compile_usual  # noqa: E402


def exact(x, weight, bias):
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
@pytest.mark.parametrize(("out_features", "in_features"), [(33, 100), (16, 64), (7, 1500)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_equals_the_exact_product(device, rows, out_features, in_features, has_bias):
    generator = torch.Generator(device).manual_seed(rows)
    x = torch.randn(rows, in_features, generator=generator, device=device)
    weight = torch.randn(out_features, in_features, generator=generator, device=device)
    bias = torch.randn(out_features, generator=generator, device=device) if has_bias else None
    out = few_rows_linear(x, weight, bias, RowTile(4, 64, 4))
    torch.testing.assert_close(out.double(), exact(x, weight, bias), atol=2e-4, rtol=1e-5)


def test_padding_and_strides_are_respected(device):
    generator = torch.Generator(device).manual_seed(0)
    wide = torch.full((3, 200), float("nan"), device=device)
    wide[:, :90] = torch.randn(3, 90, generator=generator, device=device)
    tall = torch.full((40, 96), float("nan"), device=device)
    tall[:21, :90] = torch.randn(21, 90, generator=generator, device=device)
    x, weight = wide[:, :90], tall[:21, :90]
    out = few_rows_linear(x, weight, None)
    torch.testing.assert_close(out.double(), exact(x, weight, None), atol=1e-4, rtol=1e-5)


def test_a_row_does_not_depend_on_the_others(device):
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(4, 300, generator=generator, device=device)
    weight = torch.randn(50, 300, generator=generator, device=device)
    tile = RowTile(4, 128, 4)
    together = few_rows_linear(x, weight, None, tile)
    for row in range(4):
        assert torch.equal(few_rows_linear(x[row : row + 1], weight, None, tile)[0], together[row])


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        (torch.zeros(5, 8), torch.zeros(3, 8), None, "x has 5 rows, the limit is 4"),
        (torch.zeros(1, 8), torch.zeros(3, 9), None, r"weight must be \[out_features, 8\]"),
        (torch.zeros(1, 8), torch.zeros(3, 8), torch.zeros(4), r"bias must be \[3\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(x, weight, bias, message):
    with pytest.raises(ValueError, match=message):
        few_rows_linear(x, weight, bias)


def test_every_kind_of_product_is_the_product(device, monkeypatch):
    """What the table names runs, in its tile, with the bias; fp32, more rows and use_triton=False are torch's."""
    x, weight, bias = (torch.randn(*size, device=device).half() for size in ((3, 96), (40, 96), (40,)))
    asked = []

    def choose(kind, tile):
        def choice(*arguments):
            asked.append(arguments)
            return ProductChoice(kind, tile)

        monkeypatch.setattr("kernels.product_choice.choose_product", choice)

    for kind, tile in (("torch", ()), ("few_rows", (4, 128, 4)), ("dot", (16, 64, 2, 2))):
        choose(kind, tile)
        product = linear(x, weight, bias, use_triton=True)
        assert asked.pop()[:3] == (40, 96, 3)
        torch.testing.assert_close(product.double(), exact(x, weight, bias), rtol=2e-3, atol=2e-3)
    choose("dot", (1, 1, 1, 1))  # would be refused
    for other, use_triton in ((x, False), (x.float(), True), (x.repeat(6, 1), True), (x[:0], True)):
        expected = torch.nn.functional.linear(other, weight.to(other.dtype), bias.to(other.dtype))
        assert torch.equal(
            linear(other, weight.to(other.dtype), bias.to(other.dtype), use_triton=use_triton), expected
        )
    assert not asked


def launch(rows: int, out_features: int, in_features: int) -> Launch:
    tile = choose_tile(out_features, in_features, rows)
    return Launch(
        kernel="kernels.linear:_few_rows_kernel",
        types={**dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), "*bf16"), "rows": "i32"},
        constexprs={
            "OUT_FEATURES": out_features,
            "IN_FEATURES": in_features,
            "ROWS": rows,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
        },
        num_warps=tile.num_warps,
        label=f"{rows} x {out_features} x {in_features}",
    )


@pytest.mark.parametrize("everything", EXTENT)
def test_compiles_without_spills_for_absent_gpus(everything):
    shapes = [(rows, n, k) for n, k in ((4096, 1024), (151936, 1024), (4096, 12288)) for rows in (1, 2, 4)]
    for report in compile_usual([launch(*shape) for shape in shapes], 3, everything):
        print(report)
        report.check()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(4096, 1024), (1024, 3072), (151936, 1024), (5120, 25600)]
)
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_half_precision_on_a_gpu(dtype, out_features, in_features, rows):
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, in_features, generator=generator, device="cuda", dtype=dtype)
    weight = torch.randn(out_features, in_features, generator=generator, device="cuda", dtype=dtype)
    expected = exact(x, weight, None)
    error = ((few_rows_linear(x, weight, None).double() - expected).norm() / expected.norm()).item()
    assert error < (3e-3 if dtype == torch.bfloat16 else 4e-4)
