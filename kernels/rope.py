"""Rotary position embedding (Su et al., 2021), rotate-half layout, in place on queries and keys."""

import torch
from torch import Tensor

from kernels.triton_support import cdiv, next_power_of_2, on_device, tl, triton

TILE_ELEMENTS = 2048


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, use_triton: bool) -> None:
    """Rotate q and k in place by their tokens' positions; arithmetic in fp32, rounded once at the end.

    q [tokens, num_q_heads, head_dim] and k [tokens, num_kv_heads, head_dim], strided views allowed;
    positions [tokens] int64, each within cos_sin (padding tokens too: 0 serves); cos_sin [max_position,
    2, head_dim / 2] fp32, contiguous, cosines first. Dimension i is paired with i + head_dim / 2.
    """
    check_rope(q, k, positions, cos_sin)
    if use_triton:
        _launch(q, k, positions, cos_sin)
        return
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(2).unbind(1)
    _rotate(q, cos, sin)
    _rotate(k, cos, sin)


def check_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Raise ValueError, naming the argument, unless the tensors fit together. Reads no values."""
    if q.dim() != 3:
        raise ValueError(f"q must be [tokens, num_q_heads, head_dim], got shape {tuple(q.shape)}")
    tokens, _, head_dim = q.shape
    if head_dim % 2:
        raise ValueError(f"q's head_dim must be even, got {head_dim}")
    if k.dim() != 3 or k.shape[0] != tokens or k.shape[2] != head_dim:
        raise ValueError(f"k must be [{tokens}, num_kv_heads, {head_dim}] as q is, got {tuple(k.shape)}")
    if positions.shape != (tokens,) or positions.dtype != torch.int64:
        raise ValueError(
            f"positions must be [{tokens}] int64, got shape {tuple(positions.shape)} {positions.dtype}"
        )
    if cos_sin.shape[1:] != (2, head_dim // 2) or cos_sin.dtype != torch.float32:
        raise ValueError(
            f"cos_sin must be [max_position, 2, {head_dim // 2}] float32, "
            f"got shape {tuple(cos_sin.shape)} {cos_sin.dtype}"
        )
    if not cos_sin.is_contiguous():
        raise ValueError(f"cos_sin must be contiguous, got strides {tuple(cos_sin.stride())}")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    first, second = x.chunk(2, dim=-1)
    rotated_first = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(rotated_first)


def _launch(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    tokens, num_q_heads, head_dim = q.shape
    if not tokens:
        return
    block_half = next_power_of_2(head_dim // 2)
    num_heads = num_q_heads + k.shape[1]
    heads = min(next_power_of_2(num_heads), max(1, TILE_ELEMENTS // block_half))
    with on_device(q):
        _rope_kernel[(tokens, cdiv(num_heads, heads))](
            q,
            k,
            positions.contiguous(),
            cos_sin,
            *q.stride(),
            *k.stride(),
            NUM_Q_HEADS=num_q_heads,
            NUM_HEADS=num_heads,
            HALF=head_dim // 2,
            BLOCK_HEADS=heads,
            BLOCK_HALF=block_half,
            num_warps=4,
        )


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _rope_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    cos_sin_ptr,
    stride_q_token,
    stride_q_head,
    stride_q_dim,
    stride_k_token,
    stride_k_head,
    stride_k_dim,
    NUM_Q_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """One token and BLOCK_HEADS heads a program; the heads of k follow those of q."""
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
    half = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions_ptr + token)
    cos_ptr = cos_sin_ptr + position * (2 * HALF) + half
    cos = tl.load(cos_ptr, mask=half < HALF, other=0.0)[None, :]
    sin = tl.load(cos_ptr + HALF, mask=half < HALF, other=0.0)[None, :]

    in_half = (half < HALF)[None, :]
    is_q = (heads < NUM_Q_HEADS)[:, None] & in_half
    first_ptr = q_ptr + token * stride_q_token + heads[:, None] * stride_q_head + half[None, :] * stride_q_dim
    _rotate_tile(first_ptr, first_ptr + HALF * stride_q_dim, cos, sin, is_q)

    heads -= NUM_Q_HEADS
    is_k = ((heads >= 0) & (heads < NUM_HEADS - NUM_Q_HEADS))[:, None] & in_half
    first_ptr = k_ptr + token * stride_k_token + heads[:, None] * stride_k_head + half[None, :] * stride_k_dim
    _rotate_tile(first_ptr, first_ptr + HALF * stride_k_dim, cos, sin, is_k)


@triton.jit
def _rotate_tile(first_ptr, second_ptr, cos, sin, mask):
    first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(first_ptr, (first * cos - second * sin).to(first_ptr.dtype.element_ty), mask=mask)
    tl.store(second_ptr, (second * cos + first * sin).to(second_ptr.dtype.element_ty), mask=mask)
