"""The plots of decoding: time against context, speed-up over single_pass, share of the roofline; kernel and step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.plots import line_grid
from experiments.tables import BASELINE, median_of, over_rounds, summarise

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

UNTIMED = "nothing to show: not timed here (see the report for why)"
CONTEXT = "context length (tokens)"


def kernel_figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Three figures from kernel-level rows."""
    table, over = _complete(summarise(rows)), over_rounds(rows)
    common = _panels(table)
    cold = table[(table["cache_state"] == "cold") | table["cache_state"].isna()]
    return {
        "kernel_latency": line_grid(
            table,
            x="context_len",
            y="time_us",
            labels=(CONTEXT, "time per call (µs)"),
            title=f"Decode attention, time of a call ({median_of(rows)})",
            styles="cache_state",
            **common,
        ),
        "kernel_roofline": _roofline(
            cold, "Decode attention, cold: floor at measured ceilings / time", common
        ),
        "kernel_speedup": _speedup(table, "Decode attention", f"paired, {over}", common),
    }


def step_figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """The same three for decode steps of the engine."""
    table, over = _complete(summarise(rows)), over_rounds(rows)
    common = _panels(table)
    turns = (
        "engines in the order A B B A" if rows["engine_pass"].nunique() > 1 else "one engine after another"
    )
    return {
        "step_latency": line_grid(
            table.assign(
                step_ms_low=table["time_us_low"].astype(float) / 1000,
                step_ms_high=table["time_us_high"].astype(float) / 1000,
            ),
            x="context_len",
            y="step_ms",
            labels=(CONTEXT, "time per step (ms)"),
            title=f"One decode step of the engine ({median_of(rows)})",
            **common,
        ),
        "step_roofline": _roofline(table, "Decode step: floor at measured ceilings / time", common),
        "step_speedup": _speedup(table, "Decode step", f"{turns}, {over}", common),
    }


def _panels(table: pd.DataFrame) -> dict[str, Any]:
    """Batch sizes across; down, what else varies: tensor parallel, or else head counts."""
    rows = next(
        (name for name in ("tp", "num_q_heads", "dtype") if name in table and table[name].nunique() > 1), None
    )
    order = list(dict.fromkeys(table["variant"]))
    return {"columns": "batch_size", "rows": rows, "order": order, "empty": UNTIMED}


def _roofline(table: pd.DataFrame, title: str, common: dict[str, Any]) -> Figure:
    return line_grid(
        table,
        x="context_len",
        y="roofline_fraction",
        interval=False,
        labels=(CONTEXT, "fraction of the roofline"),
        title=title,
        log_y=False,
        level=1.0,
        **common,
    )


def _speedup(table: pd.DataFrame, what: str, how: str, common: dict[str, Any]) -> Figure:
    """Ratios to single_pass, or where the run has none to the first variant; no line where the baseline has no time."""
    baseline = BASELINE if BASELINE in common["order"] else common["order"][0]
    over = table["speedup_over"] == baseline
    others = table[table["variant"] != baseline].assign(speedup=table["speedup"].where(over))
    return line_grid(
        others,
        x="context_len",
        y="speedup",
        labels=(CONTEXT, f"speed-up over {baseline}"),
        title=f"{what}, speed-up over {baseline} ({how})",
        styles="cache_state",
        level=1.0,
        **common,
    )


def _complete(table: pd.DataFrame) -> pd.DataFrame:
    """Nulls for columns that a summary lacks because nothing was timed."""
    names = (
        *("time_us", "time_us_low", "time_us_high", "step_ms", "roofline_fraction"),
        *("speedup", "speedup_low", "speedup_high", "speedup_over", "cache_state"),
    )
    return table.assign(**{name: None for name in names if name not in table})
