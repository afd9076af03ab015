"""Which sizes steps with prompts are captured for, and when a capture is worth what it takes."""

from __future__ import annotations

import random

import pytest
import torch

from engine import LLM
from engine.config import MAX_GRAPH_CHUNK_TOKENS
from engine.execution import cuda_graphs
from engine.execution.batch_state import SamplingKind
from engine.execution.cuda_graphs import CAPTURE_COST, CAPTURE_PAUSE, StepGraphs
from engine.execution.decode_plan import DecodePlanner
from engine.execution.graph_sizes import CHUNK_COUNTS, COARSE_CHUNKS, GraphSizes, launch_rows
from engine.execution.model_runner import ModelRunner
from engine.execution.step_rows import StepSize, lay_out
from engine.scheduling.step import Chunk, StepInput
from kernels import decode
from tests.engine.checkpoints import QWEN3
from tests.engine.test_decode_plan import SHAPE

KIND = SamplingKind()


def step_of(decodes: int, *chunk_lens: int) -> StepInput:
    chunks = tuple(Chunk(1000 + i, 0, (0,) * n, True) for i, n in enumerate(chunk_lens))
    return StepInput((), (), tuple(range(decodes)), 9, 9, chunks)


def lens_of(tokens: int, chunks: int) -> list[int]:
    return [tokens // chunks + (i < tokens % chunks) for i in range(chunks)]


@pytest.mark.parametrize("decodes", [0, 1, 4, 5, 40])
@pytest.mark.parametrize("chunks", [1, 2, 4, 5, 16])
@pytest.mark.parametrize("tokens", [16, 17, 299, 300])
def test_every_size_holds_its_step_and_the_least_wastes_little(
    decodes: int, chunks: int, tokens: int
) -> None:
    step = step_of(decodes, *lens_of(tokens, chunks))
    fine, *coarse = GraphSizes(40, 300, 1000).holding(step)
    assert fine.decodes <= max(4 * decodes, 4) * (decodes > 0)
    assert fine.tokens <= max(2 * tokens, 16)
    assert fine.chunks <= 4 * chunks
    for size in (fine, *coarse):
        assert decodes <= size.decodes <= 40
        assert tokens <= size.tokens <= 300
        assert size.samples >= len(step.sampled_slots)
        assert -(-tokens // chunks) <= size.max_query_len <= size.tokens
    for size in coarse:
        assert size.chunks == COARSE_CHUNKS
        assert size.max_query_len == size.tokens
        assert size.rows >= fine.rows
        lay_out(step, size, 99)


def test_short_chunks_start_fewer_programs() -> None:
    sizes = GraphSizes(40, 1024, 10_000)
    short, alone, long = (
        sizes.holding(step)[0] for step in (step_of(0, *[60] * 16), step_of(0, 960), step_of(0, 900, 60))
    )
    assert (short.tokens, short.chunks, short.max_query_len) == (1024, 16, 256)
    assert alone.max_query_len == long.max_query_len == 1024


def test_coarse_sizes_are_few() -> None:
    rng, sizes = random.Random(0), GraphSizes(256, 8192, 12_000)
    found = {
        sizes.holding(step_of(rng.randint(0, 256), *lens_of(rng.randint(16, 8192), rng.randint(1, 16))))[-1]
        for _ in range(500)
    }
    assert 4 < len(found) <= 8


def test_a_coarse_size_takes_no_longer_than_launches() -> None:
    """8B: 256 decode rows beside 1,024 tokens keep the GPU busy while the host launches the kernels of fewer."""
    sizes = GraphSizes(512, 2048, launch_rows(192_900_000))
    assert len(sizes.holding(step_of(10, 900))) == 2
    assert len(sizes.holding(step_of(20, 900))) == 1
    assert len(sizes.holding(step_of(20, 100))) == 2


def test_a_step_that_is_too_large_has_no_graph() -> None:
    sizes = GraphSizes(40, 300, 1000)
    assert sizes.holding(step_of(40, 300))
    assert sizes.holding(step_of(41, 3)) == sizes.holding(step_of(41)) == []
    assert not sizes.holding(step_of(1, 301))
    assert sizes.holding(step_of(1, *[1] * CHUNK_COUNTS[-1]))
    assert not sizes.holding(step_of(1, *[1] * (CHUNK_COUNTS[-1] + 1)))
    without = GraphSizes(40, 0, 1000)
    assert without.holding(step_of(4))
    assert not without.holding(step_of(4, 1))
    assert without.largest_with_chunks is None


@pytest.mark.parametrize("most", [1, 15, 16, 17, 300, 2047, 5000, 8192])
def test_sizes_of_chunks_end_at_the_most_and_waste_little(most: int) -> None:
    sizes = GraphSizes(8, most, 10_000)
    for tokens in range(1, min(most, MAX_GRAPH_CHUNK_TOKENS) + 1):
        least = sizes.holding(step_of(0, tokens))[0]
        assert tokens <= least.tokens <= min(most, max(2 * tokens, 16))
    assert not sizes.holding(step_of(0, min(most, MAX_GRAPH_CHUNK_TOKENS) + 1))
    assert sizes.largest_with_chunks == StepSize(8, most, 64, 72, most)


def test_small_models_have_graphs_of_longer_chunks() -> None:
    """Qwen3's 0.6B, 8B and 32B: a layer of the last keeps a GPU busy longer than its launches take."""
    assert [launch_rows(n) for n in (15_730_000, 192_900_000, 487_600_000)] == [12_714, 1036, 410]


# --- when they are captured ---------------------------------------------------------------------------------


class SizesOnly(StepGraphs):
    """Captures nothing: there is no GPU."""

    def _capture(self, size, kind, plan):
        self.num_captures += 1
        return size

    def find(self, step: StepInput) -> StepSize | None:
        return self._find_with_chunks(step, KIND)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> SizesOnly:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    planner = DecodePlanner(decode.get("torch"), SHAPE.decode_problem)
    return SizesOnly(lambda *_: None, planner, GraphSizes(256, 2048, 4000), 256, 4096, torch.device("cpu"))


def test_a_step_that_recurs_is_captured_when_launches_have_taken_what_a_capture_takes(graphs) -> None:
    step = step_of(3, 20)
    found = [graphs.find(step) for _ in range(5)]
    assert found == [None, None, *[graphs.sizes.holding(step)[0]] * 3]
    assert len(found) - found.count(None) == 5 - (CAPTURE_COST - 1)
    assert graphs.num_captures == 1


def test_steps_of_many_sizes_soon_share_a_coarse_graph(graphs) -> None:
    """Each occurs once: captures of their own would cost more than they can save."""
    lens = [20, 40, 70, 100, 130, 200]
    found = [graphs.find(step_of(3, n)) for n in lens]
    assert found[:2] == [None, None]
    assert set(found[2:]) == {graphs.sizes.holding(step_of(3, 20))[1]}
    assert graphs.num_captures == 1


def test_a_size_that_recurs_gets_its_own_graph_when_it_has_wasted_a_capture(graphs, monkeypatch) -> None:
    for n in (20, 40, 70):
        graphs.find(step_of(3, n))
    monkeypatch.setattr(cuda_graphs, "CAPTURE_PAUSE", 0)
    step = step_of(3, 130)
    fine, coarse = graphs.sizes.holding(step)
    uses = 0
    while graphs.find(step) == coarse:
        uses += 1
    wasted = (coarse.rows - fine.rows) / 4000
    assert uses == pytest.approx(CAPTURE_COST / wasted, abs=1)
    assert graphs.find(step) == fine
    assert graphs.num_captures == 2


def test_the_least_recently_used_graph_is_dropped(graphs, monkeypatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_CHUNK_GRAPHS", 2)
    monkeypatch.setattr(cuda_graphs, "CAPTURE_PAUSE", 0)
    graphs.sizes = GraphSizes(256, 2048, launch_rows=1)  # no coarse size is worth it
    first, second, third = step_of(0, 16), step_of(0, 500), step_of(0, 2000)

    def find(step: StepInput) -> int:
        """Steps until it has a graph of its own."""
        for steps in range(1, 10):
            if graphs.find(step) == graphs.sizes.holding(step)[0]:
                return steps
        raise AssertionError("never captured")

    graphs.capture_cost = 2.0
    assert [find(step) for step in (first, second, first, third)] == [2, 2, 1, 2]  # second has to go
    assert [find(first), find(third)] == [1, 1]
    assert graphs.num_captures == 3
    assert find(second) == 2  # dropped, it has to be worth it again
    assert graphs.num_captures == 4


def test_captures_do_not_come_in_a_row_and_the_graph_that_saves_most_comes_first(graphs) -> None:
    """96 Poisson arrivals of 0.6B captured 15 graphs one after another: the slowest first token took a second."""
    other = [step_of(200, 1500), step_of(200, 1600), step_of(200, 1700)]
    for step in [step_of(3, 20)] * 3 + [other[0]] * 2 + other * 4:
        graphs.find(step)
    assert graphs.num_captures == 1
    found = [graphs.find(other[i % 3]) for i in range(CAPTURE_PAUSE)]
    assert graphs.num_captures == 2
    assert found[-1] == graphs.sizes.holding(other[0])[1]  # the coarse one, which they all missed
    first = next(i for i, graph in enumerate(found) if graph is not None)
    assert found[:first] == [None] * first
    assert 14 + first == CAPTURE_PAUSE


def test_what_warms_up_or_checks_has_every_graph_at_once(graphs) -> None:
    graphs.capture_cost = 0.0
    for step in (step_of(3, 20), step_of(3, 40), step_of(0, 2000)):
        assert graphs.find(step) == graphs.sizes.holding(step)[0]
    assert graphs.num_captures == 3


def test_the_largest_step_with_chunks_is_captured_for_what_it_takes(graphs, monkeypatch) -> None:
    captured = []
    monkeypatch.setattr(graphs, "_capture", lambda size, kind, plan: captured.append((size, plan.problem)))
    graphs.capture_largest(KIND)
    ((size, problem),) = captured
    assert size == graphs.sizes.largest_with_chunks
    assert (problem.batch_size, problem.max_context_len) == (256, 4096)


def test_chunks_that_no_graph_can_hold_are_refused_by_name(monkeypatch) -> None:
    options = {"load_format": "dummy", "device": "cpu", "skip_tokenizer_init": True, "num_kv_blocks": 8}
    monkeypatch.setattr(ModelRunner, "uses_cuda_graphs", True)
    with pytest.raises(ValueError, match=r"graph_chunk_tokens is 64, .* prefill_attention 'torch'"):
        LLM(QWEN3, graph_chunk_tokens=64, prefill_attention="torch", **options)
