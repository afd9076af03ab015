"""The second stage of split decode attention: partial results of a row's splits become its output."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.decode.planner import padded_dim
from kernels.triton_support import on_device, tl, triton

# Splits that a program weighs at once, at most: their values fill its registers.
MAX_CHUNK = 64


@triton.jit
def merge_head(
    partial_ptr,
    lse_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """[DIM]: sum of 2^lse_s o_s / sum of 2^lse_s over one head's splits, CHUNK at a time; zeros if all are empty.

    partial_ptr, lse_ptr point at the head's first split. Loads pass by the L1 cache, since other programs of the
    same launch may have written what they read.
    """
    dims = tl.arange(0, DIM)
    acc = tl.zeros([DIM], tl.float32)
    peak = float("-inf")
    total = 0.0
    for chunk_start in range(0, num_splits, CHUNK):
        splits = chunk_start + tl.arange(0, CHUNK)
        valid = splits < num_splits
        lse = tl.load(lse_ptr + splits, mask=valid, other=float("-inf"), cache_modifier=".cg")
        partial = tl.load(
            partial_ptr + splits[:, None] * HEAD_DIM + dims[None, :],
            mask=valid[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        # All splits empty so far: every weight is 2^-inf = 0, without -inf minus -inf.
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(lse - origin)
        decay = tl.exp2(peak - origin)
        acc = acc * decay + tl.sum(weights[:, None] * partial, 0)
        total = total * decay + tl.sum(weights, 0)
        peak = new_peak
    return acc / tl.where(total > 0, total, 1.0)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits(
    partial_ptr,
    lse_ptr,
    out_ptr,
    num_splits,
    stride_out_row,
    stride_out_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program a row and query head."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    first = (row * NUM_HEADS + head) * num_splits
    out = merge_head(partial_ptr + first * HEAD_DIM, lse_ptr + first, num_splits, HEAD_DIM, DIM, CHUNK)
    dims = tl.arange(0, DIM)
    tl.store(
        out_ptr + row * stride_out_row + head.to(tl.int64) * stride_out_head + dims,
        out.to(out_ptr.dtype.element_ty),
        mask=dims < HEAD_DIM,
    )


@triton.jit
def merge_step(acc, peak, total, partial, lse):
    """acc [HEADS, DIM], peak and total [HEADS] with more results: partial [HEADS, CHUNK, DIM], lse [HEADS, CHUNK]."""
    new_peak = tl.maximum(peak, tl.max(lse, 1))
    origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(lse - origin[:, None])
    decay = tl.exp2(peak - origin)
    acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * partial, 1)
    return acc, new_peak, total * decay + tl.sum(weights, 1)


@triton.jit
def merge_heads(
    partial_ptr,
    lse_ptr,
    num_splits,
    active,
    num_heads,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """[HEADS, DIM]: merge_head for num_heads heads at once, from the first `active` of each one's num_splits slots.

    partial_ptr, lse_ptr point at the first head's first slot. The loads of several chunks are in flight at once.
    """
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    acc = tl.zeros([HEADS, DIM], tl.float32)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for chunk_start in tl.range(0, active, CHUNK, num_stages=STAGES):
        splits = chunk_start + tl.arange(0, CHUNK)
        valid = (heads < num_heads)[:, None] & (splits < active)[None, :]
        slots = heads.to(tl.int64)[:, None] * num_splits + splits[None, :]
        lse = tl.load(lse_ptr + slots, mask=valid, other=float("-inf"), cache_modifier=".cg")
        partial = tl.load(
            partial_ptr + slots[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=valid[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        acc, peak, total = merge_step(acc, peak, total, partial, lse)
    return acc / tl.where(total > 0, total, 1.0)[:, None]


def merge_splits(partial: Tensor, lse: Tensor, out: Tensor, chunk: int = MAX_CHUNK) -> None:
    """Weigh the splits' outputs by their base-2 log-sum-exp into `out`, in place.

    partial: [batch, num_q_heads, num_splits, head_dim] fp32, contiguous: each split's normalised output.
    lse: [batch, num_q_heads, num_splits] fp32, contiguous, base 2. An empty split is (0, -inf).
    out: [batch, num_q_heads, head_dim], any strides; zeros where every split is empty.
    chunk: splits a step; with the same chunk a row's result has the same bits however many empty splits follow.
    """
    batch_size, num_heads, num_splits, head_dim = partial.shape
    if batch_size == 0:
        return
    with on_device(out):
        _merge_splits[(num_heads, batch_size)](
            partial,
            lse,
            out,
            num_splits,
            out.stride(0),
            out.stride(1),
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            DIM=padded_dim(head_dim),
            CHUNK=chunk,
            num_warps=4,
        )


def chunk_for(num_splits: int) -> int:
    """The step that takes num_splits at once if it can: one of three, so that three programs are compiled."""
    return 16 if num_splits <= 16 else 32 if num_splits <= 32 else MAX_CHUNK


def partial_numel(batch_size: int, num_heads: int, num_splits: int, head_dim: int) -> int:
    """fp32 elements that the partial outputs and log-sum-exps of a call take."""
    return batch_size * num_heads * num_splits * (head_dim + 1)


def partial_views(
    workspace: Tensor | None, batch_size: int, num_heads: int, num_splits: int, head_dim: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """(partial, lse) as merge_splits takes them, in `workspace` (flat fp32) or newly allocated beside `like`."""
    needed = partial_numel(batch_size, num_heads, num_splits, head_dim)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=like.device)
    if workspace.dtype != torch.float32 or workspace.dim() != 1 or not workspace.is_contiguous():
        raise ValueError(
            f"workspace must be flat contiguous float32, got {tuple(workspace.shape)} {workspace.dtype}"
        )
    if workspace.numel() < needed or workspace.device != like.device:
        raise ValueError(
            f"workspace has {workspace.numel()} elements on {workspace.device}, "
            f"this call needs {needed} on {like.device}"
        )
    rows = batch_size * num_heads * num_splits
    partial = workspace[: rows * head_dim].view(batch_size, num_heads, num_splits, head_dim)
    return partial, workspace[rows * head_dim : needed].view(batch_size, num_heads, num_splits)
