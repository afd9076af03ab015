"""How samples that were taken elsewhere become pytest-benchmark's statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class SampleClock:
    """A timer for pytest-benchmark on which each call of `advance` lasts as long as the next sample.

    pytest-benchmark reads a timer before and after what it times. Around a launch on a GPU that would time the host,
    and only one call: kernels/timing.py knows better. So its samples are played back: `now` is the timer, `advance`
    the function that is timed, once a sample. Statistics, tables, JSON and comparisons then work as for any other.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._samples: Iterator[float] = iter(())

    def load(self, samples_us: Iterable[float]) -> None:
        """What the following calls of `advance` last, microseconds."""
        self._samples = iter([1e-6 * sample for sample in samples_us])

    def now(self) -> float:
        """Seconds."""
        return self._now

    def advance(self) -> None:
        """Raises StopIteration where no sample is left: there must be a round for each, and no more."""
        self._now += next(self._samples)
