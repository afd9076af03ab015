"""y = x W^T + b. For the few rows of a small decode batch, Triton kernels that read the weights at memory speed."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels import product_choice
from kernels.dot_linear import DotTile, dot_linear
from kernels.triton_support import cdiv, next_power_of_2, on_device, tl, triton
from kernels.tuned_tables import device_name

MAX_ROWS = 4
"""Rows of x that the Triton kernel takes at most: it multiplies on the plain cores, a row at a time."""


@dataclass(frozen=True)
class RowTile:
    """What one program computes: block_n outputs, block_k inputs a step."""

    block_n: int
    block_k: int
    num_warps: int


def choose_tile(out_features: int, in_features: int, rows: int) -> RowTile:
    """Some 500 to 1,000 small programs, each with all the loads of a step in flight: the best of those measured on an
    H200 (results/adhoc-h200/few_rows_linear.json). At 5,120 outputs four a program are 1.3 times slower than eight."""
    if rows > 1 or 2048 < out_features <= 4096:
        block_n, block_k = 4, 512
    else:
        block_n, block_k = (2, 1024) if out_features <= 2048 else (8, 512)
    return RowTile(block_n, min(next_power_of_2(in_features), block_k), 4)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    use_triton: bool,
) -> Tensor:
    """x [rows, in_features] by weight [out_features, in_features]: [rows, out_features] in x's dtype.

    Sums are fp32. use_triton: for few half-precision rows the kernel that product_choice.py names; otherwise, and
    always with use_triton=False, torch's product.
    """
    rows = x.shape[0]
    if use_triton and 0 < rows <= product_choice.MAX_ROWS and x.dtype != torch.float32:
        chosen = product_choice.choose_product(*weight.shape, rows, device_name(x.device))
        if chosen.kind == "few_rows":
            return few_rows_linear(x, weight, bias, RowTile(*chosen.tile))
        if chosen.kind == "dot":
            return dot_linear(x, weight, bias, tile=DotTile(*chosen.tile))
    return functional.linear(x, weight, bias)


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: RowTile | None = None) -> Tensor:
    """The Triton kernel: rows up to MAX_ROWS, any float dtype. tile: None for choose_tile's.

    Raises ValueError, naming the argument, for shapes that do not fit.
    """
    rows, in_features = x.shape
    out_features = weight.shape[0]
    if weight.shape != (out_features, in_features) or weight.stride(1) != 1:
        raise ValueError(
            f"weight must be [out_features, {in_features}] with contiguous rows, got shape {tuple(weight.shape)}, "
            f"strides {weight.stride()}"
        )
    if not 0 < rows <= MAX_ROWS:
        raise ValueError(f"x has {rows} rows, the limit is {MAX_ROWS}")
    if bias is not None and bias.shape != (out_features,):
        raise ValueError(f"bias must be [{out_features}], got shape {tuple(bias.shape)}")
    x = x if x.stride(1) == 1 else x.contiguous()
    padded_rows = next_power_of_2(rows)
    tile = tile or choose_tile(out_features, in_features, padded_rows)
    out = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
    with on_device(x):
        _few_rows_kernel[(cdiv(out_features, tile.block_n),)](
            x,
            weight,
            bias,
            out,
            rows,
            x.stride(0),
            weight.stride(0),
            OUT_FEATURES=out_features,
            IN_FEATURES=in_features,
            ROWS=padded_rows,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            num_warps=tile.num_warps,
        )
    return out


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    stride_x_row,
    stride_weight_row,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N outputs of every row: products are kept apart until the end, so that a step needs no reduction."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    weight_rows = weight_ptr + n.to(tl.int64)[:, None] * stride_weight_row
    x_rows = x_ptr + row.to(tl.int64)[:, None] * stride_x_row
    products = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_K):
        inside = start + k < IN_FEATURES
        weight = tl.load(
            weight_rows + (start + k)[None, :],
            mask=(n < OUT_FEATURES)[:, None] & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        x = tl.load(x_rows + (start + k)[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        products += weight.to(tl.float32)[None, :, :] * x.to(tl.float32)[:, None, :]
    sums = tl.sum(products, 2)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + n, mask=n < OUT_FEATURES, other=0.0).to(tl.float32)[None, :]
    offsets = row.to(tl.int64)[:, None] * OUT_FEATURES + n[None, :]
    mask = (row < rows)[:, None] & (n < OUT_FEATURES)[None, :]
    tl.store(out_ptr + offsets, sums.to(out_ptr.dtype.element_ty), mask=mask)
