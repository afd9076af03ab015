"""How long a rank's collectives take, waiting for the other ranks included."""

from __future__ import annotations

import time

import torch
from torch.profiler import ProfilerActivity, profile

from engine.parallel.group import ParallelGroup

_KERNELS = ("ncclDevKernel", "ncclKernel", "_one_shot_kernel")


class CollectiveTimer:
    """Sums the time of collectives between start() and stop().

    Over NCCL that is the time of its kernels, and of kernels/all_reduce.py's, also in CUDA graphs, by torch's profiler,
    which slows the host down: the whole time between the two is told as well, so that a share is of the same work.
    Over gloo it is the time of the calls.
    """

    def __init__(self, group: ParallelGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._profile: profile | None = None
        self._host_s = 0.0
        self._started_s = 0.0

    @property
    def _on_device(self) -> bool:
        return self._device.type == "cuda" and self._group.is_capturable

    def start(self) -> None:
        """Begin anew."""
        self._host_s = self._group.host_time.seconds
        if self._on_device:
            torch.cuda.synchronize(self._device)
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()
        self._started_s = time.perf_counter()

    def stop(self) -> tuple[float, float]:
        """Seconds in collectives since start(), and all seconds since then, until the device had done its work."""
        if not self._on_device:
            elapsed_s = time.perf_counter() - self._started_s
            return self._group.host_time.seconds - self._host_s, elapsed_s
        if self._profile is None:
            raise RuntimeError("collectives are timed from start() on, which was not called")
        torch.cuda.synchronize(self._device)
        elapsed_s = time.perf_counter() - self._started_s
        finished, self._profile = self._profile, None
        finished.stop()
        kernels = [event for event in finished.events() if event.name.startswith(_KERNELS)]
        return sum(kernel.time_range.elapsed_us() for kernel in kernels) / 1e6, elapsed_s
