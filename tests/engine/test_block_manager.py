"""Paged KV bookkeeping and the prefix cache (cases P1-P10 of the design's case list), without tensors."""

from __future__ import annotations

import gc
import time

import pytest
import xxhash

from engine.sampling_params import SamplingParams
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.request import Request
from tests.engine.fake_engine import alone, make_engine, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


def make_request(num_tokens: int, first: int = 0, request_id: str = "r") -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(range(first, first + num_tokens)),
        params=GREEDY,
        arrival=0,
        max_total_tokens=num_tokens + 2,
        stop_token_ids=frozenset(),
        seed=0,
    )


def compute(blocks: BlockManager, request: Request, num_tokens: int | None = None) -> None:
    """Pretend the forward pass wrote the KV of num_tokens more tokens (default: all that are left)."""
    request.num_computed_tokens += request.num_uncomputed_tokens if num_tokens is None else num_tokens
    blocks.publish(request, request.num_computed_tokens)
    blocks.check_invariants()


def admit(blocks: BlockManager, request: Request) -> int:
    """Admit a request and return how many of its tokens are cached."""
    prefix = blocks.find_prefix(request)
    assert blocks.can_admit(request, prefix)
    blocks.admit(request, prefix)
    blocks.check_invariants()
    return request.num_computed_tokens


def admit_compute_free(blocks: BlockManager, request: Request) -> int:
    cached = admit(blocks, request)
    compute(blocks, request)
    blocks.free(request)
    assert request.request_id not in blocks._holders
    blocks.check_invariants()
    return cached


def test_p1_reused_blocks_answer_no_more():
    blocks = BlockManager(4, 4)
    assert admit_compute_free(blocks, make_request(8)) == 0
    assert admit_compute_free(blocks, make_request(16, first=20)) == 0  # takes the whole pool
    assert admit(blocks, make_request(8)) == 0


@pytest.mark.parametrize("num_tokens", [24, 16, 8])
def test_p2_a_wholly_cached_prompt_gives_up_its_last_block(num_tokens):
    blocks = BlockManager(16, 8)
    admit_compute_free(blocks, make_request(num_tokens))
    assert admit(blocks, make_request(num_tokens)) == num_tokens - 8


def test_p2_hits_on_a_running_owner_leave_it_unchanged():
    prompt = list(range(24))
    params = SamplingParams(temperature=0.0, max_tokens=12)
    core = make_engine(block_size=8)
    core.add_request(prompt, params, "owner")
    core.step()
    core.add_request(prompt, params, "second")
    core.add_request(prompt, params, "third")
    outputs = run(core)
    expected = alone(prompt, params, block_size=8).token_ids
    assert {output.token_ids for output in outputs.values()} == {expected}
    assert [outputs[name].num_cached_tokens for name in ("owner", "second", "third")] == [0, 16, 16]


def test_p3_equal_prompts_in_one_step_do_not_hit_unwritten_blocks():
    prompt = list(range(12))
    core = make_engine(block_size=4, num_kv_blocks=24)
    lengths = {"a": 3, "b": 1, "c": 5}
    for name, max_tokens in lengths.items():
        core.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), name)
    outputs = run(core)
    expected = alone(prompt, SamplingParams(temperature=0.0, max_tokens=5), block_size=4).token_ids
    for name, max_tokens in lengths.items():
        assert outputs[name].token_ids == expected[:max_tokens]
        assert outputs[name].num_cached_tokens == 0
    core.add_request(prompt, GREEDY, "fourth")
    assert run(core)["fourth"].num_cached_tokens == 8
    core.add_request([40] * 94, SamplingParams(temperature=0.0, max_tokens=3), "evicts everything")
    run(core)
    core.add_request(prompt, GREEDY, "fifth")
    fifth = run(core)["fifth"]
    assert fifth.num_cached_tokens == 0
    assert fifth.token_ids == expected[:2]
    assert core.block_manager.num_free_blocks == core.block_manager.num_blocks


def test_p3_freeing_a_duplicate_keeps_the_published_block():
    blocks = BlockManager(8, 4)
    first, second = make_request(8, request_id="first"), make_request(8, request_id="second")
    admit(blocks, first), admit(blocks, second)
    compute(blocks, first), compute(blocks, second)
    published = first.block_table[0]
    blocks.free(second)
    third = make_request(8, request_id="third")
    assert admit(blocks, third) == 4
    assert third.block_table[0] == published


def test_nothing_is_published_below_a_block_that_was_reused():
    blocks = BlockManager(5, 4)
    first, second = make_request(8, request_id="first"), make_request(8, request_id="second")
    admit(blocks, first), admit(blocks, second)
    compute(blocks, first), compute(blocks, second)  # second's copies stay unpublished
    blocks.free(first)
    admit_compute_free(blocks, make_request(12, first=30, request_id="other"))  # reuses first's blocks
    second.token_ids += [90, 91, 92, 93]
    assert blocks.grow(second, 12)
    compute(blocks, second)
    assert len(second.cached_chain) == 2
    blocks.free(second)
    assert not blocks.find_prefix(make_request(13))


def test_p6_a_resumed_request_runs_only_what_is_not_cached():
    blocks = BlockManager(8, 4)
    request = make_request(14)
    admit(blocks, request)
    compute(blocks, request)
    blocks.free(request)
    request.num_computed_tokens = 0
    assert admit(blocks, request) == 12
    assert request.num_uncomputed_tokens == 2


def test_p7_only_written_blocks_are_published():
    prompt = list(range(20))
    core = make_engine(block_size=4, max_num_batched_tokens=8)
    core.add_request(prompt, GREEDY, "aborted")
    core.step()
    core.abort("aborted")
    core.block_manager.check_invariants()
    core.add_request(prompt, GREEDY, "again")
    again = run(core)["again"]
    assert again.num_cached_tokens == 8
    assert again.token_ids == alone(prompt, GREEDY, block_size=4).token_ids


def test_p7_abort_between_scheduling_and_the_forward_pass_publishes_nothing():
    core = make_engine(block_size=4)
    core.add_request(list(range(20)), GREEDY, "aborted")
    core.scheduler.schedule()
    core.abort("aborted")
    core.block_manager.check_invariants()
    core.add_request(list(range(20)), GREEDY, "again")
    assert run(core)["again"].num_cached_tokens == 0


def test_p8_a_chain_loses_its_tail_first():
    blocks = BlockManager(6, 4)
    admit_compute_free(blocks, make_request(16))
    admit_compute_free(blocks, make_request(12, first=30))  # two plain blocks, and the oldest published one
    assert admit(blocks, make_request(16)) == 12


def test_p8_plain_blocks_are_reused_before_published_ones():
    blocks = BlockManager(4, 4)
    admit_compute_free(blocks, make_request(8))
    for i in range(10):  # partial blocks come and go without touching what is cached
        admit_compute_free(blocks, make_request(3, first=10 + i))
    assert admit(blocks, make_request(8)) == 4


@pytest.mark.parametrize(("block_size", "length", "needs_block"), [(4, 3, False), (4, 4, True), (1, 1, True)])
def test_p10_a_block_is_taken_only_when_the_table_is_full(block_size, length, needs_block):
    blocks = BlockManager(-(-length // block_size), block_size)
    request = make_request(length)
    admit(blocks, request)
    assert blocks.num_free_blocks == 0
    assert blocks.grow(request, length + 1) is not needs_block
    assert len(request.block_table) == blocks.num_blocks


def test_admission_counts_free_hits_as_taken():
    blocks = BlockManager(4, 4)
    admit_compute_free(blocks, make_request(12))  # three published blocks, one plain
    longer = make_request(18, request_id="longer")
    prefix = blocks.find_prefix(longer)
    assert len(prefix) == 3
    assert not blocks.can_admit(
        longer, prefix
    )  # needs two new blocks, and its hits are three of the four free


def test_a_request_never_evicts_its_own_hits():
    blocks = BlockManager(5, 4)
    admit_compute_free(blocks, make_request(16))
    request = make_request(18)
    assert admit(blocks, request) == 16
    assert len(set(request.block_table)) == 5


@pytest.mark.parametrize(
    "hash_function", [lambda tokens, parent: 7, lambda tokens, parent: (sum(tokens) + parent) % 4]
)
def test_colliding_hashes_never_share_foreign_blocks(hash_function):
    blocks = BlockManager(32, 4, hash_function=hash_function)
    for first in range(0, 40, 8):
        assert admit_compute_free(blocks, make_request(9, first=first)) == 0
    for first in range(0, 40, 8):
        assert admit_compute_free(blocks, make_request(9, first=first)) == 8


@pytest.mark.parametrize("published", [0, 20])
def test_of_two_colliding_blocks_only_the_equal_one_is_found(published):
    blocks = BlockManager(4, 4, hash_function=lambda tokens, parent: 0)
    admit_compute_free(blocks, make_request(5, first=published))
    assert len(blocks.find_prefix(make_request(5, first=20 - published))) == 0
    assert len(blocks.find_prefix(make_request(5, first=published))) == 1


def test_a_colliding_block_is_still_found_when_the_other_was_reused():
    blocks = BlockManager(3, 4, hash_function=lambda tokens, parent: 0)
    for first in (0, 20):
        admit_compute_free(blocks, make_request(4, first=first))
    admit(blocks, make_request(8, first=40))  # takes the block without an entry, then the older of the two
    assert len(blocks.find_prefix(make_request(5, first=0))) == 0
    assert len(blocks.find_prefix(make_request(5, first=20))) == 1


def test_equal_tokens_under_another_parent_are_another_block():
    blocks = BlockManager(16, 4, hash_function=lambda tokens, parent: 7)
    one = Request("one", (1, 1, 1, 1, 9, 9, 9, 9, 0), GREEDY, 0, 11, frozenset(), 0)
    other = Request("other", (2, 2, 2, 2, 9, 9, 9, 9, 0), GREEDY, 0, 11, frozenset(), 0)
    admit_compute_free(blocks, one)
    assert admit(blocks, other) == 0


def test_reset_forgets_prefixes_but_not_running_requests():
    blocks = BlockManager(8, 4)
    admit_compute_free(blocks, make_request(8))
    running = make_request(8, first=20, request_id="running")
    admit(blocks, running)
    compute(blocks, running)
    blocks.reset_prefix_cache()
    blocks.check_invariants()
    assert len(running.block_table) == 2
    assert admit(blocks, make_request(9)) == 0
    assert not blocks.find_prefix(make_request(9, first=20))


@pytest.mark.parametrize("forget", [lambda b: b.reset_prefix_cache(), lambda b: b.withdraw(make_request(9))])
def test_hits_that_were_forgotten_are_not_published_again(forget):
    blocks = BlockManager(12, 4)
    admit_compute_free(blocks, make_request(8))
    sharer = make_request(13)
    assert admit(blocks, sharer) == 8
    forget(blocks)
    compute(blocks, sharer)
    assert not blocks.find_prefix(make_request(13))


def test_the_cache_can_be_off():
    """Then no block is ever hashed."""
    hashed = []
    blocks = BlockManager(8, 4, False, hash_function=lambda tokens, parent: hashed.append(tokens) or 0)
    admit_compute_free(blocks, make_request(8))
    assert admit_compute_free(blocks, make_request(8)) == 0
    blocks.withdraw(make_request(8))
    assert not hashed


@pytest.mark.parametrize("bad", [{"num_blocks": 0, "block_size": 4}, {"num_blocks": 4, "block_size": 0}])
def test_bad_sizes_are_named(bad):
    with pytest.raises(ValueError, match="must be >= 1, got 0"):
        BlockManager(**bad)


def test_invariant_check_sees_damage():
    blocks = BlockManager(4, 4)
    request = make_request(4)
    admit(blocks, request)
    compute(blocks, request)
    blocks.check_invariants()
    request.block_table[0] = 3  # not the block that was published and counted
    with pytest.raises(AssertionError, match="free"):
        blocks.check_invariants()


def test_p4_a_duplicates_table_names_only_its_own_blocks_while_others_take_what_is_free():
    """Nothing is merged: a copy of a published block stays its request's own until the request ends."""
    prompt = list(range(12))
    params = SamplingParams(temperature=0.0, max_tokens=14)
    core = make_engine(block_size=4, num_kv_blocks=24)
    ids = [core.add_request(prompt, params) for _ in range(3)]
    core.step()
    tables = [set(request.block_table) for request in core.scheduler.running]
    assert len(set.union(*tables)) == 9
    core.abort(ids[1])
    late = core.add_request([40] * 20, params)  # takes the freed copies
    outputs = run(core)  # checks after each step that no block is both free and in a live table
    expected = alone(prompt, params, block_size=4).token_ids
    assert [outputs[ids[i]].token_ids for i in (0, 2)] == [expected] * 2
    assert outputs[late].token_ids == alone([40] * 20, params, block_size=4).token_ids


def test_p6_a_preempted_sequence_is_charged_for_what_it_lost():
    """14 tokens with three cached blocks left: exactly positions 12 and 13 run again."""
    core = make_engine(block_size=4, num_kv_blocks=20, max_num_batched_tokens=14)
    core.add_request(list(range(10)), SamplingParams(temperature=0.0, max_tokens=8), "r")
    for _ in range(4):
        core.step()
    assert [request.num_tokens for request in core.scheduler.running] == [14]
    core.scheduler.restart_running()
    core.step()
    [chunk] = core.executor.steps[-1].chunks
    assert (chunk.start, len(chunk.token_ids)) == (12, 2)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    assert run(core)["r"].token_ids == alone(list(range(10)), params, block_size=4).token_ids


@pytest.mark.parametrize("held", ["running", "free", "shared"])
def test_withdrawn_blocks_answer_no_more_and_stay_with_who_holds_them(held):
    blocks = BlockManager(12, 4)
    request = make_request(12)
    admit(blocks, request)
    compute(blocks, request)
    other = make_request(14, request_id="other")
    if held == "shared":
        assert admit(blocks, other) == 12
    if held != "running":
        blocks.free(request)
    blocks.withdraw(request)
    blocks.check_invariants()
    assert not blocks.find_prefix(make_request(9))
    assert len(other.block_table) == (4 if held == "shared" else 0)
    blocks.free(request)
    blocks.free(other)
    blocks.check_invariants()
    assert blocks.num_free_blocks == 12
    assert admit_compute_free(blocks, make_request(12)) == 0
    assert admit(blocks, make_request(12)) == 8


class Counting(BlockManager):
    """Counts look-ups, hashes and hashed bytes."""

    def __init__(self, *arguments, **options):
        self.num_lookups = self.num_hashed = self.num_hashed_bytes = 0
        super().__init__(*arguments, hash_function=self._count_hash, **options)

    def _count_hash(self, tokens, parent):
        self.num_hashed += 1
        self.num_hashed_bytes += len(tokens)
        return xxhash.xxh3_64_intdigest(tokens, parent)

    def _lookup(self, *arguments):
        self.num_lookups += 1
        return super()._lookup(*arguments)


@pytest.mark.parametrize("cached", [0, 100])
def test_a_prompt_that_waits_for_room_costs_what_changes_not_its_length(cached):
    core = make_engine(num_kv_blocks=125, block_size=4, max_model_len=600)
    blocks = core.block_manager = core.scheduler.block_manager = Counting(125, 4)
    prompt = [i % 37 for i in range(480)]  # 120 blocks
    if cached:
        core.add_request(prompt[: 4 * cached + 1], GREEDY, "before")
        run(core)
    running = SamplingParams(temperature=0.0, max_tokens=170, ignore_eos=True)
    core.add_request([40] * 30, running, "running")
    core.step()
    core.add_request(prompt, GREEDY, "waiting")
    core.step()
    assert blocks.num_hashed >= 119
    blocks.num_lookups = blocks.num_hashed = num_steps = 0
    while core.scheduler.waiting:
        core.step()
        num_steps += 1
    assert num_steps > 100
    num_published = num_steps // 4 + 2
    assert blocks.num_hashed <= num_published
    assert blocks.num_lookups <= num_steps + num_published + 200  # the last: when it is admitted at last
    outputs = run(core)
    assert outputs["waiting"].token_ids == alone(prompt, GREEDY, block_size=4, max_model_len=600).token_ids


def test_a_kept_search_follows_what_is_published_freed_taken_and_forgotten():
    blocks = BlockManager(12, 4)
    waiting = make_request(25, request_id="waiting")
    assert len(blocks.find_prefix(waiting)) == 0
    first = make_request(12, request_id="first")
    admit(blocks, first)
    compute(blocks, first, 8)
    prefix = blocks.find_prefix(waiting)
    assert (len(prefix), len(prefix.free)) == (2, 0)
    compute(blocks, first)
    prefix = blocks.find_prefix(waiting)
    assert (len(prefix), len(prefix.free)) == (3, 0)
    blocks.free(first)
    blocks.check_invariants()
    assert len(prefix.free) == 3
    other = make_request(4, first=50, request_id="other")
    blocks._holders["other"] = other
    assert blocks.grow(other, 44)  # eleven of twelve blocks: two of the three
    other.num_computed_tokens = 44
    blocks.check_invariants()
    prefix = blocks.find_prefix(waiting)
    assert (len(prefix), len(prefix.free)) == (1, 1)
    blocks.withdraw(make_request(9))
    blocks.check_invariants()
    assert len(blocks.find_prefix(waiting)) == 0
    blocks.free(other)
    admit_compute_free(blocks, make_request(12))
    assert len(blocks.find_prefix(waiting)) == 3
    blocks.reset_prefix_cache()
    assert len(blocks.find_prefix(waiting)) == 0


def test_a_prefix_found_before_another_is_not_taken_for_true():
    blocks = BlockManager(12, 4)
    admit_compute_free(blocks, make_request(12))
    one, other = make_request(13, request_id="one"), make_request(13, request_id="other")
    prefix = blocks.find_prefix(one)
    blocks.find_prefix(other)
    with pytest.raises(RuntimeError, match="request one: its prefix was found before another's"):
        blocks.admit(one, prefix)


def test_what_is_admitted_twice_or_beyond_the_pool_is_an_error():
    blocks = BlockManager(3, 4)
    request = make_request(8)
    admit(blocks, request)
    with pytest.raises(RuntimeError, match="request r already holds blocks"):
        blocks.admit(request, blocks.find_prefix(request))
    large = make_request(8, first=20, request_id="large")
    with pytest.raises(RuntimeError, match="admitted request large beyond the free blocks"):
        blocks.admit(large, blocks.find_prefix(large))


def schedule_warm_batch(num_shared: int) -> tuple[float, Counting]:
    """8 prompts, all but 256 tokens of each in common: CPU seconds and look-ups of one step of the 8 x 256 others."""
    core = make_engine(num_kv_blocks=9000, max_model_len=17_000)
    blocks = core.block_manager = core.scheduler.block_manager = Counting(9000, 16)
    shared = [i * i % 50 for i in range(num_shared)]
    core.scheduler.add(_long_request(core, shared, "first"))
    schedule = core.scheduler.schedule()
    while core.scheduler.has_requests:
        for scheduled in schedule.prefills:
            core.scheduler.publish(scheduled)
            if scheduled.samples:
                core.scheduler.finish(scheduled.request)
        schedule = core.scheduler.schedule() if core.scheduler.has_requests else schedule
    prompts = [[*shared, *[i] * 256] for i in range(8)]
    requests = [_long_request(core, prompt, f"warm {i}") for i, prompt in enumerate(prompts)]
    blocks.num_lookups = blocks.num_hashed = blocks.num_hashed_bytes = 0
    gc.collect()
    gc.disable()  # its passes over all live objects are not this test's subject
    start = time.process_time()
    for request in requests:
        core.scheduler.add(request)
    schedule = core.scheduler.schedule()
    elapsed_s = time.process_time() - start
    gc.enable()
    assert [(chunk.start, chunk.end) for chunk in schedule.prefills] == [(num_shared, num_shared + 256)] * 8
    assert all(chunk.samples for chunk in schedule.prefills)
    return elapsed_s, blocks


def test_a_warm_batch_of_long_prompts_costs_each_block_once():
    """Each block of 16 tokens is hashed and looked up once, and four times the tokens take four times as long."""
    seconds: dict[int, list[float]] = {4032: [], 16_128: []}
    for _ in range(5):
        for num_shared, found in seconds.items():
            elapsed_s, blocks = schedule_warm_batch(num_shared)
            found.append(elapsed_s)
            num_blocks = 8 * (num_shared + 256) // 16
            assert blocks.num_lookups <= blocks.num_hashed <= num_blocks
            # 16 tokens and the parent, not the whole prefix.
            assert blocks.num_hashed_bytes <= num_blocks * 200
    short, long = map(min, seconds.values())
    assert long < 10 * short


def _long_request(core, prompt, request_id):
    arrival = core._num_arrivals = core._num_arrivals + 1
    return Request(request_id, tuple(prompt), GREEDY, arrival, len(prompt) + 1, frozenset(), 0)
