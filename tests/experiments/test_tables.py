"""The table: medians over rounds, paired speed-ups, winners, worst statuses; plots that leave gaps."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.columns import make_row
from experiments.records import to_frame
from experiments.suites.tp_scaling import SUITE as TP_SCALING
from experiments.tables import compact, median_of, over_rounds, reasons, summarise, to_markdown


def rows(
    variant: str, times: list[float] | None, *, context: int = 128, status: str = "ok"
) -> list[dict[str, Any]]:
    base = {
        "suite": "s",
        "level": "kernel",
        "tp": 1,
        "batch_size": 1,
        "context_len": context,
        "variant": variant,
    }
    if times is None:
        return [make_row(**base, status=status, error=f"{status} happened")]
    return [
        make_row(**base, status="ok", cache_state="cold", round=i, time_us=t, bytes=1000, flops=1, floor_us=t / 2,
                 roofline_fraction=0.5)
        for i, t in enumerate(times)
    ]  # fmt: skip


NOISE = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98]


def test_medians_speedups_and_the_winner() -> None:
    slow = [100 * n for n in NOISE]
    fast = [25 * n for n in NOISE]
    table = summarise(to_frame([*rows("single_pass", slow), *rows("split_kv", fast)])).set_index("variant")
    assert table.loc["single_pass", "time_us"] == pytest.approx(100.0)
    assert table.loc["split_kv", "speedup"] == pytest.approx(4.0)
    assert table.loc["split_kv", "speedup_low"] == pytest.approx(4.0)
    assert table.loc["split_kv", "speedup_over"] == "single_pass"
    assert table["fastest"].to_dict() == {"single_pass": False, "split_kv": True}
    assert table.loc["split_kv", "gb_per_s"] == pytest.approx(0.04, rel=0.05)


def test_equal_variants_have_no_winner() -> None:
    a = [100 * n for n in NOISE]
    b = [100 * n for n in reversed(NOISE)]
    assert not summarise(to_frame([*rows("a", a), *rows("b", b)]))["fastest"].any()


def test_failed_cells_stay_as_lines_without_times() -> None:
    frame = to_frame(
        [
            *rows("a", NOISE),
            *rows("a", None, context=256, status="oom"),
            *rows("a", None, context=512, status="not_timed"),
            *rows("a", NOISE, context=1024),
        ]
    )
    table = summarise(frame)
    assert table["context_len"].tolist() == [128, 256, 512, 1024]
    assert table["status"].tolist() == ["ok", "oom", "not_timed", "ok"]
    assert table["time_us"].isna().tolist() == [False, True, True, False]
    text = compact(table)
    assert text["time us [95%]"].tolist()[1] == "-"
    assert reasons(table) == ["oom (1 lines): oom happened", "not_timed (1 lines): not_timed happened"]
    assert to_markdown(text).count("\n") == 5


def test_a_variant_that_was_wrong_in_one_pass_has_no_time_at_all() -> None:
    """Correct before timed: what the other pass measured is a time of what gives wrong results."""
    wrong = [*rows("b", [1.0, 1.0]), *rows("b", None, status="incorrect")]
    for row in wrong:
        row |= {"cache_state": "cold", "decode_tok_s": 5.0 if row["status"] == "ok" else None}
    table = summarise(to_frame([*rows("a", NOISE), *wrong])).set_index("variant")
    assert "decode_tok_s" not in table
    assert table.loc["b", "status"] == "incorrect"
    assert table.loc["b", ["time_us", "time_us_low"]].isna().all()
    assert table.loc["a", "time_us"] == pytest.approx(1.0)


def test_plots_leave_a_gap_where_a_point_failed() -> None:
    from matplotlib import pyplot as plt

    from experiments.plots import line_grid

    frame = to_frame(
        [*rows("a", NOISE), *rows("a", None, context=256, status="error"), *rows("a", NOISE, context=512)]
    )
    figure = line_grid(summarise(frame), x="context_len", y="time_us", labels=("x", "y"), title="t")
    (line,) = [
        line for line in figure.axes[0].lines if line.get_linestyle() == "-" and len(line.get_xdata()) == 3
    ]
    y = line.get_ydata()
    assert y[0] > 0
    assert y[1] != y[1]
    assert y[2] > 0
    plt.close(figure)


def test_nothing_timed_gives_a_table_and_a_figure_that_say_so() -> None:
    from matplotlib import pyplot as plt

    from experiments.decode_figures import kernel_figures

    frame = to_frame([*rows("split_kv", None, status="not_timed")])
    assert len(compact(summarise(frame))) == 1
    for figure in kernel_figures(frame).values():
        texts = [text.get_text() for axes in figure.axes for text in axes.texts]
        assert any("not timed" in text for text in texts)
        plt.close(figure)


def test_engines_that_did_not_take_turns_have_no_winner() -> None:
    """One ran after the other: what drifted meanwhile may be all that tells them apart."""
    slow, fast = [100 * n for n in NOISE], [50 * n for n in NOISE]
    frame = to_frame([*rows("a", slow), *rows("b", fast)])
    assert summarise(frame)["fastest"].tolist() == [False, True]
    assert not summarise(frame.assign(level="step", engine_pass=0))["fastest"].any()
    in_turn = frame.assign(level="step", engine_pass=[0, 0, 0, 1, 1, 1] * 2)
    assert summarise(in_turn)["fastest"].tolist() == [False, True]


def test_titles_say_how_many_rounds_and_what_the_bars_are() -> None:
    assert over_rounds(to_frame(rows("a", NOISE))) == "6 rounds, 95% interval"
    assert over_rounds(to_frame(rows("a", NOISE[:3]))) == "3 rounds, lowest to highest"
    assert (
        over_rounds(to_frame(rows("a", NOISE[:1]))) == median_of(to_frame(rows("a", NOISE[:1]))) == "1 round"
    )
    assert median_of(to_frame(rows("a", NOISE))) == "median of 6 rounds, 95% interval"
    assert over_rounds(to_frame(rows("a", None))) == "no rounds"
    mixed = to_frame([*rows("a", NOISE), *rows("a", NOISE[:4], context=256)])
    assert over_rounds(mixed) == "4 to 6 rounds, lowest to highest"


def test_columns_that_are_plotted_have_intervals() -> None:
    frame = to_frame(rows("a", NOISE)).assign(ttft_ms_p50=[10.0, 11.0, 12.0, 13.0, 14.0, 40.0])
    line = summarise(frame, medians=["ttft_ms_p50"], intervals=["ttft_ms_p50"]).iloc[0]
    assert 10.0 <= line["ttft_ms_p50_low"] < line["ttft_ms_p50"] < line["ttft_ms_p50_high"] <= 40.0
    assert "ttft_ms_p50_low" not in summarise(frame, medians=["ttft_ms_p50"])


def test_tp_scaling_of_one_rank_has_a_table_of_one_rank() -> None:
    """A run whose ranks are measured elsewhere ended in a KeyError after its last point."""
    table = TP_SCALING.summary(to_frame(rows("auto", [100 * n for n in NOISE])))
    assert table["speedup"].tolist() == [1.0]
    assert table["efficiency"].tolist() == [1.0]
    assert compact(table)["speed-up [95%]"].tolist() == ["1x tp 1"]
    assert not TP_SCALING.summary(to_frame(rows("auto", None, status="oom"))).empty
