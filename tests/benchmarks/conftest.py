"""What every benchmark here does: check, time through kernels/timing.py, play the samples back to pytest-benchmark."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch

from experiments.roofline import Ceilings, measure_ceilings
from kernels.timing import CacheState
from tests.benchmarks.comparison import Comparison, Unsupported
from tests.benchmarks.sample_clock import SampleClock

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = ("bfloat16",) if DEVICE.type == "cuda" else ("float32",)

Bench = Callable[[str, str, CacheState], None]


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """What saved numbers depend on besides the CPU."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    gpu = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else None
    machine_info["accelerator"] = {"device": DEVICE.type, "gpu": gpu, **versions}


@pytest.fixture(scope="session")
def ceilings() -> Ceilings:
    """Measured once, before the first benchmark is."""
    return measure_ceilings(DEVICE, DTYPES)


@pytest.fixture
def sample_clock(request: pytest.FixtureRequest) -> SampleClock:
    """The timer of this test's `benchmark` fixture, which must therefore be made after this one."""
    clock = SampleClock()
    request.node.add_marker(pytest.mark.benchmark(timer=clock.now))
    return clock


@pytest.fixture(scope="module")
def comparison_of(request: pytest.FixtureRequest) -> Callable[[str], Comparison]:
    """The module's `compare(shape, device)`, of which the last shape's result is kept."""
    current: dict[str, Comparison] = {}

    def get(shape: str) -> Comparison:
        if shape not in current:
            current.clear()
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
            current[shape] = request.module.compare(shape, DEVICE)
        return current[shape]

    return get


@pytest.fixture
def bench(
    request: pytest.FixtureRequest,
    comparison_of: Callable[[str], Comparison],
    sample_clock: SampleClock,
    benchmark: Any,
) -> Bench:
    """bench(shape, label, cache_state): the whole of a benchmark, in a group of its shape and cache state.

    With benchmarks disabled it is one checked call. All contenders of the group that this session selected are timed
    together, at the first one's turn.
    """

    def run(shape: str, label: str, cache_state: CacheState) -> None:
        comparison = comparison_of(shape)
        benchmark.group = f"{comparison.shape}, {cache_state}"
        try:
            if benchmark.disabled:
                benchmark.pedantic(comparison.check, args=(label,))
                return
            comparison.refuse_interpreted(label)
            error = comparison.check(label)
        except Unsupported as reason:
            pytest.skip(str(reason))
        selected = _selected_labels(request, shape, cache_state)
        measured: Ceilings = request.getfixturevalue("ceilings")
        rounds = comparison.timings(selected, cache_state)[label]
        samples = [sample for found in rounds for sample in found.samples_us]
        sample_clock.load(samples)
        benchmark.pedantic(sample_clock.advance, rounds=len(samples))
        problem = comparison.contenders[label].problem
        seconds = benchmark.stats.stats.median
        benchmark.extra_info |= measured.columns(problem.cost, problem.dtype, 1e6 * seconds) | {
            "cache_state": cache_state,
            "timing_method": rounds[0].method,
            "dtype": problem.dtype,
            "max_rel_err": error,
            "bytes_per_s": problem.cost.bytes / seconds,
            "flops_per_s": problem.cost.flops / seconds,
            "read_bandwidth": measured.read_bytes_per_s,
            "fraction_of_read_bandwidth": problem.cost.bytes / seconds / measured.read_bytes_per_s,
            "device_name": torch.cuda.get_device_name(DEVICE)
            if DEVICE.type == "cuda"
            else platform.machine(),
        }

    return run


def _selected_labels(request: pytest.FixtureRequest, shape: str, cache_state: str) -> list[str]:
    """The contenders of this test's group among the tests of this session."""
    return [
        item.callspec.params["label"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.function is request.function
        and (item.callspec.params["shape"], item.callspec.params["cache_state"]) == (shape, cache_state)
    ]
