"""Prefill attention for Hopper in Gluon with specialised warps: one warp copies keys, one values (TMA), two warpgroups of
64 query rows each attend, so that one's softmax can run beside the other's products, as in FlashAttention-3 (Shah et
al., 2024); each warpgroup's own product of the tile before runs beside its softmax too.

prefill_overlap.py's tiles, walk and masks. A tile of keys arrives as boxes of BOX slots by 64 dims, which lie in shared
memory one after another as the columns' halves of the whole tile do. Slots past the tile's last token may hold NaN: the
last tile's are zeroed in V by its warp before the others see it; in K the scores' mask hides them. So far seen by the
compiler (3.6.0 and 3.7.1, sm_90a: no spills, nothing serialised, the exponentials beside a product in flight) and by
prefill_ws_on_numpy.py alone: no GPU has run it.
"""

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2_E = 1.4426950408889634
BLOCK_M, BLOCK_N = 128, 128
ORDER, PINGPONG = "values", True  # ORDER: which product runs beside a warpgroup's own softmax, see _consume
GL_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # of one partition; Triton 3.6, 3.7


@gluon.jit
def _wait_full(full, tile, STAGES: gl.constexpr):
    mbarrier.wait(full.index(tile % STAGES), (tile // STAGES) & 1)


@gluon.jit
def _produce(
    desc, boxes, atoms, full, empty, clean, table_ptr, column, end, num_tiles, VALUES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
):
    BOXES: gl.constexpr = BLOCK_N // BOX
    HALVES: gl.constexpr = HEAD_DIM // 64
    last_box = (end - 1) // BOX * BOX  # boxes after it are copies of it: the table past the end is not read
    for tile in range(num_tiles):
        stage = tile % STAGES
        rows = ()
        for i in gl.static_range(BOXES):
            key = gl.minimum(tile * BLOCK_N + i * BOX, last_box)
            rows = rows + (gl.load(table_ptr + key // BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE,)
        mbarrier.wait(empty.index(stage), (tile // STAGES + 1) & 1)
        mbarrier.expect(full.index(stage), BLOCK_N * HEAD_DIM * 2)
        for i in gl.static_range(BOXES):
            for half in gl.static_range(HALVES):
                box = boxes.index((stage * HALVES + half) * BOXES + i)
                tma.async_copy_global_to_shared(desc, [rows[i], column + half * 64], full.index(stage), box)
    if VALUES:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
        last = num_tiles - 1
        _wait_full(full, last, STAGES)
        slots = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
        for i in range((end - last * BLOCK_N) // 8, BLOCK_N // 8):
            written = gl.expand_dims(last * BLOCK_N + i * 8 + slots < end, 1)
            for half in gl.static_range(HALVES):
                atom = atoms.index(((last % STAGES) * HALVES + half) * (BLOCK_N // 8) + i)
                values = atom.load(layout)
                atom.store(gl.where(written, values, gl.zeros_like(values)))
        fence_async_shared()
        _meet()
        mbarrier.arrive(clean)


@gluon.jit
def _hold(x):
    """x, which is never negative, in such a way that nothing after this begins before x is known.

    ptxas moves the wait for products in flight ahead of arithmetic that does not need them, but not across a branch.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $2, 0f00000000; setp.lt.or.f32 p, $3, 0f00000000, p; again: "
        "@p nanosleep.u32 32; @p bra.uni again; mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=f,=f,f,f", [x], dtype=gl.float32, is_pure=False, pack=2,
    )


@gluon.jit
def _take_turn(turns, turn, WHO: gl.constexpr, PINGPONG: gl.constexpr):
    if PINGPONG:
        mbarrier.wait(turns.index(WHO), (turn + 1 - WHO) & 1)  # the first warpgroup's first turn is there at once


@gluon.jit
def _pass_turn(turns, WHO: gl.constexpr, PINGPONG: gl.constexpr):
    if PINGPONG:
        _meet()  # no warp may still wait for this turn when the next one comes
        mbarrier.arrive(turns.index(1 - WHO))


@gluon.jit
def _hide(s, first, shared_end, positions, BLOCK_N: gl.constexpr, mma_s: gl.constexpr):
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


@gluon.jit
def _consume(
    q_smem, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean, turns, q_ptr, out_ptr, scale_log2,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, first_query, num_tokens, first_position,
    first_head, num_tiles, WHO: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, ORDER: gl.constexpr, PINGPONG: gl.constexpr,
):
    """Rows 64 * WHO to 64 * WHO + 63 of the tile.

    ORDER "values": the tile before's values are multiplied beside this tile's softmax (FlashAttention-3's order).
    "keys": the next tile's scores are (prefill_overlap.py's). "none": neither, but the other warpgroup's may be.
    """
    ROWS: gl.constexpr = 64
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma_o, 2)
    dtype: gl.constexpr = q_ptr.dtype.element_ty

    rows = WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, plain))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, plain))
    q_rows = q_ptr + (first_query + rows // GROUP).to(gl.int64) * stride_q_token + (first_head + rows % GROUP) * stride_q_head
    is_query = gl.expand_dims(rows // GROUP < num_tokens, 1)
    q = gl.load(gl.expand_dims(q_rows, 1) + gl.expand_dims(dims, 0), mask=is_query, other=0.0)
    q = gl.where(scale_log2 < 0, -q, q)  # the largest score is scaled after the search for it
    scale_log2 = gl.abs(scale_log2)
    q_smem.store(q)
    fence_async_shared()
    _meet()

    positions = first_position + (WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma_s))) // GROUP
    shared_end = (first_position + WHO * ROWS // GROUP + 1) // BLOCK_N * BLOCK_N
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=mma_s)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, mma_s))
    row_sum = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, mma_s))
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=mma_o)

    _wait_full(k_full, 0, STAGES)
    _take_turn(turns, 0, WHO, PINGPONG)
    s = warpgroup_mma(q_smem, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    _pass_turn(turns, WHO, PINGPONG)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    mbarrier.arrive(k_empty.index(0))
    last = num_tiles - 1
    if ORDER == "values":
        s = _hide(s, 0, shared_end, positions, BLOCK_N, mma_s)
        p, rescale, row_max, row_sum = _weigh(s, row_max, row_sum, scale_log2, dtype, operand)
        for tile in range(1, num_tiles):
            stage, stage_before = tile % STAGES, (tile - 1) % STAGES
            _wait_full(k_full, tile, STAGES)
            _take_turn(turns, tile, WHO, PINGPONG)
            s_next = warpgroup_mma(q_smem, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            _wait_full(v_full, tile - 1, STAGES)
            acc_next = warpgroup_mma(p, v_tiles.index(stage_before), acc, is_async=True)
            _pass_turn(turns, WHO, PINGPONG)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s_next,))
            mbarrier.arrive(k_empty.index(stage))
            s = _hide(s, tile * BLOCK_N, shared_end, positions, BLOCK_N, mma_s)
            p_next, rescale, row_max, row_sum = _weigh(s, row_max, row_sum, scale_log2, dtype, operand)
            row_sum = _hold(row_sum)
            acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next, p))
            mbarrier.arrive(v_empty.index(stage_before))
            acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, mma_o)), 1)
            p = p_next
    else:
        for tile in range(0, last):
            stage, stage_next = tile % STAGES, (tile + 1) % STAGES
            if ORDER == "keys":
                _wait_full(k_full, tile + 1, STAGES)
                _take_turn(turns, tile + 1, WHO, PINGPONG)
                s_next = warpgroup_mma(q_smem, k_tiles.index(stage_next).permute((1, 0)), zeros, use_acc=False, is_async=True)
                _pass_turn(turns, WHO, PINGPONG)
            s = _hide(s, tile * BLOCK_N, shared_end, positions, BLOCK_N, mma_s)
            p, rescale, row_max, row_sum = _weigh(s, row_max, row_sum, scale_log2, dtype, operand)
            acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, mma_o)), 1)
            if ORDER == "none":
                _wait_full(k_full, tile + 1, STAGES)
                _wait_full(v_full, tile, STAGES)
                _take_turn(turns, tile + 1, WHO, PINGPONG)
                acc_next = warpgroup_mma(p, v_tiles.index(stage), acc, is_async=True)
                s_next = warpgroup_mma(q_smem, k_tiles.index(stage_next).permute((1, 0)), zeros, use_acc=False, is_async=True)
                _pass_turn(turns, WHO, PINGPONG)
            else:
                _wait_full(v_full, tile, STAGES)
                acc_next = warpgroup_mma(p, v_tiles.index(stage), acc, is_async=True)
            s, acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(s_next, acc_next, p))
            mbarrier.arrive(k_empty.index(stage_next))
            mbarrier.arrive(v_empty.index(stage))
        s = _hide(s, last * BLOCK_N, shared_end, positions, BLOCK_N, mma_s)
        p, rescale, row_max, row_sum = _weigh(s, row_max, row_sum, scale_log2, dtype, operand)
        acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, mma_o)), 1)
    mbarrier.wait(v_clean, 0)
    acc = warpgroup_mma(p, v_tiles.index(last % STAGES), acc)

    out = acc * gl.expand_dims(gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, mma_o)), 1)
    q_smem.store(out.to(dtype))  # rows as they lie in memory, so that a warp writes whole lines
    _meet()
    out = q_smem.load(plain)
    rows = WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, plain))
    out_rows = out_ptr + (first_query + rows // GROUP).to(gl.int64) * stride_out_token + (first_head + rows % GROUP) * stride_out_head
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, plain))
    is_query = gl.expand_dims(rows // GROUP < num_tokens, 1)
    gl.store(gl.expand_dims(out_rows, 1) + gl.expand_dims(dims, 0), out, mask=is_query)


@gluon.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["block_table_ptr", "context_lens_ptr", "query_start_loc_ptr"])
def prefill_ws_kernel(
    q_ptr, k_desc, v_desc, out_ptr, block_table_ptr, context_lens_ptr, query_start_loc_ptr, scale_log2,
    stride_q_token, stride_q_head, stride_k_head, stride_v_head, stride_out_token, stride_out_head, stride_table,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, ORDER: gl.constexpr, PINGPONG: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):
    TOKENS: gl.constexpr = BLOCK_M // GROUP
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    first_token = (gl.num_programs(0) - 1 - gl.program_id(0)) * TOKENS
    kv_head = gl.program_id(1)
    batch_row = gl.program_id(2)
    chunk_start = gl.load(query_start_loc_ptr + batch_row)
    chunk_len = gl.load(query_start_loc_ptr + batch_row + 1) - chunk_start
    context_len = gl.load(context_lens_ptr + batch_row)
    if first_token >= chunk_len:
        return
    first_position = context_len - chunk_len + first_token
    num_tokens = gl.minimum(chunk_len - first_token, TOKENS)
    end = first_position + num_tokens
    num_tiles = (end + BLOCK_N - 1) // BLOCK_N
    table_ptr = block_table_ptr + batch_row.to(gl.int64) * stride_table

    BOXES: gl.constexpr = STAGES * (HEAD_DIM // 64) * (BLOCK_N // BOX)
    k_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, 64], swizzled)
    v_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, 64], swizzled)
    k_tiles = k_boxes._reinterpret(dtype, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
    v_tiles = v_boxes._reinterpret(dtype, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
    v_atoms = v_boxes._reinterpret(dtype, [BOXES * BOX // 8, 8, 64], swizzled)
    q_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, HEAD_DIM], swizzled)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_clean = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    mbarrier.init(v_clean, count=1)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()

    first_query = chunk_start + first_token
    first_head = kv_head.to(gl.int64) * GROUP
    gl.warp_specialize(
        [
            (_consume, (q_smem.index(0), k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean, turns, q_ptr,
                out_ptr, scale_log2, stride_q_token, stride_q_head, stride_out_token, stride_out_head, first_query,
                num_tokens, first_position, first_head, num_tiles, 0, GROUP, HEAD_DIM, BLOCK_N, STAGES, ORDER, PINGPONG)),
            (_consume, (q_smem.index(1), k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean, turns, q_ptr,
                out_ptr, scale_log2, stride_q_token, stride_q_head, stride_out_token, stride_out_head, first_query,
                num_tokens, first_position, first_head, num_tiles, 1, GROUP, HEAD_DIM, BLOCK_N, STAGES, ORDER, PINGPONG)),
            (_produce, (k_desc, k_boxes, v_atoms, k_full, k_empty, v_clean, table_ptr, kv_head * stride_k_head, end,
                num_tiles, False, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BOX, STAGES)),
            (_produce, (v_desc, v_boxes, v_atoms, v_full, v_empty, v_clean, table_ptr, kv_head * stride_v_head, end,
                num_tiles, True, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BOX, STAGES)),
        ],
        [4, 1, 1],
        [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
    )


def unsupported(q, k_cache, v_cache):
    """Why the kernel cannot take these tensors, or None: then the caller has another."""
    head_dim, block_size = q.shape[2], k_cache.shape[1]
    if torch.cuda.get_device_capability(q.device) != (9, 0):
        return "not sm_90"
    if q.dtype not in GL_DTYPES or k_cache.dtype != q.dtype or v_cache.dtype != q.dtype:
        return "not one half-precision dtype"
    if head_dim not in (64, 128):
        return f"head_dim {head_dim} is neither 64 nor 128"
    if q.shape[1] // k_cache.shape[2] > BLOCK_M:
        return f"a group above {BLOCK_M}"
    if block_size % 8:
        return f"block_size {block_size} is no multiple of 8"
    for cache in (k_cache, v_cache):
        block, slot, head, dim = cache.stride()
        if dim != 1 or block != block_size * slot or slot % 8 or head % 8 or cache.data_ptr() % 16:
            return f"a cache of strides {cache.stride()}"
        if head * (cache.shape[2] - 1) + head_dim > slot:
            return f"heads outside a slot: strides {cache.stride()}"
    return None


def prefill_ws(
    q, k_cache, v_cache, block_table, context_lens, query_start_loc, max_query_len, scale=None, out=None, stages=2,
    order=ORDER, pingpong=PINGPONG, consumer_regs=232, producer_regs=40,
):
    """kernels/prefill/contract.py's call; ValueError for tensors of a kind that the kernel does not take."""
    if (reason := unsupported(q, k_cache, v_cache)) is not None:
        raise ValueError(reason)
    out = torch.empty_like(q) if out is None else out
    batch, (num_q_heads, head_dim) = block_table.shape[0], q.shape[1:]
    num_blocks, block_size, num_kv_heads = k_cache.shape[:3]
    if batch == 0 or max_query_len == 0:
        return out
    group = num_q_heads // num_kv_heads
    box = math.gcd(block_size, BLOCK_N)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    descriptors = [
        TensorDescriptor(
            cache, [num_blocks * block_size, cache.stride(2) * (num_kv_heads - 1) + head_dim], [cache.stride(1), 1],
            [box, 64], layout,
        )
        for cache in (k_cache, v_cache)
    ]
    scale = head_dim**-0.5 if scale is None else scale
    prefill_ws_kernel[(triton.cdiv(max_query_len, BLOCK_M // group), num_kv_heads, batch)](
        q, *descriptors, out, block_table, context_lens, query_start_loc, scale * LOG2_E, *q.stride()[:2],
        k_cache.stride(2), v_cache.stride(2), *out.stride()[:2], block_table.stride(0), GROUP=group,
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BOX=box, STAGES=stages,
        ORDER=order, PINGPONG=pingpong, CONSUMER_REGS=consumer_regs, PRODUCER_REGS=producer_regs, num_warps=4,
    )
    return out
