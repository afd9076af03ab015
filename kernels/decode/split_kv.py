"""Flash decoding: the context split over programs, query heads of a group packed, partial results merged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode.contract import DecodeProblem
from kernels.decode.launch import Call, TritonDecodeKernel, group_constexprs
from kernels.decode.merge import MAX_CHUNK, chunk_for, merge_splits, partial_numel, partial_views
from kernels.decode.online_softmax import attend_range, load_queries, normalised
from kernels.decode.planner import TileShape, head_tiles, max_partials, plan_splits
from kernels.fp8_cache import FP8, check_scales
from kernels.triton_support import tl, triton


@triton.jit(
    do_not_specialize=[
        "num_splits",
        "split_size",
        "first_key",
        "first_slot",
        "num_slots",
        "stride_table_row",
    ],
    do_not_specialize_on_alignment=["table_ptr", "context_lens_ptr"],
)
def _attend_split(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    context_lens_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale_log2,
    num_splits,
    split_size,
    first_key,
    first_slot,
    num_slots,
    stride_q_row,
    stride_q_head,
    stride_k_block,
    stride_k_token,
    stride_k_head,
    stride_v_block,
    stride_v_token,
    stride_v_head,
    stride_table_row,
    stride_out_row,
    stride_out_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIRECT: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """One program a (KV head and tile of its query heads, split, row), for the context from first_key on.

    A split is split_size keys, or where that is 0 an equal part of those keys, up to a multiple of TILE; the last
    takes what is left. Its result goes to slot first_slot + split of the row's num_slots.
    DIRECT (one split) writes the output, else the normalised partial output and its base-2 log-sum-exp; an
    empty split writes (0, -inf), so the second stage never reads memory that nothing wrote.
    k_scale_ptr, v_scale_ptr: of an fp8 cache, a factor a KV head, else None. A head's factors leave the loop: K's
    joins the scores' scale, V's is applied to the result.
    """
    kv_head = tl.program_id(0) // HEAD_TILES
    head_in_group = (tl.program_id(0) % HEAD_TILES) * HEADS
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    first_head = kv_head * GROUP + head_in_group
    num_heads = tl.minimum(GROUP - head_in_group, HEADS)

    context_len = tl.load(context_lens_ptr + row)
    q = load_queries(
        q_ptr + row * stride_q_row, stride_q_head, first_head, num_heads, HEADS, HEAD_DIM, DIM, DOT_DTYPE
    )
    split_len = split_size
    if split_size == 0:
        length = tl.maximum(context_len - first_key, 0)
        split_len = tl.cdiv(tl.cdiv(length, num_splits), TILE) * TILE
    if k_scale_ptr is not None:
        scale_log2 *= tl.load(k_scale_ptr + kv_head)
    start = first_key + split * split_len
    end = tl.minimum(start + split_len, context_len)
    if split == num_splits - 1:
        end = context_len
    acc, peak, total = attend_range(
        q,
        k_ptr + kv_head.to(tl.int64) * stride_k_head,
        v_ptr + kv_head.to(tl.int64) * stride_v_head,
        table_ptr + row * stride_table_row,
        start,
        end,
        scale_log2,
        stride_k_block,
        stride_k_token,
        stride_v_block,
        stride_v_token,
        HEADS,
        HEAD_DIM,
        DIM,
        BLOCK_SIZE,
        TILE,
        DOT_DTYPE,
        PREFETCH=PREFETCH,
    )
    out, lse = normalised(acc, peak, total)
    if v_scale_ptr is not None:
        out *= tl.load(v_scale_ptr + kv_head)
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    mask = (heads < num_heads)[:, None] & (dims < HEAD_DIM)[None, :]
    head_ids = (first_head + heads).to(tl.int64)
    if DIRECT:
        tl.store(
            out_ptr + row * stride_out_row + head_ids[:, None] * stride_out_head + dims[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=mask,
        )
    else:
        slots = (row * (NUM_KV_HEADS * GROUP) + head_ids) * num_slots + first_slot + split
        tl.store(partial_ptr + slots[:, None] * HEAD_DIM + dims[None, :], out, mask=mask)
        tl.store(lse_ptr + slots, lse, mask=heads < num_heads)


class SplitKVDecode(TritonDecodeKernel):
    """Two stages: attention of each split, then a merge by log-sum-exp (base 2 in both).

    FlashDecoding (Dao et al. 2023) over a paged cache. A row's context is cut into num_splits equal parts,
    whatever its length, so a plan holds for every context; results may then differ with the batch in the last bits,
    since num_splits does. With split_size a row's bits are the same in any batch (see fixed_split).

    Caches in fp8 (torch.float8_e4m3fn) with k_scale and v_scale, as kernels/fp8_cache.py makes them, halve the bytes:
    q, products, sums and out stay as they are. From the attention of the dequantised cache the result then differs
    as in bf16 (by 8e-3 at most, norm over norm, of a head's vector; 1e-5 in fp32). From that of the cache before it
    was quantised it differs by 0.04 (0.08 at most) for standard normal queries, keys and values: rounding moves each
    value by 0.027 of itself (root mean square), and as much each key and so, through the scores, the weights.
    Needs a GPU of compute capability 8.9 or later, whose instructions convert e4m3.
    """

    name = "split_kv"
    kv_dtypes = (FP8,)

    def plan(self, problem: DecodeProblem) -> dict[str, Any]:
        shape = shape_of(problem)
        return {"num_splits": plan_splits(problem, shape), **shape_options(shape)}

    def workspace(self, problem: DecodeProblem, device: torch.device) -> Tensor | None:
        numel = partial_numel(
            max_partials(problem, shape_of(problem)), problem.num_q_heads, 1, problem.head_dim
        )
        return torch.empty(numel, dtype=torch.float32, device=device)

    def launch(
        self,
        call: Call,
        num_splits: int | None = None,
        split_size: int = 0,
        tile: int | None = None,
        num_warps: int | None = None,
        num_stages: int | None = None,
        prefetch: bool | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """tile, num_warps, num_stages, prefetch: see TileShape; what is None is planned for a full table.

        split_size: keys a split, a multiple of tile, 0 for equal parts; by default num_splits then covers a full
        table. The last split takes what the others leave. k_scale, v_scale: [num_kv_heads] float32 each, with caches
        in fp8 alone.
        """
        check_scales(call.k_cache, k_scale, v_scale)
        scales = (k_scale, v_scale)
        problem = call.problem
        shape = shape_of(problem, tile, num_warps, num_stages, prefetch)
        if split_size % shape.tile:
            raise ValueError(f"split_size is {split_size}, not a multiple of tile {shape.tile}")
        if num_splits is None and split_size:
            num_splits = max(1, -(-problem.max_context_len // split_size))
        elif num_splits is None:
            num_splits = plan_splits(problem, shape)
        if num_splits < 1:
            raise ValueError(f"num_splits is {num_splits}, the least is 1")
        # With split_size always the same two programs: another might round differently.
        if num_splits == 1 and not split_size:
            attend_splits(call, None, None, shape, 1, scales=scales)
            return
        partial, lse = partial_views(
            call.workspace, problem.batch_size, problem.num_q_heads, num_splits, problem.head_dim, like=call.q
        )
        attend_splits(call, partial, lse, shape, num_splits, split_size, scales=scales)
        # A constant step with split_size, since the order of the sums must not follow the batch.
        merge_splits(partial, lse, call.out, chunk=MAX_CHUNK if split_size else chunk_for(num_splits))


def shape_options(shape: TileShape) -> dict[str, Any]:
    """A shape as options of a call."""
    return {**shape.options(), "prefetch": shape.prefetch}


def shape_of(
    problem: DecodeProblem,
    tile: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    prefetch: bool | None = None,
) -> TileShape:
    """The given numbers, and for None those that were fastest: prefetch, but for exact fp32."""
    if prefetch is None:
        prefetch = problem.dtype != torch.float32
    return TileShape.of(problem, tile, num_warps, num_stages, prefetch)


def attend_splits(
    call: Call,
    partial: Tensor | None,
    lse: Tensor | None,
    shape: TileShape,
    num_splits: int,
    split_size: int = 0,
    first_key: int = 0,
    first_slot: int = 0,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """The first stage: partial output and log-sum-exp of each split of the keys from first_key on.

    partial, lse: as merge_splits takes them, with slots for first_slot + num_splits splits at least; None, with one
    split, to write the output itself. first_key: a multiple of the tile. scales: of K and V, checked.
    """
    num_slots = 1 if lse is None else lse.shape[2]
    problem = call.problem
    _attend_split[(problem.num_kv_heads * head_tiles(problem), num_splits, problem.batch_size)](
        call.q,
        call.k_cache,
        call.v_cache,
        call.block_table,
        call.context_lens,
        call.out,
        partial,
        lse,
        *scales,
        call.scale_log2,
        num_splits,
        split_size,
        first_key,
        first_slot,
        num_slots,
        *call.q.stride()[:2],
        *call.cache_strides,
        call.block_table.stride(0),
        *call.out.stride()[:2],
        DIRECT=partial is None,
        PREFETCH=shape.prefetch,
        **group_constexprs(problem, shape.tile),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
