"""Timing on a CPU with a clock of the test's own; what only a GPU can show is marked so."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import pytest
import torch

from kernels import ceilings
from kernels.timing import (
    COLD_FACTOR,
    MAX_INPUT_SETS,
    Timing,
    cache_bytes,
    calls_of_sample,
    num_input_sets,
    time_interleaved,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


class World:
    """A clock that moves only when something is done, and a record of what was done."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def clock(self) -> float:
        return self.now

    def doing(self, name: str, seconds: float) -> Callable[[], None]:
        def act() -> None:
            self.log.append(name)
            self.now += seconds

        return act


def test_a_cpu_sample_is_one_call_and_nothing_else() -> None:
    world = World()
    found = time_interleaved(
        {"slow": [world.doing("slow", 0.5)], "fast": [world.doing("fast", 0.25)]},
        device=CPU,
        cache_state="cold",
        rounds=3,
        samples=2,
        clock=world.clock,
        sweep=world.doing("sweep", 100.0),
    )
    assert [t.samples_us for t in found["slow"]] == [(5e5, 5e5)] * 3
    assert [t.samples_us for t in found["fast"]] == [(2.5e5, 2.5e5)] * 3
    assert {(t.method, t.cache_state) for ts in found.values() for t in ts} == {("perf_counter", "cold")}
    # Every timed call of the cold state comes right after a sweep; the untimed first use does not.
    for index in range(0, len(world.log), 5):
        name = world.log[index]
        assert world.log[index : index + 5] == [name, "sweep", name, "sweep", name]


def test_first_uses_are_not_timed() -> None:
    world = World()
    first = [True]

    def compiles_once() -> None:
        world.now += 10.0 if first[0] else 0.001
        first[0] = False

    (timing,) = time_interleaved(
        {"jit": [compiles_once]}, device=CPU, cache_state="hot", rounds=1, samples=4, clock=world.clock
    )["jit"]
    assert timing.samples_us == pytest.approx((1000.0,) * 4)


def test_cold_rotates_over_the_sets_and_hot_uses_the_first() -> None:
    for state, used in (("cold", {"a0", "a1", "a2"}), ("hot", {"a0"})):
        world = World()
        time_interleaved(
            {"a": [world.doing(f"a{i}", 1.0) for i in range(3)]},
            device=CPU,
            cache_state=state,
            rounds=2,
            samples=3,
            clock=world.clock,
            sweep=world.doing("sweep", 1.0),
        )
        assert set(world.log) - {"sweep"} == used
        assert ("sweep" in world.log) == (state == "cold")


def test_hot_sweeps_nothing_by_default() -> None:
    world = World()
    (timing,) = time_interleaved(
        {"a": [world.doing("a", 1.0)]}, device=CPU, cache_state="hot", rounds=1, samples=1, clock=world.clock
    )["a"]
    assert timing.samples_us == (1e6,)


def test_rounds_are_interleaved_in_random_order() -> None:
    orders = []
    for seed in (0, 0, 1):
        world = World()
        time_interleaved(
            {name: [world.doing(name, 1.0)] for name in "abcd"},
            device=CPU,
            cache_state="hot",
            rounds=6,
            samples=1,
            clock=world.clock,
            rng=random.Random(seed),
        )
        rounds = [tuple(world.log[i : i + 8 : 2]) for i in range(0, len(world.log), 8)]
        assert all(sorted(one) == list("abcd") for one in rounds)
        assert len(set(rounds)) > 1
        orders.append(rounds)
    assert orders[0] == orders[1] != orders[2]


def test_median_and_raw_samples() -> None:
    timing = Timing((3.0, 1.0, 100.0), "perf_counter", "hot")
    assert timing.median == 3.0
    assert timing.samples_us == (3.0, 1.0, 100.0)
    with pytest.raises(ValueError, match="samples_us is empty"):
        Timing((), "perf_counter", "hot")


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="cache_state is 'warm'"):
        time_interleaved({}, device=CPU, cache_state="warm")
    with pytest.raises(ValueError, match="variant 'a' has no callable"):
        time_interleaved({"a": []}, device=CPU, cache_state="hot")
    with pytest.raises(ValueError, match="rounds and samples"):
        time_interleaved({}, device=CPU, cache_state="hot", rounds=0)
    with pytest.raises(ValueError, match="bytes_per_set is 0"):
        num_input_sets(0, CPU, "cold")


def test_input_sets_pass_enough_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.timing.cache_bytes", lambda device: 60 << 20)
    for size in (1 << 20, 8 << 20, 300 << 20, 1 << 33):
        sets = num_input_sets(size, CUDA, "cold")
        assert (sets - 1) * size >= COLD_FACTOR * (60 << 20)
        assert (sets - 2) * size < COLD_FACTOR * (60 << 20)
        assert num_input_sets(size, CUDA, "hot") == 1
        assert num_input_sets(size, CPU, "cold") == 1


def test_tiny_inputs_make_no_more_sets_than_a_sample_has_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.timing.cache_bytes", lambda device: 60 << 20)
    assert num_input_sets(6144, CUDA, "cold") == num_input_sets(1, CUDA, "cold") == MAX_INPUT_SETS
    least = -(-COLD_FACTOR * (60 << 20) // (MAX_INPUT_SETS - 2))
    assert num_input_sets(least, CUDA, "cold") < MAX_INPUT_SETS


def test_a_sample_is_whole_rotations_unless_they_are_too_long() -> None:
    calls = [lambda i=i: i for i in range(30)]

    def sample(num_calls: int, wanted: int) -> tuple[list[int], bool]:
        chosen, swept = calls_of_sample((calls * 100)[:num_calls], wanted)
        return [call() for call in chosen], swept

    assert sample(1, 3) == ([0, 0, 0], False)
    assert sample(3, 7) == ([0, 1, 2] * 3, False)
    assert sample(30, 3) == (list(range(30)), False)  # ten samples' time, and no more
    assert sample(30, 2) == ([0, 1], True)
    assert sample(2, 1) == ([0, 1], False)
    # So many sets need not be as large as the cache: they are swept however short they are, and none is used twice.
    for wanted in (1000, 5000):
        chosen, swept = sample(MAX_INPUT_SETS, wanted)
        assert (len(chosen), swept) == (min(wanted, MAX_INPUT_SETS), True)


@pytest.mark.parametrize(("num_sets", "calls_a_sample", "swept"), [(3, 225, False), (2100, 223, True)])
def test_a_gpu_sample_holds_its_calls_and_no_sweep(
    monkeypatch: pytest.MonkeyPatch, num_sets: int, calls_a_sample: int, swept: bool
) -> None:
    """Calls of 9 us on a GPU of the test's own, on which nothing can be captured."""
    world = World()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            world.log.append("event")
            self.at = world.now

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.at - self.at)

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr("kernels.timing._gpu_sweep", lambda device: world.doing("sweep", 1.0))
    capture = property(lambda self: lambda: (self._run_calls, "cuda_event"))
    monkeypatch.setattr("kernels.timing._GpuSampler._capture", capture)
    calls = [world.doing(f"call {i}", 9e-6) for i in range(num_sets)]
    (found,) = time_interleaved({"a": calls}, device=CUDA, cache_state="cold", rounds=1, samples=2)["a"]
    assert found.samples_us == pytest.approx((9.0, 9.0))
    one = [*(["sweep"] * swept), "event", *(f"call {i % num_sets}" for i in range(calls_a_sample)), "event"]
    assert world.log[-2 * len(one) :] == one * 2
    assert world.log.count("sweep") == 2 * swept


def test_a_failing_call_is_not_swallowed() -> None:
    def fail() -> None:
        raise RuntimeError("broken kernel")

    with pytest.raises(RuntimeError, match="broken kernel"):
        time_interleaved({"a": [fail]}, device=CPU, cache_state="hot")


def test_cpu_ceilings_are_plausible() -> None:
    """Wide bounds, for a busy machine: a unit mistaken by 1,000 must not pass."""
    assert 1e8 < ceilings.read_bandwidth(CPU) < 2e12
    assert 1e8 < ceilings.matmul_rate(CPU, torch.float32) < 2e14


@pytest.mark.gpu
@pytest.mark.alone
def test_cold_and_hot_on_a_gpu() -> None:
    """8 MB of input: hot lies in the L2 and beats the memory's rate, cold does not exceed it."""
    size = 8 << 20
    ceiling = ceilings.read_bandwidth(CUDA)
    sets = num_input_sets(size, CUDA, "cold")
    assert (sets - 1) * size >= COLD_FACTOR * cache_bytes(CUDA)
    tensors = [torch.rand(size // 4, device=CUDA) for _ in range(sets)]
    calls = {"sum": [tensor.sum for tensor in tensors]}
    rates = {}
    for state in ("cold", "hot"):
        found = time_interleaved(calls, device=CUDA, cache_state=state, rounds=3)["sum"]
        assert {timing.method for timing in found} == {"cuda_graph"}
        rates[state] = size / (1e-6 * min(timing.median for timing in found))
    assert rates["cold"] < 1.05 * ceiling
    assert rates["cold"] < rates["hot"]


@pytest.mark.gpu
@pytest.mark.alone
def test_a_swept_sample_takes_what_a_rotation_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 KB of input, once each of a few sets after a sweep, and by rotation over as many as pass the cache."""
    size = 128 << 10
    num_sets = 1 + COLD_FACTOR * cache_bytes(CUDA) // size
    tensors = [torch.rand(size // 4, device=CUDA) for _ in range(max(num_sets, MAX_INPUT_SETS))]
    calls = {"sum": [tensor.sum for tensor in tensors]}
    medians = {}
    for way, limit in (("swept", MAX_INPUT_SETS), ("rotation", 1 << 30)):
        monkeypatch.setattr("kernels.timing.MAX_INPUT_SETS", limit)
        found = time_interleaved(calls, device=CUDA, cache_state="cold", rounds=3)["sum"]
        assert {each.method for each in found} == {"cuda_graph"}
        medians[way] = min(each.median for each in found)
    assert 0.9 < medians["swept"] / medians["rotation"] < 1.1, medians


@pytest.mark.gpu
def test_what_cannot_be_captured_is_timed_by_events() -> None:
    x = torch.rand(1 << 20, device=CUDA)
    found = time_interleaved({"sync": [lambda: x.sum().item()]}, device=CUDA, cache_state="hot", rounds=1)
    assert found["sync"][0].method == "cuda_event"
    again = time_interleaved({"sum": [x.sum]}, device=CUDA, cache_state="hot", rounds=1)
    assert again["sum"][0].method == "cuda_graph"


@pytest.mark.gpu
@pytest.mark.alone
def test_a_graphs_time_agrees_with_a_known_amount_of_work() -> None:
    """Four times the bytes, far beyond the cache, take about four times as long."""
    small, large = (torch.rand(n << 26, device=CUDA) for n in (1, 4))
    found = time_interleaved(
        {"small": [small.sum], "large": [large.sum]}, device=CUDA, cache_state="hot", rounds=3
    )
    ratio = found["large"][0].median / found["small"][0].median
    assert 3.0 < ratio < 5.0


@pytest.mark.gpu
@pytest.mark.alone
def test_gpu_ceilings_are_plausible() -> None:
    assert 1e11 < ceilings.read_bandwidth(CUDA) < 2e13
    assert 1e12 < ceilings.matmul_rate(CUDA, torch.bfloat16) < 1e16
