"""Equal shares of all tiles of a ragged batch, one a program, and the merge of what they cut in two.

Stream-K (Osama et al. 2023) over the tiles of all contexts, a function of context_lens that every program computes for
itself: nothing is read back to the host, and one captured launch serves any lengths.

A *line* is the tiles of all rows, row after row, for LINE_ITEMS of a row's items (KV head and tile of its query heads):
all of them, item after item, or one, so that there are as many lines as items. Share s of n is the tiles
s * total // n to (s + 1) * total // n - 1; where there are more shares than tiles, those beyond n = total are empty. An
item of a row that lies wholly in one share is written to the output; else each share leaves its part in one of its two
slots: 0 for a part that continues what an earlier share began (its first), 1 for a part that later shares continue (its
last). The slots of share s of line l are those of program l * num_shares + s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.decode.contract import DecodeProblem
from kernels.decode.launch import Call
from kernels.decode.merge import chunk_for, merge_step
from kernels.decode.online_softmax import normalised
from kernels.decode.planner import head_rows, head_tiles, padded_dim
from kernels.triton_support import next_power_of_2, tl, triton

# Programs of the second stage, at most, that take one query head each; where there would be more (two turns of what a
# GPU holds at once), each takes all heads of an item, HEADS_CHUNK parts at a time.
MERGE_PROGRAMS = 4096
HEADS_CHUNK = 2

# Elements of partial outputs that a warp of the second stage holds at once, and of its result, at most.
WARP_ELEMENTS = 2048


@triton.jit
def row_tiles(context_lens, rows, batch_size, TILE: tl.constexpr):
    """[ROWS]: the tiles of each row's context, 0 past the batch.

    An empty row takes one step too, so that it lies in some share, whose program writes its zeros.
    """
    return tl.where(rows < batch_size, tl.maximum(tl.cdiv(context_lens, TILE), 1), 0)


@triton.jit
def share_bounds(share, num_shares, total):
    """The first tile of a share (int64) of `total` tiles and the first after it: the same if it is empty."""
    busy = tl.minimum(num_shares, total)
    start = tl.minimum(share, busy) * total // busy
    return start.to(tl.int32), (tl.minimum(share + 1, busy) * total // busy).to(tl.int32)


@triton.jit
def leave(
    acc,
    peak,
    weight,
    begun,
    ended,
    program,
    row,
    first_head,
    num_heads,
    out_ptr,
    partial_ptr,
    lse_ptr,
    stride_out_row,
    stride_out_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SLOT_HEADS: tl.constexpr,
):
    """Write what a share has of an item, [HEADS, DIM]: begun, ended say whether the item's first, last tile is in it.

    program (int64): whose slots. partial: [2 * programs, SLOT_HEADS, HEAD_DIM] normalised outputs, lse: [2 * programs,
    SLOT_HEADS] base-2 log-sum-exps, of parts.
    """
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    out, lse = normalised(acc, peak, weight)
    mask = (heads < num_heads)[:, None] & (dims < HEAD_DIM)[None, :]
    if begun & ended:
        head_ids = (first_head + heads).to(tl.int64)
        tl.store(
            out_ptr + row * stride_out_row + head_ids[:, None] * stride_out_head + dims[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=mask,
        )
    else:
        slots = (2 * program + begun.to(tl.int64)) * SLOT_HEADS + heads
        tl.store(partial_ptr + slots[:, None] * HEAD_DIM + dims[None, :], out, mask=mask)
        tl.store(lse_ptr + slots, lse, mask=heads < num_heads)


@triton.jit(
    do_not_specialize=["batch_size", "num_shares"], do_not_specialize_on_alignment=["context_lens_ptr"]
)
def _merge_shares(
    partial_ptr,
    lse_ptr,
    context_lens_ptr,
    out_ptr,
    batch_size,
    num_shares,
    stride_out_row,
    stride_out_head,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    SLOT_HEADS: tl.constexpr,
    LINE_ITEMS: tl.constexpr,
    MERGED_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program a (MERGED_HEADS query heads of an item, row): merges its parts, if more than one share has it."""
    PARTS: tl.constexpr = (SLOT_HEADS + MERGED_HEADS - 1) // MERGED_HEADS
    item = tl.program_id(0) // PARTS
    row = tl.program_id(1).to(tl.int64)
    heads = (tl.program_id(0) % PARTS) * MERGED_HEADS + tl.arange(0, MERGED_HEADS)
    head_in_group = (item % HEAD_TILES) * HEADS
    num_heads = tl.minimum(GROUP - head_in_group, HEADS)
    dims = tl.arange(0, DIM)
    mask = (heads < num_heads)[:, None] & (dims < HEAD_DIM)[None, :]

    rows = tl.arange(0, ROWS)
    tiles = row_tiles(
        tl.load(context_lens_ptr + rows, mask=rows < batch_size, other=0), rows, batch_size, TILE
    )
    total = tl.sum(tiles, 0) * LINE_ITEMS
    num_tiles = tl.sum(tl.where(rows == row, tiles, 0), 0)
    start = tl.sum(tl.where(rows < row, tiles, 0), 0) * LINE_ITEMS + (item % LINE_ITEMS) * num_tiles
    # The share that holds tile t is the last s with s * total // busy <= t.
    busy = tl.minimum(num_shares, total).to(tl.int64)
    first = ((start + 1) * busy - 1) // total
    last = ((start + num_tiles) * busy - 1) // total
    if first < last:
        first_program = (item // LINE_ITEMS).to(tl.int64) * num_shares
        acc = tl.zeros([MERGED_HEADS, DIM], tl.float32)
        peak = tl.full([MERGED_HEADS], float("-inf"), tl.float32)
        weight = tl.zeros([MERGED_HEADS], tl.float32)
        for chunk_start in range(first, last + 1, CHUNK):
            shares = chunk_start + tl.arange(0, CHUNK)
            present = (heads < num_heads)[:, None] & (shares <= last)[None, :]
            slots = 2 * (first_program + shares) + (shares == first).to(tl.int64)
            slots = slots[None, :] * SLOT_HEADS + heads[:, None]
            lse = tl.load(lse_ptr + slots, mask=present, other=float("-inf"))
            partial = tl.load(
                partial_ptr + slots[:, :, None] * HEAD_DIM + dims[None, None, :],
                mask=present[:, :, None] & (dims < HEAD_DIM)[None, None, :],
                other=0.0,
            )
            acc, peak, weight = merge_step(acc, peak, weight, partial, lse)
        head_ids = ((item // HEAD_TILES) * GROUP + head_in_group + heads).to(tl.int64)
        tl.store(
            out_ptr + row * stride_out_row + head_ids[:, None] * stride_out_head + dims[None, :],
            (acc / tl.where(weight > 0, weight, 1.0)[:, None]).to(out_ptr.dtype.element_ty),
            mask=mask,
        )


def merge_shares(
    call: Call, partial: Tensor, lse: Tensor, tile: int, num_shares: int, line_items: int
) -> None:
    """The second stage: call.out of the items whose parts lie in several shares. num_shares: of a line."""
    problem = call.problem
    # Of an item, were all rows equal: so many shares have nothing else, and two begin or end with it.
    parts = num_shares // (problem.batch_size * line_items) + 2
    heads, chunk = merged_heads(problem, parts)
    programs = problem.num_kv_heads * head_tiles(problem) * -(-slot_heads(problem) // heads)
    _merge_shares[(programs, problem.batch_size)](
        partial,
        lse,
        call.context_lens,
        call.out,
        problem.batch_size,
        num_shares,
        *call.out.stride()[:2],
        GROUP=problem.group_size,
        HEADS=head_rows(problem),
        HEAD_TILES=head_tiles(problem),
        HEAD_DIM=problem.head_dim,
        DIM=padded_dim(problem.head_dim),
        TILE=tile,
        ROWS=padded_rows(problem.batch_size),
        SLOT_HEADS=slot_heads(problem),
        LINE_ITEMS=line_items,
        MERGED_HEADS=heads,
        CHUNK=chunk,
        num_warps=merge_warps(problem, heads, chunk),
    )


def merged_heads(problem: DecodeProblem, parts: int) -> tuple[int, int]:
    """Query heads that a program of the second stage takes, and parts at a time, for items of about so many parts."""
    heads = slot_heads(problem)
    if problem.batch_size * problem.num_kv_heads * head_tiles(problem) * heads <= MERGE_PROGRAMS:
        return 1, chunk_for(parts)
    return min(next_power_of_2(heads), WARP_ELEMENTS // padded_dim(problem.head_dim)), HEADS_CHUNK


def merge_warps(problem: DecodeProblem, heads: int, chunk: int) -> int:
    """Warps of a program of the second stage: as few as hold its parts, since one waits for no other."""
    return max(1, heads * chunk * padded_dim(problem.head_dim) // WARP_ELEMENTS)


def padded_rows(batch_size: int) -> int:
    """batch_size up to 16, 64, 256, 512, ...: a kernel is compiled for each, and holds that many lengths."""
    return next(rows for rows in (16, 64, 256, next_power_of_2(batch_size)) if rows >= batch_size)


def slot_heads(problem: DecodeProblem) -> int:
    """Query heads that a slot holds: an item's."""
    return min(problem.group_size, head_rows(problem))


def slots_numel(problem: DecodeProblem, num_programs: int) -> int:
    """fp32 elements of two slots a program: the outputs and log-sum-exps of an item's heads."""
    return 2 * num_programs * slot_heads(problem) * (problem.head_dim + 1)


def slots_of(call: Call, num_programs: int) -> tuple[Tensor, Tensor]:
    """(partial, lse) as `leave` takes them, flat, in the call's workspace or newly allocated."""
    needed = slots_numel(call.problem, num_programs)
    workspace = call.workspace
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=call.q.device)
    if workspace.dtype != torch.float32 or workspace.dim() != 1 or workspace.numel() < needed:
        raise ValueError(
            f"workspace is {tuple(workspace.shape)} {workspace.dtype}, this call needs [{needed}] torch.float32"
        )
    outputs = needed // (call.problem.head_dim + 1) * call.problem.head_dim
    return workspace[:outputs], workspace[outputs:needed]
