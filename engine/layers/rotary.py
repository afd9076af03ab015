"""The table of rotary cosines and sines, computed in fp32 whatever the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.rope import apply_rope


class RotaryEmbedding(nn.Module):
    """cos_sin [max_position, 2, head_dim / 2] fp32, cosines first, shared by all layers.

    inv_freq: [head_dim / 2] fp32, radians a position. scale: multiplies cosines and sines (yarn's attention factor).
    """

    cos_sin: Tensor

    def __init__(
        self, inv_freq: Tensor, max_position: int, *, scale: float, use_triton: bool, device: torch.device
    ) -> None:
        super().__init__()
        self.use_triton = use_triton
        positions = torch.arange(max_position, dtype=torch.float32, device=device)
        angles = positions[:, None] * inv_freq.to(device)
        cos_sin = torch.empty((max_position, 2, len(inv_freq)), dtype=torch.float32, device=device)
        torch.cos(angles, out=cos_sin[:, 0])
        torch.sin(angles, out=cos_sin[:, 1])
        self.register_buffer("cos_sin", cos_sin.mul_(scale), persistent=False)

    def _apply(self, fn, recurse=True):
        """Module.to(dtype) must not round the table: it follows the device only."""
        moved = fn(self.cos_sin)
        self.cos_sin = self.cos_sin.to(moved.device)
        return self

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> None:
        """Rotate q [tokens, num_q_heads, head_dim] and k [tokens, num_kv_heads, head_dim] in place."""
        apply_rope(q, k, positions, self.cos_sin, use_triton=self.use_triton)
