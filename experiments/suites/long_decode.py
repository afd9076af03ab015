"""Decoding at long contexts: batch x context x tensor parallel x decode kernel, as kernels and as engine steps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.passes import in_turn
from experiments.records import Row
from experiments.settings import Settings
from experiments.suites import options
from experiments.suites.decode_kernel import measure_decode, rank_kernel_point, variant_columns
from experiments.suites.protocol import Point, PointContext, Suite

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LongDecodeOptions:
    """See conf/suite/long_decode.yaml."""

    batch_sizes: Any
    context_lens: Any
    tensor_parallel: Any
    levels: Any
    engine_batch_sizes: Any
    engine_context_lens: Any
    engine_tensor_parallel: Any
    engine_steps: int
    engine_passes: int
    cache_states: Any
    max_interpreted_tokens: int

    def __post_init__(self) -> None:
        axes = ("batch_sizes", "context_lens", "tensor_parallel")
        for name in (*axes, *(f"engine_{axis}" for axis in axes)):
            object.__setattr__(self, name, options.positives(name, getattr(self, name)))
        object.__setattr__(self, "levels", options.choices("levels", self.levels, options.LEVELS))
        states = options.choices("cache_states", self.cache_states, options.CACHE_STATES)
        object.__setattr__(self, "cache_states", states)
        options.positive("engine_steps", self.engine_steps)
        options.positive("engine_passes", self.engine_passes)
        options.positive("max_interpreted_tokens", self.max_interpreted_tokens)


class LongDecode(Suite):
    """Kernel points compare all kernels at one rank's head counts, so tensor parallel can be studied on one device;
    step points run the engine on that many ranks."""

    name = "long_decode"
    options = LongDecodeOptions

    def points(self, settings: Settings) -> list[Point]:
        from experiments.step_bench import step_point

        chosen = self.parse_options(settings)
        points = []
        if "kernel" in chosen.levels:
            axes = (chosen.tensor_parallel, chosen.batch_sizes, chosen.context_lens)
            points += [
                rank_kernel_point(
                    settings, suite=self.name, tp=tp, batch_size=batch_size, context_len=context_len
                )
                for tp, batch_size, context_len in itertools.product(*axes)
            ]
        if "step" in chosen.levels:
            axes = (chosen.engine_tensor_parallel, chosen.engine_batch_sizes, chosen.engine_context_lens)
            for tp, batch_size, context_len in itertools.product(*axes):
                points += [
                    step_point(
                        settings,
                        variant,
                        suite=self.name,
                        tp=tp,
                        batch_size=batch_size,
                        context_len=context_len,
                        num_steps=chosen.engine_steps,
                        engine_pass=engine_pass,
                    )
                    for engine_pass, variant in in_turn(
                        settings.variants, settings.size.rounds, chosen.engine_passes
                    )
                ]
        return points

    def run(self, point: Point, context: PointContext) -> list[Row]:
        chosen = self.parse_options(context.settings)
        if point.params["level"] == "kernel":
            return measure_decode(point, context, chosen.cache_states, chosen.max_interpreted_tokens)
        from experiments.step_bench import measure_step

        return measure_step(point, context, max_interpreted_tokens=chosen.max_interpreted_tokens)

    def blank_rows(self, point: Point) -> list[dict[str, Any]]:
        return variant_columns(point) if point.params["level"] == "kernel" else [{}]

    def dtypes(self, settings: Settings) -> tuple[str, ...]:
        from experiments.backends.engine import EngineSetup

        return (EngineSetup(settings, settings.variants[0]).dtype_name,)

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        from experiments.decode_figures import kernel_figures, step_figures

        figures: dict[str, Figure] = {}
        kernel, step = (rows[rows["level"] == level] for level in ("kernel", "step"))
        if len(kernel):
            figures |= kernel_figures(kernel)
        if len(step):
            figures |= step_figures(step)
        return figures


SUITE = LongDecode()
