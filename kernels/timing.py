"""The only code that times device work.

Two cache states, always named beside the number. "cold": at least COLD_FACTOR times the cache passes between two
uses of the same bytes. On a GPU the callables rotate over as many input sets as that takes; where that would be
thousands of tiny ones, or a rotation far longer than a sample, a sample uses each of a few sets once, and COLD_FACTOR
caches are written over before it, outside the timed region. On a CPU, where each call is timed by itself, a buffer
larger than the cache is swept before each in the same way. "hot": the same inputs again and again.

A GPU sample is one replay of a CUDA graph of many calls over their number, or, where a callable cannot be
captured, of the same calls between two events ("cuda_event", which then holds launch gaps). A CPU sample is one
call by perf_counter. Variants run interleaved, in a new random order each round, so that drift of clocks and
temperature falls on all of them alike. Compilation and first uses happen in a warm-up that is never timed.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

CacheState = Literal["cold", "hot"]
Method = Literal["cuda_graph", "cuda_event", "perf_counter"]
Call = Callable[[], Any]

COLD_FACTOR = 5

# A GPU sample lasts at least this long, so that the events' resolution and the replay's start vanish in it.
SAMPLE_US = 2000.0

# Input sets at most: in a graph a call takes a microsecond at least, so that a sample needs no more. Without this
# limit one token's norm of 1,024 elements would want 51,201 sets to rotate over on an H200.
MAX_INPUT_SETS = 2048

# Whole rotations are sampled unless they would take so many samples' time. What is swept instead leaves a cache full of
# bytes that wait to be written back; calls that move COLD_FACTOR caches in ten samples' time or more do not notice.
MAX_ROTATION = 10

# Bytes swept before a cold CPU call: COLD_FACTOR caches, within these bounds.
SWEEP_BOUNDS = (64 << 20, 256 << 20)


@dataclass(frozen=True)
class Timing:
    """Raw samples of one variant in one round, microseconds a call."""

    samples_us: tuple[float, ...]
    method: str
    cache_state: str

    def __post_init__(self) -> None:
        if not self.samples_us:
            raise ValueError("samples_us is empty")

    @property
    def median(self) -> float:
        """Microseconds a call."""
        return statistics.median(self.samples_us)


def cache_bytes(device: torch.device) -> int:
    """The cache that must be passed over: a GPU's L2, or a CPU's last level as Linux tells it (else 32 MiB)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [
        path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(
        (int(size.rstrip("KM")) << (20 if size.endswith("M") else 10) for size in sizes), default=32 << 20
    )


def num_input_sets(bytes_per_set: int, device: torch.device, cache_state: CacheState) -> int:
    """How many input sets of bytes_per_set a variant needs to be timed in that state.

    Between two uses of one set all others are used: COLD_FACTOR caches' worth of bytes at least. MAX_INPUT_SETS of them
    are enough, however small: time_interleaved does not rotate over so many, but sweeps the cache before each sample.
    """
    _check_state(cache_state)
    if bytes_per_set < 1:
        raise ValueError(f"bytes_per_set is {bytes_per_set}, the least is 1")
    if cache_state == "hot" or device.type != "cuda":
        return 1
    return min(1 + -(-COLD_FACTOR * cache_bytes(device) // bytes_per_set), MAX_INPUT_SETS)


def time_interleaved(
    variants: Mapping[str, Sequence[Call]],
    *,
    device: torch.device,
    cache_state: CacheState,
    rounds: int = 5,
    samples: int = 5,
    rng: random.Random | None = None,
    agree: Callable[[int], int] = int,
    clock: Callable[[], float] = time.perf_counter,
    sweep: Call | None = None,
    inside: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, list[Timing]]:
    """Time each variant in each round, in random order: one Timing a variant and round, in round order.

    variants: name -> one callable per input set (see num_input_sets); "hot" uses the first alone.
    samples: per variant and round. rng: the order; None for a fixed seed.
    agree: from how many calls a GPU's sample should hold to how many it does. Where calls wait for those of other
    processes, it has to give all of these one number, and all of them time the same variants with the same rng.
    inside: entered with a variant's name while its callables run, to tell whose fault an exception is.
    clock, sweep: of the CPU path, seconds and what evicts the cache before a cold call; replaceable in tests.
    """
    _check_state(cache_state)
    if rounds < 1 or samples < 1:
        raise ValueError(f"rounds and samples must be at least 1, got {rounds} and {samples}")
    for name, calls in variants.items():
        if not calls:
            raise ValueError(f"variant {name!r} has no callable")
    rng = rng or random.Random(0)
    chosen = {name: calls[:1] if cache_state == "hot" else calls for name, calls in variants.items()}
    if device.type == "cuda":
        sweep_gpu = _gpu_sweep(device) if cache_state == "cold" else _nothing
        samplers: dict[str, _Sampler] = {}
        for name, calls in chosen.items():
            with inside(name):
                samplers[name] = _GpuSampler(calls, device, agree, sweep_gpu)
    else:
        evict = _nothing if cache_state == "hot" else sweep or _cpu_sweep()
        samplers = {name: _CpuSampler(calls, clock, evict) for name, calls in chosen.items()}
    timings: dict[str, list[Timing]] = {name: [] for name in variants}
    for _ in range(rounds):
        order = list(variants)
        rng.shuffle(order)
        for name in order:
            with inside(name):
                taken = samplers[name].take(samples)
            timings[name].append(Timing(taken, samplers[name].method, cache_state))
    return timings


class _Sampler:
    """Times one variant."""

    method: Method

    def take(self, count: int) -> tuple[float, ...]:
        """`count` samples after an untimed use, microseconds a call."""
        raise NotImplementedError


class _CpuSampler(_Sampler):
    method: Method = "perf_counter"

    def __init__(self, calls: Sequence[Call], clock: Callable[[], float], sweep: Call) -> None:
        self._calls = itertools.cycle(calls)
        self._clock = clock
        self._sweep = sweep

    def take(self, count: int) -> tuple[float, ...]:
        next(self._calls)()
        return tuple(self._sample(next(self._calls)) for _ in range(count))

    def _sample(self, call: Call) -> float:
        self._sweep()
        start = self._clock()
        call()
        return 1e6 * (self._clock() - start)


def calls_of_sample(calls: Sequence[Call], wanted: int) -> tuple[list[Call], bool]:
    """What a GPU sample of `wanted` calls or more is, and whether the cache has to be swept before it.

    Whole rotations over all calls, a set each, or, where those are too many (MAX_INPUT_SETS, MAX_ROTATION), the first
    `wanted` of them, once.
    """
    if len(calls) >= MAX_INPUT_SETS or len(calls) > MAX_ROTATION * wanted:
        return list(calls[:wanted]), True
    return list(calls) * math.ceil(wanted / len(calls)), False


class _GpuSampler(_Sampler):
    """A CUDA graph of a sample's calls; the same calls between events if capture fails."""

    def __init__(
        self, calls: Sequence[Call], device: torch.device, agree: Callable[[int], int], sweep: Call
    ) -> None:
        self._device = device
        self._calls = list(calls)
        self._sweep = _nothing
        with torch.cuda.device(device):
            for call in calls:  # compiles, and allocates what is kept between calls
                call()
            self._run, self.method = self._capture()
            (per_call,) = self.take(1)
            self._calls, swept = calls_of_sample(calls, agree(math.ceil(SAMPLE_US / per_call)))
            if swept:
                self._sweep = sweep
            if len(self._calls) != len(calls):
                self._run, self.method = self._capture()

    def take(self, count: int) -> tuple[float, ...]:
        # Runs follow one another without the host in between: each starts while the device is still busy.
        spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        with torch.cuda.device(self._device):
            self._run()
            for start, end in spans:
                self._sweep()
                start.record()
                self._run()
                end.record()
            spans[-1][1].synchronize()
        return tuple(1000.0 * start.elapsed_time(end) / len(self._calls) for start, end in spans)

    def _run_calls(self) -> None:
        for call in self._calls:
            call()

    def _capture(self) -> tuple[Call, Method]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: NCCL's own thread may look at events meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._run_calls()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # the callable waits for the device, or does something else that no graph holds
            torch.cuda.synchronize()
            return self._run_calls, "cuda_event"
        return graph.replay, "cuda_graph"


def _gpu_sweep(device: torch.device) -> Call:
    """Writes COLD_FACTOR caches' worth of bytes, after which the cache holds nothing else."""
    return torch.empty(COLD_FACTOR * cache_bytes(device), dtype=torch.uint8, device=device).zero_


def _cpu_sweep() -> Call:
    """Reads and writes a buffer larger than the CPU's cache."""
    low, high = SWEEP_BOUNDS
    size = min(max(COLD_FACTOR * cache_bytes(torch.device("cpu")), low), high)
    buffer = torch.zeros(size // 4, dtype=torch.float32, device="cpu")
    return lambda: buffer.add_(1.0)


def _nothing() -> None:
    pass


def _check_state(cache_state: str) -> None:
    if cache_state not in ("cold", "hot"):
        raise ValueError(f"cache_state is {cache_state!r}, expected 'cold' or 'hot'")
