"""Cascade decode attention: a prefix that all rows share is read once for the whole batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.decode.contract import DecodeProblem
from kernels.decode.cost_model import Gpu, cost_model
from kernels.decode.launch import Call, TritonDecodeKernel, group_constexprs
from kernels.decode.merge import chunk_for, merge_splits, partial_numel, partial_views
from kernels.decode.online_softmax import attend_range, normalised
from kernels.decode.planner import (
    PROGRAMS_PER_SM,
    TileShape,
    device_name,
    device_sm_count,
    max_partials,
    padded_dim,
    plan_splits,
    work_of,
)
from kernels.decode.split_kv import attend_splits
from kernels.triton_support import next_power_of_2, tl, triton

# Rows of a query tile, at most: as many queries as share one reading of the prefix.
MAX_QUERIES = 64


@triton.jit(
    do_not_specialize=["batch_size", "prefix_len", "num_splits", "num_slots", "stride_table_row"],
    do_not_specialize_on_alignment=["table_ptr", "context_lens_ptr"],
)
def _attend_prefix(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    context_lens_ptr,
    partial_ptr,
    lse_ptr,
    scale_log2,
    batch_size,
    prefix_len,
    num_splits,
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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """One program a (KV head, split of the prefix, tile of queries).

    The queries of a KV head are those of all rows, GROUP each, one after another. The blocks are those of the row with
    the longest context, which has all that any row shares. Writes normalised partial outputs and base-2
    log-sum-exps to slot `split` of each row's num_slots; (0, -inf) for a row that has no key in the split.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    queries = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    dims = tl.arange(0, DIM)
    rows = (queries // GROUP).to(tl.int64)
    heads = kv_head * GROUP + queries % GROUP
    is_query = rows < batch_size
    mask = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(
        q_ptr + rows[:, None] * stride_q_row + heads.to(tl.int64)[:, None] * stride_q_head + dims[None, :],
        mask=mask,
        other=0.0,
    ).to(DOT_DTYPE)
    row_ends = tl.load(context_lens_ptr + rows, mask=is_query, other=0)

    batch = tl.arange(0, ROWS)
    lens = tl.load(context_lens_ptr + batch, mask=batch < batch_size, other=0)
    longest = tl.argmax(lens, 0).to(tl.int64)
    split_len = tl.cdiv(tl.cdiv(prefix_len, num_splits), TILE) * TILE
    start = split * split_len
    end = tl.minimum(tl.minimum(start + split_len, prefix_len), tl.max(lens, 0))
    acc, peak, total = attend_range(
        q,
        k_ptr + kv_head.to(tl.int64) * stride_k_head,
        v_ptr + kv_head.to(tl.int64) * stride_v_head,
        table_ptr + longest * stride_table_row,
        start,
        end,
        scale_log2,
        stride_k_block,
        stride_k_token,
        stride_v_block,
        stride_v_token,
        QUERIES,
        HEAD_DIM,
        DIM,
        BLOCK_SIZE,
        TILE,
        DOT_DTYPE,
        row_ends,
        OWN_ENDS=True,
    )
    out, lse = normalised(acc, peak, total)
    slots = (rows * (NUM_KV_HEADS * GROUP) + heads) * num_slots + split
    tl.store(partial_ptr + slots[:, None] * HEAD_DIM + dims[None, :], out, mask=mask)
    tl.store(lse_ptr + slots, lse, mask=is_query)


class SharedPrefixDecode(TritonDecodeKernel):
    """Attention over the common prefix for all rows' queries at once, over the rest row by row, merged by log-sum-exp.

    Cascade inference (Ye et al. 2024) and Hydragen (Juravsky et al. 2024) over a paged cache, base 2 throughout. The
    problem's shared_prefix_len says how long the prefix is; without one this is split_kv.
    """

    name = "shared_prefix"

    def plan(self, problem: DecodeProblem) -> dict[str, Any]:
        shape = TileShape.of(problem)
        prefix_len = problem.shared_prefix_len // shape.tile * shape.tile
        mean = problem.mean_context_len
        rest = replace(
            problem,
            max_context_len=problem.max_context_len - prefix_len,
            mean_context_len=None if mean is None else max(0, mean - prefix_len),
            shared_prefix_len=0,
        )
        return {
            "prefix_len": prefix_len,
            "prefix_splits": _prefix_splits(problem, prefix_len, shape),
            "num_splits": plan_splits(rest, shape),
            **shape.options(),
        }

    def workspace(self, problem: DecodeProblem, device: torch.device) -> Tensor | None:
        # As max_partials, for query tiles of MAX_QUERIES: batch * prefix_splits stays below this.
        slots = PROGRAMS_PER_SM * device_sm_count(problem.device)
        prefix = -(-slots * MAX_QUERIES // problem.num_q_heads) + problem.batch_size
        numel = partial_numel(
            prefix + max_partials(problem, TileShape.of(problem)), problem.num_q_heads, 1, problem.head_dim
        )
        return torch.empty(numel, dtype=torch.float32, device=device)

    def launch(
        self,
        call: Call,
        prefix_len: int = 0,
        prefix_splits: int | None = None,
        num_splits: int | None = None,
        tile: int | None = None,
        num_warps: int | None = None,
        num_stages: int | None = None,
    ) -> None:
        """prefix_len: a multiple of the tile; the rows must agree in so many tokens' table entries.

        prefix_splits: of the prefix; num_splits: of each row's rest; None to plan for full tables.
        """
        problem = call.problem
        shape = TileShape.of(problem, tile, num_warps, num_stages)
        if prefix_len < 0 or prefix_len % shape.tile:
            raise ValueError(f"prefix_len is {prefix_len}, not a multiple of tile {shape.tile}")
        if num_splits is None:
            num_splits = plan_splits(problem, shape)
        if prefix_len == 0:
            prefix_splits = 0
        elif prefix_splits is None:
            prefix_splits = _prefix_splits(problem, prefix_len, shape)
        elif prefix_splits < 1:
            raise ValueError(f"prefix_splits is {prefix_splits}, the least is 1 (prefix_len is {prefix_len})")
        if num_splits < 1:
            raise ValueError(f"num_splits is {num_splits}, the least is 1")
        num_slots = prefix_splits + num_splits
        if num_slots == 1:
            attend_splits(call, None, None, shape, 1)
            return
        partial, lse = partial_views(
            call.workspace, problem.batch_size, problem.num_q_heads, num_slots, problem.head_dim, like=call.q
        )
        if prefix_splits:
            _attend(call, partial, lse, shape, prefix_len, prefix_splits)
        attend_splits(call, partial, lse, shape, num_splits, first_key=prefix_len, first_slot=prefix_splits)
        merge_splits(partial, lse, call.out, chunk=chunk_for(num_slots))


def _attend(
    call: Call, partial: Tensor, lse: Tensor, shape: TileShape, prefix_len: int, prefix_splits: int
) -> None:
    """The prefix's part of the first stage."""
    problem = call.problem
    queries = query_rows(problem)
    constexprs = group_constexprs(problem, shape.tile)
    del constexprs["HEADS"], constexprs["HEAD_TILES"]
    _attend_prefix[(problem.num_kv_heads, prefix_splits, _query_tiles(problem))](
        call.q,
        call.k_cache,
        call.v_cache,
        call.block_table,
        call.context_lens,
        partial,
        lse,
        call.scale_log2,
        problem.batch_size,
        prefix_len,
        prefix_splits,
        lse.shape[2],
        *call.q.stride()[:2],
        *call.cache_strides,
        call.block_table.stride(0),
        QUERIES=queries,
        ROWS=max(16, next_power_of_2(problem.batch_size)),
        **constexprs,
        # As TileShape, for an accumulator of so many rows.
        num_warps=8 if queries * padded_dim(problem.head_dim) > 4096 else shape.num_warps,
        num_stages=shape.num_stages,
    )


def query_rows(problem: DecodeProblem) -> int:
    """Rows of a query tile: all queries of a KV head if they are few, else MAX_QUERIES (16 for exact fp32)."""
    if problem.dtype == torch.float32:
        return 16
    queries = problem.batch_size * problem.group_size
    return min(MAX_QUERIES, max(16, next_power_of_2(queries)))


def _query_tiles(problem: DecodeProblem) -> int:
    return -(-problem.batch_size * problem.group_size // query_rows(problem))


def _prefix_splits(problem: DecodeProblem, prefix_len: int, shape: TileShape) -> int:
    """Splits of the prefix, as for a batch of query tiles."""
    sm_count = device_sm_count(problem.device)
    work = replace(
        work_of(problem, shape.tile),
        programs=problem.num_kv_heads * _query_tiles(problem),
        max_keys=prefix_len,
        mean_keys=prefix_len,
        result_bytes=4 * query_rows(problem) * (problem.head_dim + 1),
    )
    gpu = Gpu(sm_count, PROGRAMS_PER_SM * sm_count)
    most = min(-(-prefix_len // shape.tile), -(-gpu.slots // work.programs))
    model = cost_model("split_kv", shape.tile, device_name(problem.device))
    return model.best_num_splits(work, max(1, most), gpu)
