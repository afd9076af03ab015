"""Decode steps of few rows on one residual stream: which steps, and their products."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.activation import silu_mul
from kernels.fused_linear import MAX_ROWS, Norm, add_linear, dot_linear
from kernels.norm import rms_norm

MIN_ROWS = 2
"""One row is a matrix-vector product, where tensor cores that pad it to 16 rows lose everywhere."""


@dataclass(frozen=True)
class LayerFusion:
    """Decode steps of min_rows to max_rows rows keep one residual stream, to which o_proj and down_proj add in place.

    Their products, and those of qkv_proj and gate_up_proj, are kernels/fused_linear.py's. The default fuses nothing.
    Only for whole layers on one rank: an all-reduce would have to come before the sum.

    inside: the norms before qkv_proj and gate_up_proj, and the activation, are computed inside these products, not by
    kernels of their own.
    """

    min_rows: int = MIN_ROWS
    max_rows: int = 0
    inside: bool = False

    def __post_init__(self) -> None:
        if self.min_rows < 1:
            raise ValueError(f"min_rows must be at least 1, got {self.min_rows}")
        if not 0 <= self.max_rows <= MAX_ROWS:
            raise ValueError(f"max_rows must be in [0, {MAX_ROWS}], got {self.max_rows}")

    def applies(self, num_decodes: int, num_tokens: int) -> bool:
        """Whether a step runs fused: decode rows alone, and few of them."""
        return num_decodes == num_tokens and self.min_rows <= num_tokens <= self.max_rows

    def norm_linear(self, stream: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None) -> Tensor:
        """rms_norm(stream) by weight: [rows, out_features]."""
        if self.inside:
            return dot_linear(stream, weight, bias, norm=norm)
        return dot_linear(rms_norm(stream, norm.weight, norm.eps, use_triton=True), weight, bias)

    def gated_linear(self, stream: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None) -> Tensor:
        """silu(gate) * up of rms_norm(stream) by weight, whose rows are gate's, then up's: [rows, intermediate]."""
        if self.inside:
            return dot_linear(stream, weight, bias, norm=norm, gated=True)
        return silu_mul(self.norm_linear(stream, norm, weight, bias), use_triton=True)

    def add_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, stream: Tensor) -> None:
        """stream += x by weight, in place."""
        add_linear(x, weight, stream, bias)


NO_FUSION = LayerFusion()


def measured_fusion(hidden_size: int) -> LayerFusion:
    """What "auto" takes in half precision: what beat separate kernels on an H200 (results/NOTES.md).

    Measured at 1, 2, 4, 8 and 16 rows of Qwen3-0.6B, 8B and 32B in bf16, hidden sizes 1024, 4096 and 5120: no gain in
    the first, from 2 rows on in the second, from 4 in the third (3 rows run as 4 in a CUDA graph). Below 4096 nothing
    is fused, since nothing between 1024 and 4096 was measured; beyond 5120 the third's rows are assumed.
    """
    if hidden_size < 4096:
        return NO_FUSION
    return LayerFusion(min_rows=2 if hidden_size == 4096 else 3, max_rows=MAX_ROWS)
