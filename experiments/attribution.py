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
COLUMNS = (
    *(*SHAPE, "level", "variant", "baseline", "baseline_us", "time_us"),
    *("speedup", "speedup_low", "speedup_high"),
    *("saved_us_per_step", "saved_us_per_step_low", "saved_us_per_step_high", "survives", "why_not"),
)


def attribute(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a shape, variant other than the baseline (the first of the run) and depth.

    time_us and baseline_us: medians of a call, a step, the whole workload. speedup: baseline over variant, the
    geometric mean over rounds with its interval (kernels are paired in interleaved rounds, engines in the order that
    passes.py gives them). saved_us_per_step: what the variant saves in one decode step by this depth's speed-up,
    baseline_us (1 - 1 / speedup) times the calls in a step, over the steps of a workload; its interval is the
    speed-up's, and it is negative where the variant is slower. survives: the share of the kernel's saving that arrives
    at this depth, given only where the kernel and the depth both gain more than noise. why_not: why a time or a share
    is missing.
    """
    variants = list(dict.fromkeys(rows["variant"].dropna()))
    lines = []
    for shape, group in rows.groupby(list(SHAPE), sort=True):
        for variant in variants[1:]:
            lines += _lines(dict(zip(SHAPE, shape)), group, variants[0], variant)
    return pd.DataFrame(lines, columns=list(COLUMNS))


def _lines(shape: dict[str, Any], group: pd.DataFrame, baseline: str, variant: str) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for level in LEVELS:
        of_level = group[group["level"] == level]
        line: dict[str, Any] = shape | {"level": level, "variant": variant, "baseline": baseline}
        before, after = _times(of_level, baseline), _times(of_level, variant)
        if before and len(before) == len(after):
            line |= _saving(before, after, _per_step(of_level, level))
        else:
            line["why_not"] = _why_no_time(of_level, {baseline: before, variant: after})
        lines.append(line)
    kernel = lines[0]
    for line in lines:
        if "why_not" not in line:
            line["why_not"] = _why_no_share(kernel, line)
            line["survives"] = (
                line["saved_us_per_step"] / kernel["saved_us_per_step"]
                if line["why_not"] is None
                else math.nan
            )
    return lines


def _saving(before: list[float], after: list[float], per_step: float) -> dict[str, float]:
    ratio = stats.paired_ratio(before, after)
    baseline_us = float(np.median(before))
    line = {"baseline_us": baseline_us, "time_us": float(np.median(after))}
    for end, speedup in (("", ratio.value), ("_low", ratio.low), ("_high", ratio.high)):
        line[f"speedup{end}"] = speedup
        line[f"saved_us_per_step{end}"] = baseline_us * (1 - 1 / speedup) * per_step
    return line


def _why_no_time(rows: pd.DataFrame, times: dict[str, list[float]]) -> str:
    errors = rows.loc[rows["variant"].isin(list(times)), "error"].dropna()
    if len(errors):
        return str(errors.iloc[0])
    if not all(times.values()):
        return "no rows"
    return ", ".join(f"{len(rounds)} rounds of {name}" for name, rounds in times.items())


def _why_no_share(kernel: dict[str, Any], line: dict[str, Any]) -> str | None:
    """Why no share of the kernel's gain can be told at a depth that was timed; None if one can."""
    if "speedup" not in kernel:
        return "no share: the kernel has no time"
    for depth, what in ((kernel, "the kernel"), (line, f"the {line['level']}")):
        ratio = stats.Interval(*(depth[f"speedup{end}"] for end in ("", "_low", "_high")))
        if math.isnan(ratio.low):
            return f"no share: one round of {what} shows no gain"
        if not stats.leaves_one(ratio):
            return f"no share: what {what} gains is within the noise"
        if ratio.value < 1:
            return f"no share: {what} is slower"
    return None


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


def figures(table: pd.DataFrame, over: str) -> dict[str, Figure]:
    """Speed-ups at the three depths, and what each saves in a decode step. over: of how many rounds, in words."""
    from experiments.bar_plots import bar_grid

    if table.empty:
        return {}
    baseline = table["baseline"].iloc[0]
    common: dict[str, Any] = {"groups": "level", "columns": "context_len", "rows": "batch_size"}
    depth = "depth at which it is measured"
    return {
        "attribution_speedup": bar_grid(
            table,
            y="speedup",
            labels=(depth, f"speed-up over {baseline}"),
            title=f"What a kernel's speed-up over {baseline} is worth ({over})",
            number="{:.3g}x",
            level=1.0,
            log_y=None,
            **common,
        ),
        "attribution_saving": bar_grid(
            table,
            y="saved_us_per_step",
            labels=(depth, "saved in a decode step (µs)"),
            title=f"Time saved in one decode step over {baseline}, by each depth ({over})",
            log_y=False,  # it may be negative
            **common,
        ),
    }
