"""Products of a few decode rows with what surrounds them in a layer: a norm or activation before, the residual after.

`norm_linear`  y = rms_norm(x) W^T          every program normalises the rows anew: they are a few KB
`gated_linear` h += (silu(gate) * up) W^T   likewise
`add_linear`   h += x W^T                   any few rows

In place on the residual stream h there is no race: an element is read and written by one program alone, and the x of
such a product is never h. All round where the separate kernels (and Transformers) do: after the scale, the norm's
weight, the silu, the activation, the product, and the sum.

Up to MAX_PLAIN_ROWS rows multiply on the plain cores, up to MAX_ROWS on the tensor cores. There each program keeps
several weight tiles in flight (cp.async), while on the plain cores the next tile waits in registers. With pdl the
first weights are fetched before the kernel waits for the one before it (kernels/dependent_launch.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.dependent_launch import launch_options, start_after_previous
from kernels.triton_support import dot_dtype, on_device, tl, triton

MAX_PLAIN_ROWS = 4
MAX_ROWS = 16

# Neighbouring inputs that one thread loads at once: 16 bytes of a 16-bit format.
THREAD_K = 8

# Bytes of each weight row, at most, that a program asks the L2 for before it waits, besides those in registers.
PREFETCH_BYTES = 4096


@dataclass(frozen=True)
class PlainTile:
    """A program of the plain cores: block_n outputs, block_k inputs a step."""

    block_n: int
    block_k: int
    num_warps: int

    def __post_init__(self) -> None:
        _check_powers_of_two(self)


@dataclass(frozen=True)
class DotTile:
    """A program of the tensor cores: block_n outputs, block_k inputs a step, num_stages - 1 steps in flight."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        _check_powers_of_two(self)
        if self.block_n < 8 or self.block_k < 16:
            raise ValueError(f"block_n must be at least 8 and block_k at least 16, got {self}")


def choose_plain_tile(out_features: int, in_features: int, rows: int) -> PlainTile:
    """Small enough for no spills, so that an SM holds four programs, each with two tiles in registers."""
    block_n = 8 if rows == 1 and out_features * in_features > 1 << 24 else 4
    return PlainTile(block_n, min(triton.next_power_of_2(in_features), 1024), 4)


def choose_dot_tile(out_features: int, in_features: int, element_size: int = 2) -> DotTile:
    """A warp for every 8 outputs, and enough programs for all SMs before enough outputs for all warps."""
    if element_size > 2:
        return DotTile(
            16, 64, 2, 2
        )  # exact fp32 products, without tensor cores, keep their operands in registers
    if out_features <= 2048:
        return DotTile(8, 512, 1, 4)
    if out_features <= 8192:
        return DotTile(16, 256, 2, 6)
    return DotTile(32, 256, 4, 4)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tile: PlainTile | None = None,
    pdl: bool = False,
) -> Tensor:
    """rms_norm(x) by weight, for up to MAX_PLAIN_ROWS rows.

    x [rows, in_features], norm_weight [in_features], weight [out_features, in_features], bias [out_features] or None,
    all of one dtype. Returns [rows, out_features]. Raises ValueError, naming the argument, for what does not fit.
    """
    if norm_weight.shape != x.shape[1:]:
        raise ValueError(f"norm_weight must be [{x.shape[1]}], got shape {tuple(norm_weight.shape)}")
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch_plain(x, weight, bias, out, tile, pdl, norm_weight=norm_weight, eps=eps)
    return out


def gated_linear(
    gate_up: Tensor,
    weight: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    *,
    tile: PlainTile | None = None,
    pdl: bool = False,
) -> None:
    """residual += (silu(gate) * up) by weight, in place, for up to MAX_PLAIN_ROWS rows.

    gate_up [rows, 2 * in_features], gate first; residual [rows, out_features], contiguous rows; the rest as for
    norm_linear.
    """
    _launch_plain(gate_up, weight, bias, residual, tile, pdl, gated=True)


def add_linear(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    *,
    tile: PlainTile | DotTile | None = None,
    pdl: bool = False,
) -> None:
    """residual += x by weight, in place, for up to MAX_ROWS rows; arguments as for gated_linear and norm_linear."""
    if isinstance(tile, PlainTile) or (tile is None and x.shape[0] == 1):
        _launch_plain(x, weight, bias, residual, tile, pdl, add=True)
    else:
        _launch_dot(x, weight, bias, residual, tile, pdl, add=True)


def dot_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: DotTile | None = None, pdl: bool = False
) -> Tensor:
    """x by weight on the tensor cores, for up to MAX_ROWS rows; arguments and result as for norm_linear."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch_dot(x, weight, bias, out, tile, pdl, add=False)
    return out


def _launch_plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: PlainTile | None,
    pdl: bool,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    add: bool = False,
) -> None:
    out_features, in_features = weight.shape
    rows = x.shape[0]
    _check(x, weight, bias, out, 2 * in_features if gated else in_features, MAX_PLAIN_ROWS)
    padded_rows = triton.next_power_of_2(rows)
    tile = tile or choose_plain_tile(out_features, in_features, padded_rows)
    with on_device(x):
        _plain_kernel[(triton.cdiv(out_features, tile.block_n),)](
            x,
            weight,
            bias,
            norm_weight,
            out,
            rows,
            out_features,
            in_features,
            eps,
            x.stride(0),
            weight.stride(0),
            out.stride(0),
            ROWS=padded_rows,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            THREAD_K=min(THREAD_K, tile.block_k),
            ONE_STEP=in_features <= tile.block_k,
            NORM=norm_weight is not None,
            GATED=gated,
            ADD=add or gated,
            **_prefetch(weight, tile, tile.block_k, pdl),
            num_warps=tile.num_warps,
            **launch_options(pdl),
        )


def _launch_dot(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Any, pdl: bool, *, add: bool
) -> None:
    out_features, in_features = weight.shape
    _check(x, weight, bias, out, in_features, MAX_ROWS)
    tile = tile or choose_dot_tile(out_features, in_features, x.element_size())
    with on_device(x):
        _dot_kernel[(triton.cdiv(out_features, tile.block_n),)](
            x,
            weight,
            bias,
            out,
            x.shape[0],
            out_features,
            in_features,
            x.stride(0),
            weight.stride(0),
            out.stride(0),
            ROWS=MAX_ROWS,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            STAGES=tile.num_stages,
            ADD=add,
            DOT_DTYPE=dot_dtype(x.dtype),
            **_prefetch(weight, tile, 0, pdl),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **launch_options(pdl),
        )


def _prefetch(weight: Tensor, tile: PlainTile | DotTile, start: int, pdl: bool) -> dict[str, int]:
    """Constexprs of _prefetch_rows: a request a thread, of equal parts of each row from input `start` on."""
    chunks = max(1, 32 * tile.num_warps // tile.block_n)
    row_bytes = weight.stride(0) * weight.element_size()
    if not pdl or row_bytes % 16 or weight.data_ptr() % 16:
        return {"CHUNKS": chunks, "CHUNK_BYTES": 0}
    return {
        "CHUNKS": chunks,
        "CHUNK_BYTES": prefetch_bytes(weight.shape[1] - start, weight.element_size(), chunks),
    }


def prefetch_bytes(num_inputs: int, element_size: int, chunks: int) -> int:
    """Bytes of each request, a multiple of 16."""
    return min(max(num_inputs, 0) * element_size, PREFETCH_BYTES) // chunks // 16 * 16


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, x_features: int, max_rows: int
) -> None:
    rows, out_features = x.shape[0], weight.shape[0]
    if not 0 < rows <= max_rows:
        raise ValueError(f"x has {rows} rows, the limit is {max_rows}")
    if x.shape[1] != x_features:
        raise ValueError(f"x must have {x_features} features, as weight has, got shape {tuple(x.shape)}")
    if bias is not None and bias.shape != (out_features,):
        raise ValueError(f"bias must be [{out_features}], got shape {tuple(bias.shape)}")
    if out.shape != (rows, out_features):
        raise ValueError(f"residual must be [{rows}, {out_features}], got shape {tuple(out.shape)}")
    for name, tensor in (("x", x), ("weight", weight), ("residual", out)):
        if tensor.stride(1) != 1:
            raise ValueError(f"{name} must have contiguous rows, got strides {tensor.stride()}")
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} must be {x.dtype}, as x is, got {tensor.dtype}")


def _check_powers_of_two(tile: PlainTile | DotTile) -> None:
    for field, value in asdict(tile).items():
        if value < 1 or (field != "num_stages" and value & (value - 1)):
            raise ValueError(f"{field} is {value}, expected a power of two from 1 on")


@triton.jit
def _load_weights(weight_rows, in_n, k, in_features):
    return tl.load(
        weight_rows + k[None, :],
        mask=in_n[:, None] & (k < in_features)[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )


@triton.jit
def _store(out_ptr, offsets, mask, sums, bias_ptr, n, in_n, residual, ADD: tl.constexpr):
    """Rounded after the bias and after the residual."""
    dtype = out_ptr.dtype.element_ty
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if ADD:
        sums = sums.to(dtype).to(tl.float32) + residual.to(tl.float32)
    tl.store(out_ptr + offsets, sums.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _plain_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_weight_ptr,
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
    THREAD_K: tl.constexpr,
    ONE_STEP: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_BYTES: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of every row: sums of THREAD_K inputs, those of a thread, are kept apart until the end.

    So a step reduces nothing across threads, and few registers are sums: more are weights on their way.
    """
    dtype = x_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    in_n = n < out_features
    in_rows = (row < rows)[:, None]
    weight_rows = weight_ptr + n.to(tl.int64)[:, None] * stride_weight_row
    x_rows = x_ptr + row.to(tl.int64)[:, None] * stride_x_row

    weight = _load_weights(weight_rows, in_n, k, in_features)
    if NORM:
        norm_weight = tl.load(norm_weight_ptr + k, mask=k < in_features, other=0.0)
    if CHUNK_BYTES > 0:
        _prefetch_rows(weight_rows + BLOCK_K, in_n, CHUNKS, CHUNK_BYTES)
    start_after_previous(PDL)

    offsets = row.to(tl.int64)[:, None] * stride_out_row + n[None, :]
    mask = in_rows & in_n[None, :]
    residual = 0.0
    if ADD:
        residual = tl.load(out_ptr + offsets, mask=mask, other=0.0)
    if NORM and not ONE_STEP:
        squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
        for start in range(0, in_features, BLOCK_K):
            in_k = in_rows & (start + k < in_features)[None, :]
            x = tl.load(x_rows + (start + k)[None, :], mask=in_k, other=0.0).to(tl.float32)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, 1) / in_features + eps)[:, None]

    sums = tl.zeros([ROWS, BLOCK_N, BLOCK_K // THREAD_K], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        here = start + k
        in_k = in_rows & (here < in_features)[None, :]
        if not ONE_STEP:
            next_weight = _load_weights(weight_rows, in_n, here + BLOCK_K, in_features)
        x = tl.load(x_rows + here[None, :], mask=in_k, other=0.0).to(tl.float32)
        if NORM:
            if ONE_STEP:
                scale = tl.rsqrt(tl.sum(x * x, 1) / in_features + eps)[:, None]
            x = (x * scale).to(dtype).to(tl.float32)
            x = (norm_weight.to(tl.float32)[None, :] * x).to(dtype).to(tl.float32)
            if not ONE_STEP:
                after = here + BLOCK_K
                norm_weight = tl.load(norm_weight_ptr + after, mask=after < in_features, other=0.0)
        if GATED:
            up = tl.load(x_rows + in_features + here[None, :], mask=in_k, other=0.0).to(tl.float32)
            x = (x / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32)
            x = (x * up).to(dtype).to(tl.float32)
        products = weight.to(tl.float32)[None, :, :] * x[:, None, :]
        sums += tl.sum(tl.reshape(products, [ROWS, BLOCK_N, BLOCK_K // THREAD_K, THREAD_K]), 3)
        if not ONE_STEP:
            weight = next_weight
    _store(out_ptr, offsets, mask, tl.sum(sums, 2), bias_ptr, n, in_n, residual, ADD)


@triton.jit
def _prefetch_rows(weight_rows, in_n, CHUNKS: tl.constexpr, CHUNK_BYTES: tl.constexpr):
    """Ask the L2 for the first CHUNKS * CHUNK_BYTES bytes of each row: one bulk request a thread."""
    chunk = tl.arange(0, CHUNKS)
    addresses = weight_rows.to(tl.int64) + chunk[None, :] * CHUNK_BYTES
    # A request of no bytes past the last row.
    sizes = tl.where(in_n, CHUNK_BYTES, 0)[:, None] + tl.zeros([1, CHUNKS], tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [addresses, sizes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


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
    stride_out_row,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ADD: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_BYTES: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of up to ROWS rows, the rows being M of the tensor cores' m16n8k16."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    in_n = n < out_features
    in_rows = (row < rows)[:, None]
    weight_rows = weight_ptr + n.to(tl.int64)[:, None] * stride_weight_row
    x_rows = x_ptr + row.to(tl.int64)[:, None] * stride_x_row
    if CHUNK_BYTES > 0:
        _prefetch_rows(weight_rows, in_n, CHUNKS, CHUNK_BYTES)
    start_after_previous(PDL)

    offsets = row.to(tl.int64)[:, None] * stride_out_row + n[None, :]
    mask = in_rows & in_n[None, :]
    residual = 0.0
    if ADD:
        residual = tl.load(out_ptr + offsets, mask=mask, other=0.0)
    sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
        here = start + k
        weight = _load_weights(weight_rows, in_n, here, in_features)
        x = tl.load(x_rows + here[None, :], mask=in_rows & (here < in_features)[None, :], other=0.0)
        sums = tl.dot(x.to(DOT_DTYPE), tl.trans(weight.to(DOT_DTYPE)), sums, input_precision="ieee")
    _store(out_ptr, offsets, mask, sums, bias_ptr, n, in_n, residual, ADD)
