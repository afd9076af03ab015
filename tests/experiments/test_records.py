"""Rows on disk and as DataFrames: declared columns, types that survive nulls, torn lines, several runs at once."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import experiments
from experiments.columns import COLUMNS, CONTRACT, make_row
from experiments.records import RECORDS, RecordWriter, find_records, point_id, read_rows

NAMES = [
    *("run_id", "point_id", "suite", "status", "error", "device_name", "dtype", "model", "load_format", "tp"),
    *("decode_attention", "prefill_attention", "block_size", "num_q_heads", "num_kv_heads", "head_dim"),
    *(
        "batch_size",
        "context_len",
        "output_len",
        "cache_state",
        "round",
        "time_us",
        "time_us_low",
        "time_us_high",
    ),
    *("samples_us", "bytes", "flops", "floor_us", "roofline_fraction", "max_rel_err", "prompt_tokens"),
    *("output_tokens", "cached_tokens", "hit_rate", "prefill_s", "decode_s", "prefill_tok_s", "decode_tok_s"),
    *("step_ms", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "num_preemptions"),
    *("peak_memory_bytes", "timing_method", "throttled"),
]


def test_the_contract_has_exactly_the_columns_of_the_design() -> None:
    assert list(CONTRACT) == NAMES
    assert list(make_row(status="ok"))[: len(NAMES)] == NAMES


def test_undeclared_columns_and_unknown_statuses_are_refused() -> None:
    with pytest.raises(ValueError, match="time_ms"):
        make_row(status="ok", time_ms=1.0)
    assert make_row({"mine": "Int64"}, status="ok", mine=3)["mine"] == 3
    with pytest.raises(ValueError, match="incorrect"):
        make_row(status="fine")


def write(path: Path, *points: str, rows: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with RecordWriter(path) as writer:
        for point in points:
            writer.append(
                [
                    make_row(
                        status="ok", point_id=point, batch_size=i + 1, time_us=1.5, samples_us=[1.0, 2.0]
                    )
                    for i in range(rows)
                ]
            )


def test_load_gives_each_column_its_type_even_beside_nulls(tmp_path: Path) -> None:
    write(tmp_path / "a" / RECORDS, "p")
    with RecordWriter(tmp_path / "a" / RECORDS) as writer:
        writer.append([make_row(status="oom", point_id="q", error="no memory", throttled=False)])
    df = experiments.load(tmp_path / "a")
    assert list(df.columns[: len(NAMES)]) == NAMES
    assert {name: str(df[name].dtype) for name in COLUMNS} == COLUMNS
    assert df["batch_size"].tolist()[:2] == [1, 2]
    assert df["batch_size"].isna().tolist() == [False, False, True]
    assert df["samples_us"].iloc[0] == [1.0, 2.0]
    assert math.isnan(df["time_us"].iloc[2])


def test_load_takes_folders_files_patterns_and_several(tmp_path: Path) -> None:
    for name in ("a", "b", "deep/c"):
        write(tmp_path / name / RECORDS, name)
    assert len(experiments.load(tmp_path / "a" / RECORDS)) == 2
    assert len(experiments.load(str(tmp_path))) == 6
    assert len(experiments.load([tmp_path / "a", tmp_path / "b"])) == 4
    assert len(experiments.load(str(tmp_path / "?"))) == 4
    assert len(find_records([tmp_path / "a", tmp_path])) == 3
    with pytest.raises(FileNotFoundError, match="nowhere"):
        experiments.load(tmp_path / "nowhere")


def test_a_torn_last_line_is_left_out_and_a_broken_one_in_between_is_named(tmp_path: Path) -> None:
    path = tmp_path / RECORDS
    write(path, "p", "q")
    path.write_bytes(path.read_bytes()[:-10])
    assert len(read_rows(path)) == 3
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0][:-5], *lines[1:]]) + "\n")
    with pytest.raises(ValueError, match="line 1"):
        read_rows(path)


def test_reopening_keeps_whole_points_only(tmp_path: Path) -> None:
    path = tmp_path / RECORDS
    write(path, "p", "q", rows=3)
    path.write_bytes(path.read_bytes()[:-10])
    with RecordWriter(path) as writer:
        assert writer.finished == {"p"}
        assert len(writer.rows) == 3
    assert [row["point_id"] for row in read_rows(path)] == ["p"] * 3
    with RecordWriter(path, forget=["p"]) as writer:
        assert writer.finished == set()


def test_what_json_cannot_hold_is_refused_rather_than_written_wrong(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / RECORDS) as writer, pytest.raises(ValueError, match="JSON"):
        writer.append([make_row(status="ok", point_id="p", time_us=float("nan"))])
    assert read_rows(tmp_path / RECORDS) == []


def test_point_ids_depend_on_the_parameters_alone() -> None:
    assert point_id("s", {"a": 1, "b": [2]}) == point_id("s", {"b": [2], "a": 1})
    assert len({point_id("s", {"a": 1}), point_id("s", {"a": 2}), point_id("t", {"a": 1})}) == 3


def test_rows_are_one_json_object_a_line(tmp_path: Path) -> None:
    write(tmp_path / RECORDS, "p")
    for line in (tmp_path / RECORDS).read_text().splitlines():
        assert set(json.loads(line)) == set(COLUMNS)


def test_importing_the_package_is_light() -> None:
    code = "import sys, experiments; print({'torch', 'pandas', 'matplotlib', 'hydra'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_further_columns_come_last_with_inferred_types(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / RECORDS) as writer:
        writer.append([make_row({"n": "", "x": ""}, status="ok", point_id="p", n=1, x=0.5)])
        writer.append([make_row(status="ok", point_id="q")])
    df = experiments.load(tmp_path)
    assert str(df["n"].dtype) == "Int64"
    assert str(df["x"].dtype) == "float64"
    assert isinstance(df, pd.DataFrame)


@pytest.mark.parametrize(
    ("line", "why"),
    [("3", "not a JSON object"), ("[1]", "not a JSON object"), ('{"a": 1}', "no point_id")],
)
def test_a_file_of_something_else_is_refused_by_line(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / RECORDS
    path.write_text(f"{json.dumps(make_row(point_id='p', suite='s', status='ok'))}\n{line}\n")
    with pytest.raises(ValueError, match=f"{RECORDS}, line 2 .*{why}"):
        experiments.load(tmp_path)


def test_loading_nothing_at_all_is_an_error_too() -> None:
    with pytest.raises(FileNotFoundError, match="no paths"):
        experiments.load([])
