"""Decode steps of few rows on one residual stream: which steps, and their products."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.activation import silu_mul
from kernels.fused_linear import MAX_ROWS, add_linear, dot_linear
from kernels.norm import rms_norm


@dataclass(frozen=True)
class LayerFusion:
    """Decode steps of up to max_rows rows keep one residual stream, to which o_proj and down_proj add in place.

    Their products, and those of qkv_proj and gate_up_proj, are kernels/fused_linear.py's. The default fuses nothing.
    Only for whole layers on one rank: an all-reduce would have to come before the sum.
    """

    max_rows: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.max_rows <= MAX_ROWS:
            raise ValueError(f"max_rows must be in [0, {MAX_ROWS}], got {self.max_rows}")

    def applies(self, num_decodes: int, num_tokens: int) -> bool:
        """Whether a step runs fused: decode rows alone, and few of them."""
        return num_decodes == num_tokens and 0 < num_tokens <= self.max_rows

    def norm_linear(
        self, stream: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """rms_norm(stream) by weight: [rows, out_features]."""
        return dot_linear(rms_norm(stream, norm_weight, eps, use_triton=True), weight, bias)

    def add_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, stream: Tensor) -> None:
        """stream += x by weight, in place."""
        add_linear(x, weight, stream, bias)

    def gated_linear(self, gate_up: Tensor, weight: Tensor, bias: Tensor | None, stream: Tensor) -> None:
        """stream += (silu(gate) * up) by weight, in place."""
        self.add_linear(silu_mul(gate_up, use_triton=True), weight, bias, stream)


NO_FUSION = LayerFusion()


def measured_fusion(hidden_size: int) -> LayerFusion:
    """What "auto" takes in half precision: what beat separate kernels on an H200 (results/NOTES.md).

    Measured at 1, 2, 4, 8 and 16 rows of Qwen3-0.6B, 8B and 32B in bf16, hidden sizes 1024, 4096 and 5120: no gain in
    the first, from 1 row on in the others (a step of one row: 32B 19.25 to 17.21 ms, 8B 4.67 to 4.64; 32B at 16 rows:
    none to speak of). Below 4096 nothing is fused, since nothing between 1024 and 4096 was measured.
    """
    return NO_FUSION if hidden_size < 4096 else LayerFusion(max_rows=MAX_ROWS)
