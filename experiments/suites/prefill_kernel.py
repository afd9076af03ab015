"""Prefill attention kernels alone, on one rank's heads of a model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
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
class PrefillKernelOptions:
    """See conf/suite/prefill_kernel.yaml."""

    kernels: Any
    shapes: Any
    tensor_parallel: Any
    contiguous: bool
    cache_states: Any
    max_interpreted_tokens: int

    def __post_init__(self) -> None:
        from kernels import prefill

        if self.kernels is not None:
            kernels = options.choices("kernels", self.kernels, tuple(prefill.names()))
            object.__setattr__(self, "kernels", kernels)
        listed = isinstance(self.shapes, list | tuple) and self.shapes
        shapes = self.shapes if listed and isinstance(self.shapes[0], list | tuple) else [self.shapes]
        for shape in shapes:
            if not isinstance(shape, list | tuple) or len(shape) != 3:
                raise ValueError(
                    f"bench.shapes must be [batch, query length, context length] each, got {shape!r}"
                )
            _, query_len, context_len = (options.positive("shapes", each) for each in shape)
            if query_len > context_len:
                raise ValueError(
                    f"bench.shapes: query length {query_len} is above context length {context_len}"
                )
        object.__setattr__(self, "shapes", tuple(dict.fromkeys(tuple(shape) for shape in shapes)))
        object.__setattr__(
            self, "tensor_parallel", options.positives("tensor_parallel", self.tensor_parallel)
        )
        options.flag("contiguous", self.contiguous)
        states = options.choices("cache_states", self.cache_states, options.CACHE_STATES)
        object.__setattr__(self, "cache_states", states)
        options.positive("max_interpreted_tokens", self.max_interpreted_tokens)


class PrefillKernelSuite(Suite):
    name = "prefill_kernel"
    options = PrefillKernelOptions
    columns: Mapping[str, str] = {
        "contiguous": "boolean"
    }  # the order of the blocks that all kernels were given

    def points(self, settings: Settings) -> list[Point]:
        from experiments.backends.engine import EngineSetup, division_refusal, model_columns

        chosen = self.parse_options(settings)
        kernels = chosen.kernels or _kernels(settings.device, chosen.contiguous)
        setup = EngineSetup(settings, settings.variants[0])
        points = []
        for tp, (batch_size, query_len, context_len) in itertools.product(
            chosen.tensor_parallel, chosen.shapes
        ):
            columns = model_columns(settings, setup.model_config, setup.dtype_name, tp)
            params = columns | {
                "level": "kernel",
                "batch_size": batch_size,
                "query_len": query_len,
                "context_len": context_len,
                "kernels": list(kernels),
                "contiguous": chosen.contiguous,
                "rounds": settings.size.rounds,
                "samples": settings.size.samples,
                "seed": settings.seed,
            }
            refusal = division_refusal(setup.model_config, tp)
            points.append(Point(self.name, params, unsupported=refusal))
        return points

    def run(self, point: Point, context: PointContext) -> list[Row]:
        from experiments.kernel_bench import measure
        from experiments.prefill_bench import PrefillBench

        chosen = self.parse_options(context.settings)
        names = ("batch_size", "query_len", "context_len", "num_q_heads", "num_kv_heads", "head_dim")
        bench = PrefillBench(
            **{name: point.params[name] for name in (*names, "block_size", "dtype", "kernels", "contiguous")},
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
        from experiments.prefill_bench import variant_of

        return [{"variant": variant_of(name), "prefill_attention": name} for name in point.params["kernels"]]

    def dtypes(self, settings: Settings) -> tuple[str, ...]:
        from experiments.backends.engine import EngineSetup

        return (EngineSetup(settings, settings.variants[0]).dtype_name,)

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        from experiments.bar_plots import bar_grid
        from experiments.tables import median_of

        table = self.summary(rows)
        shapes = zip(table["batch_size"], table["query_len"], table["context_len"])
        table = table.assign(shape=[f"{batch} x {new} of {context}" for batch, new, context in shapes])
        shape = "batch x new tokens of context"
        return {
            "time": bar_grid(
                table,
                y="time_us",
                groups="shape",
                rows="tp",
                labels=(shape, "time per call (µs)"),
                title=f"Prefill attention, time of a call ({median_of(rows)})",
                log_y=None,
            ),
            "roofline": bar_grid(
                table,
                y="roofline_fraction",
                groups="shape",
                rows="tp",
                labels=(shape, "fraction of the roofline"),
                title="Prefill attention: floor at measured ceilings / time",
                number="{:.2f}",
            ),
        }


def _kernels(device: str, contiguous: bool) -> Sequence[str]:
    """All that run on the device but the reference; on contiguous KV, after them those that need it, run or not."""
    from kernels import prefill

    known = [name for name in prefill.available(device) if name != "reference" and prefill.get(name).paged]
    return [*known, *(prefill.CONTIGUOUS_ONLY if contiguous else ())]


SUITE = PrefillKernelSuite()
