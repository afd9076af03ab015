"""Figures that survive print and colour blindness: grids of lines with error bars, gaps where a point failed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# Okabe and Ito's palette, told apart with any colour vision; markers repeat the distinction without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLE: Any = {
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.dpi": 110,
    "savefig.dpi": 160,
}

LINE_STYLES = {"cold": "-", "hot": "--"}
HOLLOW = "--"  # markers of dashed lines are open, so that single points differ too
MAX_ACROSS = 4  # panels side by side; more go on below
MAX_TICKS = 9  # of x; more values than this get an ordinary axis
WIDE = 3.0  # values whose largest is so many times the smallest get a logarithmic axis


def look(number: int) -> tuple[str, str]:
    """Colour and marker of a series by its number; those after the palette's end differ in their markers."""
    return COLOURS[number % len(COLOURS)], MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]


def line_grid(
    table: pd.DataFrame,
    *,
    x: str,
    y: str,
    labels: tuple[str, str],
    title: str,
    series: str = "variant",
    interval: bool = True,
    columns: str | None = None,
    rows: str | None = None,
    styles: str | None = None,
    log_y: bool | None = None,
    level: float | None = None,
    ideal: bool = False,
    top: float | None = None,
    order: Sequence[str] | None = None,
    empty: str = "no timed rows",
) -> Figure:
    """y over x, one line a series, in a grid of panels over the values of `columns` and `rows`.

    styles: a column that chooses the line style (cache_state). log_y: None lets the values decide (see is_wide); a
    linear axis begins at 0. level: a horizontal line to compare with; ideal: the line y = x. top: of a linear axis, at
    least. order: series in the order of their colours; all that the table names if None. A series that was not timed
    keeps its colour and has no line.
    """
    names = list(order) if order is not None else list(dict.fromkeys(table[series]))
    if y not in table or not table[y].notna().any():
        return nothing(title, empty)
    down, across = _values(table, rows), _values(table, columns)
    panels = [(row, column) for row in down for column in across]
    height, width = (len(down), len(across)) if len(across) <= MAX_ACROSS else _wrapped(len(panels))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            height,
            width,
            figsize=(max(5.6, 2.3 * width + 2.6), 1.9 * height + 1.2),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        handles: dict[str, Any] = {}
        for axes, (row, column) in zip(grid.flat, panels):
            panel = _where(_where(table, rows, row), columns, column)
            for name in names:
                colour, marker = look(names.index(name))
                of_series = panel[panel[series] == name]
                for style in _values(of_series, styles):
                    line = _where(of_series, styles, style)
                    dashes = LINE_STYLES.get(str(style), "-")
                    drawn = _line(axes, line, x, y, interval, colour, marker, dashes)
                    if drawn is not None:
                        handles.setdefault(_legend(name, style), drawn)
            if level is not None:
                axes.axhline(level, color="0.4", linewidth=0.8, linestyle=":")
            if ideal:
                axes.axline((1, 1), (2, 2), color="0.4", linewidth=0.8, linestyle=":")
            axes.set_title(panel_title([(rows, row, len(down)), (columns, column, len(across))]), fontsize=9)
            if not panel[y].notna().any():
                axes.text(
                    0.5, 0.5, "not timed", ha="center", va="center", transform=axes.transAxes, color="0.4"
                )
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        _x_scale(grid[0][0], table, x)
        spread = [y, f"{y}_low", f"{y}_high"] if interval else [y]
        values = [v for name in spread if name in table for v in table[name].dropna().astype(float)]
        if ideal:
            values.append(float(table[x].max()))
        y_scale(grid[0][0], [*values, *([] if level is None else [level])], log_y, top)
        figure.supxlabel(labels[0], fontsize=9)
        figure.supylabel(labels[1], fontsize=9)
        figure.suptitle(title, fontsize=10)
        if handles:
            figure.legend(
                handles.values(), handles.keys(), loc="outside right center", fontsize=8, handlelength=3
            )
    return figure


def panel_title(parts: Sequence[tuple[str | None, Any, int]]) -> str:
    """What tells a panel from the others: (column, its value, how many values it has) where there are several."""
    return ", ".join(f"{_SHORT.get(key, key)}{value}" for key, value, many in parts if key and many > 1)


def _wrapped(count: int) -> tuple[int, int]:
    """Rows and columns for so many panels in reading order."""
    return -(-count // MAX_ACROSS), MAX_ACROSS


def nothing(title: str, why: str) -> Figure:
    """A figure that says that there is nothing to draw."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.6, 1.1), layout="constrained")
        axes.set_axis_off()
        axes.text(0.5, 0.5, why, ha="center", va="center", color="0.4", transform=axes.transAxes)
        figure.suptitle(title, fontsize=10)
    return figure


_SHORT = {
    "batch_size": "batch ",
    "tp": "TP ",
    "context_len": "context ",
    "operation": "",
    "arrivals": "",
    "level": "",
    "unique_len": "unique tokens ",
    "num_q_heads": "query heads ",
    "dtype": "",
}


def _line(
    axes: Axes, line: pd.DataFrame, x: str, y: str, interval: bool, colour: str, marker: str, style: str
) -> Any:
    """One series with its error bars; None if it has no value. A missing value breaks the line."""
    line = line.sort_values(x)
    if not line[y].notna().any():
        return None
    xs, ys = line[x].astype(float).to_numpy(), line[y].astype(float).to_numpy()
    errors = None
    if interval and f"{y}_low" in line:
        low, high = line[f"{y}_low"].astype(float).to_numpy(), line[f"{y}_high"].astype(float).to_numpy()
        if not np.isnan(low).all():
            errors = [_nonnegative(ys - low), _nonnegative(high - ys)]
    return axes.errorbar(
        xs,
        ys,
        yerr=errors,
        color=colour,
        marker=marker,
        markersize=4,
        markerfacecolor="white" if style == HOLLOW else colour,
        linewidth=1.2,
        capsize=2,
        linestyle=style,
        clip_on=False,  # a marker on the edge of the axis is whole; nothing lies beyond it
        zorder=3,
    )


def _nonnegative(values: Any) -> list[float]:
    return [0.0 if math.isnan(value) else max(float(value), 0.0) for value in values]


def _x_scale(axes: Axes, table: pd.DataFrame, x: str) -> None:
    """Shared by all panels: a log axis for x that doubles, with the measured values as its ticks."""
    ticks = sorted({float(value) for value in table[x].dropna()})
    if ticks and len(ticks) <= MAX_TICKS and ticks[0] > 0:
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            ticks, [f"{int(t) // 1024}K" if t >= 1024 and t % 1024 == 0 else f"{t:g}" for t in ticks]
        )
        # Room for a label at either end, so that those of panels side by side do not touch.
        margin = max(1.15, (ticks[-1] / ticks[0]) ** 0.08) if len(ticks) > 1 else 1.5
        axes.set_xlim(ticks[0] / margin, ticks[-1] * margin)
        axes.xaxis.minorticks_off()


def is_wide(values: Sequence[float]) -> bool:
    """Whether values need a logarithmic axis: on one that begins at 0 the small ones could not be told apart."""
    return bool(values) and min(values) > 0 and max(values) >= WIDE * min(values)


def y_scale(axes: Axes, values: Sequence[float], log_y: bool | None = None, top: float | None = None) -> None:
    """A y axis that holds the values: logarithmic between 1, 2 or 5 of some decades, or linear from 0 on.

    Panels that share their y axis share the scale. log_y: None for is_wide; values of which some are not above 0 are
    never drawn on a logarithmic axis.
    """
    if not values:
        return
    if is_wide(values) if log_y is None else log_y and min(values) > 0:
        axes.set_yscale("log")
        axes.set_ylim(_round_number(min(values), up=False), _round_number(max(values), up=True))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        highest, lowest = max(*values, top or 0.0, 0.0), min(*values, 0.0)
        room = 0.08 * (highest - lowest)
        axes.set_ylim(lowest - room if lowest < 0 else 0.0, highest + room if highest > 0 else 0.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,.6g}"))


def _round_number(value: float, *, up: bool) -> float:
    """The next of 1, 2 and 5 times a power of ten, up or down; a value that is one already stays."""
    decade = math.floor(math.log10(value))
    steps = [mantissa * 10.0**power for power in range(decade - 1, decade + 2) for mantissa in (1, 2, 5)]
    if up:
        return min(step for step in steps if step >= value * (1 - 1e-9))
    return max(step for step in steps if step <= value * (1 + 1e-9))


def _values(table: pd.DataFrame, column: str | None) -> list[Any]:
    if column is None or column not in table or not table[column].notna().any():
        return [None]
    return sorted(table[column].dropna().unique().tolist())


def _where(table: pd.DataFrame, column: str | None, value: Any) -> pd.DataFrame:
    return table if column is None or value is None else table[table[column] == value]


def _legend(name: str, style: Any) -> str:
    return str(name) if style is None else f"{name}, {style}"


def add_caption(figure: Figure, text: str) -> None:
    """What the figure was measured on, small, below everything else."""
    figure.text(0.005, -0.012, text, fontsize=6.5, color="0.35", ha="left", va="top")


def save(figure: Figure, path: Path) -> None:
    """Write a PNG that nothing is cut off from, and forget the figure."""
    figure.savefig(path, dpi=STYLE["savefig.dpi"], bbox_inches="tight", pad_inches=0.08)
    plt.close(figure)
