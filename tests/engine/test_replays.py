"""Graphs where no GPU is: what the runner does around replays that write over one another's results."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

from engine import LLM
from engine.execution.batch_state import SamplingKind
from engine.scheduling.step import StepInput
from tests.engine.checkpoints import QWEN3


class OneBuffer:
    """Replays as StepGraphs does: eager steps whose logits land in one and the same tensor."""

    sizes = SimpleNamespace(most_decodes=1)
    capture_largest = staticmethod(lambda kind: None)
    captured_at_once = staticmethod(contextlib.nullcontext)

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._logits: torch.Tensor | None = None

    def replay(self, step: StepInput, kind: SamplingKind) -> tuple[torch.Tensor, torch.Tensor] | None:
        if step.chunks:
            return None
        token_ids, logits = self._runner.run_eagerly(step, kind)
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        return token_ids, self._logits.copy_(logits)


def test_forced_logits_are_those_of_their_own_step() -> None:
    with LLM(QWEN3, load_format="dummy", dtype="float32", device="cpu", num_kv_blocks=20) as llm:
        expected = llm.forced_logits([1, 2, 3], [4, 5, 6, 7])
        llm.runner.graphs = OneBuffer(llm.runner)
        torch.testing.assert_close(llm.forced_logits([1, 2, 3], [4, 5, 6, 7]), expected)


def test_the_measurement_of_memory_stays_within_the_block_table() -> None:
    """One sequence, whose prompt leaves room for one token: replays for two plans once ran past its last block."""
    sizes = {"max_num_seqs": 1, "max_model_len": 64, "block_size": 16, "num_kv_blocks": 4}
    with LLM(QWEN3, load_format="dummy", dtype="float32", device="cpu", **sizes) as llm:
        runner = llm.runner
        runner.launch(runner._largest_step()).result()
        assert runner.state.num_computed[0] == 63
        runner.graphs = OneBuffer(runner)
        runner._replay_largest()
