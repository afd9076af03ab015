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


def test_no_share_survives_of_a_gain_that_is_not_there() -> None:
    frame = to_frame(
        [
            *rows("kernel", "a", 100.0),
            *rows("kernel", "b", 100.0),
            *rows("step", "a", 3000.0),
            *rows("step", "b", 2900.0),
        ]
    )
    assert attribute(frame)["survives"].isna().all()


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
