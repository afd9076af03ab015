"""When requests come, and how long they are: Poisson, bursts, or as a trace file recorded."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Arrival:
    """A request's shape: seconds after the start, prompt tokens, output tokens."""

    arrival_s: float
    input_len: int
    output_len: int

    def __post_init__(self) -> None:
        if not _is_number(self.arrival_s) or not (math.isfinite(self.arrival_s) and self.arrival_s >= 0):
            raise ValueError(f"arrival_s must be a number of seconds >= 0, got {self.arrival_s!r}")
        for name in ("input_len", "output_len"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def poisson_times(count: int, rate: float, rng: random.Random) -> list[float]:
    """`count` arrivals of a Poisson process of `rate` a second: gaps are exponential. The first comes at once."""
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def burst_times(count: int, rate: float, size: int) -> list[float]:
    """The same mean rate in bursts: `size` requests at one moment, then nothing for size / rate seconds."""
    return [i // size * size / rate for i in range(count)]


def read_trace(path: Path, speed: float = 1.0, limit: int | None = None) -> list[Arrival]:
    """Arrivals of a JSON-lines file, `speed` times as fast as recorded, counted from the first.

    Raises ValueError, naming the line, for what is no arrival.
    """
    found: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            Arrival(entry["arrival_s"], entry["input_len"], entry["output_len"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {type(error).__name__} {error}") from error
        found.append(entry)
    if not found:
        raise ValueError(f"{path} holds no requests")
    found.sort(key=lambda entry: entry["arrival_s"])
    start = float(found[0]["arrival_s"])
    return [
        Arrival((float(entry["arrival_s"]) - start) / speed, entry["input_len"], entry["output_len"])
        for entry in found[:limit]
    ]


def digest(trace: Sequence[Arrival]) -> str:
    """16 hex digits that name a trace by what it holds."""
    text = json.dumps([astuple(arrival) for arrival in trace])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_lengths(
    times: Sequence[float], input_lens: tuple[int, int], output_lens: tuple[int, int], rng: random.Random
) -> list[Arrival]:
    """Arrivals at those times with lengths drawn evenly from the ranges, both ends included."""
    return [Arrival(time, rng.randint(*input_lens), rng.randint(*output_lens)) for time in times]
