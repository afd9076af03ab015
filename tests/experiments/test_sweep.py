"""Sweeps that survive: failing, hanging and dying points, kills, resumes, two at once, a disk that refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import experiments
from experiments import differences, session
from experiments.provenance import git_state
from experiments.records import RECORDS, read_rows
from tests.engine.leftovers import wait_until_gone
from tests.experiments.fake_run import ROOT, command, composed, only_folder, run

# What says when a row was made, not what it says.
VOLATILE = ["run_id"]


def table(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in VOLATILE} for row in read_rows(folder / RECORDS)]


def wait_for(condition: Callable[[], Any], seconds: float = 240) -> None:
    """The time is for a command on a busy machine to start, which imports torch."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_failing_points_are_rows_and_the_others_go_on(tmp_path: Path) -> None:
    assert run(["ok", "raise", "oom", "ok"], root=tmp_path, plots=True) == 1
    folder = only_folder(tmp_path)
    df = experiments.load(folder)
    assert df.groupby("context_len")["status"].first().tolist() == ["ok", "error", "oom", "ok"]
    failed = df[df["status"] != "ok"]
    assert failed["time_us"].isna().all()
    assert "this point always fails" in failed["error"].iloc[0]
    assert "20.00 GiB" in failed["error"].iloc[1]
    assert (folder / "plots" / "time.png").stat().st_size > 1000
    report = (folder / "report.md").read_text()
    assert "this point always fails" in report


def test_all_points_good_is_exit_code_zero_and_a_whole_folder(tmp_path: Path) -> None:
    assert run(["ok", "ok"], root=tmp_path, plots=True) == 0
    folder = only_folder(tmp_path)
    for name in (
        RECORDS,
        "config.yaml",
        "provenance.json",
        "table.csv",
        "report.md",
        "report.html",
        "plots/time.png",
    ):
        assert (folder / name).stat().st_size > 0, name
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["command"] == "python -m experiments.run a=b"
    assert len(provenance["git"]["commit"]) == 40
    assert provenance["git"]["dirty"] in (True, False)
    assert provenance["packages"]["torch"]
    assert provenance["ceilings"]["read_bytes_per_s"] > 1e8
    assert 'src="data:image/png;base64,' in (folder / "report.html").read_text()


def test_a_hanging_point_is_a_timeout_in_this_process_and_in_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, patience_s = tmp_path / "log", 300.0

    class Hasty(subprocess.Popen):
        """A point's process whose time is up soon after the point began, however long it took to come so far."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout == patience_s:
                wait_for(lambda: self.poll() is not None or has_line(log, f"1 {self.pid}"))
                timeout = 1.0
            return super().wait(timeout)

    monkeypatch.setattr("experiments.execution.subprocess.Popen", Hasty)
    for isolate in (False, True):
        root, timeout_s = tmp_path / str(isolate), patience_s if isolate else 2.0
        bench = {"log": str(log)}
        assert run(["hang", "ok"], root=root, isolate=isolate, timeout_s=timeout_s, bench=bench) == 1
        df = experiments.load(root)
        assert df["status"].tolist() == ["timeout", "ok", "ok", "ok"]
        assert f"took longer than {timeout_s:g} s" in df["error"].iloc[0]


def has_line(log: Path, line: str) -> bool:
    return log.exists() and line in log.read_text().splitlines()


def test_a_point_that_kills_its_process_is_a_row(tmp_path: Path) -> None:
    assert run(["kill", "ok"], root=tmp_path, isolate=True) == 1
    df = experiments.load(tmp_path)
    assert df["status"].tolist() == ["error"] + ["ok"] * 3
    assert "SIGKILL" in df["error"].iloc[0]


def test_isolated_points_run_in_processes_of_their_own_and_give_the_same_rows(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run(["ok", "ok"], root=tmp_path / "own", isolate=True, bench={"log": str(log)}) == 0
    pids = {line.split()[1] for line in log.read_text().splitlines()}
    assert len(pids) == 2
    assert str(os.getpid()) not in pids
    assert run(["ok", "ok"], root=tmp_path / "here") == 0
    assert [{**row, "point_id": ""} for row in table(only_folder(tmp_path / "own"))] == [
        {**row, "point_id": ""} for row in table(only_folder(tmp_path / "here"))
    ]


@pytest.mark.parametrize("cut", [0.02, 0.3, 0.5, 0.77, 0.999])
def test_a_run_cut_anywhere_resumes_to_the_same_table(tmp_path: Path, cut: float) -> None:
    points = ["ok", "raise", "ok", "ok"]
    log = tmp_path / "log"
    assert run(points, root=tmp_path / "whole", bench={"log": str(log)}) == 1
    whole = only_folder(tmp_path / "whole")
    data = (whole / RECORDS).read_bytes()
    kept = data[: int(cut * len(data))]
    (whole / RECORDS).write_bytes(kept)
    ends = [len(b"".join(data.splitlines(keepends=True)[:n])) for n in (3, 4, 7, 10)]
    finished = sum(end <= len(kept) for end in ends)
    log.write_text("")
    expected = [json.loads(line) for line in data.splitlines()]
    assert run(points, root=tmp_path, folder=str(whole), resume=True, bench={"log": str(log)}) == 1
    assert len(log.read_text().splitlines()) == len(points) - finished
    assert read_rows(whole / RECORDS) == expected


def test_resume_repeats_failed_points_only_when_asked(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options: dict[str, Any] = {"root": tmp_path, "bench": {"log": str(log)}}
    run(["ok", "raise"], **options)
    folder = only_folder(tmp_path)
    run(["ok", "raise"], folder=str(folder), resume=True, **options)
    assert len(log.read_text().splitlines()) == 2
    run(["ok", "raise"], folder=str(folder), resume=True, retry_failed=True, **options)
    assert len(log.read_text().splitlines()) == 3
    assert len(read_rows(folder / RECORDS)) == 4
    resumed = json.loads((folder / "provenance.json").read_text())["resumed"]
    assert [entry["git"]["commit"] for entry in resumed] == [git_state()["commit"]] * 2


def test_resume_refuses_another_configuration_and_an_old_folder_needs_resume(tmp_path: Path) -> None:
    run(["ok"], root=tmp_path)
    folder = only_folder(tmp_path)
    with pytest.raises(ValueError, match=r"differs in bench\.points"):
        run(["ok", "ok"], root=tmp_path, folder=str(folder), resume=True)
    with pytest.raises(ValueError, match="already exists"):
        run(["ok"], root=tmp_path, folder=str(folder))


def test_kill_9_during_a_sweep_then_resume(tmp_path: Path) -> None:
    log, gate, folder = tmp_path / "log", tmp_path / "gate", tmp_path / "run"
    points = ["ok", "ok", "ok", "wait", "ok", "ok"]
    bench = f", log: '{log}', gate: '{gate}'"
    typed = command(points, root=tmp_path, bench=bench, more=[f"run.folder={folder}"])
    child = subprocess.Popen(typed, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) == 4)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert len({row["point_id"] for row in read_rows(folder / RECORDS)}) == 3
    gate.touch()
    done = subprocess.run([*typed, "run.resume=true"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = [line.split()[0] for line in log.read_text().splitlines()]
    assert runs == ["1", "2", "4", "8", "8", "16", "32"]  # the one that the kill cut off once more
    whole = tmp_path / "whole"
    assert run(points, root=whole, bench={"log": str(log), "gate": str(gate)}) == 0
    stripped = [{k: v for k, v in row.items() if k != "run_id"} for row in read_rows(folder / RECORDS)]
    assert stripped == table(only_folder(whole))


def test_a_killed_sweep_leaves_no_isolated_child(tmp_path: Path) -> None:
    log = tmp_path / "log"
    bench = f", log: '{log}'"
    typed = command(["hang"], root=tmp_path, bench=bench, more=["run.isolate=true"])
    parent = subprocess.Popen(typed, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: log.exists() and log.read_text())
    child = int(log.read_text().split()[1])
    assert child != parent.pid
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until_gone([child], timeout_s=120)


def test_two_sweeps_started_together_never_share_a_folder(tmp_path: Path) -> None:
    typed = command(["ok", "ok"], root=tmp_path, bench=", seconds: 0.2")
    children = [
        subprocess.Popen(typed, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [child.wait(timeout=240) for child in children] == [0, 0]
    folders = sorted(path.parent for path in tmp_path.rglob(RECORDS))
    assert len(folders) == 2
    for folder in folders:
        rows = read_rows(folder / RECORDS)
        assert len(rows) == 6
        assert {row["run_id"] for row in rows} == {folder.name}


def test_runs_of_a_multirun_cannot_share_one_folder(tmp_path: Path) -> None:
    """The first took it, the second was refused, and the sweep's table held neither."""
    config = composed(["ok"], root=tmp_path, folder=str(tmp_path / "one"))
    with pytest.raises(ValueError, match=r"run\.folder .*run\.root"):
        session.run(config, ROOT, [], tmp_path / "multirun" / "0000")
    assert not (tmp_path / "one").exists()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    import fcntl

    run(["ok"], root=tmp_path)
    folder = only_folder(tmp_path)
    with (folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(ValueError, match="another process"):
            run(["ok"], root=tmp_path, folder=str(folder), resume=True)


def test_resume_begins_a_run_that_never_came_to_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "never"
    assert run(["ok"], root=tmp_path, folder=str(folder), resume=True) == 0
    assert len(read_rows(folder / RECORDS)) == 3


def test_sigint_ends_the_command_with_a_report_and_no_child(tmp_path: Path) -> None:
    log = tmp_path / "log"
    typed = command(["ok", "hang"], root=tmp_path, bench=f", log: '{log}'", more=["run.isolate=true"])
    child = subprocess.Popen(typed, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=240) == 130
    (report,) = tmp_path.rglob("report.md")
    assert len(read_rows(report.parent / RECORDS)) == 3
    hanging = log.read_text().splitlines()[1].split()[1]
    assert not Path(f"/proc/{hanging}").exists()


def test_ctrl_c_leaves_a_valid_folder(tmp_path: Path) -> None:
    assert run(["ok", "interrupt", "ok"], root=tmp_path, plots=True) == 130
    folder = only_folder(tmp_path)
    assert len(read_rows(folder / RECORDS)) == 3
    assert (folder / "report.md").exists()


def test_a_run_has_ended_only_with_its_last_point(tmp_path: Path) -> None:
    assert run(["ok", "interrupt", "ok"], root=tmp_path, plots=True) == 130
    folder = only_folder(tmp_path)
    record = json.loads((folder / "provenance.json").read_text())
    assert "ended" not in record
    assert differences.warnings(folder, folder)[-1] == "run B did not end: some of its points are missing"
    assert "3 ok; it did not end, and points are missing" in (folder / "report.md").read_text()


def test_a_run_that_is_continued_has_not_ended_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert run(["ok", "raise"], root=tmp_path, folder=str(folder), plots=True) == 1
    assert "3 ok" in (folder / "report.md").read_text()
    (folder / RECORDS).write_bytes(b"")
    with monkeypatch.context() as patch:
        patch.setattr("experiments.sweep.run_sweep", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            run(["ok", "raise"], root=tmp_path, folder=str(folder), resume=True)
    record = json.loads((folder / "provenance.json").read_text())
    assert {"ended", "rows"}.isdisjoint(record)
    assert run(["ok", "raise"], root=tmp_path, folder=str(folder), resume=True) == 1
    assert {"ended", "rows"} <= set(json.loads((folder / "provenance.json").read_text()))


def test_a_disk_that_refuses_is_an_error_before_the_first_point(tmp_path: Path) -> None:
    log = tmp_path / "log"
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OSError, match="file"):
        run(["ok"], root=blocked, bench={"log": str(log)})
    assert not log.exists()


def test_rows_already_measured_are_kept_when_the_disk_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experiments import records

    fsync, calls = os.fsync, 0

    def full(file: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device")
        fsync(file)

    monkeypatch.setattr(records.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        run(["ok", "ok", "ok"], root=tmp_path)
    assert len(experiments.load(tmp_path)) >= 3
