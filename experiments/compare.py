"""Two runs side by side: `python -m experiments.compare RUN_A RUN_B`. Exit code 1 on a regression, for use in CI."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import differences, stats
from experiments.multirun import load_runs
from experiments.records import find_records

if TYPE_CHECKING:
    import pandas as pd

# Worse than "ok": what a point may have become.
BAD = ("incorrect", "oom", "error", "timeout")
MAX_LISTED = 20


def main(argv: Sequence[str] | None = None) -> int:
    """0: no regression; 1: a time beyond the threshold, or a point that no longer works; 2: nothing to compare."""
    parser = argparse.ArgumentParser(prog="python -m experiments.compare", description=__doc__)
    parser.add_argument("run_a", help="the run to compare with: a run folder or a folder of runs")
    parser.add_argument("run_b", help="the new run")
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.05,
        help="slower by more than this share, with the whole interval, is a regression (default: 0.05)",
    )
    parser.add_argument("--csv", type=Path, help="write the comparison there as well")
    arguments = parser.parse_args(argv)
    if not arguments.threshold >= 0:
        parser.error(f"--threshold must not be negative, got {arguments.threshold}")
    try:
        (a, keys_a), (b, keys_b) = load_runs(arguments.run_a), load_runs(arguments.run_b)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, rows in ((arguments.run_a, a), (arguments.run_b, b)):
        if rows.empty:
            print(f"error: {name} holds no rows: the run ended before its first point", file=sys.stderr)
            return 2
    table = compare(a, b, arguments.threshold, [*keys_a, *(key for key in keys_b if key not in keys_a)])
    common = table[~table["verdict"].isin(["only in A", "only in B"])]
    if common.empty:
        print(f"error: the runs have no point in common{_apart(table)}", file=sys.stderr)
        return 2
    if arguments.csv is not None:
        try:
            table.to_csv(arguments.csv, index=False)
        except OSError as error:
            print(f"error: --csv {arguments.csv}: {error}", file=sys.stderr)
            return 2
    runs_a, runs_b = (
        [file.parent for file in find_records(run)] for run in (arguments.run_a, arguments.run_b)
    )
    print(f"A: {_named(arguments.run_a, runs_a)}\nB: {_named(arguments.run_b, runs_b)}\n")
    print(shown(common))
    print(overall(common))
    alone = table.drop(common.index)
    _list(f"Not compared, {len(alone)} lines of one run alone", _missing(alone))
    _list("Caution", [*differences.warnings(runs_a[0], runs_b[0]), *_throttled(a, "A"), *_throttled(b, "B")])
    _list("What changed", differences.changes(runs_a[0], runs_b[0]) or ["nothing that is recorded"])
    return 1 if (common["verdict"] == "regression").any() else 0


def compare(
    a: pd.DataFrame, b: pd.DataFrame, threshold: float, further_keys: Sequence[str] = ()
) -> pd.DataFrame:
    """One line for each thing that was measured: times, their ratio b / a with its interval, and a verdict.

    Lines pair what has the same parameters. Rounds are paired where both runs have as many (round i of one with round i
    of the other: both drift as they warm up), else the medians' bootstraps are independent. verdict: "regression" and
    "improvement" where the whole interval lies beyond the threshold, or where a point stopped or began to work; "same"
    where it lies within; else "unclear". "only in A" and "only in B" where a run has no such point, "not timed" where
    one has no time for it. further_keys: what besides the keys of a table tells lines apart.
    """
    import pandas as pd

    from experiments.tables import KEYS, SERIES

    keys = [key for key in (*further_keys, *KEYS, SERIES) if key in a or key in b]
    groups_a, groups_b = _groups(a, keys), _groups(b, keys)
    lines = []
    for key in dict.fromkeys([*groups_a, *groups_b]):
        rows_a, rows_b = groups_a.get(key), groups_b.get(key)
        line = dict(zip(keys, key))
        if rows_a is None:
            lines.append(line | {"verdict": "only in B"})
        elif rows_b is None:
            lines.append(line | {"verdict": "only in A"})
        else:
            lines.append(line | _line(rows_a, rows_b, threshold))
    return pd.DataFrame(lines)


def _groups(rows: pd.DataFrame, keys: list[str]) -> dict[tuple[Any, ...], pd.DataFrame]:
    """Rows by their keys as text: nulls of all kinds, and columns that a run does not have, are equal."""
    text = rows.assign(
        **{
            key: rows[key].astype(object).where(rows[key].notna(), "").map(str) if key in rows else ""
            for key in keys
        }
    )
    return {tuple(key): rows.loc[part.index] for key, part in text.groupby(keys, sort=False)}


def _line(a: pd.DataFrame, b: pd.DataFrame, threshold: float) -> dict[str, Any]:
    from experiments.tables import worst_status

    status_a, status_b = worst_status(a["status"]), worst_status(b["status"])
    line: dict[str, Any] = {"status_a": status_a, "status_b": status_b}
    # Stable: rounds of several runs stay in the order of the runs.
    times_a, times_b = (
        rows[rows["status"] == "ok"].sort_values("round", kind="stable")["time_us"].dropna().tolist()
        for rows in (a, b)
    )
    if status_b in BAD and status_a not in BAD:
        return line | {"verdict": "regression"}
    if not times_a or not times_b:
        return line | {"verdict": "improvement" if status_a in BAD and status_b not in BAD else "not timed"}
    paired = len(times_a) == len(times_b)
    ratio = stats.paired_ratio(times_b, times_a) if paired else stats.unpaired_ratio(times_b, times_a)
    return line | {
        "time_us_a": float(np.median(times_a)),
        "time_us_b": float(np.median(times_b)),
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "paired": paired,
        "verdict": verdict(ratio, min(len(times_a), len(times_b)), threshold),
    }


def verdict(ratio: stats.Interval, num_rounds: int, threshold: float) -> str:
    """See compare. Fewer than stats.MIN_PAIRS rounds prove nothing: then the ratio must pass twice the threshold."""
    low, high = ratio.low, ratio.high
    if num_rounds < stats.MIN_PAIRS:
        low = high = ratio.value
        threshold = 2 * threshold
    if low > 1 + threshold:
        return "regression"
    if high < 1 / (1 + threshold):
        return "improvement"
    return "same" if low >= 1 / (1 + threshold) and high <= 1 + threshold else "unclear"


def shown(table: pd.DataFrame) -> str:
    """The table for the terminal: keys and statuses that differ, times, ratio with its interval, verdict."""
    from experiments.tables import rounded, to_text

    figures = ("time_us_a", "time_us_b", "ratio", "ratio_low", "ratio_high", "verdict")
    keys = [name for name in _keys(table) if table[name].nunique(dropna=False) > 1]
    statuses = [name for name in ("status_a", "status_b") if (table[name] != "ok").any()]
    return to_text(rounded(table[[*keys, *statuses, *(name for name in figures if name in table)]]))


def overall(table: pd.DataFrame) -> str:
    """The geometric mean of all ratios, each point a pair, and the count of each verdict."""
    counts = ", ".join(f"{count} {name}" for name, count in table["verdict"].value_counts().items())
    if "ratio" not in table or not table["ratio"].notna().any():
        return f"\n{len(table)} comparisons: {counts}"
    times = table[table["ratio"].notna()]
    ratio = stats.paired_ratio(times["ratio"].tolist(), [1.0] * len(times))
    interval = f" [{ratio.low:.3f}, {ratio.high:.3f}]" if len(times) >= stats.MIN_PAIRS else ""
    return f"\n{len(table)} comparisons: {counts}; time b / a over {len(times)} points: {ratio.value:.3f}{interval}"


def _keys(table: pd.DataFrame) -> list[str]:
    """The columns in front of the figures."""
    figures = ("status_a", "status_b", "time_us_a", "time_us_b", "ratio", "ratio_low", "ratio_high", "paired")
    return [name for name in table.columns if name not in (*figures, "verdict")]


def _missing(table: pd.DataFrame) -> list[str]:
    """The lines that one run alone has, by the parameters in which they differ."""
    from experiments.tables import to_text

    names = [name for name in _keys(table) if table[name].nunique() > 1]
    return to_text(table[[*names, "verdict"]]).splitlines() if len(table) else []


def _apart(table: pd.DataFrame) -> str:
    """The parameters of which the runs have no value in common."""
    values = {run: table[table["verdict"] == f"only in {run}"] for run in ("A", "B")}
    parts = [
        f"{key} {', '.join(sorted(set(values['A'][key])))} in A and {', '.join(sorted(set(values['B'][key])))} in B"
        for key in _keys(table)
        if not set(values["A"][key]) & set(values["B"][key])
    ]
    return f": {'; '.join(parts)}" if parts else ""


def _throttled(rows: pd.DataFrame, name: str) -> list[str]:
    known = rows["throttled"].dropna()
    count = int(known.sum())
    return [f"the GPU was throttled in {count} of {len(known)} rows of run {name}"] if count else []


def _named(given: str, runs: Sequence[Path]) -> str:
    return given if len(runs) == 1 else f"{given} ({len(runs)} runs; what changed is told of the first)"


def _list(heading: str, lines: Sequence[str]) -> None:
    if lines:
        print(f"\n{heading}:")
    for line in lines[:MAX_LISTED]:
        print(f"  {line}")
    if len(lines) > MAX_LISTED:
        print(f"  ... and {len(lines) - MAX_LISTED} more")


if __name__ == "__main__":
    sys.exit(main())
