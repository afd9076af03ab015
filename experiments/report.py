"""A run's table, plots, Markdown report and self-contained HTML report.

`python -m experiments.report RUN ...` makes them again from the rows of runs, with today's code.
"""

from __future__ import annotations

import argparse
import base64
import html
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import provenance, tables
from experiments.columns import FAILURES
from experiments.records import RECORDS, Row, find_records, read_rows, to_frame

if TYPE_CHECKING:
    import pandas as pd

    from experiments.suites.protocol import Suite

NEEDED = ("device_name", "started", "command", "git", "packages", "seed", "ceilings")
"""What a report tells of a run's provenance."""

MAX_PRINTED = 100
MAX_REASONS = 8


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 where a folder is not a run's."""
    parser = argparse.ArgumentParser(prog="python -m experiments.report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or folders that hold some")
    try:
        folders = [file.parent for file in find_records(parser.parse_args(argv).runs)]
        for folder in folders:
            rewrite(folder)
            print(folder / "report.md")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def rewrite(folder: Path) -> None:
    """Make the table, plots and reports of a finished run again from its rows.

    Raises OSError without a provenance.json, ValueError where it is broken or there are no rows or no such suite.
    """
    from experiments import suites

    rows = read_rows(folder / RECORDS)
    record = provenance.read(folder / "provenance.json", NEEDED)
    if not rows:
        raise ValueError(f"{folder} has no rows")
    write(folder, suites.get(rows[0]["suite"]), rows, record)


def printed_table(suite: Suite, rows: Sequence[Row]) -> str:
    """The table for the terminal, shortened if it is very long."""
    summary = suite.summary(to_frame(rows))
    table = tables.compact(summary)
    lines = [tables.to_text(table.head(MAX_PRINTED))]
    if len(table) > MAX_PRINTED:
        lines.append(f"... and {len(table) - MAX_PRINTED} more lines in table.csv")
    why = tables.reasons(summary)
    if why:
        lines += ["", "Without a time:", *(f"  {reason}" for reason in why[:MAX_REASONS])]
    if len(why) > MAX_REASONS:
        lines.append(f"  ... and {len(why) - MAX_REASONS} more reasons in table.csv")
    for name, further in suite.tables(to_frame(rows)).items():
        lines += ["", f"{name}:", tables.to_text(tables.rounded(further).head(MAX_PRINTED))]
        if len(further) > MAX_PRINTED:
            lines.append(f"... and {len(further) - MAX_PRINTED} more lines in {name}.csv")
    return "\n".join(lines)


def write(
    folder: Path, suite: Suite, rows: Sequence[Row], record: Mapping[str, Any], *, plots: bool = True
) -> None:
    """table.csv, plots/*.png, report.md and report.html of a run, each replacing the one before.

    record: the run's provenance; its "note", if somebody has written one, stands below the title.
    """
    import pandas as pd

    frame = to_frame(rows)
    table = suite.summary(frame)
    table.to_csv(folder / "table.csv", index=False)
    further = suite.tables(frame)
    for name, each in further.items():
        each.to_csv(folder / f"{name}.csv", index=False)
    names = _draw(folder / "plots", suite, frame, record) if plots else []
    title = f"{suite.name} on {record['device_name']}"
    note = record.get("note")
    sections = {
        "What was run": _facts(frame, record),
        **{name.capitalize(): tables.rounded(each) for name, each in further.items()},
        "Table": tables.compact(table),
        "Without a time": pd.DataFrame({"why": tables.reasons(table)}),
        "What failed": _failures(frame),
    }
    (folder / "report.md").write_text(_markdown(title, note, sections, names))
    images = [folder / "plots" / name for name in names]
    (folder / "report.html").write_text(_html(title, note, sections, images))


def _draw(folder: Path, suite: Suite, frame: pd.DataFrame, record: Mapping[str, Any]) -> list[str]:
    from experiments import plots

    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    names = []
    for name, figure in suite.figures(frame).items():
        plots.add_caption(figure, caption(record, frame))
        plots.save(figure, folder / f"{name}.png")
        names.append(f"{name}.png")
    return names


def caption(record: Mapping[str, Any], frame: pd.DataFrame | None = None) -> str:
    """Device, versions and commit in one line; above it, of a run's rows, the model, its weights and its dtype."""
    packages = record["packages"]
    driver = (record.get("gpu_before") or {}).get("driver_version")
    parts = [
        record["device_name"],
        f"torch {packages['torch']}",
        f"triton {packages['triton']}" if packages["triton"] else "no triton",
        f"driver {driver}" if driver else None,
        " ".join(
            ["decodelab", *filter(None, [packages["decodelab"]]), "at", " and ".join(_commits(record, 10))]
        ),
        str(record["started"])[:10],
    ]
    line = "  |  ".join(part for part in parts if part)
    measured = "" if frame is None else _measured(frame)
    return f"{measured}\n{line}" if measured else line


def _measured(frame: pd.DataFrame) -> str:
    """What model was run, in one line; of kernels alone only the dtype."""
    names = [", ".join(frame[name].dropna().unique()) for name in ("model", "dtype")]
    weights = "dummy weights" if (frame["load_format"] == "dummy").fillna(False).any() else ""
    return "  |  ".join(part for part in (*names, weights) if part)


def _commits(record: Mapping[str, Any], length: int) -> list[str]:
    """The commits whose code made the rows: the run's first, then those it was resumed with, each once."""
    states = [record["git"], *(entry["git"] for entry in record.get("resumed", []))]
    names = [(git["commit"] or "no git")[:length] + ("+changes" if git["dirty"] else "") for git in states]
    return list(dict.fromkeys(names))


def _facts(frame: pd.DataFrame, record: Mapping[str, Any]) -> pd.DataFrame:
    import pandas as pd

    ceilings = record["ceilings"]
    flops = ", ".join(
        f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in ceilings["matmul_flops_per_s"].items()
    )
    throttled = frame["throttled"].dropna()
    facts = {
        "command": record["command"],
        "commit": ", then ".join(_commits(record, 40)),
        "device": record["device_name"],
        "measured ceilings": f"reading {ceilings['read_bytes_per_s'] / 1e9:,.0f} GB/s; matmul {flops or '-'}",
        "models": ", ".join(frame["model"].dropna().unique()) or "-",
        "versions": ", ".join(f"{name} {version}" for name, version in record["packages"].items() if version),
        "seed": str(record["seed"]),
        "rows": _counts(frame) + ("" if record.get("ended") else "; it did not end, and points are missing"),
        "kernels": "; ".join(_kernels(frame)) or "-",
        "timing": ", ".join(frame["timing_method"].dropna().unique()) or "-",
        "throttled rows": f"{int(throttled.sum())} of {len(throttled)}"
        if len(throttled)
        else "not known here",
        "intervals": "95%, bootstrap over rounds (of fewer than 6 rounds: their range, which is less); speed-ups are "
        "paired by round; <- marks a winner, named only where 6 paired ratios to every other leave 1 by more than 1%",
        **_turns(frame),
    }
    return pd.DataFrame({"what": facts.keys(), "value": facts.values()})


def _counts(frame: pd.DataFrame) -> str:
    counts = frame["status"].value_counts().sort_index()
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def _kernels(frame: pd.DataFrame) -> list[str]:
    """What each variant ran that its name does not say, as the engine told it."""
    found = []
    timed = frame[(frame["status"] == "ok") & frame["variant"].notna()]
    for variant, rows in timed.groupby("variant", sort=False):
        chosen = {kind: rows[f"{kind}_attention"].dropna().unique() for kind in ("decode", "prefill")}
        told = [f"{kind} {', '.join(names)}" for kind, names in chosen.items() if len(names)]
        if told:
            found.append(f"{variant}: {' and '.join(told)}")
    return found


def _turns(frame: pd.DataFrame) -> dict[str, str]:
    """How engines that are compared took turns, where there are any."""
    engines = frame[frame["level"].isin(["step", "workload"]) & frame["time_us"].notna()]
    if engines["variant"].nunique() < 2:
        return {}
    if engines["engine_pass"].nunique() > 1:
        return {
            "engines": "ran in the order A B B A, each pass a part of the rounds, so that an even drift cancels"
        }
    return {
        "engines": "ran one after another, each all of its rounds: a drift meanwhile is in their speed-ups, so no "
        "winner is named (bench.engine_passes=2 lets them take turns)"
    }


def _failures(frame: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    failed = frame[frame["status"].isin(sorted(FAILURES))]
    shown = failed[["point_id", "status", "level", "variant", "batch_size", "context_len", "error"]]
    return pd.DataFrame(shown.astype(object).where(shown.notna(), "")).drop_duplicates()


def _markdown(
    title: str, note: str | None, sections: Mapping[str, pd.DataFrame], plot_names: Sequence[str]
) -> str:
    parts = [f"# {title}", *([f"> {note}"] if note else [])]
    for heading, table in sections.items():
        if len(table):
            parts.append(f"## {heading}\n\n{tables.to_markdown(table)}")
    if plot_names:
        parts.append("## Plots\n\n" + "\n\n".join(f"![{name[:-4]}](plots/{name})" for name in plot_names))
    return "\n\n".join(parts) + "\n"


_CSS = """
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { padding: 2px 10px; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
th { position: sticky; top: 0; background: #f4f4f4; }
img { max-width: 100%; margin: 1em 0; }
"""


def _html(title: str, note: str | None, sections: Mapping[str, pd.DataFrame], images: Sequence[Path]) -> str:
    """One file with everything in it: styles, tables, pictures."""
    parts = [f"<blockquote>{html.escape(note)}</blockquote>"] if note else []
    for heading, table in sections.items():
        if len(table):
            parts.append(f"<h2>{html.escape(heading)}</h2>\n{table.to_html(index=False, border=0)}")
    for image in images:
        data = base64.b64encode(image.read_bytes()).decode()
        parts.append(
            f'<figure><img alt="{html.escape(image.stem)}" src="data:image/png;base64,{data}"></figure>'
        )
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_CSS}</style></head>\n<body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
    )


if __name__ == "__main__":
    sys.exit(main())
