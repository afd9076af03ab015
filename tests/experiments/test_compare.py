"""Comparing runs: verdicts, exit codes for CI, what changed in provenance."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments.columns import make_row
from experiments.compare import main
from experiments.records import RECORDS, RecordWriter

ROOT = Path(__file__).resolve().parents[2]


def write(
    folder: Path,
    times: dict[str, float | str],
    seed: int,
    rounds: int = 8,
    config: dict[str, Any] | None = None,
    **provenance: Any,
) -> str:
    """A run with one point a variant: its mean time, or its status."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps(config or {}))
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
    record: dict[str, Any] = {"git": {"commit": "a" * 40, "dirty": False}, "packages": {"torch": "2.13.0"}}
    record |= {"ended": "now"} | provenance
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
    assert "nothing that is recorded" in out
    assert "Caution" not in out
    assert "Not compared" not in out
    assert (tmp_path / "c.csv").read_text().count("\n") == 3
    assert main([a, b, "--csv", str(tmp_path / "nowhere" / "c.csv")]) == 2
    assert f"--csv {tmp_path / 'nowhere' / 'c.csv'}: " in capsys.readouterr().err


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
    assert main([a, write(tmp_path / "empty", {}, 3)]) == 2
    assert "holds no rows" in capsys.readouterr().err
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / RECORDS).write_text("no json\n")
    assert main([a, str(tmp_path / "broken")]) == 2
    assert "line 1 is not a JSON object" in capsys.readouterr().err


def test_points_of_one_run_alone_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    a = write(tmp_path / "a", {"x": 100.0, "gone": 10.0}, 1)
    b = write(tmp_path / "b", {"x": 100.0, "new": 10.0}, 2)
    csv = tmp_path / "c.csv"
    assert main([a, b, "--csv", str(csv)]) == 0
    out = capsys.readouterr().out
    assert "Not compared, 2 lines" in out
    assert dict(zip(*(pd.read_csv(csv)[name] for name in ("variant", "verdict")))) == {
        "x": "same",
        "gone": "only in A",
        "new": "only in B",
    }


def test_noise_alone_is_no_regression(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {str(i): 100.0 for i in range(40)}, 1)
    b = write(tmp_path / "b", {str(i): 100.0 for i in range(40)}, 2)
    assert main([a, b]) == 0
    assert main([a, b, "--threshold", "0.0"]) == 1  # at no threshold some of forty intervals of 95% leave 1


def test_reasons_to_doubt_a_comparison_are_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    a = write(tmp_path / "a", {"x": 100.0}, 1, device_name="H100", ceilings={"read_bytes_per_s": 1e12})
    b = write(tmp_path / "b", {"x": 100.0}, 2, device_name="H200", ceilings={"read_bytes_per_s": 2e12})
    main([a, b])
    out = capsys.readouterr().out
    assert "different devices: H100 and H200" in out
    assert "device_name: H100 -> H200" in out
    assert "times as fast" not in out  # which devices of two kinds always are
    c = write(
        tmp_path / "c",
        {"x": 100.0},
        3,
        device_name="H100",
        ceilings={"read_bytes_per_s": 9e11},
        git={"commit": "b" * 40, "dirty": True},
        ended=None,
    )
    main([a, c])
    out = capsys.readouterr().out
    assert "0.90 times as fast in run B" in out
    assert "run B was made from a working tree with changes" in out
    assert f"git.commit: {'a' * 40} -> {'b' * 40}" in out
    assert "run B did not end" in out


def test_what_changed_in_the_configuration_and_the_clocks_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def config(eager: bool, root: str) -> dict[str, Any]:
        return {"engine": {"enforce_eager": eager, "block_size": 16}, "run": {"root": root}, "seed": 0}

    gpu = {"clocks.max.sm": "1980 MHz", "power.limit": "700 W", "temperature.gpu": "30"}
    a = write(tmp_path / "a", {"x": 100.0}, 1, config=config(False, "/a"), gpu_before=gpu)
    slow = gpu | {"power.limit": "500 W", "temperature.gpu": "60"}
    b = write(tmp_path / "b", {"x": 100.0}, 2, config=config(True, "/b"), gpu_before=slow)
    main([a, b])
    changed = capsys.readouterr().out.split("What changed:\n")[1].splitlines()
    assert changed == ["  gpu.power.limit: 700 W -> 500 W", "  config.engine.enforce_eager: False -> True"]


def test_settings_of_a_sweep_are_compared_each_with_its_own(tmp_path: Path) -> None:
    for name, eager in (("a", 300.0), ("b", 310.0)):
        for engine, time in (("default", 100.0), ("eager", eager)):
            write(tmp_path / name / engine, {"x": time}, 1, overrides=[f"engine={engine}"])
    csv = tmp_path / "c.csv"
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--csv", str(csv)]) == 0
    table = pd.read_csv(csv)
    assert table["engine"].tolist() == ["default", "eager"]
    assert table["ratio"].tolist() == pytest.approx([1.0, 310 / 300])


def test_the_command_works(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", {"x": 100.0}, 1), write(tmp_path / "b", {"x": 150.0}, 2)
    command = [sys.executable, "-m", "experiments.compare", a, b]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert "1 regression" in done.stdout
