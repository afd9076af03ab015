"""Sweeps of runs by Hydra's launchers: each run its own folder, all merged into one table."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import experiments
from experiments.records import RECORDS
from tests.experiments.fake_run import ROOT, command

LAUNCHERS = {
    "basic": None,
    "joblib": "hydra_plugins.hydra_joblib_launcher",
    "processes": "hydra_plugins.hydra_joblib_launcher",
    "submitit_local": "hydra_plugins.hydra_submitit_launcher",
    "ray": "hydra_plugins.hydra_ray_launcher",
}


def installed(plugin: str | None) -> bool:
    return plugin is None or importlib.util.find_spec(plugin) is not None


def sweep(root: Path, launcher: str, points: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    typed = command(points, root=root, more=["-m", "seed=0,1", f"hydra/launcher={launcher}", *more])
    return subprocess.run(typed, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


Sweep = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sweep]:
    """A launcher's sweep of two runs of two points, made once: its root and the finished command."""

    @cache
    def make(launcher: str) -> Sweep:
        root = tmp_path_factory.mktemp(launcher)
        return root, sweep(root, launcher, ["ok", "ok"])

    return make


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_every_launcher_leaves_a_folder_a_run_and_one_table(
    swept: Callable[[str], Sweep], launcher: str
) -> None:
    if not installed(LAUNCHERS[launcher]):
        pytest.skip(f"the plug-in of launcher {launcher} is not installed")
    root, done = swept(launcher)
    assert done.returncode == 0, done.stderr
    (folder,) = (root / "multirun").iterdir()
    runs = sorted(path.parent for path in folder.rglob(RECORDS))
    assert len(runs) == 2
    df = experiments.load(folder)
    assert len(df) == 12
    assert df["run_id"].nunique() == 2
    assert df["point_id"].nunique() == 4  # the seed is a parameter
    assert (folder / "table.csv").read_text().count("\n") >= 3
    assert all(run.name in (folder / "report.md").read_text() for run in runs)
    assert f"12 rows of 2 runs in {folder}" in done.stdout


def test_runs_of_several_launchers_load_as_one_table(swept: Callable[[str], Sweep]) -> None:
    launchers = [name for name in ("basic", "joblib", "submitit_local") if installed(LAUNCHERS[name])]
    df = experiments.load([swept(name)[0] for name in launchers])
    assert len(df) == 12 * len(launchers)
    # The same points, whoever ran them.
    assert df["point_id"].nunique() == 4
    assert df.groupby("point_id")["time_us"].nunique().tolist() == [3] * 4


def test_a_failing_run_does_not_stop_the_others(tmp_path: Path) -> None:
    done = sweep(tmp_path, "basic", ["ok", "raise"])
    assert done.returncode == 1
    df = experiments.load(tmp_path)
    assert df["status"].value_counts().to_dict() == {"ok": 6, "error": 2}


def test_a_senseless_run_is_told_and_the_others_are_kept(tmp_path: Path) -> None:
    done = sweep(tmp_path, "basic", ["ok"], "bench.rows=0,2")
    assert done.returncode == 2
    assert "rows must be at least 1" in done.stderr
    assert len(experiments.load(tmp_path)) == 4


def test_a_relative_folder_and_chdir_find_each_other(tmp_path: Path) -> None:
    typed = command(["ok"], root=Path("here"), more=["-m", "seed=0,1", "hydra.job.chdir=true"])
    done = subprocess.run(
        typed, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False, env=_environment()
    )
    assert done.returncode == 0, done.stderr
    assert len(experiments.load(tmp_path / "here")) == 6


def _environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(ROOT)}
