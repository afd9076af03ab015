"""Sweeps of runs by Hydra's launchers: each run its own folder, all merged into one table."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

import experiments
from experiments import session
from experiments.arguments import CONF, group_options
from experiments.columns import make_row
from experiments.multirun import load_runs, merge
from experiments.records import RECORDS, RecordWriter
from tests.experiments.fake_run import ROOT, command
from tests.experiments.test_sweep import wait_for

LAUNCHERS = {
    "basic": None,
    "joblib": "hydra_plugins.hydra_joblib_launcher",
    "processes": "hydra_plugins.hydra_joblib_launcher",
    "submitit_local": "hydra_plugins.hydra_submitit_launcher",
    "ray": "hydra_plugins.hydra_ray_launcher",
}


def installed(plugin: str | None) -> bool:
    return plugin is None or importlib.util.find_spec(plugin) is not None


def sweep(
    root: Path, launcher: str, points: list[str], *more: str, bench: str = ""
) -> subprocess.CompletedProcess[str]:
    typed = command(
        points, root=root, bench=bench, more=["-m", "seed=0,1", f"hydra/launcher={launcher}", *more]
    )
    return subprocess.run(typed, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


Sweep = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sweep]:
    """A launcher's sweep of two runs of two points, made once: its root, with a log, and the finished command."""

    @cache
    def make(launcher: str) -> Sweep:
        root = tmp_path_factory.mktemp(launcher)
        return root, sweep(root, launcher, ["ok", "ok"], bench=f", seconds: 0.2, log: '{root / 'log'}'")

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


def test_every_launcher_gives_the_same_table(swept: Callable[[str], Sweep]) -> None:
    names = [name for name in LAUNCHERS if installed(LAUNCHERS[name])]
    assert {"basic", "joblib", "submitit_local"} <= set(names)  # what `make test` installs
    found = {name: next(swept(name)[0].glob("multirun/*/table.csv")).read_text() for name in names}
    assert found == dict.fromkeys(names, found["basic"])
    assert found["basic"].count("\n") == 1 + 4  # two seeds, two contexts


def test_the_launcher_processes_runs_one_after_another_in_processes_of_their_own(
    swept: Callable[[str], Sweep],
) -> None:
    root, _ = swept("processes")
    points, pids = zip(*(line.split() for line in (root / "log").read_text().splitlines()))
    assert points == ("1", "2", "1", "2")
    assert pids[0] == pids[1] != pids[2] == pids[3]


def test_a_killed_run_is_told_and_the_others_are_merged(tmp_path: Path) -> None:
    done = sweep(tmp_path, "processes", ["ok"], "seed=0", "bench.points=[ok],[ok,kill]")
    assert done.returncode == 1
    assert "TerminatedWorkerError" in done.stderr
    assert "Traceback" not in done.stderr
    assert "6 rows of 2 runs" in done.stdout  # the point before the kill is kept
    (report,) = tmp_path.glob("multirun/*/report.md")
    assert report.read_text().count("(did not end)") == 1


def test_ctrl_c_ends_the_whole_sweep_and_merges_what_there_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    bench = f", log: '{log}', seconds: 0.5"
    typed = command(["ok", "hang"], root=tmp_path, bench=bench, more=["-m", "seed=0,1"])
    started = subprocess.Popen(typed, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
    started.send_signal(signal.SIGINT)
    assert started.wait(timeout=240) == session.INTERRUPTED
    assert len(log.read_text().splitlines()) == 2  # the second run never began
    (table,) = tmp_path.glob("multirun/*/table.csv")
    assert len(pd.read_csv(table)) == 1
    (report,) = table.parent.glob("0000/fake_suite/*/report.md")
    assert len(experiments.load(report.parent)) == 3


def write_run(folder: Path, overrides: list[str], **columns: Any) -> None:
    """A finished run with one row."""
    folder.mkdir(parents=True)
    row = make_row(point_id="p", suite="decode_kernel", variant="torch", status="ok", round=0, **columns)
    with RecordWriter(folder / RECORDS) as writer:
        writer.append([row])
    (folder / "provenance.json").write_text(json.dumps({"overrides": overrides, "ended": "now"}))


def test_what_was_swept_tells_lines_apart_unless_a_column_does(tmp_path: Path) -> None:
    for i, (engine, context_len) in enumerate((e, c) for e in ("default", "eager") for c in (128, 512)):
        typed = [f"engine={engine}", f"bench.context_lens=[{context_len}]", f"run.folder={i}", "seed=0"]
        write_run(tmp_path / str(i), typed, context_len=context_len, time_us=float(i + 1))
    rows, apart = load_runs(tmp_path)
    assert apart == ["engine"]
    assert rows["engine"].tolist() == ["default"] * 2 + ["eager"] * 2
    assert merge(tmp_path) == 0
    table = pd.read_csv(tmp_path / "table.csv")
    assert table[["engine", "context_len", "time_us"]].values.tolist() == [
        ["default", 128, 1.0],
        ["default", 512, 2.0],
        ["eager", 128, 3.0],
        ["eager", 512, 4.0],
    ]
    assert "| eager | 512 |" in (tmp_path / "report.md").read_text()


def test_runs_of_several_devices_are_not_pooled(tmp_path: Path) -> None:
    for i, name in enumerate(("H100", "H200")):
        write_run(tmp_path / name, [], device_name=name, time_us=float(i + 1))
    assert load_runs(tmp_path)[1] == ["device_name"]
    merge(tmp_path)
    assert pd.read_csv(tmp_path / "table.csv")["time_us"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("name", group_options("hydra/launcher"))
def test_every_launcher_of_ours_composes(name: str) -> None:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = compose("config", overrides=[f"hydra/launcher={name}"], return_hydra_config=True)
    assert config.hydra.launcher._target_.startswith("hydra_plugins.")


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
