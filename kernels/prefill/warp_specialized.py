"""Prefill attention for Hopper with specialised warps, in Gluon: copies, products and softmax at the same time.

FlashAttention-3's division of labour (Shah et al., 2024) over a paged cache. One warp copies keys and one values (TMA);
two warpgroups attend, to 64 rows of a tile each, and take turns at the tensor cores (ping-pong): one's softmax runs
beside the other's products, and beside its own product of the weights and values of the tile before. The tiles, the
walk over the keys and the masks are triton_flash.py's, and so are the results, bit for bit where their tiles agree.

A tile of keys arrives as boxes of as many slots as lie together in a block, 64 dims wide, which is how the tensor cores
want them in shared memory. A box past the row's last token is a copy of the last one that is not, so the table is never
read there. Slots past the last token may hold anything: in K the mask hides them, in V the copying warp zeroes them.

The grid is persistent: a program an SM, with many items (a tile of queries and a KV head, tile_scheduler.py) one after
the other, so that an item's beginning and end are hidden. The copying warps run ahead into the items to come. While a
warpgroup walks an item's keys, the next one's queries come. It multiplies the item's last weights and values beside the
next one's first scores and their softmax, as within an item, and stores its output while the other warpgroup attends.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kernels.decode.planner import device_sm_count
from kernels.prefill.contract import PrefillProblem
from kernels.prefill.tile_scheduler import find_row
from kernels.prefill.triton_flash import LOG2_E, PrefillTile, TritonPrefill
from kernels.prefill.warp_roles import attend, copy_tiles
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

fence_async_shared, mbarrier = hopper.fence_async_shared, hopper.mbarrier


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
        batch, head_dim, (block_size, num_kv_heads) = block_table.shape[0], q.shape[2], k_cache.shape[1:3]
        group = q.shape[1] // num_kv_heads
        is_short = tile is not None or max_query_len * group <= SHORT_ROWS
        if is_short or group > BLOCK_M or not (_takes(q, k_cache) and _takes(q, v_cache)):
            super()._launch(*tensors, max_query_len, scale, tile)
            return
        box = math.gcd(block_size, BLOCK_N)
        # No chunks of so many tokens have more tiles: whole ones, and one that is not whole a row.
        tokens = BLOCK_M // group
        tiles = min(cdiv(max_query_len, tokens) * batch, q.shape[0] // tokens + batch)
        programs = min(device_sm_count(q.device), tiles * num_kv_heads)
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
                2 * programs,
                KV_HEADS=num_kv_heads,
                GROUP=group,
                HEAD_DIM=head_dim,
                BLOCK_SIZE=block_size,
                BLOCK_M=BLOCK_M,
                BLOCK_N=BLOCK_N,
                BOX=box,
                STAGES=NUM_STAGES,
                EARLY=_is_aligned(q),
                WIDE=_is_far(q) or _is_far(out),
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


def _is_aligned(q: Tensor) -> bool:
    """Whether Triton sees that every row of q starts at a multiple of 16 bytes, as cp.async needs it."""
    return q.data_ptr() % 16 == 0 and q.stride(0) % 16 == 0 and q.stride(1) % 16 == 0


def _is_far(tensor: Tensor) -> bool:
    """Whether offsets into it may need 64 bits."""
    return tensor.shape[0] * tensor.stride(0) + tensor.shape[1] * tensor.stride(1) >= 2**31


@gluon.jit(
    do_not_specialize=["stride_table", "batch", "step"],
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
    batch,
    step,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
    WIDE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    TOKENS: gl.constexpr = BLOCK_M // GROUP
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    number, zero = gl.program_id(0), gl.to_tensor(0)
    row, first, start, stop = find_row(number, zero, zero, query_start_loc_ptr, batch, TOKENS, KV_HEADS)
    if row >= batch:
        return
    place = number - first  # in the row: with `number` in its place the warpgroups need more registers

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
            (attend, (q_of_0, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean, turns, q_ptr,
                out_ptr, context_lens_ptr, query_start_loc_ptr, scale_log2, stride_q_token, stride_q_head,
                stride_out_token, stride_out_head, batch, place, step, row, first, start, stop, 0, KV_HEADS, TOKENS,
                GROUP, HEAD_DIM, BLOCK_N, STAGES, EARLY, WIDE)),
            (attend, (q_of_1, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, v_clean, turns, q_ptr,
                out_ptr, context_lens_ptr, query_start_loc_ptr, scale_log2, stride_q_token, stride_q_head,
                stride_out_token, stride_out_head, batch, place, step, row, first, start, stop, 1, KV_HEADS, TOKENS,
                GROUP, HEAD_DIM, BLOCK_N, STAGES, EARLY, WIDE)),
            (copy_tiles, (k_desc, k_boxes, v_atoms, k_full, k_empty, v_clean, block_table_ptr, context_lens_ptr,
                query_start_loc_ptr, stride_table, k_block_rows, stride_k_head, batch, place, step, row, first, start,
                stop, False, KV_HEADS, TOKENS, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BOX, STAGES)),
            (copy_tiles, (v_desc, v_boxes, v_atoms, v_full, v_empty, v_clean, block_table_ptr, context_lens_ptr,
                query_start_loc_ptr, stride_table, v_block_rows, stride_v_head, batch, place, step, row, first, start,
                stop, True, KV_HEADS, TOKENS, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BOX, STAGES)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
    # fmt: on
