"""Comparing runs: verdicts, exit codes for CI, what changed in provenance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.columns import make_row
from experiments.compare import main
from experiments.records import RECORDS, RecordWriter


def write(folder: Path, times: dict[str, float | str], seed: int, rounds: int = 8, **provenance: Any) -> str:
    """A run with one point a variant: its mean time, or its status."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    with RecordWriter(folder / RECORDS) as writer:
        for variant, time in times.items():
            base: dict[str, Any] = {"point_id": variant, "suite": "s", "level": "kernel", "variant": variant}
            if isinstance(time, str):
                writer.append([make_row(**base, status=time, error="why")])
            else:
                noise = np.exp(0.01 * rng.normal(size=rounds))
                writer.append(
                    [make_row(**base, status="ok", round=i, time_us=time * n) for i, n in enumerate(noise)]
                )
    record = {"git": {"commit": "a" * 40, "dirty": False}, "packages": {"torch": "2.13.0"}} | provenance
    (folder / "provenance.json").write_text(json.dumps(record))
    return str(folder)


def test_a_slower_point_is_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    a = write(tmp_path / "a", {"x": 100.0, "y": 50.0}, 1)
    b = write(tmp_path / "b", {"x": 120.0, "y": 50.0}, 2, packages={"torch": "2.14.0"})
    assert main([a, b]) == 1
    out = capsys.readouterr().out
    assert "regression" in out
    assert "packages.torch: 2.13.0 -> 2.14.0" in out
    assert main([b, a]) == 0
    assert "improvement" in capsys.readouterr().out
    assert main([a, b, "--threshold", "0.5"]) == 0


def test_equal_runs_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    a, b = (write(tmp_path / name, {"x": 100.0, "y": 50.0}, seed) for name, seed in (("a", 1), ("b", 2)))
    assert main([a, b, "--csv", str(tmp_path / "c.csv")]) == 0
    out = capsys.readouterr().out
    assert "2 same" in out
    assert "Nothing changed" in out
    assert (tmp_path / "c.csv").read_text().count("\n") == 3


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        (100.0, "oom", 1),
        (100.0, "incorrect", 1),
        ("oom", 100.0, 0),
        ("oom", "oom", 0),
        ("not_timed", "error", 1),
    ],
)
def test_a_point_that_stops_working_is_a_regression(
    tmp_path: Path, before: float | str, after: float | str, code: int
) -> None:
    assert main([write(tmp_path / "a", {"x": before}, 1), write(tmp_path / "b", {"x": after}, 2)]) == code


def test_runs_of_different_length_are_compared_unpaired(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    a = write(tmp_path / "a", {"x": 100.0}, 1, rounds=8)
    assert main([a, write(tmp_path / "b", {"x": 130.0}, 2, rounds=12)]) == 1
    assert main([a, write(tmp_path / "c", {"x": 100.0}, 3, rounds=12)]) == 0


def test_few_rounds_need_more_than_twice_the_threshold(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"x": 100.0}, 1, rounds=2)
    assert main([a, write(tmp_path / "b", {"x": 108.0}, 2, rounds=2)]) == 0
    assert main([a, write(tmp_path / "c", {"x": 120.0}, 3, rounds=2)]) == 1


def test_nothing_to_compare_is_an_error_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    a, b = write(tmp_path / "a", {"x": 100.0}, 1), write(tmp_path / "b", {"z": 100.0}, 2)
    assert main([a, b]) == 2
    assert main([a, str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
