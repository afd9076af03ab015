"""Bars beside bars, with their numbers on them, for what has no natural order on an axis."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import COLOURS, STYLE, nothing, panel_title, y_scale

NOTHING = "nothing to show: not timed here (see the report for why)"


def bar_grid(
    table: pd.DataFrame,
    *,
    y: str,
    groups: str,
    labels: tuple[str, str],
    title: str,
    series: str = "variant",
    columns: str | None = None,
    rows: str | None = None,
    number: str = "{:,.0f}",
    log_y: bool | None = False,
    level: float | None = None,
) -> Figure:
    """y as one bar a series in each group, in a grid of panels over the values of `columns` and `rows`.

    number: the format of the values written on the bars. log_y: as y_scale has it. A value that is missing is said to
    be.
    """
    if y not in table or not table[y].notna().any():
        return nothing(title, NOTHING)
    names, places = list(dict.fromkeys(table[series])), list(dict.fromkeys(table[groups].dropna()))
    down, across = _values(table, rows), _values(table, columns)
    bars = max(len(names) * len(places), 3)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            len(down),
            len(across),
            figsize=(max(5.6, (0.42 * bars + 1.0) * len(across) + 2.4), 2.1 * len(down) + 1.2),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        spread = (name for name in (y, f"{y}_low", f"{y}_high") if name in table)
        values = [value for name in spread for value in table[name].dropna().astype(float)]
        y_scale(grid[0][0], [*values, *([] if level is None else [level])], log_y)
        # On a logarithmic axis, which has no zero, bars begin at what they are compared with.
        base = level if level is not None and grid[0][0].get_yscale() == "log" else 0.0
        for i, row in enumerate(down):
            for j, column in enumerate(across):
                axes = grid[i][j]
                panel = table
                for key, value in ((rows, row), (columns, column)):
                    panel = panel if key is None or value is None else panel[panel[key] == value]
                _draw(axes, panel, y, groups, series, names, places, number, base)
                axes.set_title(
                    panel_title([(rows, row, len(down)), (columns, column, len(across))]), fontsize=9
                )
                if level is not None:
                    axes.axhline(level, color="0.4", linewidth=0.8, linestyle=":")
        _make_room(grid[0][0])
        handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[k % len(COLOURS)]) for k in range(len(names))]
        if len(names) > 1:
            figure.legend(handles, names, loc="outside right center", fontsize=8)
        figure.supxlabel(labels[0], fontsize=9)
        figure.supylabel(labels[1], fontsize=9)
        figure.suptitle(title, fontsize=10)
    return figure


def _draw(
    axes: Axes,
    panel: pd.DataFrame,
    y: str,
    groups: str,
    series: str,
    names: list[Any],
    places: list[Any],
    number: str,
    base: float,
) -> None:
    """One panel. base: where the bars begin."""
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        for j, place in enumerate(places):
            found = panel[(panel[series] == name) & (panel[groups] == place)]
            x = j + (i - (len(names) - 1) / 2) * width
            if not found[y].notna().any():
                if len(found):
                    at = axes.get_xaxis_transform()
                    axes.text(
                        x, 0.03, "not timed", rotation=90, ha="center", fontsize=7, color="0.4", transform=at
                    )
                continue
            value = float(found[y].dropna().iloc[0])
            drawn = axes.bar(
                x,
                value - base,
                0.92 * width,
                base,
                yerr=_error(found, y, value),
                capsize=2,
                ecolor="0.35",
                color=COLOURS[i % len(COLOURS)],
            )
            axes.bar_label(drawn, labels=[number.format(value)], padding=2, fontsize=7)
    axes.set_xticks(range(len(places)), [str(place) for place in places])
    axes.set_xlim(-0.7, len(places) - 0.3)
    axes.grid(False, axis="x")


def _make_room(axes: Axes) -> None:
    """For the numbers above the highest bars, and below the lowest where there are bars below 0."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        axes.set_ylim(low / (high / low) ** 0.06, high * (high / low) ** 0.12)
    else:
        axes.set_ylim(low + 0.1 * low, high + 0.1 * (high - low))


def _error(found: pd.DataFrame, y: str, value: float) -> list[list[float]] | None:
    """How far the interval's ends are from the value; None where there is no interval."""
    if f"{y}_low" not in found or not found[f"{y}_low"].notna().any():
        return None
    low, high = float(found[f"{y}_low"].iloc[0]), float(found[f"{y}_high"].iloc[0])
    return [[max(value - low, 0.0)], [max(high - value, 0.0)]]


def _values(table: pd.DataFrame, column: str | None) -> list[Any]:
    if column is None or column not in table or not table[column].notna().any():
        return [None]
    return sorted(table[column].dropna().unique().tolist())
