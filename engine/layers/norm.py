"""RMSNorm as a module, alone or fused with the addition of the residual."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.linear import new_parameter
from engine.layers.weight_shard import WeightShard
from kernels.norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Normalise the last dimension and scale by weight [hidden]."""

    def __init__(
        self, hidden: int, eps: float, *, use_triton: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.eps = eps
        self.use_triton = use_triton
        self.weight = new_parameter((hidden,), dtype, device)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., hidden]: its norm; with a residual, (norm of x + residual, x + residual)."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps, use_triton=self.use_triton)
        return add_rms_norm(x, residual, self.weight, self.eps, use_triton=self.use_triton)

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield WeightShard(f"{name}.weight", tuple(self.weight.shape), self.weight)
