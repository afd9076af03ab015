"""The gated feed-forward block (SwiGLU), split over the ranks by intermediate features."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.linear import PackedColumnParallelLinear, RowParallelLinear, split_evenly
from engine.layers.weight_shard import WeightShard
from engine.parallel.group import ParallelGroup
from kernels.activation import silu_mul


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up packed in one product."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        group: ParallelGroup,
        use_triton: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.use_triton = use_triton
        projections = [split_evenly(name, intermediate_size, group) for name in ("gate_proj", "up_proj")]
        self.gate_up_proj = PackedColumnParallelLinear(
            hidden_size, projections, bias=bias, use_triton=use_triton, dtype=dtype, device=device
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias=bias,
            group=group,
            use_triton=use_triton,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden_size] to the same."""
        return self.down_proj(silu_mul(self.gate_up_proj(x), use_triton=self.use_triton))

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield from self.gate_up_proj.weight_shards(name)
        yield from self.down_proj.weight_shards(f"{name}.down_proj")
