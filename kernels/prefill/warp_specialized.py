"""Prefill attention for Hopper with specialised warps, in Gluon: copies, products and softmax at the same time.

FlashAttention-3's division of labour (Shah et al., 2024) over a paged cache. One warp copies keys and one values (TMA);
two warpgroups attend, to 64 rows of a tile each, and take turns at the tensor cores (ping-pong): one's softmax runs
beside the other's products, and beside its own product of the weights and values of the tile before. The tiles, the
walk over the keys and the masks are triton_flash.py's, and so are the results, bit for bit where their tiles agree.

A tile of keys arrives as boxes of as many slots as lie together in a block, 64 dims wide, which is how the tensor cores
want them in shared memory. A box past the row's last token is a copy of the last one that is not, so the table is never
read there. Slots past the last token may hold anything: in K the mask hides them, in V the copying warp zeroes them.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kernels.prefill.contract import PrefillProblem
from kernels.prefill.triton_flash import LOG2_E, PrefillTile, TritonPrefill
from kernels.triton_support import INTERPRETING, cdiv, gl, gluon, gluon_unavailable, hopper, on_device

BLOCK_M, BLOCK_N = 128, 128
"""Rows (tokens x heads of a group) and keys of a tile."""

HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16)
SHORT_ROWS = 64
"""Chunks of no more rows leave a warpgroup without work."""

NUM_STAGES = 2
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
"""A thread's, of 65,536 in all: two warpgroups attend, one copies."""

fence_async_shared, mbarrier, tma = hopper.fence_async_shared, hopper.mbarrier, hopper.tma
warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
_meet = hopper.meet


def unsupported(dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why the kernel is not made for such a cache, or None if it is."""
    if dtype not in DTYPES:
        return f"dtype {dtype} is not one of float16, bfloat16"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not one of 64, 128"
    if block_size % 8:
        return f"block_size {block_size} is not a multiple of 8"
    return None


class WarpSpecializedPrefill(TritonPrefill):
    """On compute capability 9.0. What it is not made for goes to `triton`: short chunks, caches that are not slots at
    equal distances, each with all its heads and 16-byte aligned, as TMA needs them, and what supports() refuses."""

    name = "warp_specialized"

    def unavailable(self, device: torch.device) -> str | None:
        if (reason := super().unavailable(device) or gluon_unavailable()) is not None:
            return reason
        if INTERPRETING:
            return "Triton's interpreter does not know Gluon"
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            return f"it needs compute capability 9.0, {device} has {capability[0]}.{capability[1]}"
        return None

    def supports(self, problem: PrefillProblem) -> str | None:
        reason = super().supports(problem)
        return reason or unsupported(problem.dtype, problem.head_dim, problem.block_size)

    def plan(self, problem: PrefillProblem) -> dict[str, Any]:
        group = problem.num_q_heads // problem.num_kv_heads
        return super().plan(problem) if problem.max_query_len * group <= SHORT_ROWS else {}

    def _launch(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        query_start_loc: Tensor,
        max_query_len: int,
        scale: float,
        tile: PrefillTile | None,
    ) -> None:
        """`tile`, which the plan of short chunks holds, asks for `triton`."""
        tensors = (q, k_cache, v_cache, out, block_table, context_lens, query_start_loc)
        head_dim, (block_size, num_kv_heads) = q.shape[2], k_cache.shape[1:3]
        group = q.shape[1] // num_kv_heads
        is_short = tile is not None or max_query_len * group <= SHORT_ROWS
        if is_short or group > BLOCK_M or not (_takes(q, k_cache) and _takes(q, v_cache)):
            super()._launch(*tensors, max_query_len, scale, tile)
            return
        box = math.gcd(block_size, BLOCK_N)
        grid = (cdiv(max_query_len, BLOCK_M // group), num_kv_heads, block_table.shape[0])
        with on_device(q):
            _prefill_kernel[grid](
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
                GROUP=group,
                HEAD_DIM=head_dim,
                BLOCK_SIZE=block_size,
                BLOCK_M=BLOCK_M,
                BLOCK_N=BLOCK_N,
                BOX=box,
                STAGES=NUM_STAGES,
                CONSUMER_REGISTERS=CONSUMER_REGISTERS,
                PRODUCER_REGISTERS=PRODUCER_REGISTERS,
                num_warps=4,
            )


def _takes(q: Tensor, cache: Tensor) -> bool:
    """Whether TMA sees a cache as [slots, a slot's elements], and in tiles for q. Between blocks may be other slots."""
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    block, slot, head, dim = cache.stride()
    fits = num_blocks > 0 and unsupported(q.dtype, head_dim, block_size) is None
    is_aligned = slot % 8 == 0 and head % 8 == 0 and cache.data_ptr() % 16 == 0
    holds_heads = dim == 1 and head * (num_kv_heads - 1) + head_dim <= slot
    return fits and is_aligned and holds_heads and block % slot == 0


def _descriptor(cache: Tensor, box: int) -> Any:
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    block, slot, head, _ = cache.stride()
    shape = [(num_blocks - 1) * (block // slot) + block_size, head * (num_kv_heads - 1) + head_dim]
    return hopper.TensorDescriptor(cache, shape, [slot, 1], [box, 64], gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def _wait_full(full, tile, STAGES: gl.constexpr):
    mbarrier.wait(full.index(tile % STAGES), (tile // STAGES) & 1)


@gluon.jit
def _copy_tiles(
    desc,
    boxes,
    atoms,
    full,
    empty,
    clean,
    table_ptr,
    block_rows,
    column,
    end,
    num_tiles,
    VALUES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The warp of keys, or of values: `clean` tells that those of the last tile past `end` are zero."""
    BOXES: gl.constexpr = BLOCK_N // BOX
    HALVES: gl.constexpr = HEAD_DIM // 64
    last_box = (end - 1) // BOX * BOX
    for tile in range(num_tiles):
        stage = tile % STAGES
        rows = ()
        for i in gl.static_range(BOXES):
            key = gl.minimum(tile * BLOCK_N + i * BOX, last_box)
            rows = rows + (gl.load(table_ptr + key // BLOCK_SIZE) * block_rows + key % BLOCK_SIZE,)  # type: ignore[assignment]  # noqa: RUF005
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
    scale_log2,
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
    first_query,
    num_tokens,
    first_position,
    first_head,
    num_tiles,
    WHO: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A warpgroup: rows 64 * WHO to 64 * WHO + 63 of the tile."""
    ROWS: gl.constexpr = 64
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma_o, 2)
    dtype: gl.constexpr = q_ptr.dtype.element_ty

    rows = WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, plain))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, plain))
    tokens, heads = (first_query + rows // GROUP).to(gl.int64), first_head + rows % GROUP
    q_rows = q_ptr + tokens * stride_q_token + heads * stride_q_head
    is_query = gl.expand_dims(rows // GROUP < num_tokens, 1)
    q_smem.store(gl.load(gl.expand_dims(q_rows, 1) + gl.expand_dims(dims, 0), mask=is_query, other=0.0))
    fence_async_shared()
    _meet()

    positions = first_position + (WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma_s))) // GROUP
    shared_end = (first_position + WHO * ROWS // GROUP + 1) // BLOCK_N * BLOCK_N
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=mma_s)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, mma_s))
    row_sum = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, mma_s))
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=mma_o)

    _wait_full(k_full, 0, STAGES)
    _take_turn(turns, 0, WHO)
    s = warpgroup_mma(q_smem, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    _pass_turn(turns, WHO)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    mbarrier.arrive(k_empty.index(0))
    s = _hide(s, 0, shared_end, positions, BLOCK_N, mma_s)
    p, rescale, row_max, row_sum = _weigh(s, row_max, row_sum, scale_log2, dtype, operand)
    for tile in range(1, num_tiles):
        stage, stage_before = tile % STAGES, (tile - 1) % STAGES
        _wait_full(k_full, tile, STAGES)
        _take_turn(turns, tile, WHO)
        s_next = warpgroup_mma(
            q_smem, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        _wait_full(v_full, tile - 1, STAGES)
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
    mbarrier.wait(v_clean, 0)
    acc = warpgroup_mma(p, v_tiles.index((num_tiles - 1) % STAGES), acc)

    out = acc * gl.expand_dims(gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, mma_o)), 1)
    q_smem.store(out.to(dtype))  # rows as they lie in memory, so that a warp writes whole lines
    _meet()
    out_rows = out_ptr + tokens * stride_out_token + heads * stride_out_head
    gl.store(gl.expand_dims(out_rows, 1) + gl.expand_dims(dims, 0), q_smem.load(plain), mask=is_query)


@gluon.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["block_table_ptr", "context_lens_ptr", "query_start_loc_ptr"],
)
def _prefill_kernel(
    q_ptr,
    k_desc,
    v_desc,
    out_ptr,
    block_table_ptr,
    context_lens_ptr,
    query_start_loc_ptr,
    scale_log2,
    stride_q_token,
    stride_q_head,
    stride_k_head,
    stride_v_head,
    k_block_rows,
    v_block_rows,
    stride_out_token,
    stride_out_head,
    stride_table,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    TOKENS: gl.constexpr = BLOCK_M // GROUP
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # The last tile of a chunk walks the most keys, so it starts first.
    first_token = (gl.num_programs(0) - 1 - gl.program_id(0)) * TOKENS
    kv_head = gl.program_id(1)
    batch_row = gl.program_id(2)
    chunk_start = gl.load(query_start_loc_ptr + batch_row)
    chunk_len = gl.load(query_start_loc_ptr + batch_row + 1) - chunk_start
    context_len = gl.load(context_lens_ptr + batch_row)  # asked for before the branch, not after
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
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_clean = gl.allocate_shared_memory(gl.int64, [1], barrier)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
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
    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (q_smem.index(0), k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean, turns, q_ptr,
                out_ptr, scale_log2, stride_q_token, stride_q_head, stride_out_token, stride_out_head, first_query,
                num_tokens, first_position, first_head, num_tiles, 0, GROUP, HEAD_DIM, BLOCK_N, STAGES)),
            (_attend, (q_smem.index(1), k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean, turns, q_ptr,
                out_ptr, scale_log2, stride_q_token, stride_q_head, stride_out_token, stride_out_head, first_query,
                num_tokens, first_position, first_head, num_tiles, 1, GROUP, HEAD_DIM, BLOCK_N, STAGES)),
            (_copy_tiles, (k_desc, k_boxes, v_atoms, k_full, k_empty, v_clean, table_ptr, k_block_rows,
                kv_head * stride_k_head, end, num_tiles, False, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BOX, STAGES)),
            (_copy_tiles, (v_desc, v_boxes, v_atoms, v_full, v_empty, v_clean, table_ptr, v_block_rows,
                kv_head * stride_v_head, end, num_tiles, True, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BOX, STAGES)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
    # fmt: on
