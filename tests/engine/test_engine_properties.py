"""Stateful property tests: random lives of an engine on tiny pools, with hashes that collide."""

from __future__ import annotations

import functools
import os
import time

import pytest
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.sampling_params import SamplingParams
from tests.engine.fake_engine import alone, make_engine

HASHES = {
    "xxh3": xxhash.xxh3_64_intdigest,
    "2 bits": lambda tokens, parent: xxhash.xxh3_64_intdigest(tokens, parent) & 3,
    "constant": lambda tokens, parent: 0,
}
MAX_LEN = 24


@functools.cache
def tokens_alone(prompt: tuple[int, ...], params: SamplingParams, block_size: int) -> tuple[int, ...]:
    """What the request gives in an engine of its own."""
    options = {"block_size": block_size, "max_model_len": MAX_LEN, "eos_token_ids": (7, 8)}
    return alone(prompt, params, **options).token_ids


class EngineMachine(RuleBasedStateMachine):
    """Whatever happens, every request ends as it would alone without a cache, and the pool's books balance."""

    num_steps = 0

    @initialize(
        num_kv_blocks=st.integers(6, 14),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.sampled_from([1, 3, 8, 64]),
        max_num_seqs=st.integers(1, 5),
        policy=st.sampled_from(["mixed", "prefill_first"]),
        caching=st.booleans(),
        chunked=st.booleans(),
        hash_name=st.sampled_from(sorted(HASHES)),
        overlap=st.booleans(),
    )
    def start(
        self, num_kv_blocks, block_size, budget, max_num_seqs, policy, caching, chunked, hash_name, overlap
    ):
        self.core = make_engine(
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            scheduling=policy,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            hash_function=HASHES[hash_name],
            overlap=overlap,
            eos_token_ids=(7, 8),
        )
        self.block_size = block_size
        self.requests = {}
        self.lengths = {}
        self.idle_steps = 0

    @rule(
        prefix=st.integers(0, 10),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=8),
        max_tokens=st.integers(1, 12),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 3),
    )
    def add(self, prefix, tail, max_tokens, temperature, seed):
        prompt = (*(i % 3 for i in range(prefix)), *tail)
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
        refusal = ""
        try:
            request_id = self.core.add_request(prompt, params)
        except ValueError as error:
            refusal = str(error)
        if refusal:
            assert "KV blocks" in refusal or "max_num_batched_tokens" in refusal
            return
        self.requests[request_id] = (prompt, params)
        self.lengths[request_id] = 0

    @rule(
        count=st.integers(2, 5),
        length=st.integers(1, 6),
        max_tokens=st.integers(6, 12),
        seed=st.integers(0, 3),
    )
    def add_many(self, count, length, max_tokens, seed):
        """Short prompts that grow side by side: what runs out of blocks and preempts."""
        for i in range(count):
            self.add(prefix=length, tail=[i], max_tokens=max_tokens, temperature=1.0, seed=seed)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.core.abort(data.draw(st.sampled_from(sorted(self.requests))))

    @rule()
    def reset_prefix_cache(self):
        self.core.block_manager.reset_prefix_cache()

    @rule(count=st.integers(1, 12))
    def steps(self, count):
        for _ in range(count):
            self._step()

    def _step(self):
        type(self).num_steps += 1
        before = self._progress()
        self._check_outputs(self.core.step())
        idle = self.core.has_unfinished_requests() and self._progress() == before
        self.idle_steps = self.idle_steps + 1 if idle else 0
        assert self.idle_steps <= self.core.overlap, "a step changed nothing"

    def _progress(self):
        totals = self.core.totals
        return totals.num_prefill_tokens + totals.num_decode_tokens

    def _check_outputs(self, outputs):
        for output in outputs:
            prompt, params = self.requests[output.request_id]
            expected = tokens_alone(prompt, params, self.block_size)
            assert output.token_ids == expected[: len(output.token_ids)]
            assert len(output.token_ids) >= self.lengths[output.request_id]
            self.lengths[output.request_id] = len(output.token_ids)
            if output.finish_reason in ("length", "stop"):
                assert len(output.token_ids) == len(expected)
            if output.finished:
                del self.requests[output.request_id]

    @invariant()
    def books_balance(self):
        if hasattr(self, "core"):
            self.core.block_manager.check_invariants()
            for queue in (self.core.scheduler.running, self.core.scheduler.waiting):
                arrivals = [request.arrival for request in queue]
                assert arrivals == sorted(arrivals), "a queue is out of the order of arrival"
            for request in self.core.scheduler.waiting:
                assert not request.block_table
                assert request.num_computed_tokens == 0
                assert request.slot == -1
            slots = [request.slot for request in self.core.scheduler.running]
            assert len(set(slots)) == len(slots)
            assert set(slots) <= set(range(self.core.scheduler.max_num_seqs))

    def teardown(self):
        if not hasattr(self, "core"):
            return
        bound = 50 * (1 + len(self.requests)) * MAX_LEN
        for _ in range(bound):
            if not self.core.has_unfinished_requests():
                break
            self._step()
            self.core.block_manager.check_invariants()
        assert not self.core.has_unfinished_requests(), "requests are left that make no progress"
        self._check_outputs(self.core.step())
        assert not self.requests
        assert self.core.block_manager.num_free_blocks == self.core.block_manager.num_blocks


def run_machine(examples: int, length: int) -> int:
    """Run random lives of up to `length` rules each; the engine steps that they took."""
    machine = type("CountingMachine", (EngineMachine,), {"num_steps": 0})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=length,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine.num_steps


def test_random_lives_of_an_engine():
    taken = 0
    while taken < 20_000:  # lives are drawn, and so is how many steps they last
        taken += run_machine(examples=50, length=50)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_random_lives_of_an_engine_for_long():
    """DECODELAB_PROPERTY_STEPS: how many engine steps at least."""
    wanted, taken, start = int(os.environ.get("DECODELAB_PROPERTY_STEPS", 1_000_000)), 0, time.monotonic()
    while taken < wanted:
        taken += run_machine(examples=1000, length=100)
        print(f"{taken} steps in {time.monotonic() - start:.0f} s", flush=True)
