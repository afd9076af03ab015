"""What the measurement of memory counts, with a made-up allocator in a GPU's place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine import LLM
from tests.engine.checkpoints import QWEN3

TOTAL, CONTEXT, WEIGHTS, STEP, GRAPHS = 100_000_000, 1_000_000, 5_000_000, 9_000_000, 2_000_000
OPTIONS = {"num_kv_blocks": 8, "max_model_len": 64, "max_num_seqs": 2}


class Allocator:
    """Bytes held as torch.cuda tells of them: cached is what was freed and not given back."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.cached = self.graphs = 0
        self.kv_at_peak = runner.kv_cache.nbytes

    def empty_cache(self) -> None:
        self.cached = 0

    def run_step(self, step: Any) -> Any:
        self.cached += STEP
        return self

    def result(self) -> list[Any]:
        return []

    def capture(self) -> None:
        self.empty_cache()  # as torch.cuda.graph does
        self.graphs = GRAPHS

    def reserved(self, device: Any) -> int:
        return WEIGHTS + self._runner.kv_cache.nbytes + self.cached + self.graphs

    def most_allocated(self, device: Any) -> int:
        return WEIGHTS + self.kv_at_peak + STEP

    def info(self, device: Any) -> tuple[int, int]:
        self.graphs = 0  # the runner has dropped them
        return TOTAL - CONTEXT - self.reserved(device), TOTAL


def test_the_budget_is_what_weights_the_largest_step_and_graphs_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LLM(QWEN3, load_format="dummy", dtype="float32", device="cpu", **OPTIONS) as llm:
        runner = llm.runner
        memory = Allocator(runner)
        runner.launch = memory.run_step
        runner._replay_largest = memory.capture
        assert memory.kv_at_peak == 8 * runner.block_bytes  # two sequences of 64 tokens
        for name, fake in {
            "empty_cache": memory.empty_cache,
            "reset_peak_memory_stats": lambda device: None,
            "synchronize": lambda device: None,
            "memory_reserved": memory.reserved,
            "max_memory_allocated": memory.most_allocated,
            "mem_get_info": memory.info,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        expected = int(0.9 * TOTAL) - CONTEXT - WEIGHTS - STEP - GRAPHS
        assert runner._free_bytes_at_peak() == expected


def test_the_largest_step_takes_log_probabilities_too() -> None:
    """Their fp32 copies of the logits are the peak of a small model with a large vocabulary."""
    with LLM(QWEN3, load_format="dummy", dtype="float32", device="cpu", **OPTIONS) as llm:
        tokens = llm.runner.launch(llm.runner._largest_step()).result()
        assert len(tokens) == 2
        assert all(token.logprobs for token in tokens)
