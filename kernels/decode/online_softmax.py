"""The inner loop that the Triton decode kernels share: attention of packed query heads over a range of keys.

Online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022) in base 2: scores are multiplied
by log2(e), every exponent is exp2 and every log-sum-exp a log2. All stages of all kernels here use that base.
"""

from __future__ import annotations

from kernels.triton_support import tl, triton

LOG2_E = 1.4426950408889634


@triton.jit
def load_queries(
    q_row_ptr,
    stride_head,
    first_head,
    num_heads,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """[HEADS, DIM] of the heads from first_head on, zeros past num_heads and past HEAD_DIM."""
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    return tl.load(
        q_row_ptr + (first_head + heads).to(tl.int64)[:, None] * stride_head + dims[None, :],
        mask=(heads < num_heads)[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    ).to(DOT_DTYPE)


@triton.jit
def _table_entries(table_ptr, tile_start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The blocks of the tile's keys: a scalar where the tile lies in one block, else [TILE]; 0 from `end` on."""
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table_ptr + tile_start // BLOCK_SIZE, mask=tile_start < end, other=0)
    else:
        positions = tile_start + tl.arange(0, TILE)
        return tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < end, other=0)


@triton.jit
def attend_range(
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    start,
    end,
    scale_log2,
    stride_k_block,
    stride_k_token,
    stride_v_block,
    stride_v_token,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    row_ends=None,
    OWN_ENDS: tl.constexpr = False,
    PREFETCH: tl.constexpr = False,
):
    """Attention of q [HEADS, DIM] over the keys start .. end - 1 of one sequence and KV head.

    k_ptr, v_ptr point at the KV head in block 0; table_ptr at the sequence's row of the block table; start is a
    multiple of TILE. Returns (acc [HEADS, DIM], peak [HEADS], total [HEADS]) in fp32 with
    acc = sum of 2^(score - peak) v and total = sum of 2^(score - peak); for an empty range (0, -inf, 0).
    Keys from `end` on are neither loaded nor counted, nor are their table entries read. With OWN_ENDS query row i
    counts only the keys before row_ends[i]. With PREFETCH a tile's table entries are read while the tile before is
    worked on, so that Triton's pipeliner has all its stages for keys and values.
    """
    dims = tl.arange(0, DIM)
    dim_mask = dims < HEAD_DIM
    acc = tl.zeros([HEADS, DIM], tl.float32)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    if PREFETCH:
        next_block = _table_entries(table_ptr, start, end, BLOCK_SIZE, TILE)
    for tile_start in range(start, end, TILE):
        positions = tile_start + tl.arange(0, TILE)
        valid = positions < end
        if PREFETCH:
            block = next_block.to(tl.int64)
            next_block = _table_entries(table_ptr, tile_start + TILE, end, BLOCK_SIZE, TILE)
        else:
            block = _table_entries(table_ptr, tile_start, end, BLOCK_SIZE, TILE).to(tl.int64)
        offset = (positions % BLOCK_SIZE).to(tl.int64)
        k_tokens = block * stride_k_block + offset * stride_k_token
        v_tokens = block * stride_v_block + offset * stride_v_token
        # Masked loads give 0, since memory past the context may hold NaN. Both are issued before the product.
        mask = valid[:, None] & dim_mask[None, :]
        if PREFETCH:
            k = tl.trans(tl.load(k_ptr + k_tokens[:, None] + dims[None, :], mask=mask, other=0.0)).to(
                DOT_DTYPE
            )
        else:
            k_mask = valid[None, :] & dim_mask[:, None]
            k = tl.load(k_ptr + k_tokens[None, :] + dims[:, None], mask=k_mask, other=0.0).to(DOT_DTYPE)
        v = tl.load(v_ptr + v_tokens[:, None] + dims[None, :], mask=mask, other=0.0).to(DOT_DTYPE)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        allowed = valid[None, :]
        if OWN_ENDS:
            allowed = allowed & (positions[None, :] < row_ends[:, None])
        scores = tl.where(allowed, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # Finite from the first tile on, for a tile holds a valid key, except for rows that end before it.
        origin = new_peak
        if OWN_ENDS:
            origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - origin[:, None])
        decay = tl.exp2(peak - origin)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(DOT_DTYPE), v, acc, input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit
def attend_tile(q, k, v, valid, acc, peak, total, scale_log2, MASKED: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """One step of online softmax (base 2) over a tile of keys k and values v, both [TILE, DIM].

    With MASKED only the keys that are valid [TILE] count, but the others must be finite too. Where no key has been
    valid, all weigh the same: values of zero then give zero, not NaN.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if MASKED:
        # Finite, and below any score: infinity minus infinity would be NaN where no key is valid.
        scores = tl.where(valid[None, :], scores, -3.0e38)
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(DOT_DTYPE), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def normalised(acc, peak, total):
    """(attention output, base-2 log-sum-exp) of a range's state; (0, -inf) if the range was empty."""
    divisor = tl.where(total > 0, total, 1.0)
    return acc / divisor[:, None], tl.where(total > 0, peak + tl.log2(divisor), float("-inf"))
