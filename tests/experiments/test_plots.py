"""Axes that suit their values, bars that say what is missing, captions that say what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from experiments.bar_plots import bar_grid
from experiments.plots import is_wide, line_grid, look, save, y_scale
from experiments.report import caption

LABELS = ("x", "y")


@pytest.fixture
def axes() -> Iterator[Axes]:
    figure, made = plt.subplots()
    yield made
    plt.close(figure)


def ticks(axes: Axes) -> list[str]:
    """The labels of y that are within the axis."""
    axes.figure.canvas.draw()
    low, high = axes.get_ylim()
    return [
        label.get_text()
        for place, label in zip(axes.get_yticks(), axes.get_yticklabels())
        if low * (1 - 1e-9) <= place <= high * (1 + 1e-9)
    ]


def test_a_wide_range_is_logarithmic_between_round_numbers(axes: Axes) -> None:
    y_scale(axes, [2.3, 15.0])
    assert axes.get_yscale() == "log"
    assert axes.get_ylim() == pytest.approx((2.0, 20.0))
    assert ticks(axes) == ["2", "5", "10", "20"]


def test_a_range_between_round_numbers_stays_between_them(axes: Axes) -> None:
    y_scale(axes, [100.0, 20_000.0])
    assert axes.get_ylim() == pytest.approx((100.0, 20_000.0))
    assert ticks(axes)[-1] == "20,000"


def test_a_narrow_range_is_linear_from_zero(axes: Axes) -> None:
    """1.13 to 1.21 ms fill no axis of their own: the noise between them would look like much."""
    y_scale(axes, [1.13, 1.21])
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[0] == 0.0


def test_values_below_zero_are_seen_and_never_on_a_logarithmic_axis(axes: Axes) -> None:
    assert not is_wide([-1.0, 100.0])
    y_scale(axes, [-12.0, 748.0], log_y=True)
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[0] < -12.0


def test_a_fraction_above_the_top_is_not_cut_off(axes: Axes) -> None:
    y_scale(axes, [0.2, 1.3], log_y=False, top=1.0)
    assert axes.get_ylim()[1] > 1.3


def test_error_bars_are_within_the_axis() -> None:
    table = pd.DataFrame(
        {"x": [1, 2], "y": [10.0, 11.0], "y_low": [9.0, 10.0], "y_high": [12.0, 90.0], "variant": "a"}
    )
    figure = line_grid(table, x="x", y="y", labels=LABELS, title="t")
    low, high = figure.axes[0].get_ylim()
    assert low <= 9.0
    assert high >= 90.0
    plt.close(figure)


def test_bars_say_what_was_not_timed() -> None:
    table = pd.DataFrame(
        {"place": ["p", "p", "q"], "variant": ["a", "b", "a"], "y": [1000.0, float("nan"), 2000.0]}
    )
    figure = bar_grid(table, y="y", groups="place", labels=LABELS, title="t")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts.count("not timed") == 1  # b has no row at q, so nothing is missing there
    assert {"1,000", "2,000"} <= set(texts)
    plt.close(figure)


def test_a_saved_figure_is_sharp_enough_for_print(tmp_path: Any) -> None:
    figure, _ = plt.subplots(figsize=(5, 2))
    save(figure, tmp_path / "f.png")
    assert plt.imread(tmp_path / "f.png").shape[1] > 5 * 150 * 0.9
    assert not plt.fignum_exists(figure.number)


def test_a_caption_says_what_was_measured_on_what_and_with_what() -> None:
    record = {
        "device_name": "NVIDIA H200",
        "packages": {"torch": "2.11.0", "triton": "3.6.0", "decodelab": None},
        "gpu_before": {"driver_version": "580.1"},
        "git": {"commit": "0123456789abcdef", "dirty": True},
        "started": "2026-11-29T12:00:00",
    }
    rows = pd.DataFrame(
        {"model": pd.Series(["m"], dtype="string"), "dtype": ["bfloat16"], "load_format": ["dummy"]}
    )
    measured, versions = caption(record, rows).splitlines()
    assert measured == "m  |  bfloat16  |  dummy weights"
    assert versions == (
        "NVIDIA H200  |  torch 2.11.0  |  triton 3.6.0  |  driver 580.1  |  decodelab at 0123456789+changes"
        "  |  2026-11-29"
    )
    assert caption(record) == versions


def test_more_series_than_colours_still_differ() -> None:
    assert len({look(number) for number in range(24)}) == 24
    assert len({look(number)[0] for number in range(8)}) == 8


def test_bars_on_a_logarithmic_axis_begin_at_what_they_are_compared_with() -> None:
    table = pd.DataFrame({"place": ["p", "q"], "variant": "a", "y": [40.0, 0.5]})
    figure = bar_grid(table, y="y", groups="place", labels=LABELS, title="t", level=1.0, log_y=None)
    ends = [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in figure.axes[0].patches]
    assert figure.axes[0].get_yscale() == "log"
    assert ends == [(1.0, 40.0), (1.0, 0.5)]
    plt.close(figure)


def test_one_round_draws_no_error_bars() -> None:
    nan = float("nan")
    table = pd.DataFrame({"x": [1, 2], "y": [10.0, 11.0], "y_low": nan, "y_high": nan, "variant": "a"})
    figure = line_grid(table, x="x", y="y", labels=LABELS, title="t")
    assert not figure.axes[0].containers[0].has_yerr
    plt.close(figure)


def test_the_ideal_line_of_a_scaling_plot_is_within_it() -> None:
    table = pd.DataFrame({"x": [1, 2, 8], "y": [1.0, 0.5, 0.6], "variant": "a"})
    figure = line_grid(table, x="x", y="y", labels=LABELS, title="t", ideal=True)
    assert figure.axes[0].get_ylim()[1] >= 8.0
    plt.close(figure)
