"""x W^T + b for a few decode rows on the tensor cores.

The rows, padded to 16, are M of the tensor cores' m16n8k16: more rows take the same time. Each program keeps several
weight tiles in flight (cp.async).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from kernels.triton_support import cdiv, dot_dtype, on_device, tl, triton

MAX_ROWS = 16


@dataclass(frozen=True)
class DotTile:
    """A program: block_n outputs, block_k inputs a step, num_stages - 1 steps in flight."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            if value < 1 or (field != "num_stages" and value & (value - 1)):
                raise ValueError(f"{field} is {value}, expected a power of two from 1 on")
        if self.block_n < 8 or self.block_k < 16:
            raise ValueError(f"block_n must be at least 8 and block_k at least 16, got {self}")


def dot_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: DotTile) -> Tensor:
    """x [rows, in_features] by weight [out_features, in_features]: [rows, out_features] in x's dtype.

    Sums are fp32, rounded once, after the bias [out_features]. x, of up to MAX_ROWS rows, and weight have one dtype and
    contiguous rows. Raises ValueError, naming the argument, for what does not fit.
    """
    _check(x, weight, bias)
    rows, (out_features, in_features) = x.shape[0], weight.shape
    out = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
    with on_device(x):
        _dot_kernel[(cdiv(out_features, tile.block_n),)](
            x,
            weight,
            bias,
            out,
            rows,
            out_features,
            in_features,
            x.stride(0),
            weight.stride(0),
            ROWS=MAX_ROWS,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            STAGES=tile.num_stages,
            DOT_DTYPE=dot_dtype(x.dtype),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    rows, (out_features, in_features) = x.shape[0], weight.shape
    if not 0 < rows <= MAX_ROWS:
        raise ValueError(f"x has {rows} rows, the limit is {MAX_ROWS}")
    if x.shape[1] != in_features:
        raise ValueError(f"x must have {in_features} features, as weight has, got shape {tuple(x.shape)}")
    if bias is not None and bias.shape != (out_features,):
        raise ValueError(f"bias must be [{out_features}], got shape {tuple(bias.shape)}")
    if weight.dtype != x.dtype:
        raise ValueError(f"weight must be {x.dtype}, as x is, got {weight.dtype}")
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.stride(1) != 1:
            raise ValueError(f"{name} must have contiguous rows, got strides {tensor.stride()}")


@triton.jit(do_not_specialize=["rows"])
def _dot_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    out_features,
    in_features,
    stride_x_row,
    stride_weight_row,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """BLOCK_N outputs of up to ROWS rows, rounded once, after the bias."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    in_n = n < out_features
    in_rows = (row < rows)[:, None]
    weight_rows = weight_ptr + n.to(tl.int64)[:, None] * stride_weight_row
    x_rows = x_ptr + row.to(tl.int64)[:, None] * stride_x_row
    sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
        here = start + k
        in_k = (here < in_features)[None, :]
        weight = tl.load(
            weight_rows + here[None, :], mask=in_n[:, None] & in_k, other=0.0, eviction_policy="evict_first"
        )
        x = tl.load(x_rows + here[None, :], mask=in_rows & in_k, other=0.0)
        sums = tl.dot(x.to(DOT_DTYPE), tl.trans(weight.to(DOT_DTYPE)), sums, input_precision="ieee")
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    offsets = row.to(tl.int64)[:, None] * out_features + n[None, :]
    tl.store(out_ptr + offsets, sums.to(out_ptr.dtype.element_ty), mask=in_rows & in_n[None, :])
