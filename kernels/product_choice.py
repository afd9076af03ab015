"""Which kernel multiplies few rows by a weight matrix the fastest, as python -m experiments.tune_products measured."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kernels.tuned_tables import tuned_table

Kind = Literal["torch", "few_rows", "dot"]
KINDS: tuple[str, ...] = get_args(Kind)

MAX_ROWS = 16
"""Rows beyond which torch's product (cuBLAS) is never left."""

FARTHEST = 3.0
"""Doublings, of outputs and of inputs together, between a shape and the measured one that may stand in for it."""


@dataclass(frozen=True)
class ProductChoice:
    """kind: torch's product, kernels.linear.few_rows_linear or kernels.dot_linear.dot_linear.
    tile: the fields of their RowTile or DotTile, empty for torch."""

    kind: Kind
    tile: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")


TORCH = ProductChoice("torch")

Measured = dict[tuple[int, int], dict[int, ProductChoice]]
"""(out_features, in_features) -> rows -> what was the fastest."""


@functools.cache
def choose_product(out_features: int, in_features: int, rows: int, gpu: str) -> ProductChoice:
    """For x [rows, in_features] in half precision by weight [out_features, in_features].

    What was measured for the shape nearest to this one (by the sum of the two ratios, in doublings, FARTHEST at
    most) with as many rows, or the next larger number of them that was measured; on a GPU that never was, an H200's.
    """
    table = _measured(gpu)

    def distance(shape: tuple[int, int]) -> float:
        return abs(math.log2(shape[0] / out_features)) + abs(math.log2(shape[1] / in_features))

    nearest = min(table, key=distance)
    fits = [most for most in table[nearest] if most >= rows]
    if distance(nearest) > FARTHEST or not fits or rows > MAX_ROWS:
        return TORCH
    return table[nearest][min(fits)]


@functools.cache
def _measured(gpu: str) -> Measured:
    return read_table(tuned_table("kernels", gpu))


def read_table(content: Mapping[str, Any]) -> Measured:
    """What tune_products writes."""
    table: Measured = {}
    for entry in content["products"]:
        shape = (entry["out_features"], entry["in_features"])
        table.setdefault(shape, {})[entry["rows"]] = ProductChoice(entry["kind"], tuple(entry["tile"]))
    return table
