"""Which runs there are: the folders under results/ or outputs/, each with what it measured, on what, and when."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import provenance
from experiments.records import RECORDS

if TYPE_CHECKING:
    import pandas as pd


def list_runs(root: str | os.PathLike[str]) -> pd.DataFrame:
    """One line a run folder under root, in the order they were started: suite, model, device, start, commit, folder.

    Folders without provenance or configuration are left out. Raises FileNotFoundError if there is no run at all.
    """
    import pandas as pd

    folders = [file.parent for file in Path(root).expanduser().rglob(RECORDS)]
    lines = [_line(folder) for folder in folders if _is_whole(folder)]
    if not lines:
        raise FileNotFoundError(f"there is no run under {root}")
    return pd.DataFrame(lines).sort_values("started", ignore_index=True, key=_moments)


def newest(suite: str, root: str | os.PathLike[str], level: str | None = None) -> Path:
    """The folder of the run of that suite which was started last, of those with good rows of that level if it is given.

    Raises FileNotFoundError, which lists the suites that have runs.
    """
    from experiments.records import load

    runs = list_runs(root)
    for folder in reversed(runs.loc[runs["suite"] == suite, "folder"].tolist()):
        if level is None:
            return Path(folder)
        rows = load(folder)
        if ((rows["level"] == level) & (rows["status"] == "ok")).any():
            return Path(folder)
    what = suite if level is None else f"{suite} with level {level}"
    raise FileNotFoundError(
        f"no run of {what} under {root}; there are {', '.join(sorted(set(runs['suite'])))}"
    )


def _moments(started: pd.Series) -> pd.Series:
    """Times on one clock: machines differ in their time zones."""
    import pandas as pd

    return pd.to_datetime(started, format="ISO8601", utc=True)


def _is_whole(folder: Path) -> bool:
    return all((folder / name).exists() for name in ("provenance.json", "config.yaml"))


def _line(folder: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    record = provenance.read(folder / "provenance.json", ("device_name", "started", "git"))
    config = OmegaConf.load(folder / "config.yaml")
    return {
        "suite": config.bench.suite,
        "model": config.model.name,
        "device": record["device_name"],
        "started": record["started"],
        "commit": (record["git"]["commit"] or "-")[:10] + ("+changes" if record["git"]["dirty"] else ""),
        "rows": ", ".join(f"{count} {status}" for status, count in sorted(record.get("rows", {}).items())),
        "folder": str(folder),
    }
