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
        """Speed-ups are over one rank; efficiency is the speed-up over the number of ranks.

        collective_share: the part of a step that goes to collectives.
        """
        from experiments.tables import summarise

        table = summarise(rows, medians=("collective_us",))
        if "time_us" not in table:
            return table
        one = table[table["tp"] == 1].set_index(["variant", "batch_size", "context_len"])["time_us"]
        keys = zip(table["variant"], table["batch_size"], table["context_len"])
        table["speedup"] = [one.get(key, float("nan")) for key in keys] / table["time_us"]
        table["speedup_low"] = table["speedup_high"] = float("nan")
        table["speedup_over"] = "tp 1"
        table["efficiency"] = table["speedup"] / table["tp"].astype(float)
        if "collective_us" in table:
            table["collective_share"] = table["collective_us"] / table["time_us"]
        return table

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        from experiments.plots import line_grid

        table = self.summary(rows).assign()
        for name in ("time_us", "speedup"):
            if name not in table:
                table[name] = float("nan")
        common: dict[str, Any] = {"x": "tp", "columns": "batch_size", "rows": "context_len"}
        return {
            "step_time": line_grid(
                table.assign(step_ms=table["time_us"].astype(float) / 1000),
                y="step_ms",
                labels=("ranks", "time per step (ms)"),
                title="One decode step on several ranks (median over rounds)",
                **common,
            ),
            "speedup": line_grid(
                table,
                y="speedup",
                interval=False,
                labels=("ranks", "speed-up over one rank"),
                title="One decode step: speed-up over one rank",
                log_y=False,
                **common,
            ),
        }


SUITE = TpScaling()
