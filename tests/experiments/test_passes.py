"""The turns of engines: every round once, in an order in which an even drift cancels."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import suites
from experiments.attribution import attribute
from experiments.columns import make_row
from experiments.passes import EnginePass, in_turn, split_rounds
from experiments.records import to_frame
from experiments.settings import Settings, Variant, resolve
from experiments.suites.protocol import Point
from tests.experiments.test_conf import composed

A, B, C = (Variant(name, "torch") for name in "abc")


@pytest.mark.parametrize(
    ("rounds", "passes", "expected"),
    [(6, 2, [3, 3]), (5, 2, [3, 2]), (1, 2, [1]), (6, 1, [6]), (7, 3, [3, 2, 2])],
)
def test_passes_share_the_rounds_without_a_gap(rounds: int, passes: int, expected: list[int]) -> None:
    found = split_rounds(rounds, passes)
    assert [each.rounds for each in found] == expected
    numbers = [each.first_round + i for each in found for i in range(each.rounds)]
    assert numbers == list(range(rounds))
    assert [each.number for each in found] == list(range(len(expected)))


def test_the_second_pass_goes_backwards() -> None:
    names = [(each.number, variant.name) for each, variant in in_turn([A, B, C], 6, 2)]
    assert names == [(0, "a"), (0, "b"), (0, "c"), (1, "c"), (1, "b"), (1, "a")]
    assert [(each.rounds, variant.name) for each, variant in in_turn([A], 6, 2)] == [(6, "a")]


def test_a_pass_has_rounds() -> None:
    with pytest.raises(ValueError, match="rounds >= 1"):
        EnginePass(0, 0, 0)


@pytest.mark.parametrize(("passes", "speedup"), [(1, 0.92), (2, 1.0)])
def test_an_even_drift_is_a_difference_in_one_pass_and_none_in_two(passes: int, speedup: float) -> None:
    """Two engines that are equally fast, on a machine that becomes slower by 1% of the start with every round."""
    rows, now = [], 0
    for each, variant in in_turn([A, B], 8, passes):
        for number in range(each.first_round, each.first_round + each.rounds):
            columns = {"tp": 1, "batch_size": 1, "context_len": 64, "level": "step", "variant": variant.name}
            time_us = 1000.0 * (1 + 0.01 * now)
            rows.append(make_row(**columns, status="ok", round=number, time_us=time_us))
            now += 1
    table = attribute(to_frame(rows)).set_index("level")
    assert table.loc["step", "speedup"] == pytest.approx(speedup, abs=0.01 if passes == 1 else 2e-3)
    spans_one = table.loc["step", "speedup_low"] < 1 < table.loc["step", "speedup_high"]
    assert spans_one == (passes == 2)


def engine_points(*overrides: str) -> list[Point]:
    settings = Settings.parse(resolve(composed("device=cpu", "size.rounds=6", *overrides), Path.cwd()))
    return [point for point in suites.get(settings.suite).points(settings) if point.on_engine]


def turns(points: list[Point], level: str) -> list[tuple[int, str, int, int]]:
    names = ("engine_pass", "variant", "first_round", "rounds")
    found = []
    for point in points:
        if point.params["level"] == level:
            found.append(tuple(point.params[name] for name in names))
    return found


def test_attribution_lets_engines_take_turns_at_both_depths() -> None:
    points = engine_points("+suite=attribution", "attention=[torch,reference]", "bench.context_lens=[64]")
    expected = [(0, "torch", 0, 3), (0, "reference", 0, 3), (1, "reference", 3, 3), (1, "torch", 3, 3)]
    assert turns(points, "step") == turns(points, "workload") == expected
    assert len({point.id for point in points}) == 8


def test_long_decode_takes_turns_when_asked() -> None:
    typed = ("+suite=long_decode", "attention=[torch,reference]", "bench.engine_context_lens=[64]")
    typed += ("bench.engine_tensor_parallel=[1]", "bench.levels=step")
    assert turns(engine_points(*typed), "step") == [(0, "torch", 0, 6), (0, "reference", 0, 6)]
    assert [turn[:2] for turn in turns(engine_points(*typed, "bench.engine_passes=2"), "step")] == [
        (0, "torch"),
        (0, "reference"),
        (1, "reference"),
        (1, "torch"),
    ]
    with pytest.raises(ValueError, match=r"bench\.engine_passes"):
        engine_points(*typed, "bench.engine_passes=0")
