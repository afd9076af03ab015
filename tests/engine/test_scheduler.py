"""Scheduling: admission, chunks, preemption, limits (cases S2-S6, E2, E3), over the fake executor."""

from __future__ import annotations

import pytest

from engine.sampling_params import SamplingParams
from tests.engine.fake_engine import alone, make_engine, run


def greedy(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def test_s2_what_can_never_fit_is_refused_and_the_rest_completes():
    core = make_engine(num_kv_blocks=2, block_size=4)
    with pytest.raises(ValueError, match=r"needs 3 KV blocks of 4, the pool has 2 \(num_kv_blocks\)"):
        core.add_request(list(range(8)), greedy(3))
    core.add_request([1, 2, 3], greedy(3), "small")
    assert len(run(core, max_steps=50)["small"].token_ids) == 3


def test_the_last_token_needs_no_kv():
    core = make_engine(num_kv_blocks=2, block_size=4)
    core.add_request(list(range(6)), greedy(3), "exact")  # 9 tokens, KV of 8
    assert len(run(core)["exact"].token_ids) == 3


def test_s3_two_long_prompts_do_not_preempt_each_other_in_turns():
    core = make_engine(num_kv_blocks=10, block_size=4, max_num_batched_tokens=8, enable_prefix_caching=False)
    prompts = [list(range(28)), list(range(10, 38))]
    ids = [core.add_request(prompt, greedy(4)) for prompt in prompts]
    outputs = run(core, max_steps=40)
    assert sum(output.num_preemptions for output in outputs.values()) <= 2
    for request_id, prompt in zip(ids, prompts):
        assert outputs[request_id].token_ids == alone(prompt, greedy(4), block_size=4).token_ids


def test_s5_chunks_progress_without_the_prefix_cache():
    core = make_engine(block_size=4, max_num_batched_tokens=8, enable_prefix_caching=False)
    core.add_request(list(range(30)), greedy(1))
    used = []
    while core.has_unfinished_requests():
        core.step()
        used.append(core.last_step.num_prefill_tokens)
    assert used == [8, 8, 8, 6]
    assert len(core.executor.steps[0].new_blocks[0].block_ids) == 8
    assert [step.chunks[0].start for step in core.executor.steps] == [0, 8, 16, 24]


def test_s6_a_prompt_over_the_budget_is_refused_without_chunking():
    core = make_engine(max_num_batched_tokens=16, enable_chunked_prefill=False)
    with pytest.raises(ValueError, match="17 tokens, more than max_num_batched_tokens=16"):
        core.add_request(list(range(17)), greedy(1))
    core.add_request(list(range(16)), greedy(1), "fits")
    assert run(core)["fits"].finish_reason == "length"


def test_a_resumed_sequence_may_outgrow_the_budget_without_chunking():
    """The prefix cache is off, or it would leave less to run than the budget."""
    options = {"num_kv_blocks": 6, "block_size": 4, "max_num_batched_tokens": 8}
    core = make_engine(enable_chunked_prefill=False, enable_prefix_caching=False, **options)
    ids = [core.add_request([i] * 7, greedy(12)) for i in range(3)]
    outputs = run(core, max_steps=200)
    assert any(outputs[request_id].num_preemptions for request_id in ids)
    assert any(chunk.start for step in core.executor.steps for chunk in step.chunks)
    for i, request_id in enumerate(ids):
        assert outputs[request_id].token_ids == alone([i] * 7, greedy(12), block_size=4).token_ids


@pytest.mark.parametrize("num_prompt", [6, 8])
def test_without_chunking_a_prompt_waits_until_the_budget_holds_it_whole(num_prompt):
    core = make_engine(block_size=4, max_num_batched_tokens=8, enable_chunked_prefill=False)
    core.add_request([1] * 3, greedy(2))
    core.add_request([2] * num_prompt, greedy(1))
    run(core)
    chunks = [[len(chunk.token_ids) for chunk in step.chunks] for step in core.executor.steps]
    assert [lengths for lengths in chunks if lengths] == [[3], [num_prompt]]


def test_without_chunking_a_prompt_counts_without_what_is_cached():
    options = {"max_num_batched_tokens": 16, "enable_chunked_prefill": False}
    core = make_engine(block_size=4, **options)
    core.add_request(list(range(16)), greedy(1))
    run(core)
    core.add_request([40] * 12, greedy(1))
    core.add_request(list(range(16)), greedy(1))  # 12 tokens are cached, so 4 are left
    core.step()
    chunks = core.executor.steps[-1].chunks
    assert [(chunk.start, len(chunk.token_ids)) for chunk in chunks] == [(0, 12), (12, 4)]


def test_who_never_ran_has_no_cached_tokens():
    core = make_engine(max_num_seqs=1)
    core.add_request([1, 2, 3], greedy(9), "running")
    core.add_request([1, 2, 3], greedy(9), "waiting")
    core.step()
    core.abort("waiting")
    assert run(core)["waiting"].num_cached_tokens == 0


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_preempted_requests_end_as_if_alone(policy, budget):
    core = make_engine(num_kv_blocks=12, block_size=4, max_num_batched_tokens=budget, scheduling=policy)
    prompts = [[i, *range(i % 5, 11)] for i in range(8)]
    params = [SamplingParams(temperature=0.9, max_tokens=20, seed=i) for i in range(8)]
    ids = [core.add_request(prompt, p) for prompt, p in zip(prompts, params)]
    outputs = run(core, max_steps=3000)
    for request_id, prompt, p in zip(ids, prompts, params):
        assert outputs[request_id].token_ids == alone(prompt, p, block_size=4).token_ids
    if budget > 1:
        assert sum(output.num_preemptions for output in outputs.values()) > 0
    assert core.block_manager.num_free_blocks == 12


def test_the_earliest_request_is_never_preempted():
    core = make_engine(num_kv_blocks=8, block_size=4)
    ids = [core.add_request([i] * 6, greedy(24)) for i in range(4)]
    outputs = run(core)
    assert outputs[ids[0]].num_preemptions == 0
    assert sum(output.num_preemptions for output in outputs.values()) > 0


def test_mixed_steps_hold_decodes_and_chunks_and_prefill_first_does_not():
    composition = {}
    for policy in ("mixed", "prefill_first"):
        core = make_engine(block_size=4, max_num_batched_tokens=8, scheduling=policy)
        core.add_request([1, 2, 3], greedy(20))
        core.step()
        core.add_request(list(range(20)), greedy(2))
        steps = set()
        while core.has_unfinished_requests():
            core.step()
            steps.add((core.last_step.num_prefill_tokens > 0, core.last_step.num_decode_tokens > 0))
        composition[policy] = steps
    assert (True, True) in composition["mixed"]
    assert composition["prefill_first"] == {(True, False), (False, True)}


def test_limits_hold_in_every_step():
    core = make_engine(num_kv_blocks=64, block_size=4, max_num_batched_tokens=10, max_num_seqs=3)
    for i in range(9):
        core.add_request([i] * (1 + i), greedy(5))
    run(core)
    for step in core.executor.steps:
        slots = [*step.decode_slots, *(chunk.slot for chunk in step.chunks)]
        assert len(slots) == len(set(slots)) <= 3
        assert set(slots) <= set(range(3))
        assert len(step.decode_slots) + sum(len(chunk.token_ids) for chunk in step.chunks) <= 10


def test_p6_the_budget_is_charged_for_what_is_computed():
    core = make_engine(block_size=4, max_num_batched_tokens=6)
    core.add_request(list(range(14)), greedy(1))
    run(core)
    core.add_request(list(range(14)), greedy(1))
    core.add_request([40, 41, 42], greedy(1))
    core.step()
    chunks = core.executor.steps[-1].chunks
    assert [(chunk.start, len(chunk.token_ids)) for chunk in chunks] == [(12, 2), (0, 3)]


def test_requests_are_admitted_in_order_of_arrival():
    core = make_engine(max_num_seqs=1)
    ids = [core.add_request([i + 1], greedy(2)) for i in range(4)]
    ended = []
    while core.has_unfinished_requests():
        ended += [output.request_id for output in core.step() if output.finished]
    assert ended == ids


def test_a_newcomer_waits_while_it_would_soon_be_preempted():
    core = make_engine(num_kv_blocks=4, block_size=4)
    core.add_request([1] * 6, greedy(8), "running")  # two blocks, soon three
    core.step()
    core.add_request([2] * 6, greedy(1), "newcomer")  # two blocks are free, but one of them will be needed
    core.step()
    assert [request.request_id for request in core.scheduler.waiting] == ["newcomer"]
    assert all(output.num_preemptions == 0 for output in run(core).values())


def test_nobody_is_admitted_in_a_step_that_preempts():
    core = make_engine(num_kv_blocks=6, block_size=4, enable_prefix_caching=False)
    for i in range(2):
        core.add_request([i] * 8, greedy(12))
    core.step()
    core.add_request([3, 3], greedy(1))
    while core.has_unfinished_requests():
        core.step()
        if core.last_step.num_preempted:
            assert core.last_step.num_prefill_tokens == 0
            assert [request.slot for request in core.scheduler.waiting] == [-1, -1]


def test_cached_tokens_are_those_of_the_first_admission():
    core = make_engine(num_kv_blocks=6, block_size=4)
    ids = [core.add_request([i] * 8, greedy(12)) for i in range(2)]
    outputs = run(core)
    assert outputs[ids[1]].num_preemptions > 0
    assert outputs[ids[1]].num_cached_tokens == 0


def test_a_scheduler_that_cannot_move_says_so():
    core = make_engine(num_kv_blocks=2, block_size=4)
    core.add_request([1, 2, 3, 4, 5], greedy(1))
    core.block_manager._free_plain.clear()  # a leak, as a bug would make it
    with pytest.raises(
        RuntimeError, match="nothing can be scheduled: 0 running, 1 waiting, 0 of 2 blocks free"
    ):
        core.step()


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"),
    [(12, 20, 8), (19, 5, 1), (12, 8, 8), (12, 7, 7)],
)
def test_e3_sequences_stay_within_max_model_len(num_prompt, max_tokens, expected):
    core = make_engine(max_model_len=20)
    core.add_request(list(range(num_prompt)), greedy(max_tokens), "r")
    output = run(core)["r"]
    assert (len(output.token_ids), output.finish_reason) == (expected, "length")


def test_e3_a_prompt_that_leaves_no_room_is_refused():
    core = make_engine(max_model_len=20)
    with pytest.raises(ValueError, match="prompt has 20 tokens; max_model_len is 20"):
        core.add_request(list(range(20)), greedy(1))
