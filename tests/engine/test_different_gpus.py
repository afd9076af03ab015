"""Ranks capture the same graphs in the same steps, or their collectives would meet the wrong partners."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.execution.model_runner import ModelRunner


def rank_of(*, size: int = 2, graphs: bool = True, alike: bool) -> Any:
    group = SimpleNamespace(rank=1, size=size, agrees=lambda text, device: alike)
    return SimpleNamespace(group=group, uses_cuda_graphs=graphs, device=torch.device("cpu"))


def test_ranks_on_different_gpus_are_refused_where_they_would_capture() -> None:
    with pytest.raises(
        ValueError, match=r"GPUs of one kind, and rank 1 has an NVIDIA H200 of 132 multi.*enforce_eager"
    ):
        ModelRunner._check_ranks(rank_of(alike=False))


@pytest.mark.parametrize(
    "options", [{"alike": True}, {"alike": False, "graphs": False}, {"alike": False, "size": 1}]
)
def test_other_ranks_are_not(options: dict[str, Any]) -> None:
    ModelRunner._check_ranks(rank_of(**options))
