"""Plans of the decode kernel for ragged batches: few, each made once, and never for shorter contexts than there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.execution import cuda_graphs
from engine.execution.batch_state import SamplingKind
from engine.execution.cuda_graphs import MOST_PLANS, StepGraphs
from engine.execution.decode_plan import LEAST_BUCKET, MOST_RAGGED, ContextBucket, DecodePlanner
from engine.execution.graph_sizes import GraphSizes
from engine.execution.input_batch import AttentionShape
from engine.scheduling.step import Chunk, StepInput
from kernels import decode
from tests.engine.checkpoints import QWEN3

SHAPE = AttentionShape(32, 8, 128, 16, torch.bfloat16, torch.device("cpu"))
LIMIT = 40_960


@given(contexts=st.lists(st.integers(1, LIMIT), min_size=1, max_size=64), limit=st.integers(LIMIT, 2 * LIMIT))
def test_a_bucket_holds_its_contexts_and_keeps_how_ragged_they_are(contexts, limit):
    longest, mean = max(contexts), sum(contexts) // len(contexts)
    bucket = ContextBucket.of(longest, mean, limit)
    assert longest <= bucket.max_context_len <= max(2 * longest - 1, LEAST_BUCKET)
    ragged, planned = longest / mean, bucket.max_context_len / bucket.mean_context_len
    assert min(ragged, MOST_RAGGED) / 2 < planned * 1.01
    assert planned <= ragged * 1.01


def test_there_are_few_buckets():
    buckets = {
        ContextBucket.of(longest, mean, LIMIT)
        for longest in range(1, LIMIT + 1, 97)
        for mean in {longest, longest // 2, longest // 3, longest // 5, longest // 9, longest // 20, 1}
    }
    assert len(buckets) <= 5 * 9
    assert max(bucket.max_context_len for bucket in buckets) == LIMIT
    assert len({bucket.max_context_len / bucket.mean_context_len for bucket in buckets}) == 5


@given(limit=st.integers(1, 2 * LIMIT), data=st.data())
def test_every_bucket_is_known_beforehand(limit, data):
    longest = data.draw(st.integers(1, limit))
    mean = data.draw(st.integers(1, longest))
    every = ContextBucket.every(limit)
    assert ContextBucket.of(longest, mean, limit) in every
    assert len(every) == len(set(every)) <= 5 * max(1, limit.bit_length() - LEAST_BUCKET.bit_length() + 2)
    planner = DecodePlanner(decode.get("split_kv"), SHAPE.decode_problem)
    keys = [plan.key for plan in planner.every_plan(4, limit)]
    assert planner.plan(4, ContextBucket.of(longest, mean, limit)).key in keys
    assert len(keys) == len(set(keys))


def test_a_plan_is_made_once_and_buckets_that_lead_to_the_same_calls_have_one_key():
    planner = DecodePlanner(decode.get("single_pass"), SHAPE.decode_problem)
    short, long = ContextBucket(512, 512), ContextBucket(4096, 256)
    assert planner.plan(8, short) is planner.plan(8, short)
    assert planner.plan(8, short).problem == SHAPE.decode_problem(8, 512)
    assert planner.plan(8, long).problem == SHAPE.decode_problem(8, 4096, 256)
    assert planner.plan(8, long).problem.mean_context_len == 256
    assert planner.plan(8, short).key == planner.plan(8, long).key  # it plans the same for every context
    one, other = decode.get("split_kv"), decode.get("fixed_split")
    splits = [
        DecodePlanner(kernel, SHAPE.decode_problem).plan(1, ContextBucket(n, n))
        for kernel in (one, other)
        for n in (512, 8192)
    ]
    assert len({plan.key for plan in splits}) == 4


def _keys(plans):
    """Keys of one batch size whose buckets are planned so, one after another."""
    kernel = type(decode.get("torch"))()
    kernel.plan = lambda problem: plans.pop(0)
    planner = DecodePlanner(kernel, SHAPE.decode_problem)
    return [planner.plan(1, ContextBucket(4096, 4096 >> i)).key for i in range(len(plans))]


def test_equal_options_have_one_key_in_any_order():
    one, other, third = _keys([{"tile": 16, "variant": "a"}, {"variant": "a", "tile": 16}, {"tile": 32}])
    assert one == other
    assert one != third


@pytest.mark.parametrize("make", [lambda: torch.zeros(5000), lambda: [1, 2, 3]], ids=["tensor", "list"])
def test_options_that_cannot_be_compared_share_no_key(make):
    """The text of a large tensor leaves most of it out: two different ones looked alike."""
    first, second = make(), make()
    second[len(second) // 2] = 7
    one, other = _keys([{"starts": first}, {"starts": second}])
    assert one != other
    hash(one)


class PlansOnly(StepGraphs):
    """Captures nothing: there is no GPU."""

    def _capture(self, size, kind, plan):
        self.num_captures += 1
        return plan


def decodes(number, longest, mean=None):
    return StepInput((), (), tuple(range(number)), longest, mean or longest, ())


def test_graphs_are_captured_once_a_plan_and_the_least_recently_used_is_dropped(monkeypatch):
    monkeypatch.setattr(cuda_graphs.torch.cuda, "graph_pool_handle", lambda: None)
    planner = DecodePlanner(decode.get("torch"), SHAPE.decode_problem)
    graphs = PlansOnly(lambda *_: None, planner, GraphSizes(8, 0, 1000), 8, 1 << 20, torch.device("cpu"))
    kind, other = SamplingKind(), SamplingKind(any_drawn=True)
    *most, last = [512 << n for n in range(MOST_PLANS + 1)]
    for longest in [*most, *most]:
        plan = planner.plan(1, ContextBucket(longest, longest))
        assert graphs._find_or_capture(decodes(1, longest), kind) is plan
    assert graphs.num_captures == MOST_PLANS
    graphs._find_or_capture(decodes(1, last), other)
    graphs._find_or_capture(decodes(2, last), kind)
    assert graphs.num_captures == MOST_PLANS + 2
    graphs._find_or_capture(decodes(1, most[0]), kind)
    graphs._find_or_capture(decodes(1, last), kind)  # most[1] has to go
    assert graphs.num_captures == MOST_PLANS + 3
    graphs._find_or_capture(decodes(1, most[0]), kind)
    assert graphs.num_captures == MOST_PLANS + 3
    graphs._find_or_capture(decodes(1, most[1]), kind)
    assert graphs.num_captures == MOST_PLANS + 4


@pytest.mark.parametrize(("real", "chunks", "planned"), [(5, 0, 8), (1, 1, 4), (5, 1, 16), (17, 1, 64)])
def test_attention_is_planned_for_the_rows_that_are_not_padding(monkeypatch, real, chunks, planned):
    """One row of 131,072 tokens in a graph of four is a ragged batch: planned as four such rows it took 2.4 times as
    long by the cost model, since it was split less."""
    monkeypatch.setattr(cuda_graphs.torch.cuda, "graph_pool_handle", lambda: None)
    limit = 1 << 17
    planner = DecodePlanner(decode.get("torch"), SHAPE.decode_problem)
    graphs = PlansOnly(lambda *_: None, planner, GraphSizes(64, 32, 1000), 64, limit, torch.device("cpu"))
    graphs.capture_cost = 0.0
    step = replace(decodes(real, limit), chunks=(Chunk(99, 0, (1, 2), True),) * chunks)
    find = graphs._find_with_chunks if chunks else graphs._find_or_capture
    problem = find(step, SamplingKind()).problem
    assert problem.batch_size == planned
    assert problem.max_context_len == limit
    assert real * limit <= planned * (problem.mean_context_len or limit) < 2 * real * limit


def test_the_decode_kernel_is_planned_for_the_mean_context(monkeypatch):
    options = {"device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True, "num_kv_blocks": 100}
    with LLM(QWEN3, **options) as llm:
        problems = []
        kernel = llm.runner.kernels.decode
        monkeypatch.setattr(kernel, "plan", lambda problem: problems.append(problem) or {})
        prompts = [[1] * 400, *([2, 3, i] for i in range(7))]
        llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        llm.generate(prompts[0], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    ragged, alone = problems
    assert (ragged.batch_size, ragged.max_context_len, ragged.mean_context_len) == (8, 512, 128)
    assert (alone.batch_size, alone.max_context_len, alone.mean_context_len) == (1, 512, None)
