"""Prefill kernel variants for one A/B; not committed."""
import triton, triton.language as tl

@triton.jit
def _walk(acc, row_max, row_sum, s, block0, block1, q, positions, start, stop, end, k_ptr, v_ptr, table_ptr, scale_log2,
          skb, sks, svb, svs, MASKED: tl.constexpr, BLOCK_D: tl.constexpr, BS: tl.constexpr, BLOCK_N: tl.constexpr, DT: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        slots = (keys % BS).to(tl.int64)
        k = tl.load((k_ptr + (block1.to(tl.int64) * skb + slots * sks))[:, None] + dims[None, :])
        far = keys + 2 * BLOCK_N
        block1 = tl.load(table_ptr + far // BS, mask=far < end, other=0)
        s_next = tl.dot(q, tl.trans(k.to(DT)), input_precision="ieee")
        v_rows = (v_ptr + (block0.to(tl.int64) * svb + slots * svs))[:, None] + dims[None, :]
        if MASKED:
            v = tl.load(v_rows, mask=(keys < end)[:, None], other=0.0).to(DT)
            visible = (keys[None, :] <= positions[:, None]) & (keys < end)[None, :]
            s = tl.where(visible, s, float("-inf"))
        else:
            v = tl.load(v_rows).to(DT)
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
        rescale = tl.exp2(row_max - new_max)
        probs = tl.exp2(s * scale_log2 - new_max[:, None])
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        acc = tl.dot(probs.to(DT), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
        s = s_next
        nearer = keys + BLOCK_N
        block0 = tl.load(table_ptr + nearer // BS, mask=nearer < end, other=0)
    return acc, row_max, row_sum, s, block0, block1

@triton.jit
def _walk_flat(acc, row_max, row_sum, block0, q, positions, start, stop, end, k_ptr, v_ptr, table_ptr, scale_log2,
          skb, sks, svb, svs, MASKED: tl.constexpr, BLOCK_D: tl.constexpr, BS: tl.constexpr, BLOCK_N: tl.constexpr, DT: tl.constexpr):
    """As the kernel is, but table entries carried one tile ahead."""
    dims = tl.arange(0, BLOCK_D)
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        slots = (keys % BS).to(tl.int64)
        block = block0.to(tl.int64)
        far = keys + BLOCK_N
        block0 = tl.load(table_ptr + far // BS, mask=far < end, other=0)
        k = tl.load((k_ptr + (block * skb + slots * sks))[:, None] + dims[None, :])
        s = tl.dot(q, tl.trans(k.to(DT)), input_precision="ieee")
        v_rows = (v_ptr + (block * svb + slots * svs))[:, None] + dims[None, :]
        if MASKED:
            v = tl.load(v_rows, mask=(keys < end)[:, None], other=0.0).to(DT)
            visible = (keys[None, :] <= positions[:, None]) & (keys < end)[None, :]
            s = tl.where(visible, s, float("-inf"))
        else:
            v = tl.load(v_rows).to(DT)
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
        rescale = tl.exp2(row_max - new_max)
        probs = tl.exp2(s * scale_log2 - new_max[:, None])
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        acc = tl.dot(probs.to(DT), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum, block0

@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["block_table_ptr", "context_lens_ptr", "query_start_loc_ptr"])
def _kernel(q_ptr, k_ptr, v_ptr, out_ptr, block_table_ptr, context_lens_ptr, query_start_loc_ptr, scale_log2,
    stride_q_token, stride_q_head, skb, sks, skh, svb, svs, svh, stride_out_token, stride_out_head, stride_table,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DT: tl.constexpr, PIPE: tl.constexpr):
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
    kv_head = tl.program_id(1).to(tl.int64)
    batch_row = tl.program_id(2)
    chunk_start = tl.load(query_start_loc_ptr + batch_row)
    chunk_len = tl.load(query_start_loc_ptr + batch_row + 1) - chunk_start
    if first_token >= chunk_len:
        return
    first_position = tl.load(context_lens_ptr + batch_row) - chunk_len + first_token
    num_tokens = tl.minimum(chunk_len - first_token, TOKENS)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = (chunk_start + first_token + rows // GROUP).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    is_query = (rows // GROUP < num_tokens)[:, None]
    q = tl.load((q_ptr + (tokens * stride_q_token + heads * stride_q_head))[:, None] + dims[None, :], mask=is_query, other=0.0).to(DT)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    positions = first_position + rows // GROUP
    k_ptr += kv_head * skh
    v_ptr += kv_head * svh
    table_ptr = block_table_ptr + batch_row.to(tl.int64) * stride_table
    end = first_position + num_tokens
    shared_end = (first_position + 1) // BLOCK_N * BLOCK_N
    near = tl.arange(0, BLOCK_N)
    block0 = tl.load(table_ptr + near // BS, mask=near < end, other=0)
    if PIPE:
        block1 = tl.load(table_ptr + (near + BLOCK_N) // BS, mask=near + BLOCK_N < end, other=0)
        k = tl.load((k_ptr + (block0.to(tl.int64) * skb + (near % BS) * sks))[:, None] + dims[None, :])
        s = tl.dot(q, tl.trans(k.to(DT)), input_precision="ieee")
        acc, row_max, row_sum, s, block0, block1 = _walk(acc, row_max, row_sum, s, block0, block1, q, positions, 0, shared_end, end, k_ptr, v_ptr, table_ptr, scale_log2, skb, sks, svb, svs, False, BLOCK_D, BS, BLOCK_N, DT)
        acc, row_max, row_sum, s, block0, block1 = _walk(acc, row_max, row_sum, s, block0, block1, q, positions, shared_end, end, end, k_ptr, v_ptr, table_ptr, scale_log2, skb, sks, svb, svs, True, BLOCK_D, BS, BLOCK_N, DT)
    else:
        acc, row_max, row_sum, block0 = _walk_flat(acc, row_max, row_sum, block0, q, positions, 0, shared_end, end, k_ptr, v_ptr, table_ptr, scale_log2, skb, sks, svb, svs, False, BLOCK_D, BS, BLOCK_N, DT)
        acc, row_max, row_sum, block0 = _walk_flat(acc, row_max, row_sum, block0, q, positions, shared_end, end, end, k_ptr, v_ptr, table_ptr, scale_log2, skb, sks, svb, svs, True, BLOCK_D, BS, BLOCK_N, DT)
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store((out_ptr + (tokens * stride_out_token + heads * stride_out_head))[:, None] + dims[None, :], out, mask=is_query)
