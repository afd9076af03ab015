"""Persistent decode attention: as many programs as the GPU holds, each with an equal share of all tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode.contract import DecodeProblem
from kernels.decode.launch import Call, TritonDecodeKernel, group_constexprs
from kernels.decode.online_softmax import attend_range, load_queries
from kernels.decode.planner import PROGRAMS_PER_SM, TileShape, device_sm_count, head_tiles
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
from kernels.triton_support import tl, triton

# Tiles that a program should at least have: with fewer, more programs only make more partial results.
LEAST_TILES = 2


@triton.jit(
    do_not_specialize=["batch_size", "stride_table_row"],
    do_not_specialize_on_alignment=["table_ptr", "context_lens_ptr"],
)
def _attend_share(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    context_lens_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale_log2,
    batch_size,
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
    DOT_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    SLOT_HEADS: tl.constexpr,
):
    """Program p takes share p of the one line of all items (kernels/decode/shares.py), item by item."""
    ITEMS: tl.constexpr = NUM_KV_HEADS * HEAD_TILES
    rows = tl.arange(0, ROWS)
    tiles = row_tiles(
        tl.load(context_lens_ptr + rows, mask=rows < batch_size, other=0), rows, batch_size, TILE
    )
    ends = tl.cumsum(tiles, 0) * ITEMS
    program = tl.program_id(0).to(tl.int64)
    here, share_end = share_bounds(program, tl.num_programs(0), tl.sum(tiles, 0) * ITEMS)
    while here < share_end:
        row = tl.sum((ends <= here).to(tl.int32), 0)
        context_len = tl.load(context_lens_ptr + row)
        num_tiles = tl.maximum(tl.cdiv(context_len, TILE), 1)
        in_row = here - tl.sum(tl.where(rows < row, tiles, 0), 0) * ITEMS
        item = in_row // num_tiles
        first_tile = in_row % num_tiles
        last_tile = tl.minimum(num_tiles, first_tile + share_end - here)
        kv_head = item // HEAD_TILES
        head_in_group = (item % HEAD_TILES) * HEADS
        first_head = kv_head * GROUP + head_in_group
        num_heads = tl.minimum(GROUP - head_in_group, HEADS)
        row = row.to(tl.int64)
        q = load_queries(
            q_ptr + row * stride_q_row, stride_q_head, first_head, num_heads, HEADS, HEAD_DIM, DIM, DOT_DTYPE
        )
        acc, peak, weight = attend_range(
            q,
            k_ptr + kv_head.to(tl.int64) * stride_k_head,
            v_ptr + kv_head.to(tl.int64) * stride_v_head,
            table_ptr + row * stride_table_row,
            first_tile * TILE,
            tl.minimum(last_tile * TILE, context_len),
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
        )
        leave(
            acc,
            peak,
            weight,
            first_tile == 0,
            last_tile == num_tiles,
            program,
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
        here += last_tile - first_tile


class StreamKDecode(TritonDecodeKernel):
    """Balances ragged batches: stream-K (Osama et al. 2023) over the tiles of all contexts. Base 2 in both stages."""

    name = "stream_k"

    def plan(self, problem: DecodeProblem) -> dict[str, Any]:
        return {"num_programs": _num_programs(problem), **TileShape.of(problem).options()}

    def workspace(self, problem: DecodeProblem, device: torch.device) -> Tensor | None:
        numel = slots_numel(problem, _num_programs(problem))
        return torch.empty(numel, dtype=torch.float32, device=device)

    def launch(
        self,
        call: Call,
        num_programs: int | None = None,
        tile: int | None = None,
        num_warps: int | None = None,
        num_stages: int | None = None,
    ) -> None:
        """num_programs: of the grid, whatever the batch. tile, num_warps, num_stages: see TileShape."""
        problem = call.problem
        shape = TileShape.of(problem, tile, num_warps, num_stages)
        num_programs = _num_programs(problem) if num_programs is None else num_programs
        if num_programs < 1:
            raise ValueError(f"num_programs is {num_programs}, the least is 1")
        partial, lse = slots_of(call, num_programs)
        _attend_share[(num_programs,)](
            call.q,
            call.k_cache,
            call.v_cache,
            call.block_table,
            call.context_lens,
            call.out,
            partial,
            lse,
            call.scale_log2,
            problem.batch_size,
            *call.q.stride()[:2],
            *call.cache_strides,
            call.block_table.stride(0),
            *call.out.stride()[:2],
            **group_constexprs(problem, shape.tile),
            ROWS=padded_rows(problem.batch_size),
            SLOT_HEADS=slot_heads(problem),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
        items = problem.num_kv_heads * head_tiles(problem)
        merge_shares(call, partial, lse, shape.tile, num_programs, line_items=items)


def _num_programs(problem: DecodeProblem) -> int:
    """What the GPU holds at once, but no more than leaves LEAST_TILES tiles to each where all contexts are full."""
    tiles = -(-problem.max_context_len // TileShape.of(problem).tile)
    tiles *= problem.batch_size * problem.num_kv_heads * head_tiles(problem)
    return max(1, min(PROGRAMS_PER_SM * device_sm_count(problem.device), -(-tiles // LEAST_TILES)))
