"""Prefill attention for Hopper in Gluon: the tensor cores compute the next tile's scores during this tile's softmax.

kernels/prefill/triton_flash.py's tiles and walk; Triton's own pipeliner waits for all products at once, so nothing
overlaps there. FlashAttention-3 (Shah et al., 2024) overlaps within a warpgroup too, in another order. So far seen by
the compiler alone (3.6.0 and 3.7.1, sm_90a: 254 registers, no spills, the exponentials between the two products):
prefill_overlap_ab.py is to say whether it is right and faster. head_dim is a power of two from 64 to 256, the dtype half precision.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _entries(table_ptr, first, end, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    keys = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    return gl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)


@gluon.jit
def _ask(
    smem, ptr, entries, first, end, stride_block, stride_slot, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr, layout: gl.constexpr,
):
    keys = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    rows = entries.to(gl.int64) * stride_block + (keys % BLOCK_SIZE).to(gl.int64) * stride_slot
    inside = gl.expand_dims(keys < end, 1)
    async_copy.async_copy_global_to_shared(
        smem, gl.expand_dims(ptr + rows, 1) + gl.expand_dims(dims, 0), mask=inside
    )
    async_copy.commit_group()


@gluon.jit
def _hide(s, first, end, shared_end, positions, BLOCK_N: gl.constexpr, mma_s: gl.constexpr):
    if first + BLOCK_N > shared_end:
        keys = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, mma_s))
        visible = gl.expand_dims(keys, 0) <= gl.expand_dims(positions, 1)
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.jit
def _weigh(s, row_max, row_sum, scale_log2, dtype: gl.constexpr, operand: gl.constexpr):
    """Online softmax: (weights as an operand, factor of what came before, the new maximum and sum)."""
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    rescale = gl.exp2(row_max - new_max)
    probs = gl.exp2(s * scale_log2 - gl.expand_dims(new_max, 1))
    row_sum = row_sum * rescale + gl.sum(probs, 1)
    return gl.convert_layout(probs.to(dtype), operand), rescale, new_max, row_sum


@gluon.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["block_table_ptr", "context_lens_ptr", "query_start_loc_ptr"])
def prefill_overlap(
    q_ptr, k_ptr, v_ptr, out_ptr, block_table_ptr, context_lens_ptr, query_start_loc_ptr, scale_log2,
    stride_q_token, stride_q_head, stride_k_block, stride_k_slot, stride_k_head, stride_v_block, stride_v_slot,
    stride_v_head, stride_out_token, stride_out_head, stride_table,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, num_warps: gl.constexpr,
):
    TOKENS: gl.constexpr = BLOCK_M // GROUP
    load: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD_DIM, HEAD_DIM // 8], [num_warps, 1], [1, 0])
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, HEAD_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma_o, 2)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    shared_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, HEAD_DIM], dtype)
    shared_kv: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)

    first_token = (gl.num_programs(0) - 1 - gl.program_id(0)) * TOKENS
    kv_head = gl.program_id(1).to(gl.int64)
    batch_row = gl.program_id(2)
    chunk_start = gl.load(query_start_loc_ptr + batch_row)
    chunk_len = gl.load(query_start_loc_ptr + batch_row + 1) - chunk_start
    if first_token >= chunk_len:
        return
    first_position = gl.load(context_lens_ptr + batch_row) - chunk_len + first_token
    num_tokens = gl.minimum(chunk_len - first_token, TOKENS)
    end = first_position + num_tokens
    shared_end = (first_position + 1) // BLOCK_N * BLOCK_N
    table_ptr = block_table_ptr + batch_row.to(gl.int64) * stride_table
    k_ptr += kv_head * stride_k_head
    v_ptr += kv_head * stride_v_head

    k_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_N, HEAD_DIM], shared_kv)
    v_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_N, HEAD_DIM], shared_kv)
    entries = _entries(table_ptr, 0, end, BLOCK_SIZE, BLOCK_N, load)
    _ask(k_smem.index(0), k_ptr, entries, 0, end, stride_k_block, stride_k_slot, BLOCK_SIZE, BLOCK_N, HEAD_DIM, load)
    _ask(v_smem.index(0), v_ptr, entries, 0, end, stride_v_block, stride_v_slot, BLOCK_SIZE, BLOCK_N, HEAD_DIM, load)
    entries = _entries(table_ptr, BLOCK_N, end, BLOCK_SIZE, BLOCK_N, load)
    _ask(
        k_smem.index(1), k_ptr, entries, BLOCK_N, end, stride_k_block, stride_k_slot, BLOCK_SIZE, BLOCK_N, HEAD_DIM, load
    )

    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, load))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, load))
    tokens = (chunk_start + first_token + rows // GROUP).to(gl.int64)
    q_rows = q_ptr + tokens * stride_q_token + (kv_head * GROUP + rows % GROUP) * stride_q_head
    is_query = gl.expand_dims(rows // GROUP < num_tokens, 1)
    q = gl.load(gl.expand_dims(q_rows, 1) + gl.expand_dims(dims, 0), mask=is_query, other=0.0)
    q = gl.where(scale_log2 < 0, -q, q)  # the largest score is scaled after the search for it
    scale_log2 = gl.abs(scale_log2)
    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, HEAD_DIM], shared_q, q)

    positions = first_position + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, mma_s)) // GROUP
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=mma_s)
    async_copy.wait_group(2)
    fence_async_shared()
    s = warpgroup_mma(q_smem, k_smem.index(0).permute((1, 0)), zeros, use_acc=False)
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=gl.SliceLayout(1, mma_s))
    row_sum = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, mma_s))
    acc = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, layout=mma_o)
    turn = 0
    for first in range(0, end - BLOCK_N, BLOCK_N):
        this, other = turn % 2, (turn + 1) % 2
        async_copy.wait_group(0)  # this tile's values and the next one's keys
        fence_async_shared()
        s_next = warpgroup_mma(q_smem, k_smem.index(other).permute((1, 0)), zeros, use_acc=False, is_async=True)
        near, far = first + BLOCK_N, first + 2 * BLOCK_N
        _ask(v_smem.index(other), v_ptr, entries, near, end, stride_v_block, stride_v_slot, BLOCK_SIZE, BLOCK_N, HEAD_DIM, load)
        entries = _entries(table_ptr, far, end, BLOCK_SIZE, BLOCK_N, load)
        _ask(k_smem.index(this), k_ptr, entries, far, end, stride_k_block, stride_k_slot, BLOCK_SIZE, BLOCK_N, HEAD_DIM, load)
        s = _hide(s, first, end, shared_end, positions, BLOCK_N, mma_s)
        p, rescale, row_max, row_sum = _weigh(s, row_max, row_sum, scale_log2, dtype, operand)
        acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, mma_o)), 1)
        acc_next = warpgroup_mma(p, v_smem.index(this), acc, is_async=True)
        s, acc, _ = warpgroup_mma_wait(num_outstanding=0, deps=(s_next, acc_next, p))
        turn += 1
    last = turn * BLOCK_N
    s = _hide(s, last, end, shared_end, positions, BLOCK_N, mma_s)
    p, rescale, row_max, row_sum = _weigh(s, row_max, row_sum, scale_log2, dtype, operand)
    acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, mma_o)), 1)
    async_copy.wait_group(0)
    fence_async_shared()
    acc = warpgroup_mma(p, v_smem.index(turn % 2), acc)
    out = acc / gl.expand_dims(gl.convert_layout(row_sum, gl.SliceLayout(1, mma_o)), 1)
    out_rows_at = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, mma_o))
    out_dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, mma_o))
    out_tokens = (chunk_start + first_token + out_rows_at // GROUP).to(gl.int64)
    out_rows = out_ptr + out_tokens * stride_out_token + (kv_head * GROUP + out_rows_at % GROUP) * stride_out_head
    gl.store(
        gl.expand_dims(out_rows, 1) + gl.expand_dims(out_dims, 0),
        out.to(out_ptr.dtype.element_ty),
        mask=gl.expand_dims(out_rows_at // GROUP < num_tokens, 1),
    )
