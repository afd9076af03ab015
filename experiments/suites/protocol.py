"""What a suite is: points, a way to measure one, and how to look at the rows. A new one is a file here and a yaml."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from experiments.columns import COLUMNS, make_row
from experiments.records import Row, point_id
from experiments.roofline import Ceilings
from experiments.settings import Settings, parse_fields

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """One combination of a sweep. params: flat, JSON-able, complete: their hash is the point's identity.

    Params that are columns are copied into the point's rows (see PointContext.row). on_engine: a whole engine runs,
    which isolation is for. unsupported: why this machine or model cannot run it, where that is known beforehand: its
    rows say so, and nothing is started.
    """

    suite: str
    params: Mapping[str, Any]
    on_engine: bool = False
    unsupported: str | None = None

    @cached_property
    def id(self) -> str:
        return point_id(self.suite, self.params)

    @property
    def label(self) -> str:
        """What the progress bar shows."""
        shown = (("level", ""), ("variant", ""), ("tp", "tp"), ("batch_size", "b"), ("context_len", "ctx "))
        parts = [
            f"{prefix}{self.params[name]}" for name, prefix in shown if self.params.get(name) is not None
        ]
        return " ".join(parts) or self.id


# Params that say who does a point's work, not what the work is.
_WORKERS = frozenset(
    {
        *("variant", "decode_attention", "prefill_attention", "variant_options", "engine", "block_size"),
        *("tp", "num_q_heads", "num_kv_heads"),
    }
)


@dataclass(frozen=True)
class PointContext:
    """What measuring a point may use besides the point: the run's settings, device and measured ceilings."""

    settings: Settings
    device: torch.device
    ceilings: Ceilings
    run_id: str
    device_name: str
    columns: Mapping[str, str] = field(default_factory=dict)

    def seed(self, point: Point) -> int:
        """Of the point's inputs: the run's seed and the point, so that a point alone repeats what a sweep did."""
        return self._digest(point.id)

    def shared_seed(self, point: Point) -> int:
        """Of a workload's requests: the same for points that differ only in kernels, engine options or ranks, so that
        all of them are given the same work."""
        work = {name: value for name, value in point.params.items() if name not in _WORKERS}
        return self._digest(point_id(point.suite, work))

    def _digest(self, name: str) -> int:
        digest = hashlib.sha256(f"{self.settings.seed} {name}".encode()).digest()
        return int.from_bytes(digest[:6], "big")

    def row(self, point: Point, **values: Any) -> Row:
        """A row of the point: what identifies it, its parameters that are columns, and `values` over them."""
        base = {
            "run_id": self.run_id,
            "point_id": point.id,
            "suite": point.suite,
            "device_name": self.device_name,
            "size": self.settings.size.name,
        }
        params = {name: v for name, v in point.params.items() if name in COLUMNS or name in self.columns}
        return make_row(self.columns, **(base | params | values))


class Suite(ABC):
    """A kind of experiment. Stateless.

    options: a frozen dataclass whose fields are the suite's keys under `bench`, validated when made.
    columns: names and pandas dtypes of columns that only this suite's rows have.
    """

    name: str
    options: type
    columns: Mapping[str, str] = {}

    def parse_options(self, settings: Settings) -> Any:
        """The suite's options from settings.bench; ValueError names an unknown or bad one."""
        return parse_fields(self.options, settings.bench, "bench")

    @abstractmethod
    def points(self, settings: Settings) -> list[Point]:
        """The sweep, in the order to run it."""

    @abstractmethod
    def run(self, point: Point, context: PointContext) -> list[Row]:
        """Measure one point: one row at least, made by context.row. What it raises becomes rows with that status."""

    def blank_rows(self, point: Point) -> list[dict[str, Any]]:
        """Columns of the rows of a point that failed as a whole: one for each thing that it would have compared."""
        return [{}]

    def dtypes(self, settings: Settings) -> tuple[str, ...]:
        """Names of the dtypes whose matmul ceilings the suite's rows need."""
        return ()

    def tables(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        """Further tables by file name (without .csv), printed and reported beside the summary."""
        return {}

    def summary(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The table of a run: what is printed and written as table.csv."""
        from experiments.tables import summarise

        return summarise(rows)

    @abstractmethod
    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        """Plots by file name (without .png)."""
