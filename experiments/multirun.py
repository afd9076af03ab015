"""The runs of a Hydra sweep (-m), whatever launcher ran them, as one table."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import provenance
from experiments.columns import COLUMNS, FAILURES
from experiments.records import RECORDS, find_records, read_rows, to_frame

if TYPE_CHECKING:
    import pandas as pd

# Overrides that say how and where a run is made, not what it measures.
_NOT_MEASURED = ("run.", "hydra.", "hydra/", "plugins")


def merge(folder: Path) -> int:
    """Write table.csv and report.md over all runs under `folder`; the exit code: 1 if any of their points failed."""
    import pandas as pd

    from experiments import tables

    runs = sorted(path.parent for path in folder.rglob(RECORDS))
    rows, apart = load_runs(runs) if runs else (None, [])
    if rows is None or rows.empty:
        print(f"no run in {folder} got as far as a row")
        return 1
    summaries = {name: _summary(name, group, apart) for name, group in rows.groupby("suite", sort=False)}
    pd.concat(summaries.values()).to_csv(folder / "table.csv", index=False)
    unfinished = [run for run in runs if not _ended(run)]
    parts = [
        f"# {len(runs)} runs",
        "\n".join(f"- {run.relative_to(folder)}{' (did not end)' * (run in unfinished)}" for run in runs),
    ]
    for name, table in summaries.items():
        parts.append(f"## {name}\n\n{tables.to_markdown(_shown(table, apart))}")
    (folder / "report.md").write_text("\n\n".join(parts) + "\n")
    print(f"\n{len(rows)} rows of {len(runs)} runs in {folder}")
    for run in unfinished:
        print(f"  did not end: {run}")
    return 1 if unfinished or rows["status"].isin(sorted(FAILURES)).any() else 0


def load_runs(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> tuple[pd.DataFrame, list[str]]:
    """Rows of several runs, and the names of the columns that tell their lines apart besides those of a table.

    Overrides that differ between the runs (engine=default,eager; seed=0,1) become columns; those are named without
    which a line would be a mixture of several settings, and device_name where there are several.
    """
    files = find_records(paths)
    overrides = [_overrides(file.parent) for file in files]
    names = dict.fromkeys(name for each in overrides for name in each if name not in COLUMNS)
    swept = [name for name in names if len({each.get(name) for each in overrides}) > 1]
    rows = to_frame(
        [
            row | {name: each.get(name) for name in swept}
            for file, each in zip(files, overrides)
            for row in read_rows(file)
        ]
    )
    return rows, _telling(rows, ["device_name", *swept])


def _telling(rows: pd.DataFrame, candidates: Sequence[str]) -> list[str]:
    """Of the candidates, those of which a line of the table would hold several values."""
    from experiments.tables import KEYS, SERIES

    keys = [name for name in (*KEYS, SERIES) if name in rows]
    found: list[str] = []
    for name in candidates:
        values = rows.groupby([*keys, *found], dropna=False)[name].nunique(dropna=False)
        if len(values) and values.max() > 1:
            found.append(name)
    return found


def _overrides(run: Path) -> dict[str, str]:
    """What was typed for a run, by key: bench.context_lens, engine, seed."""
    path = run / "provenance.json"
    typed = provenance.read(path).get("overrides", []) if path.exists() else []
    pairs = [override.lstrip("+~").partition("=") for override in typed]
    return {key: value for key, _, value in pairs if not key.startswith(_NOT_MEASURED)}


def _ended(run: Path) -> bool:
    path = run / "provenance.json"
    return path.exists() and "ended" in provenance.read(path)


def _summary(name: Any, rows: pd.DataFrame, apart: Sequence[str]) -> pd.DataFrame:
    """The suite's own summary of each setting, one below the other."""
    import pandas as pd

    from experiments import suites

    suite = suites.get(str(name))
    parts = []
    for values, part in rows.groupby(list(apart), dropna=False, sort=False) if apart else [((), rows)]:
        table = suite.summary(part)
        for place, (column, value) in enumerate(zip(apart, values)):
            table.insert(place, column, value)
        parts.append(table)
    return pd.concat(parts, ignore_index=True)


def _shown(table: pd.DataFrame, apart: Sequence[str]) -> pd.DataFrame:
    """The table for the eye, with the columns that tell runs apart in front."""
    from experiments import tables

    shown = tables.compact(table)
    for place, column in enumerate(name for name in apart if name not in shown):
        shown.insert(place, column, [str(value) for value in table[column]])
    return shown
