"""A mixed load without end: arrivals, aborts, preemptions, shared prefixes, cache resets; and what must stay flat."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine import LLM, SamplingParams


@dataclass
class Soak:
    """What a load did. memory, tokens_per_s: one value a window of equal length."""

    num_requests: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    num_resets: int = 0
    num_steps: int = 0
    memory: list[int] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)


class Load:
    """Keeps num_live requests in an engine, some of which it aborts; now and then it resets the prefix cache."""

    def __init__(self, llm: LLM, seed: int, num_live: int) -> None:
        self.llm, self.num_live, self.done = llm, num_live, Soak()
        self._rng = rng = random.Random(seed)
        self._room = room = llm.engine.max_model_len
        self._shared = [[rng.randrange(llm.engine.vocab_size) for _ in range(room)] for _ in range(5)]
        self._live: list[str] = []

    def step(self) -> None:
        rng, engine, live = self._rng, self.llm.engine, self._live
        while len(live) < self.num_live:
            live.append(engine.add_request(*_request(rng, self._shared, self._room)))
            self.done.num_requests += 1
        if rng.random() < 0.05:
            engine.abort(live.pop(rng.randrange(len(live))))
            self.done.num_aborted += 1
        if rng.random() < 0.001:
            self.llm.reset_prefix_cache()
            self.done.num_resets += 1
        ended = {output.request_id for output in engine.step_finished()}
        self._live = [request_id for request_id in live if request_id not in ended]

    def drain(self) -> None:
        while self.llm.engine.has_unfinished_requests():
            self.llm.engine.step_finished()
        self.llm.engine.step_finished()
        self._live = []


def run_soak(
    llm: LLM,
    length: float,
    memory: Callable[[], int],
    windows: int = 10,
    seed: int = 0,
    *,
    num_live: int = 40,
    clock: Callable[[], float] = time.process_time,
    progress: Callable[[], float] | None = None,
) -> Soak:
    """Load `llm` with num_live requests for `length` of progress, then let it run empty.

    memory: bytes held now. clock: of tokens_per_s; by default what others do on the machine does not count. progress:
    by default the clock, so that length is in seconds; what counts work makes the load the same on every machine.
    """
    load, engine = Load(llm, seed, num_live), llm.engine
    soak = load.done
    progress = clock if progress is None else progress
    start = progress()
    for window in range(windows):
        window_start, before = clock(), engine.totals.num_output_tokens
        while progress() < start + (window + 1) * length / windows:
            load.step()
        elapsed = clock() - window_start
        soak.tokens_per_s.append((engine.totals.num_output_tokens - before) / elapsed)
        gc.collect()
        soak.memory.append(memory())
        engine.block_manager.check_invariants()
    load.drain()
    soak.num_preemptions, soak.num_steps = engine.totals.num_preemptions, engine.totals.num_steps
    return soak


def slowdown_of(llm: LLM, fresh: LLM, *, slices: int = 60, steps: int = 20, num_live: int = 40) -> float:
    """How much longer a step of `llm`, which is idle, takes than one of `fresh`: the median over slices of one load.

    In turns, since a machine that others use changes its speed within minutes: rates of an hour's windows tell of that.
    """
    for each in (llm, fresh):
        each.reset_prefix_cache()
    loads = [Load(each, 1, num_live) for each in (llm, fresh)]
    ratios = []
    for number in range(slices):
        taken = {}
        for load in loads if number % 2 else reversed(loads):
            start = time.process_time()
            for _ in range(steps):
                load.step()
            taken[load.llm is llm] = time.process_time() - start
        ratios.append(taken[True] / taken[False])
    for load in loads:
        load.drain()
    assert loads[0].done == loads[1].done  # the same work
    return statistics.median(ratios[slices // 6 :])


def _request(rng: random.Random, shared: list[list[int]], room: int) -> tuple[list[int], SamplingParams]:
    prompt = [*rng.choice(shared)[: rng.randrange(1, room // 2)], rng.randrange(300)]
    params = SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        top_k=rng.choice([-1, 20]),
        top_p=rng.choice([1.0, 0.9]),
        max_tokens=rng.randrange(1, room // 2),
        logprobs=rng.choice([None, None, None, 3]),
    )
    return prompt, params


def check_soak(llm: LLM, soak: Soak, *, growth_bytes: float, slowdown: float) -> None:
    """Memory and throughput flat, the pool whole, nothing left behind. The first windows warm up.

    slowdown: the later half's tokens a second may be this fraction lower, for what others do on the machine. The best
    windows are compared: what grows slower is so in all of them.
    """
    assert min(soak.num_requests, soak.num_aborted, soak.num_preemptions) > 0, soak
    engine, settled = llm.engine, len(soak.memory) // 3
    assert max(soak.memory[settled:]) - soak.memory[settled] < growth_bytes, soak.memory
    rates = soak.tokens_per_s[settled:]
    half = len(rates) // 2
    assert max(rates[-half:]) > (1 - slowdown) * max(rates[:half]), soak.tokens_per_s
    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks
    engine.block_manager.check_invariants()
    assert not engine._tracked
    assert not engine._ended
    assert engine._in_flight is None
    assert sum(engine.totals.num_finished.values()) == soak.num_requests
    assert len(engine.scheduler._free_slots) == engine.config.max_num_seqs
