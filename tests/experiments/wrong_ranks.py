"""What ranks run in tests of agreement: model runners of which something is wrong, in the last layer alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.execution.model_runner import ModelRunner
from engine.layers.linear import RowParallelLinear
from engine.parallel.group import ParallelGroup


class SwappedHeads(ModelRunner):
    """On rank 1, o_proj takes its first two heads for one another."""

    @torch.no_grad()
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.group.rank == 1:
            weight, size = _last(self, "self_attn.o_proj").weight, self.model_config.head_dim
            weight[:, : 2 * size] = weight[:, : 2 * size].roll(size, dims=1)


class MissingSum(ModelRunner):
    """Every rank goes on with its own part of what down_proj gives."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        projection = _last(self, "mlp.down_proj")
        assert isinstance(projection, RowParallelLinear)
        projection.group = ParallelGroup.single()


class LargerNorm(ModelRunner):
    """On rank 1, the weights of a norm are 1% too large."""

    @torch.no_grad()
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.group.rank == 1:
            _last(self, "input_layernorm").weight.mul_(1.01)


def _last(runner: ModelRunner, name: str) -> nn.Module:
    return runner.model.layers[-1].get_submodule(name)
