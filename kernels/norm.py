"""RMSNorm (Zhang and Sennrich, 2019), alone or after adding the residual: Triton and torch.

Both paths round where Transformers' LlamaRMSNorm does: the mean square and the normalised value in fp32,
the latter rounded to x's dtype, then multiplied by the weight.

The weight is asked for before the reduction, so that its way from memory need not follow the row's; ptxas keeps that
order with 8 warps, with 4 it waits for the row first. Measured on an H200 (results/NOTES.md): 8 warps a row are the
fastest tile from 1 to 256 rows of 1,024 to 5,120, ahead of torch.compile.
"""

import torch
from torch import Tensor

from kernels.triton_support import cdiv, next_power_of_2, on_device, tl, triton

# Elements of a program: short rows (the heads of QK-norm) share one. 16 bytes of bf16 for each thread of four warps.
TILE_ELEMENTS = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, use_triton: bool) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension.

    x [..., hidden], any strides (query heads inside packed qkv, say); weight [hidden]. Returns a new
    contiguous tensor shaped like x.
    """
    _check(x, weight)
    if not use_triton:
        return _torch_rms_norm(x, weight, eps)
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, use_triton: bool
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), the sum rounded to residual's dtype before it is normalised.

    x and residual [..., hidden] of one shape; both results are new contiguous tensors.
    """
    _check(x, weight)
    if residual.shape != x.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}, x has {tuple(x.shape)}")
    if not use_triton:
        new_residual = (x + residual).to(residual.dtype)
        return _torch_rms_norm(new_residual, weight, eps), new_residual
    return _launch(x, residual, weight, eps)


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, x's last dimension is {x.shape[-1]}")


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.to(torch.float32)
    scaled = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    rows: int | None = None,
    num_warps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """rows of a program and its num_warps: None for the default; others are there to be measured."""
    shape, hidden = x.shape, x.shape[-1]
    x = _as_rows(x)
    residual = None if residual is None else _as_rows(residual)
    norm_dtype = x.dtype if residual is None else residual.dtype
    normed = torch.empty(x.shape, dtype=torch.promote_types(norm_dtype, weight.dtype), device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    num_rows, heads = x.shape[0] * x.shape[1], x.shape[1]
    block = next_power_of_2(hidden)
    rows = rows or max(1, TILE_ELEMENTS // block)
    strides = (*x.stride()[:2], *(x if residual is None else residual).stride()[:2])
    if num_rows:
        with on_device(x):
            _rms_norm_kernel[(cdiv(num_rows, rows),)](
                x,
                x if residual is None else residual,
                weight.contiguous(),
                normed,
                total,
                num_rows,
                eps,
                *strides,
                HEADS=heads,
                HIDDEN=hidden,
                BLOCK=block,
                ROWS=rows,
                ADD=residual is not None,
                FLAT=strides == 2 * (heads * hidden, hidden),
                num_warps=num_warps or (8 if rows == 1 else 4),
            )
    return normed.view(shape), total.view(shape) if residual is not None else total


def _as_rows(x: Tensor) -> Tensor:
    """x as [rows, heads, hidden] with a contiguous last dimension; a copy only where strides force one."""
    if x.dim() > 3:
        x = x.reshape(-1, x.shape[-1])
    if x.dim() < 3:
        x = x.reshape(-1, 1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    num_rows,
    eps,
    stride_x_row,
    stride_x_head,
    stride_residual_row,
    stride_residual_head,
    HEADS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    FLAT: tl.constexpr,
):
    # FLAT: x and residual lie as the results do, each row behind the last.
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    column_mask = columns < HIDDEN
    mask = column_mask[None, :]
    if ROWS > 1:  # else there are as many programs as rows
        mask &= (rows < num_rows)[:, None]
    out_offsets = rows.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    x_offsets = out_offsets
    residual_offsets = out_offsets
    if not FLAT:
        row = (rows // HEADS).to(tl.int64)
        head = (rows % HEADS).to(tl.int64)
        x_offsets = (row * stride_x_row + head * stride_x_head)[:, None] + columns[None, :]
        residual_rows = row * stride_residual_row + head * stride_residual_head
        residual_offsets = residual_rows[:, None] + columns[None, :]
    # Every load before anything that needs one.
    x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + residual_offsets, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
    x = x.to(tl.float32)
    if ADD:
        rounded = (x + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + out_offsets, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / HIDDEN + eps)
    scaled = (x * scale[:, None]).to(total_ptr.dtype.element_ty).to(tl.float32)
    tl.store(normed_ptr + out_offsets, (weight[None, :] * scaled).to(normed_ptr.dtype.element_ty), mask=mask)
