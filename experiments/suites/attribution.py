"""A decode kernel's gain at three depths, side by side: kernel, decode step, workload; and how much of it survives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from experiments.passes import in_turn
from experiments.records import Row
from experiments.settings import Settings
from experiments.suites import options
from experiments.suites.decode_kernel import measure_decode, rank_kernel_point, variant_columns
from experiments.suites.protocol import Point, PointContext
from experiments.workload import Request
from experiments.workload_suite import Phase, WorkloadSuite, random_prompt

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class AttributionOptions:
    """See conf/suite/attribution.yaml."""

    batch_sizes: Any
    context_lens: Any
    output_len: int
    engine_steps: int
    rounds: int
    engine_passes: int
    tensor_parallel: Any
    max_interpreted_tokens: int
    sampling: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling", options.sampling("sampling", self.sampling))
        for name in ("batch_sizes", "context_lens", "tensor_parallel"):
            object.__setattr__(self, name, options.positives(name, getattr(self, name)))
        for name in ("output_len", "engine_steps", "rounds", "engine_passes", "max_interpreted_tokens"):
            options.positive(name, getattr(self, name))


class Attribution(WorkloadSuite):
    """num_layers: calls of the kernel in a step. The three depths of a shape share its batch and context."""

    name = "attribution"
    options = AttributionOptions
    columns = WorkloadSuite.columns | {"num_layers": "Int64"}

    def points(self, settings: Settings) -> list[Point]:
        from experiments.backends.engine import EngineSetup
        from experiments.step_bench import step_point

        if len(settings.variants) < 2:
            raise ValueError(
                "attribution compares: name two kernels or more, attention=[single_pass,split_kv]"
            )
        chosen = self.parse_options(settings)
        setup = EngineSetup(settings, settings.variants[0])
        kernels, steps = [], []
        for tp, batch, context_len in itertools.product(
            chosen.tensor_parallel, chosen.batch_sizes, chosen.context_lens
        ):
            shape = {"batch_size": batch, "context_len": context_len}
            kernels.append(rank_kernel_point(settings, suite=self.name, tp=tp, **shape))
            steps += [
                step_point(
                    settings,
                    variant,
                    suite=self.name,
                    tp=tp,
                    num_steps=chosen.engine_steps,
                    engine_pass=engine_pass,
                    **shape,
                )
                for engine_pass, variant in in_turn(
                    settings.variants, settings.size.rounds, chosen.engine_passes
                )
            ]
        num_layers = {"num_layers": setup.model_config.num_layers}
        points = [*kernels, *steps, *super().points(settings)]
        return [replace(point, params={**point.params, **num_layers}) for point in points]

    def cases(self, options: Any) -> list[dict[str, Any]]:
        axes = (options.tensor_parallel, options.batch_sizes, options.context_lens)
        return [
            {"tp": tp, "batch_size": batch, "context_len": context_len, "output_len": options.output_len}
            for tp, batch, context_len in itertools.product(*axes)
        ]

    def phases(self, case: Mapping[str, Any], vocab_size: int, rng: random.Random) -> list[Phase]:
        prompts = [random_prompt(rng, case["context_len"], vocab_size) for _ in range(case["batch_size"])]
        return [Phase([Request(prompt, case["output_len"]) for prompt in prompts])]

    def run(self, point: Point, context: PointContext) -> list[Row]:
        limit = self.parse_options(context.settings).max_interpreted_tokens
        if point.params["level"] == "kernel":
            return measure_decode(point, context, ("cold",), limit)
        if point.params["level"] == "step":
            from experiments.step_bench import measure_step

            return measure_step(point, context, max_interpreted_tokens=limit)
        return super().run(point, context)

    def blank_rows(self, point: Point) -> list[dict[str, Any]]:
        return variant_columns(point) if point.params["level"] == "kernel" else [{}]

    def tables(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        from experiments.attribution import attribute

        return {"attribution": attribute(rows)}

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        from experiments.attribution import attribute, figures
        from experiments.tables import over_rounds

        return figures(attribute(rows), over_rounds(rows))


SUITE = Attribution()
