"""A decode kernel's gain at three depths, side by side: kernel, decode step, workload; and how much of it survives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.records import Row
from experiments.settings import Settings
from experiments.suites import options
from experiments.suites.decode_kernel import kernel_point, measure_decode, variant_columns
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
    tensor_parallel: Any
    max_interpreted_tokens: int

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "context_lens", "tensor_parallel"):
            object.__setattr__(self, name, options.positives(name, getattr(self, name)))
        for name in ("output_len", "engine_steps", "rounds", "max_interpreted_tokens"):
            options.positive(name, getattr(self, name))


class Attribution(WorkloadSuite):
    """num_layers: calls of the kernel in a step. The three depths of a shape share its batch and context."""

    name = "attribution"
    options = AttributionOptions
    columns = WorkloadSuite.columns | {"num_layers": "Int64"}

    def points(self, settings: Settings) -> list[Point]:
        from experiments.backends.engine import EngineSetup, model_columns
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
            columns = model_columns(settings, setup.model_config, setup.dtype_name, tp)
            kernels.append(kernel_point(settings, suite=self.name, **shape, **columns))
            steps += [
                step_point(settings, v, suite=self.name, tp=tp, num_steps=chosen.engine_steps, **shape)
                for v in settings.variants
            ]
        num_layers = {"num_layers": setup.model_config.num_layers}
        points = [*kernels, *steps, *super().points(settings)]
        return [Point(p.suite, {**p.params, **num_layers}, p.on_engine) for p in points]

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

        return figures(attribute(rows))


SUITE = Attribution()
