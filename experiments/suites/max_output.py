"""One request (or a few) written to the model's limit: does it get there, and how fast is it at each length?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import workload
from experiments.suites.high_concurrency import EqualRequests

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Parts of the output whose median interval between tokens is told apart.
PARTS = 16


class MaxOutput(EqualRequests):
    """samples_us: the median interval between tokens, of each of PARTS equal parts of the output."""

    name = "max_output"

    def _row(self, point: Any, context: Any, setup: Any, run: Any, number: int, columns: Any) -> Any:
        row = super()._row(point, context, setup, run, number, columns)
        row["samples_us"] = intervals_us(run)
        return row

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        import pandas as pd

        from experiments.plots import line_grid

        lines = []
        for row in rows[rows["status"] == "ok"].itertuples():
            for part, sample in enumerate(row.samples_us or ()):
                length = row.context_len + round((part + 0.5) * row.output_len / PARTS)
                lines.append(
                    {"variant": row.variant, "tp": row.tp, "length": length, "itl_ms": sample / 1000}
                )
        table = pd.DataFrame(lines, columns=["variant", "tp", "length", "itl_ms"])
        table = table.groupby(["variant", "tp", "length"], as_index=False, sort=False)["itl_ms"].median()
        figure = line_grid(
            table,
            x="length",
            y="itl_ms",
            interval=False,
            columns="tp",
            labels=("tokens of the sequence so far", "time between tokens (ms)"),
            title="Time between tokens as the output grows (median of each part)",
        )
        return {"itl_by_length": figure}


def intervals_us(run: workload.WorkloadRun) -> list[float] | None:
    """Medians over all requests, part by part; None if the output is shorter than the parts."""
    gaps = [1e6 * np.diff(served.token_s) for served in run.served if len(served.token_s) > PARTS]
    if not gaps:
        return None
    return [
        float(np.median(np.concatenate(part))) for part in zip(*(np.array_split(gap, PARTS) for gap in gaps))
    ]


SUITE = MaxOutput()
