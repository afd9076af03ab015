"""Linear layers split over a ParallelGroup: several packed column-parallel projections in one, and row-parallel.

As in Megatron-LM (Shoeybi et al., 2019): a column-parallel layer followed by a row-parallel one costs one all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.layers.weight_shard import WeightShard
from engine.parallel.group import ParallelGroup
from kernels.linear import linear


@dataclass(frozen=True)
class Projection:
    """One of the projections in a packed layer: this rank computes output rows start .. start + rows of full_rows."""

    name: str
    full_rows: int
    start: int
    rows: int


def split_evenly(name: str, full_rows: int, group: ParallelGroup) -> Projection:
    """A projection whose rows are divided over the ranks."""
    rows = full_rows // group.size
    return Projection(name, full_rows, group.rank * rows, rows)


def split_heads(name: str, num_heads: int, head_dim: int, group: ParallelGroup) -> Projection:
    """A projection to heads, divided over the ranks; with fewer heads than ranks, neighbours share one."""
    if num_heads >= group.size:
        return split_evenly(name, num_heads * head_dim, group)
    head = group.rank // (group.size // num_heads)
    return Projection(name, num_heads * head_dim, head * head_dim, head_dim)


class PackedColumnParallelLinear(nn.Module):
    """Projections of one input computed by one product; each is split over the ranks by output rows.

    weight [sum of this rank's rows, in_features], bias likewise or None, in the order of `projections`.
    """

    def __init__(
        self,
        in_features: int,
        projections: Sequence[Projection],
        *,
        bias: bool,
        use_triton: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.use_triton = use_triton
        self.projections = tuple(projections)
        self.sizes = [projection.rows for projection in self.projections]
        self.weight = new_parameter((sum(self.sizes), in_features), dtype, device)
        self.bias = new_parameter((sum(self.sizes),), dtype, device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, in_features] to [tokens, sum of this rank's rows]."""
        return linear(x, self.weight, self.bias, use_triton=self.use_triton)

    def weight_shards(self, parent: str) -> Iterator[WeightShard]:
        """The checkpoint keeps each projection as a module of its own, below `parent`."""
        for projection, weight in zip(self.projections, self.weight.split(self.sizes), strict=True):
            full_shape = (projection.full_rows, self.in_features)
            yield WeightShard(f"{parent}.{projection.name}.weight", full_shape, weight, 0, projection.start)
        if self.bias is None:
            return
        for projection, bias in zip(self.projections, self.bias.split(self.sizes), strict=True):
            yield WeightShard(
                f"{parent}.{projection.name}.bias", (projection.full_rows,), bias, 0, projection.start
            )


class RowParallelLinear(nn.Module):
    """A product over an input whose features are split over the ranks, summed over them.

    weight [out_features, in_features / size]; bias [out_features] or None, added by rank 0 alone.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        group: ParallelGroup,
        use_triton: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.group = group
        self.use_triton = use_triton
        self.full_shape = (out_features, in_features)
        self.weight = new_parameter((out_features, in_features // group.size), dtype, device)
        self.bias = new_parameter((out_features,), dtype, device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, in_features / size] to [tokens, out_features], the same on every rank."""
        bias = self.bias if self.group.rank == 0 else None
        return self.group.all_reduce(linear(x, self.weight, bias, use_triton=self.use_triton))

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        start = self.group.rank * self.weight.shape[1]
        yield WeightShard(f"{name}.weight", self.full_shape, self.weight, 1, start)
        if self.bias is not None:
            yield WeightShard(f"{name}.bias", self.full_shape[:1], self.bias)


def new_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter for inference: the loader fills every element."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
