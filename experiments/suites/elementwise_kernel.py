"""Norms, activation, RoPE, KV writes, small matmuls, sampling: Triton, torch, torch.compile, on a model's shapes."""

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
        from experiments.elementwise_bench import OPERATIONS

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
            Point(
                self.name,
                shared | {"operation": operation, "batch_size": num_tokens},
                unsupported=OPERATIONS[operation].refusal(num_tokens),
            )
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

    def tables(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {"paths": compare_paths(rows)}

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


def compare_paths(rows: pd.DataFrame) -> pd.DataFrame:
    """One line an operation, number of tokens and cache state: each path's median time, which is fastest (null where
    none is shown to be), and how Triton does against torch.compile.

    compile_over_triton: the paired ratio of their times with its 95% interval; triton_is "faster" or "slower" where it
    leaves 1 by more than stats.EQUIVALENCE, else "equal"; null where one has no time, or there are too few rounds.
    """
    import pandas as pd

    from experiments import stats
    from experiments.elementwise_bench import PATHS

    keys = ["operation", "batch_size", "cache_state"]
    timed = rows[(rows["status"] == "ok") & rows["time_us"].notna()].sort_values("round", kind="stable")
    lines = []
    for key, group in timed.groupby(keys, sort=False):
        times = {path: of_path["time_us"].tolist() for path, of_path in group.groupby("variant")}
        line: dict[str, Any] = dict(zip(keys, key))
        line |= {f"{path}_us": group.loc[group["variant"] == path, "time_us"].median() for path in PATHS}
        paired = len({len(of_path) for of_path in times.values()}) == 1
        line["fastest"] = stats.winner(times) if paired else None
        if paired and {"triton", "compile"} <= set(times):
            ratio = stats.paired_ratio(times["compile"], times["triton"])
            line |= {"compile_over_triton": ratio.value}
            line |= {"compile_over_triton_low": ratio.low, "compile_over_triton_high": ratio.high}
            if stats.differs(ratio, len(times["triton"])):
                line["triton_is"] = "faster" if ratio.value > 1 else "slower"
            elif len(times["triton"]) >= stats.MIN_PAIRS:
                line["triton_is"] = "equal"
        lines.append(line)
    ratio_columns = [f"compile_over_triton{end}" for end in ("", "_low", "_high")]
    columns = [*keys, *(f"{path}_us" for path in PATHS), "fastest", *ratio_columns, "triton_is"]
    return pd.DataFrame(lines, columns=columns)


SUITE = ElementwiseKernel()
