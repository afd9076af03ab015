"""The kernel of kernels/persistent/layers.py: six phases a layer, a barrier after each."""

from __future__ import annotations

from kernels.persistent.attention import (
    attend_cached,
    attend_one,
    load_keys,
    merge_heads_of_rows,
    rotated,
    split_length,
    store_partials,
)
from kernels.persistent.barrier import arrive, leave, wait
from kernels.persistent.product import first_weights, product
from kernels.triton_support import tl, triton

NUM_PHASES = 6

FIELDS = (
    "input_norm",
    "qkv",
    "qkv_bias",
    "q_norm",
    "k_norm",
    "o",
    "o_bias",
    "post_norm",
    "gate_up",
    "gate_up_bias",
    "down",
    "down_bias",
)
"""Columns of the table of addresses, a row a layer; the kernel names them by their places here."""


@triton.jit
def _address(layer_ptr, field: tl.constexpr, dtype: tl.constexpr):
    """The pointer in a layer's row of the table of addresses: to a weight at a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(layer_ptr + field).to(tl.pointer_type(dtype)), 16)


@triton.jit(
    do_not_specialize=["rows", "first_layer", "last_layer", "stride_table_row"],
    do_not_specialize_on_alignment=[
        "positions_ptr",
        "block_table_ptr",
        "context_lens_ptr",
        "slot_mapping_ptr",
    ],
)
def layers_kernel(
    stream_ptr,
    addresses_ptr,
    positions_ptr,
    cos_sin_ptr,
    kv_cache_ptr,
    block_table_ptr,
    context_lens_ptr,
    slot_mapping_ptr,
    qkv_ptr,
    partial_ptr,
    lse_ptr,
    heads_ptr,
    gated_ptr,
    counter_ptr,
    rows,
    first_layer,
    last_layer,
    eps,
    scale_log2,
    stride_table_row,
    stride_layer,
    stride_kv,
    stride_block,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QK_NORM: tl.constexpr,
    ATTENTION_BIAS: tl.constexpr,
    MLP_BIAS: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    HIDDEN_N: tl.constexpr,
    HIDDEN_K: tl.constexpr,
    HIDDEN_PADDED: tl.constexpr,
    HEADS_N: tl.constexpr,
    HEADS_K: tl.constexpr,
    INTERMEDIATE_N: tl.constexpr,
    INTERMEDIATE_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PHASE: tl.constexpr,
):
    """Layers first_layer to last_layer - 1 of the stream [rows, HIDDEN], in place.

    PHASE: the only phase that this launch is for, or -1 for all, whose programs must then all run at once. *_N, *_K:
    the tile of weights of the products from that many inputs. Before a program waits, it loads what it will need first
    and what does not depend on the others: weights, or keys of earlier tokens.
    """
    ALL: tl.constexpr = PHASE < 0
    GROUP: tl.constexpr = NUM_Q_HEADS // NUM_KV_HEADS
    STRIDE_TOKEN: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    ALL_HEADS: tl.constexpr = NUM_Q_HEADS * HEAD_DIM
    QKV: tl.constexpr = ALL_HEADS + 2 * STRIDE_TOKEN
    dtype: tl.constexpr = stream_ptr.dtype.element_ty
    num_programs = tl.num_programs(0)
    arrivals = 0

    # What this program attends to is the same in all layers.
    num_splits = num_programs // (rows * NUM_KV_HEADS)
    row = tl.program_id(0) // (NUM_KV_HEADS * num_splits)
    kv_head = tl.program_id(0) // num_splits % NUM_KV_HEADS
    split = tl.program_id(0) % num_splits
    context_len = tl.load(context_lens_ptr + row, mask=row < rows, other=0)
    slot = tl.load(slot_mapping_ptr + row, mask=row < rows, other=-1)
    position = tl.load(positions_ptr + row, mask=row < rows, other=0)
    split_len = split_length(context_len, num_splits, TILE, BLOCK_SIZE)
    start = split * split_len
    end = tl.minimum(start + split_len, context_len)
    has_newest = (start < context_len) & (end == context_len)
    cached_end = tl.minimum(end, context_len - 1)
    table_ptr = block_table_ptr + row.to(tl.int64) * stride_table_row
    dims = tl.arange(0, HEAD_DIM)
    cos_ptr = cos_sin_ptr + position * HEAD_DIM + dims % (HEAD_DIM // 2)
    cos = tl.load(cos_ptr)
    sin = tl.load(cos_ptr + HEAD_DIM // 2)
    in_group = tl.arange(0, HEADS)
    group_mask = (in_group < GROUP) & (row < rows)
    q_ptr = qkv_ptr + row * QKV + (kv_head * GROUP + in_group)[:, None] * HEAD_DIM
    new_k_ptr = qkv_ptr + row * QKV + (NUM_Q_HEADS + kv_head + tl.arange(0, 1))[:, None] * HEAD_DIM
    new_v_ptr = new_k_ptr + STRIDE_TOKEN + dims[None, :]
    row_mask = (tl.arange(0, 1) + row < rows)[:, None]
    slot_offset = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * STRIDE_TOKEN

    for layer in range(first_layer, last_layer):
        layer_ptr = addresses_ptr + layer * NUM_FIELDS
        k_ptr = kv_cache_ptr + tl.cast(layer, tl.int64) * stride_layer + kv_head * HEAD_DIM
        v_ptr = k_ptr + stride_kv

        if ALL or PHASE == 0:  # qkv
            weight_ptr = _address(layer_ptr, 1, dtype)
            weights = first_weights(weight_ptr, HIDDEN, QKV, HIDDEN_N, HIDDEN_K, False)
            if ALL:
                wait(counter_ptr, arrivals)
            product(
                stream_ptr,
                _address(layer_ptr, 0, dtype),
                weight_ptr,
                _address(layer_ptr, 2, dtype),
                qkv_ptr,
                weights,
                rows,
                eps,
                HIDDEN,
                QKV,
                ROWS,
                HIDDEN_N,
                HIDDEN_K,
                HIDDEN_PADDED,
                NORM=True,
                BIAS=ATTENTION_BIAS,
                GATED=False,
                ADD=False,
            )
            if ALL:
                arrive(counter_ptr)
                arrivals += num_programs

        if ALL or PHASE == 1:  # attention over a split of the context
            k = load_keys(
                k_ptr, table_ptr, start, cached_end, stride_block, BLOCK_SIZE, STRIDE_TOKEN, HEAD_DIM, TILE
            )
            v = load_keys(
                v_ptr, table_ptr, start, cached_end, stride_block, BLOCK_SIZE, STRIDE_TOKEN, HEAD_DIM, TILE
            )
            if ALL:
                wait(counter_ptr, arrivals)
            q_norm_ptr = _address(layer_ptr, 3, dtype)
            q = rotated(q_ptr, q_norm_ptr, group_mask[:, None], cos, sin, eps, HEAD_DIM, QK_NORM)
            acc, peak, total = attend_cached(
                q,
                k,
                v,
                k_ptr,
                v_ptr,
                table_ptr,
                start,
                cached_end,
                scale_log2,
                stride_block,
                HEADS,
                HEAD_DIM,
                BLOCK_SIZE,
                STRIDE_TOKEN,
                TILE,
                DOT_DTYPE,
            )
            if has_newest:
                k_norm_ptr = _address(layer_ptr, 4, dtype)
                new_k = rotated(new_k_ptr, k_norm_ptr, row_mask, cos, sin, eps, HEAD_DIM, QK_NORM)
                new_v = tl.load(new_v_ptr, cache_modifier=".cg")
                if slot >= 0:
                    at = slot_offset + dims[None, :]
                    tl.store(k_ptr + at, new_k.to(dtype))
                    tl.store(v_ptr + at, new_v)
                acc, peak, total = attend_one(q, new_k, new_v.to(tl.float32), acc, peak, total, scale_log2)
            if start < context_len:
                q_heads = row * NUM_Q_HEADS + kv_head * GROUP + in_group
                store_partials(
                    acc, peak, total, partial_ptr, lse_ptr, q_heads, group_mask, split, num_splits, HEAD_DIM
                )
            if ALL:
                arrive(counter_ptr)
                arrivals += num_programs

        if ALL or PHASE == 3:  # the weights of the phase after next: merging needs none
            o_ptr = _address(layer_ptr, 5, dtype)
            weights = first_weights(o_ptr, ALL_HEADS, HIDDEN, HEADS_N, HEADS_K, False)

        if ALL or PHASE == 2:  # the splits' outputs to those of whole heads
            if ALL:
                wait(counter_ptr, arrivals)
            merge_heads_of_rows(
                partial_ptr,
                lse_ptr,
                context_lens_ptr,
                heads_ptr,
                rows,
                num_splits,
                NUM_Q_HEADS,
                HEAD_DIM,
                BLOCK_SIZE,
                TILE,
                CHUNK,
            )
            if ALL:
                arrive(counter_ptr)
                arrivals += num_programs

        if ALL or PHASE == 3:  # o_proj onto the stream
            if ALL:
                wait(counter_ptr, arrivals)
            product(
                heads_ptr,
                None,
                o_ptr,
                _address(layer_ptr, 6, dtype),
                stream_ptr,
                weights,
                rows,
                eps,
                ALL_HEADS,
                HIDDEN,
                ROWS,
                HEADS_N,
                HEADS_K,
                HIDDEN_PADDED,
                NORM=False,
                BIAS=ATTENTION_BIAS,
                GATED=False,
                ADD=True,
            )
            if ALL:
                arrive(counter_ptr)
                arrivals += num_programs

        if ALL or PHASE == 4:  # silu(gate) * up
            weight_ptr = _address(layer_ptr, 8, dtype)
            weights = first_weights(weight_ptr, HIDDEN, 2 * INTERMEDIATE, HIDDEN_N, HIDDEN_K, True)
            if ALL:
                wait(counter_ptr, arrivals)
            product(
                stream_ptr,
                _address(layer_ptr, 7, dtype),
                weight_ptr,
                _address(layer_ptr, 9, dtype),
                gated_ptr,
                weights,
                rows,
                eps,
                HIDDEN,
                2 * INTERMEDIATE,
                ROWS,
                HIDDEN_N,
                HIDDEN_K,
                HIDDEN_PADDED,
                NORM=True,
                BIAS=MLP_BIAS,
                GATED=True,
                ADD=False,
            )
            if ALL:
                arrive(counter_ptr)
                arrivals += num_programs

        if ALL or PHASE == 5:  # down_proj onto the stream
            weight_ptr = _address(layer_ptr, 10, dtype)
            weights = first_weights(weight_ptr, INTERMEDIATE, HIDDEN, INTERMEDIATE_N, INTERMEDIATE_K, False)
            if ALL:
                wait(counter_ptr, arrivals)
            product(
                gated_ptr,
                None,
                weight_ptr,
                _address(layer_ptr, 11, dtype),
                stream_ptr,
                weights,
                rows,
                eps,
                INTERMEDIATE,
                HIDDEN,
                ROWS,
                INTERMEDIATE_N,
                INTERMEDIATE_K,
                HIDDEN_PADDED,
                NORM=False,
                BIAS=MLP_BIAS,
                GATED=False,
                ADD=True,
            )
            if ALL:
                arrive(counter_ptr)
                arrivals += num_programs

    if ALL:
        leave(counter_ptr, arrivals, num_programs)
