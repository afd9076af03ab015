"""The sweep: every point becomes rows on disk, in order, whatever happens to any of them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from experiments.columns import FAILURES
from experiments.execution import PointResult, run_here, run_isolated
from experiments.records import RecordWriter
from experiments.suites.protocol import Point, PointContext, Suite


@dataclass(frozen=True)
class SweepResult:
    """num_points: finished ones, this time and before. statuses: rows by status. interrupted: by Ctrl-C."""

    num_points: int
    statuses: Counter[str]
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        return any(self.statuses[status] for status in FAILURES)


def run_sweep(
    suite: Suite,
    points: Sequence[Point],
    context: PointContext,
    writer: RecordWriter,
    config: dict[str, Any],
) -> SweepResult:
    """Run the points that `writer` does not hold yet and append their rows.

    config: the resolved configuration, for points that run in a process of their own. OSError from the disk ends the
    sweep; what was written stays.
    """
    to_do = [point for point in points if point.id not in writer.finished]
    isolate_rest = interrupted = False
    with tqdm(
        total=len(points),
        initial=len(points) - len(to_do),
        unit="point",
        desc=suite.name,
        file=sys.stderr,
        dynamic_ncols=True,
        mininterval=0.1 if sys.stderr.isatty() else 10.0,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]{postfix}",
    ) as bar:
        for point in to_do:
            bar.set_postfix_str(point.label, refresh=sys.stderr.isatty())
            try:
                result = _run(suite, point, context, config, isolate_rest)
            except KeyboardInterrupt:
                interrupted = True
                break
            writer.append(result.rows)
            isolate_rest = isolate_rest or result.broken
            bar.update()
    statuses = Counter(row["status"] for row in writer.rows)
    return SweepResult(len(writer.finished), statuses, interrupted)


def _run(
    suite: Suite, point: Point, context: PointContext, config: dict[str, Any], isolate_rest: bool
) -> PointResult:
    isolate = context.settings.run.isolate
    if isolate == "auto":
        isolate = isolate_rest or (point.on_engine and context.device.type == "cuda")
    if isolate and point.unsupported is None:
        return run_isolated(suite, point, context, config)
    return run_here(suite, point, context)
