"""Equal shares of a ragged batch, as in stream_k, of tiles that TMA copies, as in split_kv_tma."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode.contract import DecodeProblem
from kernels.decode.launch import Call, group_constexprs
from kernels.decode.online_softmax import attend_tile, load_queries
from kernels.decode.planner import (
    REGISTERS_PER_SM,
    SHARED_PER_SM,
    SHARED_RESERVED,
    WARPS_PER_SM,
    TileShape,
    device_sm_count,
    head_rows,
    head_tiles,
)
from kernels.decode.shares import (
    leave,
    merge_shares,
    padded_rows,
    row_tiles,
    share_bounds,
    slot_heads,
    slots_numel,
    slots_of,
)
from kernels.decode.tma import TmaDecodeKernel, descriptor, shape_of
from kernels.triton_support import tl, triton

# Keys that a program should at least have: with fewer, more programs only make more partial results.
LEAST_KEYS = 64


@triton.jit(
    do_not_specialize=["batch_size", "stride_table_row"],
    do_not_specialize_on_alignment=["table_ptr", "context_lens_ptr"],
)
def _attend_line_share(
    q_ptr,
    k_desc,
    v_desc,
    table_ptr,
    context_lens_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale_log2,
    batch_size,
    stride_q_row,
    stride_q_head,
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
    DOT_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    SLOT_HEADS: tl.constexpr,
):
    """One program a (line, share), as kernels/decode/shares.py means them, with a line for each item, row by row.

    A tile lies in one block and comes by TMA. The last of a context is copied so that it ends with its last key: what
    lies before the block's first is outside the tensor, and zero; what lies before the tile belongs to the tile before,
    and is masked. So is an empty row's, which lies outside altogether: no memory past a context is ever read.
    """
    PER_BLOCK: tl.constexpr = BLOCK_SIZE // TILE
    line = tl.program_id(0)
    share = tl.program_id(1).to(tl.int64)
    num_shares = tl.num_programs(1)
    kv_head = line // HEAD_TILES
    head_in_group = (line % HEAD_TILES) * HEADS
    first_head = kv_head * GROUP + head_in_group
    num_heads = tl.minimum(GROUP - head_in_group, HEADS)
    offsets = tl.arange(0, TILE)

    rows = tl.arange(0, ROWS)
    context_lens = tl.load(context_lens_ptr + rows, mask=rows < batch_size, other=0)
    tiles = row_tiles(context_lens, rows, batch_size, TILE)
    here, share_end = share_bounds(share, num_shares, tl.sum(tiles, 0))
    row = tl.sum((tl.cumsum(tiles, 0) <= here).to(tl.int32), 0)
    tile = here - tl.sum(tl.where(rows < row, tiles, 0), 0)
    context_len = tl.sum(tl.where(rows == row, context_lens, 0), 0)
    # Loaded ahead of their use, one tile or one item: table entry, queries and length.
    row = row.to(tl.int64)
    block = tl.load(
        table_ptr + row * stride_table_row + tile // PER_BLOCK,
        mask=(here < share_end) & (context_len > 0),
        other=0,
    )
    heads_here = tl.where(here < share_end, num_heads, 0)
    q = load_queries(
        q_ptr + row * stride_q_row, stride_q_head, first_head, heads_here, HEADS, HEAD_DIM, DIM, DOT_DTYPE
    )
    while here < share_end:
        next_len = tl.load(context_lens_ptr + row + 1, mask=row + 1 < batch_size, other=0)
        num_tiles = tl.maximum(tl.cdiv(context_len, TILE), 1)
        begun = tile == 0
        end = tl.minimum(num_tiles, tile + share_end - here)
        here += end - tile
        acc = tl.zeros([HEADS, DIM], tl.float32)
        peak = tl.full([HEADS], float("-inf"), tl.float32)
        weight = tl.zeros([HEADS], tl.float32)
        for index in range(tile, end):
            before = tl.maximum((index + 1) * TILE - context_len, 0)
            place = [block, (index % PER_BLOCK) * TILE - before, kv_head, 0]
            k = k_desc.load(place).reshape([TILE, DIM]).to(DOT_DTYPE)
            v = v_desc.load(place).reshape([TILE, DIM]).to(DOT_DTYPE)
            following = index + 1
            block = tl.load(
                table_ptr + row * stride_table_row + following // PER_BLOCK, mask=following < end, other=0
            )
            acc, peak, weight = attend_tile(
                q, k, v, offsets >= before, acc, peak, weight, scale_log2, MASKED=True, DOT_DTYPE=DOT_DTYPE
            )
        # The next item's, before this one's results are written.
        more = here < share_end
        block = tl.load(table_ptr + (row + 1) * stride_table_row, mask=more & (next_len > 0), other=0)
        next_q = load_queries(
            q_ptr + (row + 1) * stride_q_row,
            stride_q_head,
            first_head,
            tl.where(more, num_heads, 0),
            HEADS,
            HEAD_DIM,
            DIM,
            DOT_DTYPE,
        )
        leave(
            acc,
            peak,
            weight,
            begun,
            end == num_tiles,
            line * num_shares + share,
            row,
            first_head,
            num_heads,
            out_ptr,
            partial_ptr,
            lse_ptr,
            stride_out_row,
            stride_out_head,
            HEADS,
            HEAD_DIM,
            DIM,
            SLOT_HEADS,
        )
        row += 1
        tile = 0
        context_len = next_len
        q = next_q


class StreamKTmaDecode(TmaDecodeKernel):
    """Stream-K (Osama et al. 2023) with a line of tiles for each KV head. Base 2 in both stages. For Hopper and later.

    Programs of all KV heads go through the same rows in step, so that they read whole tokens from memory together.
    """

    name = "stream_k_tma"

    def plan(self, problem: DecodeProblem) -> dict[str, Any]:
        shape = shape_of(problem)
        return {"num_programs": num_programs_for(problem, shape), **shape.options()}

    def workspace(self, problem: DecodeProblem, device: torch.device) -> Tensor | None:
        numel = slots_numel(problem, num_programs_for(problem, shape_of(problem)))
        return torch.empty(numel, dtype=torch.float32, device=device)

    def launch(
        self,
        call: Call,
        num_programs: int | None = None,
        tile: int | None = None,
        num_warps: int | None = None,
        num_stages: int | None = None,
    ) -> None:
        """num_programs: of the grid, whatever the batch: as many for each line, and one at least, so often fewer.

        tile: keys a step, a divisor of the block size; num_warps, num_stages: Triton's, all but one of the stages in
        flight.
        """
        problem = call.problem
        shape = shape_of(problem, tile, num_warps, num_stages)
        if num_programs is None:
            num_programs = num_programs_for(problem, shape)
        if num_programs < 1:
            raise ValueError(f"num_programs is {num_programs}, the least is 1")
        lines = problem.num_kv_heads * head_tiles(problem)
        num_shares = max(1, num_programs // lines)
        partial, lse = slots_of(call, num_shares * lines)
        _attend_line_share[(lines, num_shares)](
            call.q,
            descriptor(call.k_cache, "k_cache", shape.tile),
            descriptor(call.v_cache, "v_cache", shape.tile),
            call.block_table,
            call.context_lens,
            call.out,
            partial,
            lse,
            call.scale_log2,
            problem.batch_size,
            *call.q.stride()[:2],
            call.block_table.stride(0),
            *call.out.stride()[:2],
            **group_constexprs(problem, shape.tile),
            ROWS=padded_rows(problem.batch_size),
            SLOT_HEADS=slot_heads(problem),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
        merge_shares(call, partial, lse, shape.tile, num_shares, line_items=1)


def num_programs_for(problem: DecodeProblem, shape: TileShape) -> int:
    """What the GPU holds at once, but no more than leaves LEAST_KEYS keys to each where all contexts are full."""
    lines = problem.num_kv_heads * head_tiles(problem)
    keys = problem.batch_size * -(-problem.max_context_len // shape.tile) * shape.tile
    shares = device_sm_count(problem.device) * programs_per_sm(problem, shape) // lines
    return lines * max(1, min(shares, -(-keys // LEAST_KEYS)))


def programs_per_sm(problem: DecodeProblem, shape: TileShape) -> int:
    """Programs that an SM of an H100 or H200 holds at once, by shared memory, registers and warps.

    Shared memory: num_stages - 1 tiles of keys and values with a barrier each, the queries, and between several warps
    the weights. Registers: at most what the compiler's reports say (tests/kernels/test_decode_aot.py), two for each
    element that a thread accumulates.
    """
    rows, threads = head_rows(problem), 32 * shape.num_warps
    row_bytes = problem.head_dim * problem.dtype.itemsize
    shared = (shape.num_stages - 1) * 2 * (shape.tile * row_bytes + 8) + rows * row_bytes
    if shape.num_warps > 1:
        shared += rows * shape.tile * problem.dtype.itemsize
    registers = 88 + 2 * rows * problem.head_dim // threads + shape.tile - 16
    most = (
        SHARED_PER_SM // (shared + SHARED_RESERVED),
        REGISTERS_PER_SM // (threads * registers),
        WARPS_PER_SM // shape.num_warps,
    )
    return max(1, min(most))
