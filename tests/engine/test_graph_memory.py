"""What captured graphs keep for themselves, and what they share: torch.cuda replaced by work done at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.execution.batch_state import BatchState, SamplingKind
from engine.execution.cuda_graphs import StepGraphs
from engine.execution.decode_plan import DecodePlanner
from engine.execution.graph_sizes import GraphSizes
from engine.scheduling.step import Chunk, SlotSetting, StepInput
from kernels import decode
from tests.engine.cuda_on_cpu import replace_cuda
from tests.engine.test_decode_plan import SHAPE

VOCAB, LARGEST = 50, 8


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> StepGraphs:
    """Graphs whose replays do nothing: their results are those of the capture, row r's logits r + its batch's size."""
    replace_cuda(monkeypatch)

    def run(rows, kind, plan):
        num_rows = len(rows.sampled_slots)
        logits = (torch.arange(num_rows) + num_rows)[:, None].expand(-1, VOCAB).half()
        return torch.zeros(num_rows, dtype=torch.int64), logits

    planner = DecodePlanner(decode.get("torch"), SHAPE.decode_problem)
    return StepGraphs(run, planner, GraphSizes(LARGEST, 64, 1000), LARGEST, 4096, torch.device("cpu"))


def decodes(number: int) -> StepInput:
    return StepInput((), (), tuple(range(number)), 200, 200, ())


def logits_of(graphs: StepGraphs, step: StepInput, kind: SamplingKind) -> torch.Tensor | None:
    replayed = graphs.replay(step, kind)
    assert replayed is not None
    return replayed[1]


def test_logits_that_nobody_reads_are_left_to_the_next_graph(graphs: StepGraphs) -> None:
    assert logits_of(graphs, decodes(2), SamplingKind()) is None
    assert logits_of(graphs, decodes(1), SamplingKind(any_drawn=True, any_top_p=True)) is None


def test_logits_that_somebody_reads_share_one_buffer(graphs: StepGraphs) -> None:
    """A graph of its own logits for each size, kind and plan would soon fill what the KV budget left."""
    kinds = SamplingKind(any_logits=True), SamplingKind(any_drawn=True, any_logits=True)
    addresses = set()
    for kind in kinds:
        for size in (1, 2, 8):
            logits = logits_of(graphs, decodes(size), kind)
            assert logits is not None
            assert logits[:, 0].tolist() == [row + size for row in range(size)]
            addresses.add(logits.untyped_storage().data_ptr())
    assert graphs.num_captures == 6
    chunks = tuple(Chunk(8 + i, 0, (1, 2, 3), True) for i in range(16))
    with_chunks = replace(decodes(LARGEST), chunks=chunks)
    while graphs.replay(with_chunks, kind) is None:
        assert graphs.num_captures == 6
    logits = logits_of(graphs, with_chunks, kind)
    assert logits is not None
    assert logits[:, 0].tolist() == [row + 24 for row in range(24)]
    addresses.add(logits.untyped_storage().data_ptr())
    assert graphs.num_captures == 7
    assert len(addresses) == 1


def test_a_batch_whose_log_probabilities_are_asked_for_is_of_that_kind() -> None:
    state = BatchState(2, 4, VOCAB, torch.device("cpu"))
    settings = SlotSetting(0, 0.0, 0, 1.0, 0, None), SlotSetting(1, 0.0, 0, 1.0, 0, 0)
    state.apply(StepInput(settings, (), (), 0, 0, ()))
    assert not state.sampling_kind((0,)).any_logits
    assert state.sampling_kind((0, 1)).any_logits
