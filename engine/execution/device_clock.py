"""How long steps keep the device busy, by events on its stream that nobody waits for."""

from __future__ import annotations

import torch

DeviceTimes = tuple[float | None, float | None]
"""Seconds of a step on the device, and seconds from the end of the step before to its start. None: not measured."""


class DeviceClock:
    """Spans of the steps of one device, in the order of their launches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last_end: torch.cuda.Event | None = None

    def start(self) -> DeviceSpan | None:
        """A span from here on; None where the device is a CPU, which is never behind its host."""
        return DeviceSpan(self) if self.device.type == "cuda" else None


class DeviceSpan:
    """One step's place on the device's current stream."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._previous_end = clock.last_end
        self._start = self._mark()
        self._end: torch.cuda.Event | None = None

    def end(self) -> None:
        """All work of the step has been launched."""
        self._end = self._clock.last_end = self._mark()

    def wait(self) -> DeviceTimes:
        """Wait until the device has done the step, whatever was launched since."""
        assert self._end is not None
        self._end.synchronize()
        previous, self._previous_end = self._previous_end, None
        idle_s = None if previous is None else 1e-3 * previous.elapsed_time(self._start)
        return 1e-3 * self._start.elapsed_time(self._end), idle_s

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._clock.device))
        return event
