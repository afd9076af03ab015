"""Figures that survive print and colour blindness: grids of lines with error bars, gaps where a point failed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

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
MAX_TICKS = 9  # of x; more values than this get an ordinary axis


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
    log_y: bool = True,
    level: float | None = None,
    y_range: tuple[float, float] | None = None,
    order: Sequence[str] | None = None,
    empty: str = "no timed rows",
) -> Figure:
    """y over x, one line a series, in a grid of panels over the values of `columns` and `rows`.

    styles: a column that chooses the line style (cache_state). level: a horizontal line to compare with.
    order: series in the order of their colours; all that the table names if None. A series that was not timed keeps
    its colour and has no line.
    """
    names = list(order) if order is not None else list(dict.fromkeys(table[series]))
    if not table[y].notna().any():
        return _nothing(title, empty)
    down, across = _values(table, rows), _values(table, columns)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            len(down),
            len(across),
            figsize=(max(5.6, 2.3 * len(across) + 2.6), 1.9 * len(down) + 1.2),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        handles: dict[str, Any] = {}
        for i, row in enumerate(down):
            for j, column in enumerate(across):
                axes = grid[i][j]
                panel = _where(_where(table, rows, row), columns, column)
                for name in names:
                    colour = COLOURS[names.index(name) % len(COLOURS)]
                    marker = MARKERS[names.index(name) % len(MARKERS)]
                    of_series = panel[panel[series] == name]
                    for style in _values(of_series, styles):
                        line = _where(of_series, styles, style)
                        drawn = _line(
                            axes, line, x, y, interval, colour, marker, LINE_STYLES.get(str(style), "-")
                        )
                        if drawn is not None:
                            handles.setdefault(_legend(name, style), drawn)
                if level is not None:
                    axes.axhline(level, color="0.4", linewidth=0.8, linestyle=":")
                parts = [
                    f"{_SHORT.get(key, key)} {value}"
                    for key, value, many in ((rows, row, len(down)), (columns, column, len(across)))
                    if key and many > 1
                ]
                axes.set_title(", ".join(parts), fontsize=9)
                if not panel[y].notna().any():
                    axes.text(
                        0.5, 0.5, "not timed", ha="center", va="center", transform=axes.transAxes, color="0.4"
                    )
        _scales(grid[0][0], table, x, y, log_y, y_range)
        figure.supxlabel(labels[0], fontsize=9)
        figure.supylabel(labels[1], fontsize=9)
        figure.suptitle(title, fontsize=10)
        if handles:
            figure.legend(
                handles.values(), handles.keys(), loc="outside right center", fontsize=8, handlelength=3
            )
    return figure


def _nothing(title: str, why: str) -> Figure:
    """A figure that says that there is nothing to draw."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.6, 1.1), layout="constrained")
        axes.set_axis_off()
        axes.text(0.5, 0.5, why, ha="center", va="center", color="0.4", transform=axes.transAxes)
        figure.suptitle(title, fontsize=10)
    return figure


_SHORT = {"batch_size": "batch", "tp": "TP", "context_len": "context"}


def bars(
    table: pd.DataFrame,
    *,
    y: str,
    groups: str,
    labels: tuple[str, str],
    title: str,
    series: str = "variant",
    number: str = "{:,.0f}",
) -> Figure:
    """y as one bar a series in each group, the number on it; a missing value leaves its place empty."""
    if y not in table or not table[y].notna().any():
        return _nothing(title, "nothing to show: not timed here (see the report for why)")
    names, places = list(dict.fromkeys(table[series])), list(dict.fromkeys(table[groups].dropna()))
    width = 0.8 / len(names)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            figsize=(max(4.8, 0.55 * len(names) * len(places) + 2.6), 3.0), layout="constrained"
        )
        for i, name in enumerate(names):
            for j, place in enumerate(places):
                found = table[(table[series] == name) & (table[groups] == place)]
                if not found[y].notna().any():
                    continue
                value = float(found[y].dropna().iloc[0])
                drawn = axes.bar(
                    j + (i - (len(names) - 1) / 2) * width,
                    value,
                    0.92 * width,
                    yerr=_bar_error(found, y, value),
                    capsize=2,
                    color=COLOURS[i % len(COLOURS)],
                    label=str(name) if j == 0 else None,
                )
                axes.bar_label(drawn, labels=[number.format(value)], padding=2, fontsize=7)
        axes.set_xticks(range(len(places)), [str(place) for place in places])
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.grid(False, axis="x")
        axes.margins(y=0.12)
        if len(names) > 1:
            figure.legend(loc="outside right center", fontsize=8)
        figure.suptitle(title, fontsize=10)
    return figure


def _bar_error(found: pd.DataFrame, y: str, value: float) -> Any:
    if f"{y}_low" not in found or not found[f"{y}_low"].notna().any():
        return None
    low, high = float(found[f"{y}_low"].iloc[0]), float(found[f"{y}_high"].iloc[0])
    return [_nonnegative([value - low]), _nonnegative([high - value])]


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
    )


def _nonnegative(values: Any) -> list[float]:
    return [0.0 if math.isnan(value) else max(float(value), 0.0) for value in values]


def _scales(
    axes: Axes, table: pd.DataFrame, x: str, y: str, log_y: bool, y_range: tuple[float, float] | None
) -> None:
    """Shared by all panels: a log axis for x that doubles, with the measured values as its ticks."""
    ticks = sorted({float(value) for value in table[x].dropna()})
    if ticks and len(ticks) <= MAX_TICKS and ticks[0] > 0:
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            ticks, [f"{int(t) // 1024}K" if t >= 1024 and t % 1024 == 0 else f"{t:g}" for t in ticks]
        )
        margin = 1.15 if len(ticks) > 1 else 1.5
        axes.set_xlim(ticks[0] / margin, ticks[-1] * margin)
        axes.xaxis.minorticks_off()
    if log_y and table[y].notna().any():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if y_range is not None:
        axes.set_ylim(*y_range)


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
    figure.savefig(path, bbox_inches="tight", pad_inches=0.08)
    plt.close(figure)
