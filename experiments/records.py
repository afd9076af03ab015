"""records.jsonl: raw rows on disk, appended so that a kill at any moment loses at most the point under way."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.columns import COLUMNS

if TYPE_CHECKING:
    import pandas as pd

RECORDS = "records.jsonl"
IDENTITY = ("point_id", "suite", "status")
Row = dict[str, Any]


def point_id(suite: str, params: Mapping[str, Any]) -> str:
    """16 hex digits that name a point: a hash of its parameters, the same in every run."""
    text = json.dumps({"suite": suite, "params": params}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_rows(path: Path, needed: Iterable[str] = IDENTITY) -> list[Row]:
    """The rows of a records file, less what a kill left half-written at its end.

    Raises ValueError, naming the line, for what is no JSON object or lacks a column that is needed.
    """
    rows = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no newline follows: torn
                break
            raise ValueError(f"{path}, line {number} is not a JSON object: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object, but {type(row).__name__}")
        missing = [name for name in needed if name not in row]
        if missing:
            raise ValueError(f"{path}, line {number} is no row of a run: it has no {missing[0]}")
        rows.append(row)
    return rows


def finished_points(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Points that have all their rows, in the order they were finished."""
    points: dict[str, list[Row]] = {}
    for row in rows:
        points.setdefault(row["point_id"], []).append(row)
    return {name: group for name, group in points.items() if len(group) == group[0]["point_rows"]}


class RecordWriter:
    """Appends finished points to a records file; a context manager.

    Opening it drops half-written lines and points without all their rows, and the points named in `forget`:
    what is left are whole points, and `finished` names them.
    """

    def __init__(self, path: Path, forget: Iterable[str] = ()) -> None:
        kept: dict[str, list[Row]] = {}
        if path.exists():
            kept = finished_points(read_rows(path))
            for name in forget:
                kept.pop(name, None)
            _replace(path, b"".join(_encode(row) for group in kept.values() for row in group))
        self.path = path
        self.rows = [row for group in kept.values() for row in group]
        self.finished = set(kept)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, rows: Sequence[Row]) -> None:
        """Write all rows of one point and wait until they are on the disk.

        Raises OSError (disk full, say) with the rows of earlier points untouched.
        """
        for index, row in enumerate(rows):
            row["point_row"], row["point_rows"] = index, len(rows)
        data = memoryview(b"".join(_encode(row) for row in rows))
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)
        self.rows.extend(rows)
        self.finished.add(rows[0]["point_id"])

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _encode(row: Row) -> bytes:
    return json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _replace(path: Path, data: bytes) -> None:
    """Write a file as a whole, or leave the old one."""
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def find_records(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The records files that paths name: a records file, a run folder, a folder of run folders, or a glob pattern."""
    found: list[Path] = []
    paths = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not paths:
        raise FileNotFoundError(f"no paths in which to look for {RECORDS}")
    for path in paths:
        text = os.path.expanduser(os.fspath(path))
        matches = [Path(match) for match in sorted(glob.glob(text))] or [Path(text)]
        files = [
            file
            for match in matches
            for file in ([match] if match.is_file() else sorted(match.rglob(RECORDS)))
        ]
        if not files:
            raise FileNotFoundError(f"no {RECORDS} at or under {text}")
        found += [file for file in files if file not in found]
    return found


def load(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> pd.DataFrame:
    """Rows of one or several runs as one DataFrame, each column with the type that columns.py gives it.

    paths: a run folder, a records file, a folder that holds runs (a multirun, say), a glob pattern, or several of
    these. Half-written last lines are left out. Raises FileNotFoundError where there is nothing to load.
    """
    return to_frame([row for file in find_records(paths) for row in read_rows(file)])


def to_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows as a DataFrame: the contract's columns first, then the others; integers stay integers beside nulls."""
    import pandas as pd

    names = [*COLUMNS, *dict.fromkeys(name for row in rows for name in row if name not in COLUMNS)]
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        columns[name] = pd.Series(values, dtype=COLUMNS.get(name) or _infer(values), name=name)
    return pd.DataFrame(columns)


def _infer(values: Sequence[Any]) -> str:
    kinds = {type(value) for value in values if value is not None}
    for types, dtype in (
        ({bool}, "boolean"),
        ({int}, "Int64"),
        ({int, float}, "float64"),
        ({str}, "string"),
    ):
        if kinds and kinds <= types:
            return dtype
    return "object"
