"""How a layer's decode steps of few rows are put together: which kernels become one, and whether they overlap."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from kernels.activation import silu_mul
from kernels.fused_linear import (
    MAX_PLAIN_ROWS,
    MAX_ROWS,
    add_linear,
    dot_linear,
    gated_linear,
    norm_linear,
)
from kernels.norm import rms_norm

PROLOGUE_ROWS = 2
"""Beyond so many rows, to normalise them in every program costs as much as the product (arithmetic, not measured)."""


@dataclass(frozen=True)
class LayerFusion:
    """Decode steps of up to max_rows rows keep one residual stream, to which o_proj and down_proj add in place.

    prologue_rows: up to so many rows, norms and activation are computed inside the products that need them.
    max_dot_outputs: beyond prologue_rows, products with more outputs than this are cuBLAS's.
    pdl: programmatic dependent launch of all kernels that can be launched so (kernels/dependent_launch.py).
    The default fuses nothing. Only for whole layers on one rank: an all-reduce would have to come before the sum.
    """

    max_rows: int = 0
    prologue_rows: int = 0
    max_dot_outputs: int = 1 << 30
    pdl: bool = False

    def __post_init__(self) -> None:
        for field, limit in (("max_rows", MAX_ROWS), ("prologue_rows", MAX_PLAIN_ROWS)):
            if not 0 <= getattr(self, field) <= limit:
                raise ValueError(f"{field} must be in [0, {limit}], got {getattr(self, field)}")
        if self.max_dot_outputs < 0:
            raise ValueError(f"max_dot_outputs must be at least 0, got {self.max_dot_outputs}")

    def applies(self, num_decodes: int, num_tokens: int) -> bool:
        """Whether a step runs fused: decode rows alone, and few of them."""
        return num_decodes == num_tokens and 0 < num_tokens <= self.max_rows

    def norm_linear(
        self, stream: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """rms_norm(stream) by weight: [rows, out_features]."""
        if stream.shape[0] <= self.prologue_rows:
            return norm_linear(stream, norm_weight, eps, weight, bias, pdl=self.pdl)
        normed = rms_norm(stream, norm_weight, eps, use_triton=True, pdl=self.pdl)
        if weight.shape[0] > self.max_dot_outputs:
            return functional.linear(normed, weight, bias)
        return dot_linear(normed, weight, bias, pdl=self.pdl)

    def add_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, stream: Tensor) -> None:
        """stream += x by weight, in place."""
        add_linear(x, weight, stream, bias, pdl=self.pdl)

    def gated_linear(self, gate_up: Tensor, weight: Tensor, bias: Tensor | None, stream: Tensor) -> None:
        """stream += (silu(gate) * up) by weight, in place."""
        if gate_up.shape[0] <= self.prologue_rows:
            gated_linear(gate_up, weight, stream, bias, pdl=self.pdl)
        else:
            self.add_linear(silu_mul(gate_up, use_triton=True, pdl=self.pdl), weight, bias, stream)


NO_FUSION = LayerFusion()


def measured_fusion(pdl: bool) -> LayerFusion:
    """What "auto" takes, where the device has pdl or not: nothing, until it was measured (results/NOTES.md)."""
    return NO_FUSION
