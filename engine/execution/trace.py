"""A trace of what host and device do, by torch.profiler, for chrome://tracing or https://ui.perfetto.dev."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

SUFFIXES = (".json", ".json.gz")


class Trace:
    """What one process and its device do between start() and stop(). Tracing slows the host down."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile: profile | None = None

    def start(self) -> None:
        """Begin anew. RuntimeError if it has begun already."""
        if self._profile is not None:
            raise RuntimeError("a trace is under way already")
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(self._device)
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self, path: Path) -> None:
        """End it when the device has done its work, and write the trace to `path`. RuntimeError if it has not begun."""
        if self._profile is None:
            raise RuntimeError("no trace is under way")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        finished, self._profile = self._profile, None
        finished.stop()
        finished.export_chrome_trace(str(path))


def trace_path(path: str | Path, rank: int, num_ranks: int) -> Path:
    """Where a rank writes its part: `path`, or with several ranks NAME.rank0.json, NAME.rank1.json, ... beside it.

    Raises ValueError unless path ends as one of SUFFIXES and its folder exists.
    """
    path = Path(path)
    suffix = next((suffix for suffix in reversed(SUFFIXES) if path.name.endswith(suffix)), None)
    if suffix is None:
        raise ValueError(f"path must end in {' or '.join(SUFFIXES)}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"path is {str(path)!r}, but its folder does not exist")
    if num_ranks == 1:
        return path
    return path.with_name(f"{path.name.removesuffix(suffix)}.rank{rank}{suffix}")
