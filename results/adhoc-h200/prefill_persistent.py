"""kernels/prefill/warp_specialized.py with a persistent grid: one program an SM, each with many tiles of queries (items).

What a program's beginning and end cost there is hidden here. The copying warps run ahead over all items of a program
(phases count its tiles from first to last). A warpgroup multiplies an item's last weights and values beside the next
item's first scores and their softmax, as within an item, and stores the output while the other one attends; the next
item's queries come (cp.async) while this one's keys are walked, to a second buffer, which is then the output's.

Items are numbered row by row, so that programs at work share a row's keys in the L2, heads side by side, tiles of
queries from last to first in the last row, first to last in the one before, and so on: the work of an item changes
slowly with its number. Numbers are dealt to programs to and fro. Rows without queries have no numbers.

Seen by the compiler and prefill_persistent_on_numpy.py alone: no GPU has run it.
"""

import math

import torch
from torch import Tensor

from kernels.prefill.contract import check_inputs
from kernels.prefill.triton_flash import LOG2_E, positive_scale
from kernels.prefill.warp_specialized import (
    BLOCK_M, BLOCK_N, CONSUMER_REGISTERS, NUM_STAGES, PRODUCER_REGISTERS, _descriptor, _hide, _hold, _pass_turn, _take_turn, _takes, _wait_full, _weigh
)
from kernels.triton_support import cdiv, gl, gluon, hopper, on_device
from triton.experimental.gluon.language.nvidia.ampere import async_copy

fence_async_shared, mbarrier, tma = hopper.fence_async_shared, hopper.mbarrier, hopper.tma
warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
_meet = hopper.meet


@gluon.jit
def _next_number(number, turn, step, SNAKE: gl.constexpr):
    """Of a program's item after `number`: they are dealt from the first program to the last, then back.

    step: as many numbers as there are programs; twice as many for the way there and back.
    """
    if SNAKE:
        return turn * step - 1 - number
    else:
        return number + step


@gluon.jit
def _seek(number, row, first, locs_ptr, batch, TOKENS: gl.constexpr, KV_HEADS: gl.constexpr):
    """The row of an item and the number of the row's first one, searched from an earlier row on; `batch` after the last.

    With where the row's chunk starts and stops.
    """
    start = gl.load(locs_ptr + row)
    stop = gl.load(locs_ptr + row + 1)
    items = (stop - start + TOKENS - 1) // TOKENS * KV_HEADS
    while (row < batch) & (number >= first + items):
        first += items
        row += 1
        start = stop
        stop = gl.load(locs_ptr + gl.minimum(row + 1, batch))
        items = (stop - start + TOKENS - 1) // TOKENS * KV_HEADS
    return row, first, start, stop


@gluon.jit
def _item(
    number,
    row,
    first,
    start,
    stop,
    lens_ptr,
    batch,
    TOKENS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ZIGZAG: gl.constexpr,
):
    """(its KV head, first token, tokens, the first token's position, its keys, their tiles); no tokens after the last."""
    context_len = gl.load(lens_ptr + row, mask=row < batch, other=0)
    chunk_len = stop - start
    level = (number - first) // KV_HEADS
    kv_head = (number - first) % KV_HEADS
    tile = (chunk_len + TOKENS - 1) // TOKENS - 1 - level
    if ZIGZAG:
        tile += ((batch + row + 1) & 1) * (level - tile)
    num_tokens = gl.minimum(chunk_len - tile * TOKENS, TOKENS)
    first_position = context_len - chunk_len + tile * TOKENS
    end = first_position + num_tokens
    return kv_head, start + tile * TOKENS, num_tokens, first_position, end, (end + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def _copy_tiles(
    desc,
    boxes,
    atoms,
    full,
    empty,
    clean,
    table_ptr,
    lens_ptr,
    locs_ptr,
    stride_table,
    block_rows,
    stride_head,
    batch,
    place,
    step,
    row,
    first,
    start,
    stop,
    VALUES: gl.constexpr,
    KV_HEADS: gl.constexpr,
    TOKENS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    ZIGZAG: gl.constexpr,
    SNAKE: gl.constexpr,
):
    """The warp of keys, or of values: `clean` tells that those of an item's last tile past `end` are zero."""
    BOXES: gl.constexpr = BLOCK_N // BOX
    HALVES: gl.constexpr = HEAD_DIM // 64
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    turn, number = 0, first + place
    done = 0  # tiles of the items before
    while row < batch:
        kv_head, _token, _tokens, _position, end, num_tiles = _item(
            number, row, first, start, stop, lens_ptr, batch, TOKENS, KV_HEADS, BLOCK_N, ZIGZAG
        )
        row_ptr = table_ptr + row.to(gl.int64) * stride_table
        column = kv_head * stride_head
        last_box = (end - 1) // BOX * BOX
        for tile in range(num_tiles):
            stage = (done + tile) % STAGES
            rows = ()
            for i in gl.static_range(BOXES):
                key = gl.minimum(tile * BLOCK_N + i * BOX, last_box)
                rows = rows + (gl.load(row_ptr + key // BLOCK_SIZE) * block_rows + key % BLOCK_SIZE,)  # type: ignore[assignment]  # noqa: RUF005
            mbarrier.wait(empty.index(stage), ((done + tile) // STAGES + 1) & 1)
            mbarrier.expect(full.index(stage), BLOCK_N * HEAD_DIM * 2)
            for i in gl.static_range(BOXES):
                for half in gl.static_range(HALVES):
                    box = boxes.index((stage * HALVES + half) * BOXES + i)
                    tma.async_copy_global_to_shared(desc, [rows[i], column + half * 64], full.index(stage), box)
            if VALUES:
                if tile + 1 < num_tiles:
                    mbarrier.arrive(clean.index(stage))  # its phases are those of `full`
        done += num_tiles
        if VALUES:
            last = num_tiles - 1
            stage_last = (done - 1) % STAGES
            _wait_full(full, done - 1, STAGES)
            slots = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
            for i in range((end - last * BLOCK_N) // 8, BLOCK_N // 8):
                written = gl.expand_dims(last * BLOCK_N + i * 8 + slots < end, 1)
                for half in gl.static_range(HALVES):
                    atom = atoms.index((stage_last * HALVES + half) * (BLOCK_N // 8) + i)
                    values = atom.load(layout)
                    atom.store(gl.where(written, values, gl.zeros_like(values)))
            fence_async_shared()
            _meet()
            mbarrier.arrive(clean.index(stage_last))
        turn += 1
        number = _next_number(number, turn, step, SNAKE)
        row, first, start, stop = _seek(number, row, first, locs_ptr, batch, TOKENS, KV_HEADS)


@gluon.jit
def _rows(tile_ptr, stride_token, stride_head, token, kv_head, WHO: gl.constexpr, GROUP: gl.constexpr, WIDE: gl.constexpr, plain: gl.constexpr):
    """Pointers to the first dims of a warpgroup's rows."""
    rows = WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, plain))
    tokens, heads = token + rows // GROUP, kv_head * GROUP + rows % GROUP
    if WIDE:
        tokens = tokens.to(gl.int64)
    return gl.expand_dims(tile_ptr + tokens * stride_token + heads * stride_head, 1)


@gluon.jit
def _is_query(num_tokens, WHO: gl.constexpr, GROUP: gl.constexpr, plain: gl.constexpr):
    rows = WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, plain))
    return gl.expand_dims(rows // GROUP < num_tokens, 1)


@gluon.jit
def _ask_queries(smem, pointers, is_query, EARLY: gl.constexpr):
    if EARLY:
        async_copy.async_copy_global_to_shared(smem, pointers, mask=is_query)
        async_copy.commit_group()
    else:
        smem.store(gl.load(pointers, mask=is_query, other=0.0))


@gluon.jit
def _await_queries(EARLY: gl.constexpr):
    if EARLY:
        async_copy.wait_group(0)
    fence_async_shared()
    _meet()


@gluon.jit
def _attend(
    q_smem,
    k_tiles,
    v_tiles,
    k_full,
    k_empty,
    v_full,
    v_empty,
    v_clean,
    turns,
    q_ptr,
    out_ptr,
    lens_ptr,
    locs_ptr,
    scale_log2,
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
    batch,
    place,
    step,
    row,
    first,
    start,
    stop,
    WHO: gl.constexpr,
    KV_HEADS: gl.constexpr,
    TOKENS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    ZIGZAG: gl.constexpr,
    SNAKE: gl.constexpr,
    EARLY: gl.constexpr,
    WIDE: gl.constexpr,
):
    """A warpgroup: rows 64 * WHO to 64 * WHO + 63 of each item. Tiles are counted over all of them, and are its turns."""
    ROWS: gl.constexpr = 64
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma_o, 2)
    dtype: gl.constexpr = q_ptr.dtype.element_ty

    dims = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, plain)), 0)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=mma_s)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=mma_o)
    no_max = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, mma_s))
    no_sum = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, mma_s))

    turn, number = 0, first + place
    kv_head, token, num_tokens, position, _end, num_tiles = _item(
        number, row, first, start, stop, lens_ptr, batch, TOKENS, KV_HEADS, BLOCK_N, ZIGZAG
    )
    q_rows = _rows(q_ptr, stride_q_token, stride_q_head, token, kv_head, WHO, GROUP, WIDE, plain)
    _ask_queries(q_smem.index(0), q_rows + dims, _is_query(num_tokens, WHO, GROUP, plain), EARLY)
    _await_queries(EARLY)
    _wait_full(k_full, 0, STAGES)
    _take_turn(turns, 0, WHO)
    s = warpgroup_mma(q_smem.index(0), k_tiles.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    _pass_turn(turns, WHO)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    mbarrier.arrive(k_empty.index(0))
    positions = position + (WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma_s))) // GROUP
    shared_end = (position + WHO * ROWS // GROUP + 1) // BLOCK_N * BLOCK_N
    s = _hide(s, 0, shared_end, positions, BLOCK_N, mma_s)
    p, rescale, row_max, row_sum = _weigh(s, no_max, no_sum, scale_log2, dtype, operand)
    count = 1  # of tiles whose scores are weighed
    while row < batch:
        # The next item, if there is one: its queries go to the other buffer, once all warps have stored its rows.
        turn += 1
        number = _next_number(number, turn, step, SNAKE)
        row, first, start, stop = _seek(number, row, first, locs_ptr, batch, TOKENS, KV_HEADS)
        is_next = row < batch
        next_head, next_token, next_tokens, next_position, _end, next_tiles = _item(
            number, row, first, start, stop, lens_ptr, batch, TOKENS, KV_HEADS, BLOCK_N, ZIGZAG
        )
        next_q = q_smem.index(turn & 1)
        q_rows = _rows(q_ptr, stride_q_token, stride_q_head, next_token, next_head, WHO, GROUP, WIDE, plain)
        is_query = _is_query(next_tokens, WHO, GROUP, plain)
        _meet()
        _ask_queries(next_q, q_rows + dims, is_query & is_next, EARLY)

        this_q = q_smem.index((turn - 1) & 1)
        positions = position + (WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma_s))) // GROUP
        shared_end = (position + WHO * ROWS // GROUP + 1) // BLOCK_N * BLOCK_N
        for tile in range(1, num_tiles):
            stage, stage_before = count % STAGES, (count - 1) % STAGES
            _wait_full(k_full, count, STAGES)
            _take_turn(turns, count, WHO)
            s_next = warpgroup_mma(
                this_q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            _wait_full(v_full, count - 1, STAGES)
            acc_next = warpgroup_mma(p, v_tiles.index(stage_before), acc, is_async=True)
            _pass_turn(turns, WHO)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s_next,))
            mbarrier.arrive(k_empty.index(stage))
            s = _hide(s, tile * BLOCK_N, shared_end, positions, BLOCK_N, mma_s)
            p_next, rescale, row_max, row_sum = _weigh(s, row_max, row_sum, scale_log2, dtype, operand)
            row_sum = _hold(row_sum)
            acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next, p))
            mbarrier.arrive(v_empty.index(stage_before))
            acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, mma_o)), 1)
            p = p_next
            count += 1

        # The next item's first scores beside this one's last values; after the last item, scores of whatever is there.
        stage, stage_before = count % STAGES, (count - 1) % STAGES
        _await_queries(EARLY)
        if is_next:
            _wait_full(k_full, count, STAGES)
        _take_turn(turns, count, WHO)
        s_next = warpgroup_mma(next_q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        _wait_full(v_clean, count - 1, STAGES)
        acc_next = warpgroup_mma(p, v_tiles.index(stage_before), acc, is_async=True)
        _pass_turn(turns, WHO)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s_next,))
        mbarrier.arrive(k_empty.index(stage), pred=is_next)
        positions = next_position + (WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma_s))) // GROUP
        shared_end = (next_position + WHO * ROWS // GROUP + 1) // BLOCK_N * BLOCK_N
        s = _hide(s, 0, shared_end, positions, BLOCK_N, mma_s)
        factor = gl.expand_dims(gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, mma_o)), 1)
        p_next, rescale, row_max, row_sum = _weigh(s, no_max, no_sum, scale_log2, dtype, operand)
        row_sum = _hold(row_sum)
        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next, p))
        mbarrier.arrive(v_empty.index(stage_before))
        this_q.store((acc * factor).to(dtype))  # rows as they lie in memory, so that a warp writes whole lines
        _meet()
        out_rows = _rows(out_ptr, stride_out_token, stride_out_head, token, kv_head, WHO, GROUP, WIDE, plain)
        gl.store(out_rows + dims, this_q.load(plain), mask=_is_query(num_tokens, WHO, GROUP, plain))

        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=mma_o)
        p = p_next
        kv_head, token, num_tokens, position, num_tiles = next_head, next_token, next_tokens, next_position, next_tiles
        count += 1


@gluon.jit(
    do_not_specialize=["stride_table", "batch", "step"],
    do_not_specialize_on_alignment=["block_table_ptr", "context_lens_ptr", "query_start_loc_ptr"],
)
def _prefill_kernel(
    q_ptr, k_desc, v_desc, out_ptr, block_table_ptr, context_lens_ptr, query_start_loc_ptr,
    scale_log2, stride_q_token, stride_q_head, stride_k_head, stride_v_head, k_block_rows, v_block_rows,
    stride_out_token, stride_out_head, stride_table, batch, step,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    ZIGZAG: gl.constexpr,
    SNAKE: gl.constexpr,
    EARLY: gl.constexpr,
    WIDE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    TOKENS: gl.constexpr = BLOCK_M // GROUP
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    number, zero = gl.program_id(0), gl.to_tensor(0)
    row, first, start, stop = _seek(number, zero, zero, query_start_loc_ptr, batch, TOKENS, KV_HEADS)
    if row >= batch:
        return
    place = number - first

    BOXES: gl.constexpr = STAGES * (HEAD_DIM // 64) * (BLOCK_N // BOX)
    k_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, 64], swizzled)
    v_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, 64], swizzled)
    k_tiles = k_boxes._reinterpret(dtype, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
    v_tiles = v_boxes._reinterpret(dtype, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
    v_atoms = v_boxes._reinterpret(dtype, [BOXES * BOX // 8, 8, 64], swizzled)
    q_of_0 = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, HEAD_DIM], swizzled)
    q_of_1 = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, HEAD_DIM], swizzled)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_clean = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
        mbarrier.init(v_clean.index(i), count=1)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()

    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (q_of_0, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean, turns, q_ptr,
                out_ptr, context_lens_ptr, query_start_loc_ptr, scale_log2, stride_q_token, stride_q_head,
                stride_out_token, stride_out_head, batch, place, step, row, first, start, stop, 0, KV_HEADS, TOKENS, GROUP,
                HEAD_DIM, BLOCK_N, STAGES, ZIGZAG, SNAKE, EARLY, WIDE)),
            (_attend, (q_of_1, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean, turns, q_ptr,
                out_ptr, context_lens_ptr, query_start_loc_ptr, scale_log2, stride_q_token, stride_q_head,
                stride_out_token, stride_out_head, batch, place, step, row, first, start, stop, 1, KV_HEADS, TOKENS, GROUP,
                HEAD_DIM, BLOCK_N, STAGES, ZIGZAG, SNAKE, EARLY, WIDE)),
            (_copy_tiles, (k_desc, k_boxes, v_atoms, k_full, k_empty, v_clean, block_table_ptr, context_lens_ptr,
                query_start_loc_ptr, stride_table, k_block_rows, stride_k_head, batch, place, step, row, first, start, stop,
                False, KV_HEADS, TOKENS, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BOX, STAGES, ZIGZAG, SNAKE)),
            (_copy_tiles, (v_desc, v_boxes, v_atoms, v_full, v_empty, v_clean, block_table_ptr, context_lens_ptr,
                query_start_loc_ptr, stride_table, v_block_rows, stride_v_head, batch, place, step, row, first, start, stop,
                True, KV_HEADS, TOKENS, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BOX, STAGES, ZIGZAG, SNAKE)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
    # fmt: on


def prefill_persistent(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float | None = None,
    out: Tensor | None = None,
    stages: int = NUM_STAGES,
    zigzag: bool = True,
    snake: bool = True,
    early_queries: bool = True,
    wide_offsets: bool = False,
    num_programs: int | None = None,
    consumer_registers: int = CONSUMER_REGISTERS,
    producer_registers: int = PRODUCER_REGISTERS,
) -> Tensor:
    """kernels/prefill/contract.py's call, for what kernels/prefill/warp_specialized.py takes itself."""
    check_inputs(q, k_cache, v_cache, block_table, context_lens, query_start_loc, max_query_len, out)
    assert _takes(q, k_cache) and _takes(q, v_cache), "not a cache that the kernel takes"
    batch, (num_q_heads, head_dim) = block_table.shape[0], q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    out = torch.empty_like(q) if out is None else out
    if batch == 0 or max_query_len == 0:
        return out
    q, scale = positive_scale(q, head_dim**-0.5 if scale is None else scale)
    group = num_q_heads // num_kv_heads
    tokens = BLOCK_M // group
    box = math.gcd(block_size, BLOCK_N)
    if num_programs is None:
        num_programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    # No more than there can be items: whole tiles of all tokens, and one that is not whole a row.
    tiles = min(cdiv(max_query_len, tokens) * batch, q.shape[0] // tokens + batch)
    programs = min(num_programs, tiles * num_kv_heads)
    is_aligned = q.data_ptr() % 16 == 0 and q.stride(0) % 16 == 0 and q.stride(1) % 16 == 0 and q.stride(2) == 1
    with on_device(q):
        _prefill_kernel[(programs,)](
            q,
            _descriptor(k_cache, box),
            _descriptor(v_cache, box),
            out,
            block_table,
            context_lens,
            query_start_loc,
            scale * LOG2_E,
            *q.stride()[:2],
            k_cache.stride(2),
            v_cache.stride(2),
            k_cache.stride(0) // k_cache.stride(1),
            v_cache.stride(0) // v_cache.stride(1),
            *out.stride()[:2],
            block_table.stride(0),
            batch,
            2 * programs if snake else programs,
            KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BOX=box,
            STAGES=stages,
            ZIGZAG=zigzag,
            SNAKE=snake,
            EARLY=early_queries and is_aligned,
            WIDE=wide_offsets or q.shape[0] * max(q.stride(0), out.stride(0)) >= 2**31,
            CONSUMER_REGISTERS=consumer_registers,
            PRODUCER_REGISTERS=producer_registers,
            num_warps=4,
        )
    return out
