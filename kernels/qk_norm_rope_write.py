"""QK-norm, RoPE and the KV write as one pass over a packed qkv projection: Triton, and torch composed."""

from torch import Tensor

from kernels.kv_write import check_kv_write, write_kv
from kernels.norm import rms_norm
from kernels.rope import apply_rope, check_rope
from kernels.triton_support import cdiv, next_power_of_2, on_device, tl, triton

# Elements of half a tile of heads: 16 bytes of bf16 for each thread of four warps.
TILE_ELEMENTS = 1024


def qk_norm_rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    use_triton: bool,
) -> None:
    """Normalise and rotate q in place; write k, normalised and rotated, and v into their cache slots.

    q [tokens, num_q_heads, head_dim]; k, v [tokens, num_kv_heads, head_dim], views of one projection, last
    dimension contiguous. q_weight, k_weight [head_dim], or None for a model without QK-norm. positions
    and slot_mapping [tokens] int64, cos_sin and caches as for `apply_rope` and `write_kv`. k and v
    themselves mean nothing afterwards. Both paths round wherever the three separate functions do.
    """
    check_rope(q, k, positions, cos_sin)
    check_kv_write(k, v, k_cache, v_cache, slot_mapping)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and weight.shape != q.shape[2:]:
            raise ValueError(f"{name} must be [{q.shape[2]}], got shape {tuple(weight.shape)}")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight must both be given or both be None")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(2) != 1:
            raise ValueError(f"{name}'s last dimension must be contiguous, got strides {tensor.stride()}")
    if use_triton:
        _launch(q, k, v, q_weight, k_weight, eps, positions, cos_sin, k_cache, v_cache, slot_mapping)
        return
    if q_weight is not None and k_weight is not None:
        q.copy_(rms_norm(q, q_weight, eps, use_triton=False))
        k = rms_norm(k, k_weight, eps, use_triton=False).to(k.dtype)
    apply_rope(q, k, positions, cos_sin, use_triton=False)
    write_kv(k, v, k_cache, v_cache, slot_mapping, use_triton=False)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    if not tokens:
        return
    block_half = next_power_of_2(head_dim // 2)
    most_heads = next_power_of_2(max(num_q_heads, num_kv_heads))
    block_heads = min(most_heads, max(1, TILE_ELEMENTS // block_half))
    q_tiles = cdiv(num_q_heads, block_heads)
    with on_device(q):
        _qk_norm_rope_write_kernel[(tokens, q_tiles + cdiv(num_kv_heads, block_heads))](
            q,
            k,
            v,
            q_weight.contiguous() if q_weight is not None else q,
            k_weight.contiguous() if k_weight is not None else q,
            positions.contiguous(),
            cos_sin,
            k_cache,
            v_cache,
            slot_mapping.contiguous(),
            eps,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *k_cache.stride(),
            *v_cache.stride(),
            Q_TILES=q_tiles,
            NUM_Q_HEADS=num_q_heads,
            NUM_KV_HEADS=num_kv_heads,
            BLOCK_SIZE=k_cache.shape[1],
            HALF=head_dim // 2,
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=block_half,
            NORM=q_weight is not None,
            num_warps=4,
        )


@triton.jit
def _norm_and_rotate(
    x_ptr,
    weight_ptr,
    mask,
    half,
    cos,
    sin,
    eps,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    """Both halves of a tile of heads [heads, half], normalised and rotated, in fp32."""
    dtype = x_ptr.dtype.element_ty
    first = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        in_half = half < HALF
        first_weight = tl.load(weight_ptr + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
        second_weight = tl.load(weight_ptr + HALF + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
        # Rounded after the scale and after the weight, as the separate norm is.
        first = ((first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slot_mapping_ptr"])
def _qk_norm_rope_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    positions_ptr,
    cos_sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    eps,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_kc_block,
    stride_kc_slot,
    stride_kc_head,
    stride_kc_dim,
    stride_vc_block,
    stride_vc_slot,
    stride_vc_head,
    stride_vc_dim,
    Q_TILES: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    """One token and BLOCK_HEADS heads a program: first the tiles of q, then those of k and v together."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    half = tl.arange(0, BLOCK_HALF)
    in_half = half < HALF
    cos_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF) + half
    cos = tl.load(cos_ptr, mask=in_half, other=0.0)[None, :]
    sin = tl.load(cos_ptr + HALF, mask=in_half, other=0.0)[None, :]
    if tile < Q_TILES:
        heads = (tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
        mask = (heads < NUM_Q_HEADS)[:, None] & in_half[None, :]
        x_ptr = q_ptr + token * stride_q_token + heads[:, None] * stride_q_head + half[None, :]
        first, second = _norm_and_rotate(x_ptr, q_weight_ptr, mask, half, cos, sin, eps, HALF, NORM)
        tl.store(x_ptr, first.to(q_ptr.dtype.element_ty), mask=mask)
        tl.store(x_ptr + HALF, second.to(q_ptr.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slot_mapping_ptr + token)
        if slot >= 0:
            heads = ((tile - Q_TILES) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
            mask = (heads < NUM_KV_HEADS)[:, None] & in_half[None, :]
            x_ptr = k_ptr + token * stride_k_token + heads[:, None] * stride_k_head + half[None, :]
            first, second = _norm_and_rotate(x_ptr, k_weight_ptr, mask, half, cos, sin, eps, HALF, NORM)
            x_ptr = v_ptr + token * stride_v_token + heads[:, None] * stride_v_head + half[None, :]
            v_first = tl.load(x_ptr, mask=mask)
            v_second = tl.load(x_ptr + HALF, mask=mask)

            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            k_slot = k_cache_ptr + block * stride_kc_block + offset * stride_kc_slot
            k_slot = k_slot + heads[:, None] * stride_kc_head + half[None, :] * stride_kc_dim
            tl.store(k_slot, first.to(k_cache_ptr.dtype.element_ty), mask=mask)
            tl.store(k_slot + HALF * stride_kc_dim, second.to(k_cache_ptr.dtype.element_ty), mask=mask)
            v_slot = v_cache_ptr + block * stride_vc_block + offset * stride_vc_slot
            v_slot = v_slot + heads[:, None] * stride_vc_head + half[None, :] * stride_vc_dim
            tl.store(v_slot, v_first, mask=mask)
            tl.store(v_slot + HALF * stride_vc_dim, v_second, mask=mask)
