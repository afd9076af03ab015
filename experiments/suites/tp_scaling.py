"""One decode step of the engine on more and more ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.records import Row
from experiments.settings import Settings
from experiments.suites import options
from experiments.suites.protocol import Point, PointContext, Suite

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TpScalingOptions:
    """See conf/suite/tp_scaling.yaml."""

    tensor_parallel: Any
    batch_sizes: Any
    context_lens: Any
    engine_steps: int
    max_interpreted_tokens: int

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "batch_sizes", "context_lens"):
            object.__setattr__(self, name, options.positives(name, getattr(self, name)))
        options.positive("engine_steps", self.engine_steps)
        options.positive("max_interpreted_tokens", self.max_interpreted_tokens)


class TpScaling(Suite):
    name = "tp_scaling"
    options = TpScalingOptions

    def points(self, settings: Settings) -> list[Point]:
        from experiments.step_bench import step_point

        chosen = self.parse_options(settings)
        axes = (settings.variants, chosen.batch_sizes, chosen.context_lens, chosen.tensor_parallel)
        return [
            step_point(
                settings,
                variant,
                suite=self.name,
                tp=tp,
                batch_size=batch_size,
                context_len=context_len,
                num_steps=chosen.engine_steps,
            )
            for variant, batch_size, context_len, tp in itertools.product(*axes)
        ]

    def run(self, point: Point, context: PointContext) -> list[Row]:
        from experiments.step_bench import measure_step

        limit = self.parse_options(context.settings).max_interpreted_tokens
        return measure_step(point, context, max_interpreted_tokens=limit)

    def dtypes(self, settings: Settings) -> tuple[str, ...]:
        from experiments.backends.engine import EngineSetup

        return (EngineSetup(settings, settings.variants[0]).dtype_name,)

    def summary(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Speed-ups are over one rank, by geometric means of rounds that have nothing in common; efficiency is the
        speed-up over the number of ranks. For the columns of collectives see collectives.py.
        """
        from experiments.stats import unpaired_ratio
        from experiments.tables import summarise

        table = summarise(rows, medians=("collective_us", "collective_step_us", "collective_share"))
        if "time_us" not in table:
            return table
        timed = rows[(rows["status"] == "ok") & rows["time_us"].notna()]
        empty = dict.fromkeys(("speedup", "speedup_low", "speedup_high", "efficiency"), float("nan"))
        table = table.assign(**empty, speedup_over=None)
        keys = ["variant", "batch_size", "context_len", "tp"]
        times = {key: group["time_us"].tolist() for key, group in timed.groupby(keys)}
        for line, key in zip(table.index, table[keys].itertuples(index=False, name=None)):
            one, several = times.get((*key[:-1], 1)), times.get(key)
            if one is None or several is None:
                continue
            ratio = unpaired_ratio(one, several)
            table.loc[line, "speedup"] = ratio.value
            if key[-1] > 1:
                table.loc[line, ["speedup_low", "speedup_high"]] = ratio.low, ratio.high
            table.loc[line, "speedup_over"] = "tp 1"
            table.loc[line, "efficiency"] = ratio.value / key[-1]
        return table

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        from experiments.plots import line_grid
        from experiments.tables import median_of, over_rounds

        table, over = self.summary(rows), over_rounds(rows)
        for name in ("time_us", "time_us_low", "time_us_high", "speedup", "collective_share"):
            if name not in table:
                table[name] = float("nan")
        common: dict[str, Any] = {"x": "tp", "columns": "batch_size", "rows": "context_len"}
        step_ms = {
            f"step_ms{end}": table[f"time_us{end}"].astype(float) / 1000 for end in ("", "_low", "_high")
        }
        return {
            "step_time": line_grid(
                table.assign(**step_ms),
                y="step_ms",
                labels=("ranks", "time per step (ms)"),
                title=f"One decode step on several ranks ({median_of(rows)})",
                **common,
            ),
            "speedup": line_grid(
                table,
                y="speedup",
                labels=("ranks", "speed-up over one rank"),
                title=f"One decode step: speed-up over one rank; dotted: as many times as ranks ({over})",
                ideal=True,
                **common,
            ),
            "collectives": line_grid(
                table,
                y="collective_share",
                interval=False,
                labels=("ranks", "share of a step in collectives"),
                title="Share of a decode step that rank 0 spends in collectives, waiting included",
                log_y=False,
                top=1.0,
                empty="nothing to show: one rank has no collectives",
                **common,
            ),
        }


SUITE = TpScaling()
