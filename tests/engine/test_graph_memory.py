"""What captured graphs keep for themselves, and what they share: torch.cuda replaced by work done at once."""

from __future__ import annotations

import pytest
import torch

from engine.execution.batch_state import BatchState, SamplingKind
from engine.execution.cuda_graphs import DecodeGraphs
from engine.execution.decode_plan import ContextBucket, DecodePlanner
from engine.scheduling.step import SlotSetting, StepInput
from kernels import decode
from tests.engine.cuda_on_cpu import replace_cuda
from tests.engine.test_decode_plan import SHAPE

VOCAB, LARGEST = 50, 8
SHORT = ContextBucket(256, 256)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> DecodeGraphs:
    """Graphs whose replays do nothing: their results are those of the capture, row r's logits r + its batch's size."""
    replace_cuda(monkeypatch)

    def run(slots, kind, plan):
        logits = (torch.arange(len(slots)) + len(slots))[:, None].expand(-1, VOCAB).half()
        return torch.zeros(len(slots), dtype=torch.int64), logits

    planner = DecodePlanner(decode.get("torch"), SHAPE.decode_problem)
    return DecodeGraphs(run, planner, LARGEST, LARGEST, torch.device("cpu"))


def test_logits_that_nobody_reads_are_left_to_the_next_graph(graphs: DecodeGraphs) -> None:
    assert graphs.replay((0, 1), SamplingKind(), SHORT)[1] is None
    assert graphs.replay((0,), SamplingKind(any_drawn=True, any_top_p=True), SHORT)[1] is None


def test_logits_that_somebody_reads_share_one_buffer(graphs: DecodeGraphs) -> None:
    """A graph of its own logits for each size, kind and plan would soon fill what the KV budget left."""
    kinds = SamplingKind(any_logits=True), SamplingKind(any_drawn=True, any_logits=True)
    addresses = set()
    for kind in kinds:
        for size in (1, 2, 8):
            logits = graphs.replay(tuple(range(size)), kind, SHORT)[1]
            assert logits is not None
            assert logits[:, 0].tolist() == [row + size for row in range(size)]
            addresses.add(logits.untyped_storage().data_ptr())
    assert graphs.num_captures == 6
    assert len(addresses) == 1


def test_a_batch_whose_log_probabilities_are_asked_for_is_of_that_kind() -> None:
    state = BatchState(2, 4, VOCAB, torch.device("cpu"))
    settings = SlotSetting(0, 0.0, 0, 1.0, 0, None), SlotSetting(1, 0.0, 0, 1.0, 0, 0)
    state.apply(StepInput(settings, (), (), 0, 0, ()))
    assert not state.sampling_kind((0,)).any_logits
    assert state.sampling_kind((0, 1)).any_logits
