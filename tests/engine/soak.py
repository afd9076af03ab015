"""A mixed load without end: arrivals, aborts, preemptions, shared prefixes, cache resets; and what must stay flat."""

from __future__ import annotations

import gc
import random
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
    rng, engine, soak = random.Random(seed), llm.engine, Soak()
    vocab_size, room = engine.vocab_size, engine.max_model_len
    shared = [[rng.randrange(vocab_size) for _ in range(room)] for _ in range(5)]
    live: list[str] = []
    progress = clock if progress is None else progress
    start = progress()
    for window in range(windows):
        window_start, before = clock(), engine.totals.num_output_tokens
        while progress() < start + (window + 1) * length / windows:
            while len(live) < num_live:
                live.append(engine.add_request(*_request(rng, shared, room)))
                soak.num_requests += 1
            if rng.random() < 0.05:
                engine.abort(live.pop(rng.randrange(len(live))))
                soak.num_aborted += 1
            if rng.random() < 0.001:
                llm.reset_prefix_cache()
                soak.num_resets += 1
            ended = {output.request_id for output in engine.step_finished()}
            live = [request_id for request_id in live if request_id not in ended]
        elapsed = clock() - window_start
        soak.tokens_per_s.append((engine.totals.num_output_tokens - before) / elapsed)
        gc.collect()
        soak.memory.append(memory())
        engine.block_manager.check_invariants()
    while engine.has_unfinished_requests():
        engine.step_finished()
    engine.step_finished()
    soak.num_preemptions, soak.num_steps = engine.totals.num_preemptions, engine.totals.num_steps
    return soak


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
