"""The attention phases of a persistent kernel: every program takes one row, one KV head and one split of its context.

Flash decoding (Dao et al. 2023) in base 2, as in kernels/decode/online_softmax.py, with two differences: the first keys
are loaded before the queries are there, and the row's newest key and value come from the projection itself, so that
nobody waits for their write into the cache.
"""

from __future__ import annotations

from kernels.decode.merge import merge_head
from kernels.decode.online_softmax import attend_tile, normalised
from kernels.triton_support import tl, triton


@triton.jit
def split_length(context_len, num_splits, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Keys of each split of a context but the last: whole tiles, where a block consists of such, or else sixteens."""
    ALIGNMENT: tl.constexpr = TILE if BLOCK_SIZE % TILE == 0 else 16
    return tl.cdiv(tl.cdiv(context_len, num_splits), ALIGNMENT) * ALIGNMENT


@triton.jit
def load_keys(
    cache_ptr,
    table_ptr,
    start,
    end,
    stride_block,
    BLOCK_SIZE: tl.constexpr,
    STRIDE_TOKEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """[TILE, HEAD_DIM] of one KV head's keys, or values, from position start on; zeros from end on."""
    positions = start + tl.arange(0, TILE)
    valid = positions < end
    block = tl.load(table_ptr + positions // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
    tokens = block * stride_block + positions % BLOCK_SIZE * STRIDE_TOKEN
    dims = tl.arange(0, HEAD_DIM)
    return tl.load(cache_ptr + tokens[:, None] + dims[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def rotated(x_ptr, norm_ptr, mask, cos, sin, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """[heads, HEAD_DIM] of the heads at x_ptr [heads, 1]: RMSNorm (NORM), then RoPE; rounded to x's dtype, as fp32."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype = x_ptr.dtype.element_ty
    dims = tl.arange(0, HEAD_DIM)
    partner = (dims + HALF) % HEAD_DIM
    x = tl.load(x_ptr + dims[None, :], mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    y = tl.load(x_ptr + partner[None, :], mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = (x * scale).to(dtype).to(tl.float32) * tl.load(norm_ptr + dims).to(tl.float32)[None, :]
        y = (y * scale).to(dtype).to(tl.float32) * tl.load(norm_ptr + partner).to(tl.float32)[None, :]
        x = x.to(dtype).to(tl.float32)
        y = y.to(dtype).to(tl.float32)
    signed = tl.where(dims < HALF, -1.0, 1.0)[None, :] * y
    return (x * cos[None, :] + signed * sin[None, :]).to(dtype).to(tl.float32)


@triton.jit
def attend_cached(
    q,
    k,
    v,
    k_ptr,
    v_ptr,
    table_ptr,
    start,
    end,
    scale_log2,
    stride_block,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STRIDE_TOKEN: tl.constexpr,
    TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """(acc, peak, total), as of online_softmax.attend_range, of q [HEADS, HEAD_DIM] over the keys start .. end - 1.

    k, v: the first tile of both, loaded before q was known. The others come through shared memory, three tiles ahead.
    """
    q = q.to(DOT_DTYPE)
    acc = tl.zeros([HEADS, HEAD_DIM], tl.float32)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    offsets = tl.arange(0, TILE)
    if start < end:
        acc, peak, total = attend_tile(
            q,
            k.to(DOT_DTYPE),
            v.to(DOT_DTYPE),
            start + offsets < end,
            acc,
            peak,
            total,
            scale_log2,
            MASKED=True,
            DOT_DTYPE=DOT_DTYPE,
        )
    for here in tl.range(start + TILE, end, TILE, num_stages=4):
        k = load_keys(k_ptr, table_ptr, here, end, stride_block, BLOCK_SIZE, STRIDE_TOKEN, HEAD_DIM, TILE)
        v = load_keys(v_ptr, table_ptr, here, end, stride_block, BLOCK_SIZE, STRIDE_TOKEN, HEAD_DIM, TILE)
        acc, peak, total = attend_tile(
            q,
            k.to(DOT_DTYPE),
            v.to(DOT_DTYPE),
            here + offsets < end,
            acc,
            peak,
            total,
            scale_log2,
            MASKED=True,
            DOT_DTYPE=DOT_DTYPE,
        )
    return acc, peak, total


@triton.jit
def attend_one(q, k, v, acc, peak, total, scale_log2):
    """attend_cached's result with one key more: k, v [1, HEAD_DIM] fp32."""
    score = tl.sum(q * k, 1) * scale_log2
    new_peak = tl.maximum(peak, score)
    weight = tl.exp2(score - new_peak)
    decay = tl.exp2(peak - new_peak)
    return acc * decay[:, None] + weight[:, None] * v, new_peak, total * decay + weight


@triton.jit
def merge_heads_of_rows(
    partial_ptr,
    lse_ptr,
    context_lens_ptr,
    heads_ptr,
    rows,
    num_splits,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """heads [rows, NUM_Q_HEADS, HEAD_DIM] from the splits' outputs: this program's share of all heads."""
    for head in range(tl.program_id(0), rows * NUM_Q_HEADS, tl.num_programs(0)):
        context_len = tl.load(context_lens_ptr + head // NUM_Q_HEADS)
        split_len = split_length(context_len, num_splits, TILE, BLOCK_SIZE)
        slot = head * num_splits
        merged = merge_head(
            partial_ptr + slot * HEAD_DIM,
            lse_ptr + slot,
            tl.cdiv(context_len, tl.maximum(split_len, 1)),
            HEAD_DIM,
            HEAD_DIM,
            CHUNK,
        )
        tl.store(heads_ptr + head * HEAD_DIM + tl.arange(0, HEAD_DIM), merged.to(heads_ptr.dtype.element_ty))


@triton.jit
def store_partials(
    acc,
    peak,
    total,
    partial_ptr,
    lse_ptr,
    q_heads,
    mask,
    split,
    num_splits,
    HEAD_DIM: tl.constexpr,
):
    """A split's normalised output and log-sum-exp of the heads q_heads [HEADS] where mask [HEADS] holds."""
    out, lse = normalised(acc, peak, total)
    slots = q_heads * num_splits + split
    dims = tl.arange(0, HEAD_DIM)
    tl.store(partial_ptr + slots[:, None] * HEAD_DIM + dims[None, :], out, mask=mask[:, None])
    tl.store(lse_ptr + slots, lse, mask=mask)
