"""What a process may leave behind: children, open files, threads, listening ports, shared memory."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import psutil

NAMES = ("torch", "gloo", "nccl", "psm_", "sem.mp", "decodelab")
"""How what an engine might leave in shared memory would begin; other programs use it too."""


def snapshot() -> dict[str, Any]:
    """Of this process (and the host's shared memory), in a form that can be compared."""
    gc.collect()
    process = psutil.Process()
    shared = Path("/dev/shm")
    ports = {c.laddr.port for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
    return {
        "children": {child.pid for child in process.children(recursive=True)},
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "ports": ports,
        "shared memory": {entry.name for entry in shared.iterdir() if entry.name.startswith(NAMES)},
    }


PASSING = {"threads", "shared memory"}
"""What may still be seen for a moment: a thread that was joined, and what other programs use and remove."""


def assert_nothing_left(before: dict[str, Any], timeout_s: float = 10.0) -> None:
    """No more than `before`, a snapshot: at once, but for what is PASSING within the time."""
    deadline = time.monotonic() + timeout_s
    while left := _left(before):
        assert set(left) <= PASSING, "; ".join(left.values())
        assert time.monotonic() < deadline, "; ".join(left.values())
        time.sleep(0.05)


def _left(before: dict[str, Any]) -> dict[str, str]:
    """What there is more of now than before, in words."""
    left, after = {}, snapshot()
    for what, value in before.items():
        if after[what] > value if isinstance(value, int) else after[what] - value:
            left[what] = f"{what}: {value} before, {after[what]} after"
    return left


def wait_until_gone(pids: list[int], timeout_s: float = 10.0) -> None:
    """Processes that are nobody's to wait for: gone or zombies within the time, or AssertionError."""
    deadline = time.monotonic() + timeout_s
    while alive := [pid for pid in pids if _is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
