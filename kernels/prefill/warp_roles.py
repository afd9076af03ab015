"""What the warps of warp_specialized.py do, in Gluon: one copies keys and one values, two warpgroups attend.

All of them walk the items of their program (tile_scheduler.py) and count tiles of keys from the first item's first to
the last one's last: a tile's stage, the phases of its barriers and its turn follow from that number.
"""

from kernels.prefill.tile_scheduler import item_at, next_item
from kernels.triton_support import gl, gluon, hopper

async_copy, mbarrier, tma = hopper.async_copy, hopper.mbarrier, hopper.tma
fence_async_shared, _meet = hopper.fence_async_shared, hopper.meet
warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait


@gluon.jit
def _wait_full(full, tile, STAGES: gl.constexpr):
    mbarrier.wait(full.index(tile % STAGES), (tile // STAGES) & 1)


@gluon.jit
def copy_tiles(
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
):
    """The warp of keys, or of values: `clean` tells that those of an item's last tile past `end` are zero."""
    BOXES: gl.constexpr = BLOCK_N // BOX
    HALVES: gl.constexpr = HEAD_DIM // 64
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    turn, number = 0, first + place
    done = 0  # tiles of the items before
    while row < batch:
        kv_head, _token, _tokens, _position, end, num_tiles = item_at(
            number, row, first, start, stop, lens_ptr, batch, TOKENS, KV_HEADS, BLOCK_N
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
                    tma.async_copy_global_to_shared(
                        desc, [rows[i], column + half * 64], full.index(stage), box
                    )
            if VALUES and tile + 1 < num_tiles:
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
        number, row, first, start, stop = next_item(
            number, row, first, turn, step, locs_ptr, batch, TOKENS, KV_HEADS
        )


@gluon.jit
def _take_turn(turns, turn, WHO: gl.constexpr):
    mbarrier.wait(turns.index(WHO), (turn + 1 - WHO) & 1)  # the first warpgroup's first turn is there at once


@gluon.jit
def _pass_turn(turns, WHO: gl.constexpr):
    _meet()  # no warp may still wait for this turn when the next one comes
    mbarrier.arrive(turns.index(1 - WHO))


@gluon.jit
def _hold(x):
    """x, which is never negative, in such a way that nothing after this begins before x is known.

    ptxas moves the wait for products in flight ahead of arithmetic that does not need them, but not across a branch.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $2, 0f00000000; setp.lt.or.f32 p, $3, 0f00000000, p; again: "
        "@p nanosleep.u32 32; @p bra.uni again; mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=f,=f,f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def _positions(position, WHO: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, mma_s: gl.constexpr):
    """(positions of a warpgroup's rows, the end of the tiles of keys that all of them see)"""
    positions = position + (WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, mma_s))) // GROUP
    return positions, (position + WHO * 64 // GROUP + 1) // BLOCK_N * BLOCK_N


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
def _rows(
    tensor_ptr,
    stride_token,
    stride_head,
    token,
    kv_head,
    WHO: gl.constexpr,
    GROUP: gl.constexpr,
    WIDE: gl.constexpr,
    plain: gl.constexpr,
):
    """Pointers to the first dims of a warpgroup's rows, in q or in the output."""
    rows = WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, plain))
    tokens, heads = token + rows // GROUP, kv_head * GROUP + rows % GROUP
    if WIDE:
        tokens, heads = tokens.to(gl.int64), heads.to(gl.int64)
    return gl.expand_dims(tensor_ptr + tokens * stride_token + heads * stride_head, 1)


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
def attend(
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
    EARLY: gl.constexpr,
    WIDE: gl.constexpr,
):
    """A warpgroup: rows 64 * WHO to 64 * WHO + 63 of each item."""
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
    kv_head, token, num_tokens, position, _end, num_tiles = item_at(
        number, row, first, start, stop, lens_ptr, batch, TOKENS, KV_HEADS, BLOCK_N
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
    positions, shared_end = _positions(position, WHO, GROUP, BLOCK_N, mma_s)
    s = _hide(s, 0, shared_end, positions, BLOCK_N, mma_s)
    p, rescale, row_max, row_sum = _weigh(s, no_max, no_sum, scale_log2, dtype, operand)
    count = 1  # of tiles whose scores are weighed
    while row < batch:
        # The next item, if there is one: its queries go to the other buffer, once all warps have stored its rows.
        turn += 1
        number, row, first, start, stop = next_item(
            number, row, first, turn, step, locs_ptr, batch, TOKENS, KV_HEADS
        )
        is_next = row < batch
        next_head, next_token, next_tokens, next_position, _end, next_tiles = item_at(
            number, row, first, start, stop, lens_ptr, batch, TOKENS, KV_HEADS, BLOCK_N
        )
        next_q = q_smem.index(turn & 1)
        q_rows = _rows(q_ptr, stride_q_token, stride_q_head, next_token, next_head, WHO, GROUP, WIDE, plain)
        is_query = _is_query(next_tokens, WHO, GROUP, plain)
        _meet()
        _ask_queries(next_q, q_rows + dims, is_query & is_next, EARLY)

        this_q = q_smem.index((turn - 1) & 1)
        positions, shared_end = _positions(position, WHO, GROUP, BLOCK_N, mma_s)
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
        s_next = warpgroup_mma(
            next_q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        _wait_full(v_clean, count - 1, STAGES)
        acc_next = warpgroup_mma(p, v_tiles.index(stage_before), acc, is_async=True)
        _pass_turn(turns, WHO)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s_next,))
        mbarrier.arrive(k_empty.index(stage), pred=is_next)
        positions, shared_end = _positions(next_position, WHO, GROUP, BLOCK_N, mma_s)
        s = _hide(s, 0, shared_end, positions, BLOCK_N, mma_s)
        factor = gl.expand_dims(gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, mma_o)), 1)
        p_next, rescale, row_max, row_sum = _weigh(s, no_max, no_sum, scale_log2, dtype, operand)
        row_sum = _hold(row_sum)
        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next, p))
        mbarrier.arrive(v_empty.index(stage_before))
        # Rows as they lie in memory, so that a warp writes whole lines.
        this_q.store((acc * factor).to(dtype))
        _meet()
        out_rows = _rows(out_ptr, stride_out_token, stride_out_head, token, kv_head, WHO, GROUP, WIDE, plain)
        gl.store(out_rows + dims, this_q.load(plain), mask=_is_query(num_tokens, WHO, GROUP, plain))

        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=mma_o)
        p = p_next
        kv_head, token, num_tokens = next_head, next_token, next_tokens
        position, num_tiles = next_position, next_tiles
        count += 1
