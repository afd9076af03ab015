"""Reports made again from a run's rows, with what somebody has noted about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import report
from tests.experiments.fake_run import only_folder, run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run(["ok", "raise"], root=tmp_path, plots=True)
    return only_folder(tmp_path)


def test_a_report_is_made_again_from_the_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = {name: (folder / name).read_text() for name in ("report.md", "report.html", "table.csv")}
    for name in made:
        (folder / name).unlink()
    (folder / "plots" / "time.png").unlink()
    assert report.main([str(folder)]) == 0
    assert str(folder / "report.md") in capsys.readouterr().out
    assert {name: (folder / name).read_text() for name in made} == made
    assert (folder / "plots" / "time.png").stat().st_size > 1000


def test_a_note_in_the_provenance_stands_below_the_title(folder: Path) -> None:
    file = folder / "provenance.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"note": "Cut by the lease & <short>."}))
    report.rewrite(folder)
    assert (folder / "report.md").read_text().splitlines()[2] == "> Cut by the lease & <short>."
    assert (
        "<blockquote>Cut by the lease &amp; &lt;short&gt;.</blockquote>"
        in (folder / "report.html").read_text()
    )


def test_what_is_no_run_is_told(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert report.main([str(tmp_path / "empty")]) == 2
    assert "no records.jsonl" in capsys.readouterr().err
    (folder / "records.jsonl").write_text("")
    assert report.main([str(folder)]) == 2
    assert "has no rows" in capsys.readouterr().err
