"""Which device a run uses, and what Triton must be told before it is first imported."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def resolve_device(device: Any) -> str:
    """ "cpu" or "cuda:N" for auto, cpu, cuda, cuda:N or N; ValueError if there is no such device here."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = str(device).strip().lower()
    if name.isdigit():
        name = f"cuda:{name}"
    if name == "auto":
        return "cuda:0" if count else "cpu"
    if name == "cpu":
        return "cpu"
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index or "0").isdigit():
        raise ValueError(f"device must be auto, cpu, cuda, cuda:N or N, got {device!r}")
    if int(index or 0) >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        narrowed = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise ValueError(
            f"device is {device!r}, but {count} CUDA device(s) are visible{narrowed}; they count from 0"
        )
    return f"cuda:{int(index or 0)}"


def choose_interpreter(device: str) -> None:
    """On a CPU Triton's kernels run in its interpreter. Must come before anything imports triton."""
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Let torch use so many threads, here and in processes started meanwhile; None changes nothing."""
    import torch

    if count is None:
        yield
        return
    before, variable = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(count)
    os.environ["OMP_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if variable is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = variable


def device_name(device: torch.device) -> str:
    """The GPU's marketing name, or the CPU's model."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
