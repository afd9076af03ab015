"""Running one point so that whatever happens to it is a row: here, or in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from experiments.failures import (
    PointTimeout,
    UnsupportedError,
    VerdictError,
    describe,
    is_sticky,
    status_of,
)
from experiments.records import Row
from experiments.suites.protocol import Point, PointContext, Suite


@dataclass(frozen=True)
class PointResult:
    """A point's rows. broken: this process cannot use its GPU any more."""

    rows: list[Row]
    broken: bool = False


def run_here(suite: Suite, point: Point, context: PointContext) -> PointResult:
    """Measure a point in this process, with the time-out as far as Python code can be interrupted."""
    timeout_s = context.settings.size.timeout_s
    try:
        if point.unsupported is not None:
            raise UnsupportedError(point.unsupported)
        with _alarm(timeout_s):
            rows = suite.run(point, context)
        if not rows:
            raise RuntimeError(f"suite {suite.name} measured nothing at this point")
    except (Exception, PointTimeout) as exception:
        columns = exception.columns if isinstance(exception, VerdictError) else {}
        rows = failed_rows(suite, point, context, status_of(exception), describe(exception), columns)
        return PointResult(rows, is_sticky(exception))
    finally:
        _free_memory(context)
    return PointResult(rows, any("CUDA error" in (row["error"] or "") for row in rows))


def failed_rows(
    suite: Suite,
    point: Point,
    context: PointContext,
    status: str,
    error: str,
    columns: Mapping[str, Any] | None = None,
) -> list[Row]:
    """What stands for a point that gave no rows itself; columns: what is known of it all the same."""
    known = dict(columns or {}) | {"status": status, "error": error}
    return [context.row(point, **(blank | known)) for blank in suite.blank_rows(point)]


def run_isolated(suite: Suite, point: Point, context: PointContext, config: dict[str, Any]) -> PointResult:
    """Measure a point in a process of its own, ended with all its children when the time is up."""
    timeout_s = context.settings.size.timeout_s
    with tempfile.TemporaryDirectory(prefix="decodelab-") as scratch:
        request, answer, log = (Path(scratch) / name for name in ("request.json", "answer.json", "log.txt"))
        request.write_text(
            json.dumps(
                {
                    "config": config,
                    "params": dict(point.params),
                    "on_engine": point.on_engine,
                    "ceilings": asdict(context.ceilings),
                    "run_id": context.run_id,
                }
            )
        )
        command = [sys.executable, "-m", "experiments.isolated", str(request), str(answer)]
        with log.open("wb") as output:
            # Its own session: a signal to the group reaches the ranks it starts, and Ctrl-C reaches only us.
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # closed when this process ends, however: the child then ends too
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            try:
                code = child.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end_group(child)
        if code is None:
            error = f"took longer than {timeout_s:g} s; its process was ended"
            return PointResult(failed_rows(suite, point, context, "timeout", error))
        if code == 0 and answer.exists():
            return PointResult(json.loads(answer.read_text()))
        text = log.read_text(errors="replace").strip()
        last = text.splitlines()[-1] if text else "it printed nothing"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        status = "oom" if "out of memory" in text.lower() else "error"
        return PointResult(
            failed_rows(suite, point, context, status, f"the point's process {how}: {last[-500:]}")
        )


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Leave nothing of a child behind: it, and what it started, whether it has ended or not."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    if child.stdin is not None:
        child.stdin.close()
    child.wait()


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise PointTimeout after so many seconds; does nothing outside the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise PointTimeout(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    start = time.monotonic()
    others_seconds, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if others_seconds:  # somebody's alarm, a test runner's say, goes on
            left = others_seconds - (time.monotonic() - start)
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.001))


def _free_memory(context: PointContext) -> None:
    """Let nothing of a point stay for the next one: its memory, and the peak that is measured."""
    import gc

    import torch

    gc.collect()
    if context.device.type == "cuda":
        try:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(context.device)
        except RuntimeError:  # the context is broken; the point's row says so
            pass
