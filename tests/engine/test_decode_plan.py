"""Which plans of the decode kernel may share a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.execution.decode_plan import ContextBucket, DecodePlanner
from engine.execution.input_batch import AttentionShape
from kernels import decode

CPU = torch.device("cpu")
SHAPE = AttentionShape(8, 2, 64, 16, torch.float32, CPU)


def keys(plans: list[dict[str, Any]]) -> list[Any]:
    """Keys of one batch size whose buckets are planned so, one after another."""
    kernel = type(decode.get("torch"))()
    kernel.plan = lambda problem: plans.pop(0)  # type: ignore[method-assign]
    planner = DecodePlanner(kernel, SHAPE.decode_problem)
    return [planner.plan(1, ContextBucket(256 << i, 256 << i)).key for i in range(len(plans))]


def test_equal_options_share_a_graph_in_any_order() -> None:
    one, other, third = keys([{"tile": 16, "variant": "a"}, {"variant": "a", "tile": 16}, {"tile": 32}])
    assert one == other
    assert one != third


@pytest.mark.parametrize("make", [lambda: torch.zeros(5000), lambda: [1, 2]], ids=["tensor", "list"])
def test_options_that_cannot_be_compared_share_no_graph(make: Any) -> None:
    """The text of a large tensor leaves most of it out: two different ones looked alike."""
    first, second = make(), make()
    second[2 if len(second) > 2 else 0] = 7
    one, other = keys([{"starts": first}, {"starts": second}])
    assert one != other
    hash(one)
