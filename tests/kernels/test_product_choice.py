"""Which product is taken for a shape: the table's, or that of the nearest shape in it."""

from __future__ import annotations

import pytest

from kernels import product_choice
from kernels.dot_linear import DotTile
from kernels.linear import MAX_ROWS as MAX_FEW_ROWS
from kernels.linear import RowTile
from kernels.product_choice import TORCH, ProductChoice, choose_product, read_table
from kernels.tuned_tables import DEFAULT_GPU, tuned_table

FEW, DOT = ProductChoice("few_rows", (4, 512, 4)), ProductChoice("dot", (16, 256, 2, 6))


def entry(out_features: int, in_features: int, rows: int, chosen: ProductChoice) -> dict:
    shape = {"out_features": out_features, "in_features": in_features, "rows": rows}
    return shape | {"kind": chosen.kind, "tile": list(chosen.tile)}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        *(entry(4096, 1024, rows, chosen) for rows, chosen in ((1, FEW), (4, DOT), (16, TORCH))),
        *(entry(65536, 4096, rows, chosen) for rows, chosen in ((1, DOT),)),
    ]
    monkeypatch.setattr(product_choice, "_measured", lambda gpu: read_table({"products": entries}))
    choose_product.cache_clear()
    yield
    choose_product.cache_clear()


@pytest.mark.parametrize(
    ("shape", "rows", "expected"),
    [
        ((4096, 1024), 1, FEW),
        ((4096, 1024), 2, DOT),  # the next larger number of rows
        ((4096, 1024), 4, DOT),
        ((4096, 1024), 5, TORCH),
        ((4096, 1024), 17, TORCH),
        ((65536, 4096), 1, DOT),
        ((65536, 4096), 2, TORCH),  # never measured
        ((6144, 1536), 1, FEW),  # nearer to the first
        ((32768, 4096), 1, DOT),
        ((4096 >> 3, 1024), 1, FEW),  # three doublings away
        ((4096 >> 3, 1023), 1, TORCH),  # a little more
        ((64, 32), 1, TORCH),
    ],
)
def test_nearest_shape_and_next_rows(table, shape, rows, expected) -> None:
    assert choose_product(*shape, rows, "some GPU") == expected


def test_the_table_that_is_shipped_names_tiles_that_can_run() -> None:
    measured = read_table(tuned_table("kernels", DEFAULT_GPU))
    assert measured
    for rows_of in measured.values():
        for rows, chosen in rows_of.items():
            assert 0 < rows <= product_choice.MAX_ROWS
            if chosen.kind == "few_rows":
                assert rows <= MAX_FEW_ROWS
                assert RowTile(*chosen.tile)
            elif chosen.kind == "dot":
                assert DotTile(*chosen.tile)
            else:
                assert chosen == TORCH


def test_a_kind_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="kind must be one of torch, few_rows, dot, got 'gemv'"):
        ProductChoice("gemv")  # type: ignore[arg-type]
