"""CUDA graphs where no GPU is: torch.cuda's part of a capture and a replay, done at once on the CPU."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.execution import cuda_graphs, sampler
from engine.execution.cuda_graphs import StepGraphs
from engine.execution.step_rows import StepRows


class RunAgain(StepGraphs):
    """A replay runs the captured step again, for what its rows hold then, and writes over its results."""

    def _capture(self, size: Any, kind: Any, plan: Any) -> Any:
        captured = super()._capture(size, kind, plan)

        def replay() -> None:
            token_ids, logits = self._run(StepRows.view(captured.rows, size), kind, plan)
            captured.token_ids.copy_(token_ids)
            if captured.logits is not None:
                captured.logits.copy_(logits)

        return replace(captured, graph=SimpleNamespace(replay=replay))


def replace_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures and replays run on the CPU, and what they left for the host is copied, as it would be from a device."""
    nothing = contextlib.nullcontext()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in {
        "graph_pool_handle": lambda: None,
        "current_stream": lambda device: stream,
        "stream": lambda side: nothing,
        "synchronize": lambda device: None,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": lambda graph, **options: nothing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(cuda_graphs, "_capture_stream", lambda device: stream)
    monkeypatch.setattr(sampler, "_to_host", torch.clone)
