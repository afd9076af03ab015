"""A suite of points that behave as told, for tests of what surrounds them: see behave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.records import Row
from experiments.settings import Settings
from experiments.suites import Point, PointContext, Suite

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

HANG_S = 600
"""Longer than anyone waits."""


@dataclass(frozen=True)
class FakeOptions:
    """points: a behaviour each. rows: of a good point. log: a file to which each execution, when it begins, appends its
    number and process. gate: the file for which a point that waits does so.
    """

    points: Sequence[str]
    rows: int = 3
    seconds: float = 0.0
    log: str | None = None
    gate: str | None = None

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"bench.rows must be at least 1, got {self.rows}")


class FakeSuite(Suite):
    name = "tests.experiments.fake_suite"
    options = FakeOptions

    def points(self, settings: Settings) -> list[Point]:
        chosen = self.parse_options(settings)
        return [
            Point(
                self.name, {"variant": name, "context_len": 1 << i, "behaviour": name, "seed": settings.seed}
            )
            for i, name in enumerate(chosen.points)
        ]

    def run(self, point: Point, context: PointContext) -> list[Row]:
        chosen = self.parse_options(context.settings)
        if chosen.log is not None:
            with Path(chosen.log).open("a") as log:
                log.write(f"{point.params['context_len']} {os.getpid()}\n")
        time.sleep(chosen.seconds)
        behave(point.params["behaviour"], chosen.gate)
        base = float(point.params["context_len"])
        return [
            context.row(point, status="ok", round=i, time_us=base * (1 + 0.01 * i), bytes=1000, flops=10)
            for i in range(chosen.rows)
        ]

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        from experiments.plots import line_grid

        table = self.summary(rows)
        if "time_us" not in table:
            table["time_us"] = float("nan")
        return {
            "time": line_grid(
                table, x="context_len", y="time_us", labels=("x", "us"), title="t", series="status"
            )
        }


def behave(behaviour: str, gate: str | None) -> Any:
    """What the name says: raise, oom, hang, wait, kill, interrupt; or nothing (ok)."""
    if behaviour == "raise":
        raise RuntimeError("this point always fails")
    if behaviour == "oom":
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
    if behaviour == "hang":
        time.sleep(HANG_S)
    if behaviour == "wait":
        assert gate is not None
        deadline = time.monotonic() + HANG_S
        while not Path(gate).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    if behaviour == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "interrupt":
        raise KeyboardInterrupt
    return None


SUITE = FakeSuite()
