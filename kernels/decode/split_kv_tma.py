"""Flash decoding with Hopper's bulk copy engine (TMA): one instruction a tile of keys, no address arithmetic."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.decode.contract import DecodeProblem
from kernels.decode.launch import Call
from kernels.decode.merge import chunk_for, merge_splits, partial_numel, partial_views
from kernels.decode.online_softmax import attend_tile, load_queries, normalised
from kernels.decode.planner import (
    TileShape,
    gpu_of,
    head_rows,
    head_tiles,
    max_partials,
    plan_splits,
    planned_us,
    work_of,
)
from kernels.decode.tma import MAX_TILE, TmaDecodeKernel, descriptor, shape_of
from kernels.triton_support import dot_dtype, tl, triton

# Keys of a chunk: what a split takes at once. A split's first chunk is known before the context's length is.
CHUNK_KEYS = MAX_TILE

# Of whole rows, at least: a tile in flight.
LEAST_STAGES = 2


@triton.jit
def _load_rest(ptr, offsets, present, DIM: tl.constexpr):
    """[TILE, DIM] at the keys' offsets, zeros where not present: memory there may hold NaN."""
    return tl.load(ptr + offsets[:, None] + tl.arange(0, DIM)[None, :], mask=present[:, None], other=0.0)


@triton.jit(
    do_not_specialize=["num_splits", "stride_table_row", "table_width"],
    do_not_specialize_on_alignment=["table_ptr", "context_lens_ptr"],
)
def _attend_chunks(
    q_ptr,
    k_desc,
    v_desc,
    k_ptr,
    v_ptr,
    table_ptr,
    context_lens_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale_log2,
    num_splits,
    table_width,
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
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY_REST: tl.constexpr,
    DIRECT: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """One program a (KV head and tile of its query heads, split, row).

    The context is dealt out in chunks of CHUNK tiles, split s getting chunks s, s + num_splits, and so on; a tile lies
    in one block. Full tiles come by TMA, unmasked; a last partial one by masked loads, with EARLY_REST issued before
    the full tiles are worked on. k_desc, v_desc: [blocks, block size, KV heads, DIM], box [1, TILE, 1, DIM].
    """
    PER_BLOCK: tl.constexpr = BLOCK_SIZE // TILE
    kv_head = tl.program_id(0) // HEAD_TILES
    head_in_group = (tl.program_id(0) % HEAD_TILES) * HEADS
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    first_head = kv_head * GROUP + head_in_group
    num_heads = tl.minimum(GROUP - head_in_group, HEADS)
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)

    table_ptr += row * stride_table_row
    context_len = tl.load(context_lens_ptr + row)
    # Not used as a block unless the context reaches it: this load need not wait for the length.
    first = split * CHUNK
    next_block = tl.load(table_ptr + first // PER_BLOCK, mask=first // PER_BLOCK < table_width, other=0)
    q = load_queries(
        q_ptr + row * stride_q_row, stride_q_head, first_head, num_heads, HEADS, DIM, DIM, DOT_DTYPE
    )
    acc = tl.zeros([HEADS, DIM], tl.float32)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)

    # This split's full tiles: CHUNK of each whole round, and what it gets of the last.
    full = context_len // TILE
    round_tiles = CHUNK * num_splits
    mine = (full // round_tiles) * CHUNK + tl.minimum(tl.maximum(full % round_tiles - first, 0), CHUNK)
    rest = context_len % TILE
    owns_rest = (rest > 0) & ((full // CHUNK) % num_splits == split)

    offsets = tl.arange(0, TILE)
    present = offsets < tl.where(owns_rest, rest, 0)
    rest_block = tl.load(table_ptr + full // PER_BLOCK, mask=owns_rest, other=0).to(tl.int64)
    rest_token = ((full % PER_BLOCK) * TILE + offsets).to(tl.int64)
    k_rest_ptr = k_ptr + kv_head.to(tl.int64) * stride_k_head + rest_block * stride_k_block
    v_rest_ptr = v_ptr + kv_head.to(tl.int64) * stride_v_head + rest_block * stride_v_block
    if EARLY_REST:
        k_rest = _load_rest(k_rest_ptr, rest_token * stride_k_token, present, DIM)
        v_rest = _load_rest(v_rest_ptr, rest_token * stride_v_token, present, DIM)

    for index in range(0, mine):
        tile = (index // CHUNK) * round_tiles + first + index % CHUNK
        following = index + 1
        next_tile = (following // CHUNK) * round_tiles + first + following % CHUNK
        block = next_block
        next_block = tl.load(table_ptr + next_tile // PER_BLOCK, mask=following < mine, other=0)
        place = [block, (tile % PER_BLOCK) * TILE, kv_head, 0]
        k = k_desc.load(place).reshape([TILE, DIM]).to(DOT_DTYPE)
        v = v_desc.load(place).reshape([TILE, DIM]).to(DOT_DTYPE)
        acc, peak, total = attend_tile(
            q, k, v, present, acc, peak, total, scale_log2, MASKED=False, DOT_DTYPE=DOT_DTYPE
        )
    if owns_rest:
        if not EARLY_REST:
            k_rest = _load_rest(k_rest_ptr, rest_token * stride_k_token, present, DIM)
            v_rest = _load_rest(v_rest_ptr, rest_token * stride_v_token, present, DIM)
        acc, peak, total = attend_tile(
            q,
            k_rest.to(DOT_DTYPE),
            v_rest.to(DOT_DTYPE),
            present,
            acc,
            peak,
            total,
            scale_log2,
            MASKED=True,
            DOT_DTYPE=DOT_DTYPE,
        )

    out, lse = normalised(acc, peak, total)
    mask = (heads < num_heads)[:, None]
    head_ids = (first_head + heads).to(tl.int64)
    if DIRECT:
        tl.store(
            out_ptr + row * stride_out_row + head_ids[:, None] * stride_out_head + dims[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=mask,
        )
    else:
        slots = (row * (NUM_KV_HEADS * GROUP) + head_ids) * num_splits + split
        tl.store(partial_ptr + slots[:, None] * DIM + dims[None, :], out, mask=mask)
        tl.store(lse_ptr + slots, lse, mask=heads < num_heads)


class SplitKVTmaDecode(TmaDecodeKernel):
    """split_kv whose tiles TMA copies into shared memory, many in flight (base 2 throughout). For Hopper and later.

    A tile is a block, or an equal part of one: at blocks of 16 it takes many small steps, which few threads do best.
    """

    name = "split_kv_tma"

    def plan(self, problem: DecodeProblem) -> dict[str, Any]:
        shape, num_splits = choose_splits(problem)
        return {"num_splits": num_splits, "num_stages": shape.num_stages}

    def workspace(self, problem: DecodeProblem, device: torch.device) -> Tensor | None:
        partials = max_partials(problem, shape_of(problem))
        numel = partial_numel(partials, problem.num_q_heads, 1, problem.head_dim)
        return torch.empty(numel, dtype=torch.float32, device=device)

    def launch(
        self,
        call: Call,
        num_splits: int | None = None,
        tile: int | None = None,
        num_warps: int | None = None,
        num_stages: int | None = None,
    ) -> None:
        """num_splits: programs a row and KV head; tile: keys a step, a divisor of the block size.

        num_warps, num_stages: Triton's, all but one of the stages in flight. What is None is planned, for a full table.
        """
        problem = call.problem
        if num_splits is None and tile is num_warps is num_stages is None:
            shape, num_splits = choose_splits(problem)
        else:
            shape = shape_of(problem, tile, num_warps, num_stages)
        if num_splits is None:
            num_splits = plan_splits(problem, shape, self.name, CHUNK_KEYS)
        if num_splits < 1:
            raise ValueError(f"num_splits is {num_splits}, the least is 1")
        partial, lse = None, None
        if num_splits > 1:
            partial, lse = partial_views(
                call.workspace,
                problem.batch_size,
                problem.num_q_heads,
                num_splits,
                problem.head_dim,
                like=call.q,
            )
        _attend_chunks[(problem.num_kv_heads * head_tiles(problem), num_splits, problem.batch_size)](
            call.q,
            descriptor(call.k_cache, "k_cache", shape.tile),
            descriptor(call.v_cache, "v_cache", shape.tile),
            call.k_cache,
            call.v_cache,
            call.block_table,
            call.context_lens,
            call.out,
            partial,
            lse,
            call.scale_log2,
            num_splits,
            call.block_table.shape[1],
            *call.q.stride()[:2],
            *call.cache_strides,
            call.block_table.stride(0),
            *call.out.stride()[:2],
            **chunk_constexprs(problem, shape.tile),
            DIRECT=partial is None,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
        if partial is not None and lse is not None:
            merge_splits(partial, lse, call.out, chunk=chunk_for(num_splits))


@functools.lru_cache(maxsize=4096)
def choose_splits(problem: DecodeProblem) -> tuple[TileShape, int]:
    """The shape and number of splits by the CostModel: its own shape, or whole rows with a stage less.

    That leaves room for more programs on an SM, which counts where whole rows are enough of them but take one more turn
    (128 x 8192 and 256 x 1024 on an H200: 4% and 2% faster than splits, or all stages; in blocks of 64 6% and 9%).
    """
    shape = shape_of(problem)
    num_splits = plan_splits(problem, shape, SplitKVTmaDecode.name, CHUNK_KEYS)
    lighter = replace(shape, num_stages=shape.num_stages - 1)
    if lighter.num_stages < LEAST_STAGES:
        return shape, num_splits

    def cost(shape: TileShape, num_splits: int) -> tuple[float, int]:
        """Microseconds, and the turns that programs take: fewer are better where the model sees no difference."""
        programs = work_of(problem, CHUNK_KEYS).programs * num_splits
        turns = -(-programs // gpu_of(problem, shape).slots)
        return planned_us(problem, shape, SplitKVTmaDecode.name, CHUNK_KEYS, num_splits), turns

    return min((shape, num_splits), (lighter, 1), key=lambda choice: cost(*choice))


def chosen_us(problem: DecodeProblem) -> float:
    """Microseconds that the CostModel gives what choose_splits chose."""
    shape, num_splits = choose_splits(problem)
    return planned_us(problem, shape, SplitKVTmaDecode.name, CHUNK_KEYS, num_splits)


def chunk_constexprs(problem: DecodeProblem, tile: int) -> dict[str, Any]:
    """The constexprs of _attend_chunks."""
    return {
        "NUM_KV_HEADS": problem.num_kv_heads,
        "GROUP": problem.group_size,
        "HEADS": head_rows(problem),
        "HEAD_TILES": head_tiles(problem),
        "DIM": problem.head_dim,
        "BLOCK_SIZE": problem.block_size,
        "TILE": tile,
        "CHUNK": CHUNK_KEYS // tile,
        "EARLY_REST": tile == 16,  # a larger one would fill the registers meanwhile
        "DOT_DTYPE": dot_dtype(problem.dtype),
    }
