"""The runs of a Hydra sweep (-m), whatever launcher ran them, as one table."""

from __future__ import annotations

from pathlib import Path

from experiments.columns import FAILURES
from experiments.records import RECORDS, load


def merge(folder: Path) -> int:
    """Write table.csv and report.md over all runs under `folder`; the exit code: 1 if any of their points failed."""
    from experiments import tables

    runs = sorted(path.parent for path in folder.rglob(RECORDS))
    rows = load(folder) if runs else None
    if rows is None or rows.empty:
        print(f"no run in {folder} got as far as a row")
        return 1
    table = tables.summarise(rows)
    table.to_csv(folder / "table.csv", index=False)
    listed = "\n".join(f"- {run.name}" for run in runs)
    text = f"# {len(runs)} runs\n\n{listed}\n\n{tables.to_markdown(tables.compact(table))}\n"
    (folder / "report.md").write_text(text)
    print(f"\n{len(rows)} rows of {len(runs)} runs in {folder}")
    return 1 if rows["status"].isin(sorted(FAILURES)).any() else 0
