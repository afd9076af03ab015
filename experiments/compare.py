"""Two runs side by side: `python -m experiments.compare RUN_A RUN_B`. Exit code 1 on a regression, for use in CI."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import stats
from experiments.records import find_records, load

if TYPE_CHECKING:
    import pandas as pd

# Of provenance.json: what makes times differ for reasons outside the code under test.
FACTS = (
    "git",
    "packages",
    "python",
    "platform",
    "device_name",
    "cuda",
    "visible_gpus",
    "environment",
    "cpu",
    "seed",
)
GPU_FACTS = ("uuid", "driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem", "ecc.mode.current")
# Worse than "ok": what a point may have become.
BAD = ("incorrect", "oom", "error", "timeout")


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
    if arguments.threshold < 0:
        parser.error(f"--threshold must not be negative, got {arguments.threshold}")
    try:
        a, b = load(arguments.run_a), load(arguments.run_b)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = compare(a, b, arguments.threshold)
    if table.empty:
        print("error: the runs have no point in common", file=sys.stderr)
        return 2
    if arguments.csv is not None:
        table.to_csv(arguments.csv, index=False)
    print(shown(table))
    print(overall(table))
    changed = changes(arguments.run_a, arguments.run_b)
    print("\nWhat changed in provenance:" if changed else "\nNothing changed in provenance.")
    for line in changed:
        print(f"  {line}")
    return 1 if (table["verdict"] == "regression").any() else 0


def compare(a: pd.DataFrame, b: pd.DataFrame, threshold: float) -> pd.DataFrame:
    """One line for each thing that both runs measured: times, their ratio b / a with its interval, and a verdict.

    Lines pair what has the same parameters. Rounds are paired where both runs have as many (round i of one with round i
    of the other: both drift as they warm up), else the medians' bootstraps are independent. verdict: "regression" and
    "improvement" where the whole interval lies beyond the threshold, or where a point stopped or began to work; "same"
    where it lies within; else "unclear".
    """
    import pandas as pd

    from experiments.tables import KEYS

    keys = [key for key in (*KEYS, "variant") if key in a and key in b]
    groups_a, groups_b = _groups(a, keys), _groups(b, keys)
    lines = []
    for key, rows_a in groups_a.items():
        rows_b = groups_b.get(key)
        if rows_b is not None:
            lines.append(dict(zip(keys, key)) | _line(rows_a, rows_b, threshold))
    return pd.DataFrame(lines)


def _groups(rows: pd.DataFrame, keys: list[str]) -> dict[tuple[Any, ...], pd.DataFrame]:
    """Rows by their keys as text: nulls of all kinds are equal."""
    text = rows.assign(
        **{key: rows[key].astype(object).where(rows[key].notna(), "").map(str) for key in keys}
    )
    return {tuple(key): rows.loc[part.index] for key, part in text.groupby(keys, sort=False)}


def _line(a: pd.DataFrame, b: pd.DataFrame, threshold: float) -> dict[str, Any]:
    from experiments.tables import worst_status

    status_a, status_b = worst_status(a["status"]), worst_status(b["status"])
    line: dict[str, Any] = {"status_a": status_a, "status_b": status_b}
    times_a, times_b = (
        rows[rows["status"] == "ok"].sort_values("round")["time_us"].dropna().tolist() for rows in (a, b)
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
    """The table for the terminal."""
    from experiments.tables import KEYS, rounded, to_text

    keys = [key for key in (*KEYS, "variant") if key in table and table[key].nunique(dropna=False) > 1]
    figures = (
        "status_a",
        "status_b",
        "time_us_a",
        "time_us_b",
        "ratio",
        "ratio_low",
        "ratio_high",
        "verdict",
    )
    return to_text(rounded(table[[*keys, *(name for name in figures if name in table)]]))


def overall(table: pd.DataFrame) -> str:
    """The geometric mean of all ratios, each point a pair, and the count of each verdict."""
    counts = ", ".join(f"{count} {name}" for name, count in table["verdict"].value_counts().items())
    if "ratio" not in table or not table["ratio"].notna().any():
        return f"\n{len(table)} comparisons: {counts}"
    times = table[table["ratio"].notna()]
    ratio = stats.paired_ratio(times["ratio"].tolist(), [1.0] * len(times))
    interval = f" [{ratio.low:.3f}, {ratio.high:.3f}]" if len(times) >= stats.MIN_PAIRS else ""
    return f"\n{len(table)} comparisons: {counts}; time b / a over {len(times)} points: {ratio.value:.3f}{interval}"


def changes(run_a: str, run_b: str) -> list[str]:
    """What differs between the runs' provenance, a line each."""
    a, b = (_facts(run) for run in (run_a, run_b))
    return [
        f"{name}: {a.get(name)} -> {b.get(name)}" for name in sorted({**a, **b}) if a.get(name) != b.get(name)
    ]


def _facts(run: str) -> dict[str, Any]:
    """Flat provenance of a run; of several runs, of the first."""
    path = find_records(run)[0].parent / "provenance.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    facts = {name: record.get(name) for name in FACTS}
    facts["gpu"] = {
        name: value for name, value in (record.get("gpu_before") or {}).items() if name in GPU_FACTS
    }
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": each for inner, each in value.items() if inner != "changed"}
        else:
            flat[name] = value
    return flat


if __name__ == "__main__":
    sys.exit(main())
