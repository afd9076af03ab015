"""Persistent decode attention: as many programs as the GPU holds, each with an equal share of all tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode.contract import DecodeProblem
from kernels.decode.launch import Call, TritonDecodeKernel, group_constexprs
from kernels.decode.online_softmax import attend_range, load_queries, normalised
from kernels.decode.planner import PROGRAMS_PER_SM, TileShape, device_sm_count, head_rows, head_tiles
from kernels.triton_support import tl, triton

# Tiles that a program should at least have: with fewer, more programs only make more partial results.
LEAST_TILES = 2

# Programs' results that the second stage weighs at once.
CHUNK = 16


@triton.jit
def _row_tiles(context_lens_ptr, batch_size, ROWS: tl.constexpr, TILE: tl.constexpr):
    """[ROWS]: the tiles of each row's context, 0 past the batch."""
    rows = tl.arange(0, ROWS)
    return tl.cdiv(tl.load(context_lens_ptr + rows, mask=rows < batch_size, other=0), TILE)


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
    """Program p takes the tiles p * total // P to (p + 1) * total // P - 1 of the line of all tiles.

    On that line rows follow one another, within a row its items (KV head and tile of its query heads), within an item
    its context. A program goes through its share item by item. An item that lies wholly in one share is written to the
    output; else each program leaves its part in one of its two slots: 0 for a part that continues what an earlier
    program began (its first), 1 for a part that later programs continue (its last).
    """
    ITEMS: tl.constexpr = NUM_KV_HEADS * HEAD_TILES
    rows = tl.arange(0, ROWS)
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    tiles = _row_tiles(context_lens_ptr, batch_size, ROWS, TILE)
    ends = tl.cumsum(tiles, 0) * ITEMS
    total = tl.sum(tiles, 0) * ITEMS
    program = tl.program_id(0).to(tl.int64)
    here = (program * total // tl.num_programs(0)).to(tl.int32)
    share_end = ((program + 1) * total // tl.num_programs(0)).to(tl.int32)
    while here < share_end:
        row = tl.sum((ends <= here).to(tl.int32), 0)
        context_len = tl.load(context_lens_ptr + row)
        num_tiles = tl.cdiv(context_len, TILE)
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
        acc, peak, total_weight = attend_range(
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
        out, lse = normalised(acc, peak, total_weight)
        mask = (heads < num_heads)[:, None] & (dims < HEAD_DIM)[None, :]
        head_ids = (first_head + heads).to(tl.int64)
        if (first_tile == 0) & (last_tile == num_tiles):
            tl.store(
                out_ptr + row * stride_out_row + head_ids[:, None] * stride_out_head + dims[None, :],
                out.to(out_ptr.dtype.element_ty),
                mask=mask,
            )
        else:
            slot = 2 * program + (first_tile == 0).to(tl.int64)
            slots = slot * SLOT_HEADS + heads
            tl.store(partial_ptr + slots[:, None] * HEAD_DIM + dims[None, :], out, mask=mask)
            tl.store(lse_ptr + slots, lse, mask=heads < num_heads)
        here += last_tile - first_tile


@triton.jit(
    do_not_specialize=["batch_size", "num_programs"], do_not_specialize_on_alignment=["context_lens_ptr"]
)
def _merge_shares(
    partial_ptr,
    lse_ptr,
    context_lens_ptr,
    out_ptr,
    batch_size,
    num_programs,
    stride_out_row,
    stride_out_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    SLOT_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program a query head and row: merges the parts of its item, if more than one program had it."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    dim_mask = dims < HEAD_DIM
    out_row_ptr = out_ptr + row * stride_out_row + head * stride_out_head + dims
    tiles = _row_tiles(context_lens_ptr, batch_size, ROWS, TILE)
    total = tl.sum(tiles, 0) * (NUM_KV_HEADS * HEAD_TILES)
    num_tiles = tl.sum(tl.where(rows == row, tiles, 0), 0)
    if num_tiles == 0:
        tl.store(out_row_ptr, tl.zeros([DIM], tl.float32).to(out_ptr.dtype.element_ty), mask=dim_mask)
    else:
        item = (head // GROUP * HEAD_TILES + head % GROUP // HEADS).to(tl.int32)
        start = tl.sum(tl.where(rows < row, tiles, 0), 0) * (NUM_KV_HEADS * HEAD_TILES) + item * num_tiles
        # The program whose share holds tile t is the last p with p * total // P <= t.
        first = ((start + 1).to(tl.int64) * num_programs - 1) // total
        last = ((start + num_tiles).to(tl.int64) * num_programs - 1) // total
        if first < last:
            acc = tl.zeros([DIM], tl.float32)
            peak = float("-inf")
            weight = 0.0
            for chunk_start in range(first, last + 1, CHUNK):
                programs = chunk_start + tl.arange(0, CHUNK)
                # With more programs than tiles some shares are empty, and their slots unwritten.
                busy = programs * total // num_programs < (programs + 1) * total // num_programs
                valid = (programs <= last) & busy
                slots = (2 * programs + (programs == first).to(tl.int64)) * SLOT_HEADS + head % GROUP % HEADS
                lse = tl.load(lse_ptr + slots, mask=valid, other=float("-inf"))
                partial = tl.load(
                    partial_ptr + slots[:, None] * HEAD_DIM + dims[None, :],
                    mask=valid[:, None] & dim_mask[None, :],
                    other=0.0,
                )
                new_peak = tl.maximum(peak, tl.max(lse, 0))
                # Finite from the first chunk on, for `first` is busy and holds at least one key.
                weights = tl.exp2(lse - new_peak)
                decay = tl.exp2(peak - new_peak)
                acc = acc * decay + tl.sum(weights[:, None] * partial, 0)
                weight = weight * decay + tl.sum(weights, 0)
                peak = new_peak
            tl.store(out_row_ptr, (acc / weight).to(out_ptr.dtype.element_ty), mask=dim_mask)


class StreamKDecode(TritonDecodeKernel):
    """Balances ragged batches: stream-K (Osama et al. 2023) over the tiles of all contexts. Base 2 in both stages.

    The schedule is a function of context_lens that every program computes for itself, a cumulative sum over the batch:
    nothing is read back to the host, and one captured launch serves any lengths.
    """

    name = "stream_k"

    def plan(self, problem: DecodeProblem) -> dict[str, Any]:
        return {"num_programs": _num_programs(problem), **TileShape.of(problem).options()}

    def workspace(self, problem: DecodeProblem, device: torch.device) -> Tensor | None:
        return torch.empty(
            _partial_numel(problem, _num_programs(problem)), dtype=torch.float32, device=device
        )

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
        needed = _partial_numel(problem, num_programs)
        workspace = call.workspace
        if workspace is None:
            workspace = torch.empty(needed, dtype=torch.float32, device=call.q.device)
        if workspace.dtype != torch.float32 or workspace.dim() != 1 or workspace.numel() < needed:
            raise ValueError(
                f"workspace is {tuple(workspace.shape)} {workspace.dtype}, this call needs [{needed}] torch.float32"
            )
        slot_heads = min(problem.group_size, head_rows(problem))
        outputs = 2 * num_programs * slot_heads * problem.head_dim
        partial, lse = workspace[:outputs], workspace[outputs:needed]
        constexprs = group_constexprs(problem, shape.tile) | {
            "ROWS": padded_rows(problem.batch_size),
            "SLOT_HEADS": slot_heads,
        }
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
            **constexprs,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
        del constexprs["BLOCK_SIZE"], constexprs["DOT_DTYPE"]
        _merge_shares[(problem.num_q_heads, problem.batch_size)](
            partial,
            lse,
            call.context_lens,
            call.out,
            problem.batch_size,
            num_programs,
            *call.out.stride()[:2],
            **constexprs,
            CHUNK=CHUNK,
            num_warps=4,
        )


def padded_rows(batch_size: int) -> int:
    """batch_size up to a power of two, from 16 on: one program is compiled for each."""
    return max(16, 1 << (batch_size - 1).bit_length())


def _num_programs(problem: DecodeProblem) -> int:
    """What the GPU holds at once, but no more than leaves LEAST_TILES tiles to each where all contexts are full."""
    tiles = -(-problem.max_context_len // TileShape.of(problem).tile)
    tiles *= problem.batch_size * problem.num_kv_heads * head_tiles(problem)
    return max(1, min(PROGRAMS_PER_SM * device_sm_count(problem.device), -(-tiles // LEAST_TILES)))


def _partial_numel(problem: DecodeProblem, num_programs: int) -> int:
    """fp32 elements of two slots a program: the outputs and log-sum-exps of an item's heads."""
    return 2 * num_programs * min(problem.group_size, head_rows(problem)) * (problem.head_dim + 1)
