"""Products of a few decode rows on the tensor cores, alone or with what stands before or after them in a layer.

`dot_linear`   x W^T, or of rms_norm(x), or silu(gate) * up of a packed W
`add_linear`   h += x W^T   in place

In place on the residual stream h there is no race: an element is read and written by one program alone, and the x of
such a product is never h. Both round where the separate kernels (and Transformers) do: after the product, and after
the sum.

The rows, padded to 16, are M of the tensor cores' m16n8k16: more rows take the same time. Each program keeps several
weight tiles in flight (cp.async).

A norm needs no pass before the product, for 1 / rms is one factor a row: rms_norm(x) W^T = (x (g W)^T) / rms(x). Every
program sees all of x anyway. It multiplies g, the norm's weight, into its tiles of W, which rounds to the dtype once
where the separate kernels round x twice; products of normal weights neither overflow in fp16 nor lose bits, as x g
might, x not being normalised yet. The sums of squares are the diagonal of x x^T, which tensor cores add up in fp32
beside the product for a few instructions.

Gated, a program's tile alternates between rows of gate and of up, so that both sums of a column lie in one thread;
they round to the dtype, and so does silu, as in kernels/activation.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.triton_support import dot_dtype, on_device, tl, triton

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


class Norm(NamedTuple):
    """What rms_norm needs: weight [in_features], and eps, added to the mean square."""

    weight: Tensor
    eps: float


def choose_dot_tile(out_features: int, element_size: int = 2, *, norm: bool = False) -> DotTile:
    """A warp for every 8 outputs, and enough programs for all SMs. out_features: rows of the weight, gated or not.

    norm: each warp also reads its norm weights and a part of x again from shared memory, which then is as busy as
    device memory; with 16 outputs a warp the tile of x is read half as often (results/NOTES.md).
    """
    if element_size > 2:  # exact fp32 products, without tensor cores, keep their operands in registers
        return DotTile(16, 32, 2, 2)
    if norm:
        return DotTile(32, 128, 2, 7)
    return DotTile(16, 256, 2, 6) if out_features <= 4096 else DotTile(32, 256, 4, 4)


def add_linear(
    x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None, *, tile: DotTile | None = None
) -> None:
    """residual += x by weight, in place, for up to MAX_ROWS rows.

    x [rows, in_features], weight [out_features, in_features], residual [rows, out_features], bias [out_features] or
    None, all of one dtype with contiguous rows. Raises ValueError, naming the argument, for what does not fit.
    """
    _launch(x, weight, bias, residual, None, tile, add=True)


def dot_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    tile: DotTile | None = None,
) -> Tensor:
    """x by weight, [rows, out_features], for up to MAX_ROWS rows; x, weight, bias as for add_linear.

    norm: multiply rms_norm(x) instead (kernels/norm.py), its weight contiguous and of x's dtype.
    gated: weight holds gate's rows, then up's; the result is silu(gate) * up, [rows, out_features / 2].
    tile: block_n counts rows of weight. Raises ValueError, naming the argument, for what does not fit.
    """
    if gated and weight.shape[0] % 2:
        raise ValueError(f"weight must have an even number of rows to be gated, got {weight.shape[0]}")
    width = weight.shape[0] // (2 if gated else 1)
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out, norm, tile, gated=gated)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    norm: Norm | None,
    tile: DotTile | None,
    *,
    add: bool = False,
    gated: bool = False,
) -> None:
    out_features, in_features = weight.shape
    _check(x, weight, bias, out if add else None, norm)
    tile = tile or choose_dot_tile(out_features, x.element_size(), norm=norm is not None)
    with on_device(x):
        _dot_kernel[(triton.cdiv(out_features, tile.block_n),)](
            x,
            weight,
            bias,
            norm.weight if norm is not None else None,
            out,
            x.shape[0],
            out.shape[1],
            in_features,
            norm.eps if norm is not None else 0.0,
            x.stride(0),
            weight.stride(0),
            out.stride(0),
            ROWS=MAX_ROWS,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            STAGES=tile.num_stages,
            ADD=add,
            GATED=gated,
            DOT_DTYPE=dot_dtype(x.dtype),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Norm | None
) -> None:
    rows, (out_features, in_features) = x.shape[0], weight.shape
    if not 0 < rows <= MAX_ROWS:
        raise ValueError(f"x has {rows} rows, the limit is {MAX_ROWS}")
    if x.shape[1] != in_features:
        raise ValueError(f"x must have {in_features} features, as weight has, got shape {tuple(x.shape)}")
    if bias is not None and bias.shape != (out_features,):
        raise ValueError(f"bias must be [{out_features}], got shape {tuple(bias.shape)}")
    if residual is not None and residual.shape != (rows, out_features):
        raise ValueError(f"residual must be [{rows}, {out_features}], got shape {tuple(residual.shape)}")
    tensors = {"x": x, "weight": weight}
    if residual is not None:
        tensors["residual"] = residual
    if norm is not None:
        if norm.weight.shape != (in_features,):
            raise ValueError(f"norm.weight must be [{in_features}], got shape {tuple(norm.weight.shape)}")
        if norm.eps < 0:
            raise ValueError(f"norm.eps must be at least 0, got {norm.eps}")
        tensors["norm.weight"] = norm.weight
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} must have contiguous rows, got strides {tensor.stride()}")
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} must be {x.dtype}, as x is, got {tensor.dtype}")


@triton.jit(do_not_specialize=["rows", "eps"])
def _dot_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    out_ptr,
    rows,
    out_features,
    in_features,
    eps,
    stride_x_row,
    stride_weight_row,
    stride_out_row,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """BLOCK_N products of up to ROWS rows: as many columns of out_features, or gate and up of half as many."""
    dtype = out_ptr.dtype.element_ty
    BLOCK_OUT: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    n = tl.arange(0, BLOCK_N)
    if GATED:
        weight_row = tl.program_id(0) * BLOCK_OUT + n // 2 + n % 2 * out_features
        in_n = tl.program_id(0) * BLOCK_OUT + n // 2 < out_features
    else:
        weight_row = tl.program_id(0) * BLOCK_OUT + n
        in_n = weight_row < out_features
    row = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    in_rows = (row < rows)[:, None]
    weight_rows = weight_ptr + weight_row.to(tl.int64)[:, None] * stride_weight_row
    x_rows = x_ptr + row.to(tl.int64)[:, None] * stride_x_row
    column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    offsets = row.to(tl.int64)[:, None] * stride_out_row + column[None, :]
    mask = in_rows & (column < out_features)[None, :]
    if ADD:
        residual = tl.load(out_ptr + offsets, mask=mask, other=0.0)
    sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    squares = tl.zeros([ROWS, ROWS], tl.float32)
    for start in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
        here = start + k
        in_k = (here < in_features)[None, :]
        weight = tl.load(
            weight_rows + here[None, :], mask=in_n[:, None] & in_k, other=0.0, eviction_policy="evict_first"
        ).to(DOT_DTYPE)
        x = tl.load(x_rows + here[None, :], mask=in_rows & in_k, other=0.0).to(DOT_DTYPE)
        if norm_ptr is not None:
            norm = tl.load(norm_ptr + here[None, :], mask=in_k, other=0.0).to(DOT_DTYPE)
            squares = tl.dot(x, tl.trans(x), squares, input_precision="ieee")
            weight = (weight * norm).to(dtype).to(DOT_DTYPE)
        sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
    if norm_ptr is not None:
        square = tl.sum(tl.where(row[:, None] == row[None, :], squares, 0.0), 1)
        sums *= tl.rsqrt(square / in_features + eps)[:, None]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + weight_row, mask=in_n, other=0.0).to(tl.float32)[None, :]
    out = sums.to(dtype)
    if ADD:
        out = (out.to(tl.float32) + residual.to(tl.float32)).to(dtype)
    if GATED:
        gate, up = tl.split(tl.reshape(out.to(tl.float32), [ROWS, BLOCK_OUT, 2]))
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        out = (silu * up).to(dtype)
    tl.store(out_ptr + offsets, out, mask=mask)
