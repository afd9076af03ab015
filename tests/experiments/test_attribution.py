"""The arithmetic of attribution, on rows made for it."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.attribution import attribute
from experiments.columns import make_row
from experiments.records import to_frame

NOISE = [1.0, 1.001, 0.999, 1.002, 0.998, 1.0]
EXTRA = {"num_layers": "Int64"}


def rows(level: str, variant: str, time_us: float | None, **more: Any) -> list[dict[str, Any]]:
    base = {
        "tp": 1,
        "batch_size": 1,
        "context_len": 4096,
        "level": level,
        "variant": variant,
        "num_layers": 28,
    } | more
    if time_us is None:
        return [make_row(EXTRA, **base, status="oom", error="no memory")]
    return [make_row(EXTRA, **base, status="ok", round=i, time_us=time_us * n) for i, n in enumerate(NOISE)]


def test_three_depths_and_what_survives() -> None:
    # The kernel saves 28 x 100 us a step; the step 1400 us of it; the workload 700 us in each of its 100 decode steps.
    frame = to_frame(
        [
            *rows("kernel", "single_pass", 110.0),
            *rows("kernel", "split_kv", 10.0),
            *rows("step", "single_pass", 4200.0),
            *rows("step", "split_kv", 2800.0),
            *rows("workload", "single_pass", 420_000.0, output_len=101),
            *rows("workload", "split_kv", 350_000.0, output_len=101),
        ]
    )
    table = attribute(frame).set_index("level")
    assert table["speedup"].tolist() == pytest.approx([11.0, 1.5, 1.2], rel=1e-3)
    assert table["saved_us_per_step"].tolist() == pytest.approx([2800.0, 1400.0, 700.0], rel=1e-3)
    assert table["survives"].tolist() == pytest.approx([1.0, 0.5, 0.25], rel=1e-2)
    assert set(table["baseline"]) == {"single_pass"}


def why(*frames: list[dict[str, Any]]) -> dict[str, str]:
    """Reasons by depth; a share is there exactly where no reason is."""
    table = attribute(to_frame([row for rows in frames for row in rows])).set_index("level")
    assert (table["survives"].notna() == table["why_not"].isna()).all()
    return table["why_not"].to_dict()


def test_no_share_survives_of_a_gain_that_is_not_there() -> None:
    found = why(
        *(rows("kernel", v, 100.0) for v in "ab"), rows("step", "a", 3000.0), rows("step", "b", 2900.0)
    )
    assert found["kernel"] == found["step"] == "no share: what the kernel gains is within the noise"


def test_a_slower_kernel_has_no_share_and_a_negative_saving() -> None:
    made = [rows("kernel", "a", 100.0), rows("kernel", "b", 200.0)]
    made += [rows("step", "a", 3000.0), rows("step", "b", 5800.0)]
    made += [rows("workload", v, t, output_len=11) for v, t in (("a", 30_000.0), ("b", 58_000.0))]
    found = why(*made)
    assert set(found.values()) == {"no share: the kernel is slower"}
    table = attribute(to_frame([row for each in made for row in each])).set_index("level")
    assert table["saved_us_per_step"].tolist() == pytest.approx([-2800.0] * 3, rel=1e-2)
    assert (table["saved_us_per_step_low"] <= table["saved_us_per_step"]).all()


def test_a_depth_that_loses_what_the_kernel_gains_has_no_share() -> None:
    found = why(
        rows("kernel", "a", 200.0),
        rows("kernel", "b", 100.0),
        rows("step", "a", 3000.0),
        rows("step", "b", 3300.0),
        rows("workload", "a", 30_000.0, output_len=11),
        rows("workload", "b", 30_000.0, output_len=11),
    )
    assert found["kernel"] is None or found["kernel"] != found["kernel"]
    assert found["step"] == "no share: the step is slower"
    assert found["workload"] == "no share: what the workload gains is within the noise"


def test_one_round_shows_no_gain() -> None:
    found = why(rows("kernel", "a", 200.0)[:1], rows("kernel", "b", 100.0)[:1])
    assert found["kernel"] == "no share: one round of the kernel shows no gain"


def test_a_saving_has_the_interval_of_its_speed_up_and_its_sign() -> None:
    """A pair of outliers must not give a saving below 0 beside a speed-up above 1, as medians of either side can."""
    noisy = to_frame(
        [
            *rows("kernel", "a", 100.0),
            *rows("kernel", "b", 50.0)[:4],
            *(row | {"time_us": 400.0} for row in rows("kernel", "b", 50.0)[4:]),
        ]
    )
    line = attribute(noisy).set_index("level").loc["kernel"]
    assert line["saved_us_per_step"] == pytest.approx(28 * line["baseline_us"] * (1 - 1 / line["speedup"]))
    assert line["saved_us_per_step_low"] < line["saved_us_per_step"] < line["saved_us_per_step_high"]


def test_engines_with_different_numbers_of_rounds_say_so() -> None:
    found = why(rows("kernel", "a", 100.0), rows("kernel", "b", 100.0)[:4])
    assert found["kernel"] == "6 rounds of a, 4 rounds of b"
    assert found["step"] == "no rows"


def test_a_depth_that_failed_says_why() -> None:
    frame = to_frame(
        [
            *rows("kernel", "a", 100.0),
            *rows("kernel", "b", 50.0),
            *rows("step", "a", 3000.0),
            *rows("step", "b", None),
        ]
    )
    table = attribute(frame).set_index("level")
    assert table.loc["kernel", "speedup"] == pytest.approx(2.0)
    assert table.loc["step", "why_not"] == "no memory"
    assert table.loc["workload", "why_not"] == "no rows"
