"""One run from its configuration to its report: what run.py calls for each job."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.folder import RunFolder
from experiments.records import RecordWriter, Row, read_rows
from experiments.settings import Settings, resolve

OK, FAILED, BAD_REQUEST, INTERRUPTED = 0, 1, 2, 130


def run(composed: Mapping[str, Any], cwd: Path, overrides: Sequence[str], root: Path | None = None) -> int:
    """Run a composed configuration and return the exit code: 0, 1 if any point failed, 130 after Ctrl-C.

    cwd: where the user's relative paths start. root: the folder for the run's own folder, over run.root.
    Raises ValueError for a request that makes no sense, before any folder is made.
    """
    config = resolve(composed, cwd)
    if root is not None:
        if config["run"]["folder"] is not None:
            raise ValueError(
                f"run.folder {config['run']['folder']} is one run's; those of a sweep have theirs below run.root"
            )
        config["run"]["root"] = str(root)
    settings = Settings.parse(config)
    # Not before here: resolve has told Triton whether to interpret.
    import torch

    from experiments import provenance, report, suites
    from experiments.devices import cpu_threads, device_name
    from experiments.sweep import run_sweep

    _quiet()
    suite = suites.get(settings.suite)
    points = suite.points(settings)
    if not points:
        raise ValueError(f"suite {suite.name} has no points with these options")
    device = torch.device(settings.device)
    name = device_name(device)
    threads = settings.size.threads if device.type == "cpu" else None
    with cpu_threads(threads), RunFolder.open(settings.run, suite.name, config) as folder:
        record = _earlier(folder)
        if record is None:
            record = provenance.capture(
                device, seed=settings.seed, overrides=overrides, device_name=name, cwd=cwd
            )
        else:
            _check_device(record, name)
        forget = _failed(folder.records) if settings.run.retry_failed else []
        with RecordWriter(folder.records, forget) as writer:
            context = suites.PointContext(
                settings=settings,
                device=device,
                ceilings=_ceilings(record, suite, settings, device),
                run_id=folder.run_id,
                device_name=name,
                columns=suite.columns,
            )
            provenance.write(folder.provenance, record)
            result = run_sweep(suite, points, context, writer, config)
            record["gpu_after"] = provenance.gpu_state(device)
            if not result.interrupted:
                record["ended"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            record["rows"] = dict(result.statuses)
            provenance.write(folder.provenance, record)
            rows = writer.rows
        if rows:
            report.write(folder.path, suite, rows, record, plots=settings.run.plots)
            print(report.printed_table(suite, rows))
    _say(folder, result.statuses, rows)
    if result.interrupted:
        return INTERRUPTED
    return FAILED if result.failed else OK


def _earlier(folder: RunFolder) -> dict[str, Any] | None:
    """The provenance of the run that is continued; its ceilings and start stay, and with what it goes on is added."""
    if not folder.provenance.exists():
        return None
    from experiments import provenance

    record = provenance.read(folder.provenance)
    for name in ("gpu_after", "ended", "rows"):  # of what is no longer the whole run
        record.pop(name, None)
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    record.setdefault("resumed", []).append({"at": now, "git": provenance.git_state()})
    return record


def _check_device(record: Mapping[str, Any], name: str) -> None:
    if record["device_name"] != name:
        raise ValueError(
            f"the run was made on {record['device_name']!r}, this is {name!r}: one run has one device"
        )


def _ceilings(record: dict[str, Any], suite: Any, settings: Settings, device: Any) -> Any:
    """The run's ceilings: measured now, or by the run that is continued."""
    from experiments.roofline import Ceilings, measure_ceilings

    dtypes = suite.dtypes(settings)
    found = record.get("ceilings")
    if found is None or not set(dtypes) <= set(found["matmul_flops_per_s"]):
        measured = measure_ceilings(device, dtypes)
        found = {
            "read_bytes_per_s": measured.read_bytes_per_s,
            "matmul_flops_per_s": dict(measured.matmul_flops_per_s),
        }
        record["ceilings"] = found
    return Ceilings(**found)


def _failed(records: Path) -> list[str]:
    from experiments.columns import FAILURES

    rows = read_rows(records) if records.exists() else []
    return [row["point_id"] for row in rows if row["status"] in FAILURES]


def _quiet() -> None:
    """Only what a reader of the table needs: no chatter of libraries."""
    for name in ("transformers", "matplotlib", "torch", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)


def _say(folder: RunFolder, statuses: Mapping[str, int], rows: Sequence[Row]) -> None:
    from experiments.columns import FAILURES

    counts = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    print(f"\n{len(rows)} rows ({counts}) in {folder.path}")
    shown = 0
    for row in rows:
        if row["status"] in FAILURES and shown < 5:
            print(f"  {row['status']}: {row['error']}", file=sys.stderr)
            shown += 1
