"""Finding runs: what there is under a folder, and the newest of a suite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import report
from experiments.columns import make_row
from experiments.records import RECORDS, RecordWriter
from experiments.runs import list_runs, newest


def write(folder: Path, suite: str, started: str, status: str = "ok") -> Path:
    folder.mkdir(parents=True)
    with RecordWriter(folder / RECORDS) as writer:
        writer.append([make_row(point_id="p", suite=suite, status=status, level="step")])
    record = {
        "started": started,
        "device_name": "d",
        "git": {"commit": "a" * 40, "dirty": True},
        "rows": {status: 1},
    }
    (folder / "provenance.json").write_text(json.dumps(record))
    (folder / "config.yaml").write_text(f"bench: {{suite: {suite}}}\nmodel: {{name: tiny}}\n")
    return folder


def test_runs_are_listed_in_the_order_they_were_started(tmp_path: Path) -> None:
    write(tmp_path / "b", "throughput", "2026-01-02T00:00:00+0000")
    write(tmp_path / "deep" / "a", "long_decode", "2026-01-01T00:00:00+0000")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / RECORDS).write_text("")
    runs = list_runs(tmp_path)
    assert runs["suite"].tolist() == ["long_decode", "throughput"]
    write(tmp_path / "east", "serving", "2026-01-01T01:00:00+0900")  # 2025-12-31 16:00 in UTC
    assert list_runs(tmp_path)["suite"].tolist() == ["serving", "long_decode", "throughput"]
    assert runs["rows"].tolist() == ["1 ok", "1 ok"]
    assert runs["commit"].tolist() == ["aaaaaaaaaa+changes"] * 2


def test_the_newest_run_may_be_asked_for_one_with_good_rows_of_a_level(tmp_path: Path) -> None:
    older = write(tmp_path / "z", "long_decode", "2026-01-01T00:00:00+0000")
    newer = write(tmp_path / "a", "long_decode", "2026-01-02T00:00:00+0000", status="oom")
    assert newest("long_decode", tmp_path) == newer
    assert newest("long_decode", tmp_path, level="step") == older
    with pytest.raises(FileNotFoundError, match="long_decode with level kernel"):
        newest("long_decode", tmp_path, level="kernel")
    with pytest.raises(FileNotFoundError, match="there are long_decode"):
        newest("serving", tmp_path)
    with pytest.raises(FileNotFoundError, match="no run"):
        list_runs(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "why"), [("{", "not JSON"), ("[]", "not an object"), ("{}", "no device_name")]
)
def test_a_provenance_that_is_none_is_told_by_its_path(
    tmp_path: Path, text: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "run", "throughput", "2026-01-02T00:00:00+0000")
    (folder / "provenance.json").write_text(text)
    with pytest.raises(ValueError, match=f"run/provenance.json: {why}"):
        list_runs(tmp_path)
    assert report.main([str(folder)]) == 2
    assert f"run/provenance.json: {why}" in capsys.readouterr().err
