"""Norms, activation, RoPE, KV writes, small matmuls and greedy sampling: Triton against torch, on a model's shapes."""

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
class ElementwiseOptions:
    """See conf/suite/elementwise_kernel.yaml."""

    operations: Any
    num_tokens: Any
    cache_states: Any
    max_interpreted_tokens: int

    def __post_init__(self) -> None:
        from experiments.elementwise_bench import OPERATIONS

        known = tuple(OPERATIONS)
        chosen = known if self.operations is None else options.choices("operations", self.operations, known)
        object.__setattr__(self, "operations", chosen)
        object.__setattr__(self, "num_tokens", options.positives("num_tokens", self.num_tokens))
        states = options.choices("cache_states", self.cache_states, options.CACHE_STATES)
        object.__setattr__(self, "cache_states", states)
        options.positive("max_interpreted_tokens", self.max_interpreted_tokens)


class ElementwiseKernel(Suite):
    """batch_size is the number of tokens."""

    name = "elementwise_kernel"
    options = ElementwiseOptions

    def points(self, settings: Settings) -> list[Point]:
        from experiments.backends.engine import EngineSetup, model_columns

        chosen = self.parse_options(settings)
        setup = EngineSetup(settings, settings.variants[0])
        shared = model_columns(settings, setup.model_config, setup.dtype_name, 1) | {
            "level": "kernel",
            "model_config": settings.model.argument,
            "rounds": settings.size.rounds,
            "samples": settings.size.samples,
            "seed": settings.seed,
        }
        return [
            Point(self.name, shared | {"operation": operation, "batch_size": num_tokens})
            for operation, num_tokens in itertools.product(chosen.operations, chosen.num_tokens)
        ]

    def run(self, point: Point, context: PointContext) -> list[Row]:
        from experiments.backends.engine import EngineSetup
        from experiments.elementwise_bench import ElementwiseBench
        from experiments.kernel_bench import measure

        chosen = self.parse_options(context.settings)
        setup = EngineSetup(context.settings, context.settings.variants[0])
        bench = ElementwiseBench(
            operation=point.params["operation"],
            config=setup.model_config,
            num_tokens=point.params["batch_size"],
            dtype=point.params["dtype"],
            device=context.device,
        )
        return measure(
            bench,
            point,
            context,
            cache_states=chosen.cache_states,
            max_interpreted_size=chosen.max_interpreted_tokens,
        )

    def blank_rows(self, point: Point) -> list[dict[str, Any]]:
        from experiments.elementwise_bench import PATHS

        return [{"variant": path} for path in PATHS]

    def dtypes(self, settings: Settings) -> tuple[str, ...]:
        from experiments.backends.engine import EngineSetup

        return (EngineSetup(settings, settings.variants[0]).dtype_name,)

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        from experiments.plots import line_grid
        from experiments.tables import median_of

        table = self.summary(rows)
        for name in ("time_us", "roofline_fraction", "cache_state"):
            if name not in table:
                table[name] = None
        cold = table[(table["cache_state"] == "cold") | table["cache_state"].isna()]
        common: dict[str, Any] = {"x": "batch_size", "columns": "operation"}
        return {
            "time": line_grid(
                table,
                y="time_us",
                labels=("tokens", "time per call (µs)"),
                title=f"Elementwise operations ({median_of(rows)})",
                styles="cache_state",
                **common,
            ),
            "roofline": line_grid(
                cold,
                y="roofline_fraction",
                interval=False,
                labels=("tokens", "fraction of the roofline"),
                title="Elementwise operations, cold: floor at measured ceilings / time",
                log_y=False,
                level=1.0,
                **common,
            ),
        }


SUITE = ElementwiseKernel()
