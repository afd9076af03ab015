"""The arithmetic of attribution: speed-ups at each depth, time saved a decode step, and the share that survives."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from experiments import stats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVELS = ("kernel", "step", "workload")
SHAPE = ("tp", "batch_size", "context_len")


def attribute(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a shape, variant other than the baseline (the first of the run) and depth.

    time_us and baseline_us: of a call, a step, the whole workload. speedup: baseline over variant, with its interval
    (paired by round; depths above the kernel run one engine after the other). saved_us_per_step: what the variant saves
    in one decode step, by this depth: layers x the saving of a call; the saving of a step; the workload's saving over
    its steps. survives: that over the kernel's own, null where the kernel saves nothing that can be told from noise.
    """
    variants = list(dict.fromkeys(rows["variant"].dropna()))
    lines = []
    for shape, group in rows.groupby(list(SHAPE), sort=True):
        for variant in variants[1:]:
            lines += _lines(dict(zip(SHAPE, shape)), group, variants[0], variant)
    return pd.DataFrame(lines)


def _lines(shape: dict[str, Any], group: pd.DataFrame, baseline: str, variant: str) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    kernel_saving: float | None = None
    for level in LEVELS:
        of_level = group[group["level"] == level]
        line: dict[str, Any] = shape | {"level": level, "variant": variant, "baseline": baseline}
        before, after = _times(of_level, baseline), _times(of_level, variant)
        if before and len(before) == len(after):
            ratio = stats.paired_ratio(before, after)
            medians = float(np.median(before)), float(np.median(after))
            saved = (medians[0] - medians[1]) * _per_step(of_level, level)
            if level == "kernel" and stats.leaves_one(ratio):
                kernel_saving = saved
            line |= {
                "baseline_us": medians[0],
                "time_us": medians[1],
                "speedup": ratio.value,
                "speedup_low": ratio.low,
                "speedup_high": ratio.high,
                "saved_us_per_step": saved,
                "survives": saved / kernel_saving if kernel_saving else math.nan,
            }
        else:
            found = of_level[of_level["variant"].isin([baseline, variant])]
            errors = found["error"].dropna()
            line["why_not"] = errors.iloc[0] if len(errors) else "no rows"
        lines.append(line)
    return lines


def _times(rows: pd.DataFrame, variant: str) -> list[float]:
    """Times of a variant by round."""
    found = rows[(rows["variant"] == variant) & (rows["status"] == "ok") & rows["time_us"].notna()]
    return found.sort_values("round")["time_us"].tolist()


def _per_step(rows: pd.DataFrame, level: str) -> float:
    """How a saving at this depth turns into the saving of one decode step."""
    if level == "kernel":
        return float(rows["num_layers"].dropna().iloc[0])
    if level == "step":
        return 1.0
    # The first token of every request comes from its prefill.
    return 1.0 / max(float(rows["output_len"].dropna().iloc[0]) - 1, 1.0)


def figures(table: pd.DataFrame) -> dict[str, Figure]:
    """Speed-ups at the three depths, and what each saves in a decode step."""
    from experiments.bar_plots import bar_grid

    for name in ("speedup", "saved_us_per_step"):
        if name not in table:
            table[name] = math.nan
    baseline = table["baseline"].iloc[0]
    common: dict[str, Any] = {"groups": "level", "columns": "context_len", "rows": "batch_size"}
    depth = "depth at which it is measured"
    return {
        "attribution_speedup": bar_grid(
            table,
            y="speedup",
            labels=(depth, f"speed-up over {baseline}"),
            title=f"What a kernel's speed-up over {baseline} is worth (95% interval)",
            number="{:.3g}x",
            level=1.0,
            log_y=bool((table["speedup"] > 5).any()),  # a bar of 50 leaves nothing to see of one of 1.1
            **common,
        ),
        "attribution_saving": bar_grid(
            table,
            y="saved_us_per_step",
            labels=(depth, "saved in a decode step (µs)"),
            title=f"Time saved in one decode step over {baseline}, by each depth's measurement",
            **common,
        ),
    }
