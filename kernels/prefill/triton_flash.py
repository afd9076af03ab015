"""Prefill attention in Triton: causal, variable length, reading the paged cache through the block table.

FlashAttention-2's schedule (Dao, 2023): one program owns a tile of queries, walks the keys once and keeps
a running maximum and sum per row (online softmax, Milakov and Gimelshein, 2018), in base 2. The query
heads that share a KV head lie in one tile, row = token * group + head in group, so K and V are read once
for the whole group. Keys that every row of a tile sees are walked without a mask; those after the tile's
last token are not walked at all.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.paged_cache import rows_and_lengths
from kernels.prefill.contract import PrefillKernel, PrefillProblem, check_inputs, positive_scale
from kernels.triton_support import (
    INTERPRETING,
    MAX_GRID_ROWS,
    cdiv,
    dot_dtype,
    next_power_of_2,
    on_device,
    tl,
    triton,
    triton_unavailable,
)

LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 256
MAX_GROUP = 128
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PrefillTile:
    """block_m query rows (tokens x heads of a group) by block_n keys, and how a program is built."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, at least 16, got {value}")


def choose_tile(
    head_dim: int, dtype: torch.dtype, group: int, max_query_len: int, capability: tuple[int, int] | None
) -> PrefillTile:
    """The tile for one shape on a GPU of that compute capability; None is the interpreter.

    At most three heights are used per model, so that few kernels are ever compiled. All fit the 99 KB of
    shared memory of sm_86, sm_89 and sm_120, but for those of sm_90 and sm_100, which have 227 KB; none
    spills registers to speak of up to 16 heads a group (tests/kernels/test_prefill_aot.py has bounds).
    """
    group_rows = next_power_of_2(group)
    if capability is None:  # small tiles: short tests still take several steps
        return PrefillTile(max(16, group_rows), 16, 1, 1)
    wide = head_dim > 128
    if dtype == torch.float32:  # exact products run on the plain cores: registers set the limit
        block_m = max(16, group_rows)
        return PrefillTile(block_m, 16, 4, 1) if wide else PrefillTile(block_m, 32, 8, 2)
    hopper = capability[0] in (9, 10)
    rows = max_query_len * group
    tallest = 64 if wide and not hopper else 128
    block_m = max(group_rows, 16 if rows <= 16 else 64 if rows <= 64 else tallest)
    if wide:
        return PrefillTile(block_m, 32, 4 if block_m == 16 else 8, 2)
    if block_m >= 128:
        return PrefillTile(block_m, 128 if hopper else 64, 8, 2)
    return PrefillTile(block_m, 64 if hopper or block_m == 16 else 32, 4, 2)


class TritonPrefill(PrefillKernel):
    name = "triton"
    capturable = True

    def unavailable(self, device: torch.device) -> str | None:
        return triton_unavailable(device)

    def supports(self, problem: PrefillProblem) -> str | None:
        if (reason := self.unavailable(problem.device)) is not None:
            return reason
        if problem.dtype not in DTYPES:
            return f"dtype {problem.dtype} is not one of float32, float16, bfloat16"
        if problem.head_dim > MAX_HEAD_DIM:
            return f"head_dim {problem.head_dim} is above {MAX_HEAD_DIM}"
        group = problem.num_q_heads // problem.num_kv_heads
        if group > MAX_GROUP:
            return f"{group} query heads per KV head are above {MAX_GROUP}"
        if problem.batch_size > MAX_GRID_ROWS:
            return f"batch_size {problem.batch_size} is above {MAX_GRID_ROWS}"
        return None

    def plan(self, problem: PrefillProblem) -> dict[str, Any]:
        capability = None if INTERPRETING else torch.cuda.get_device_capability(problem.device)
        group = problem.num_q_heads // problem.num_kv_heads
        return {
            "tile": choose_tile(problem.head_dim, problem.dtype, group, problem.max_query_len, capability)
        }

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        query_start_loc: Tensor,
        max_query_len: int,
        scale: float | None = None,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
        tile: PrefillTile | None = None,
        **options: Any,
    ) -> Tensor:
        """See PrefillKernel. `tile` is the plan's choice; None chooses it here."""
        if options:
            raise TypeError(f"{self.name} takes no option {sorted(options)}")
        check_inputs(q, k_cache, v_cache, block_table, context_lens, query_start_loc, max_query_len, out)
        out = torch.empty_like(q) if out is None else out
        if block_table.shape[0] == 0 or max_query_len == 0:
            return out
        q, scale = positive_scale(q, scale)
        tables = rows_and_lengths(block_table, context_lens)
        tensors = (q, k_cache, v_cache, out, *tables, query_start_loc.contiguous())
        self._launch(*tensors, max_query_len, scale, tile)
        return out

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
        """A call's work: checked, not empty, with a positive scale."""
        num_q_heads, head_dim = q.shape[1:]
        block_size, num_kv_heads = k_cache.shape[1:3]
        group = num_q_heads // num_kv_heads
        if tile is None:
            capability = None if INTERPRETING else torch.cuda.get_device_capability(q.device)
            tile = choose_tile(head_dim, q.dtype, group, max_query_len, capability)
        if tile.block_m < group:
            raise ValueError(f"tile.block_m {tile.block_m} is below the group of {group} query heads")
        grid = (cdiv(max_query_len, tile.block_m // group), num_kv_heads, block_table.shape[0])
        with on_device(q):
            _prefill_kernel[grid](
                q,
                k_cache,
                v_cache,
                out,
                block_table,
                context_lens,
                query_start_loc,
                scale * LOG2_E,
                *q.stride()[:2],
                *k_cache.stride()[:3],
                *v_cache.stride()[:3],
                *out.stride()[:2],
                block_table.stride(0),
                GROUP=group,
                HEAD_DIM=head_dim,
                BLOCK_D=max(16, next_power_of_2(head_dim)),
                BLOCK_SIZE=block_size,
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
                DOT_DTYPE=dot_dtype(q.dtype),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )


@triton.jit
def _table_entries(table_ptr, first, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of keys first .. first + BLOCK_N - 1, 0 from `end` on: one where they share it, else [BLOCK_N]."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table_ptr + first // BLOCK_SIZE, mask=first < end, other=0)
    else:
        keys = first + tl.arange(0, BLOCK_N)
        return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)


@triton.jit
def _walk_keys(
    acc,
    row_max,
    row_sum,
    entries,
    q,
    positions,
    start,
    stop,
    end,
    k_ptr,
    v_ptr,
    table_ptr,
    scale_log2,
    stride_k_block,
    stride_k_slot,
    stride_v_block,
    stride_v_slot,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Fold keys start .. stop - 1 into (acc, row_max, row_sum); without MASKED every row sees all of them.

    entries: the table's for the tile at `start`; each turn loads the next one's, up to `end`, so that no copy of keys
    or values waits for its address. scale_log2 is positive.
    """
    dims = tl.arange(0, BLOCK_D)
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        block = entries.to(tl.int64)
        slots = (keys % BLOCK_SIZE).to(tl.int64)
        entries = _table_entries(table_ptr, first + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        k_rows = k_ptr + (block * stride_k_block + slots * stride_k_slot)
        v_rows = v_ptr + (block * stride_v_block + slots * stride_v_slot)
        # Slots past the end may hold anything, NaN included: K is masked by the scores, V must be zero.
        if MASKED:
            in_range = (keys < end)[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_rows[:, None] + dims[None, :], mask=in_range, other=0.0).to(DOT_DTYPE)
            v = tl.load(v_rows[:, None] + dims[None, :], mask=in_range, other=0.0).to(DOT_DTYPE)
        elif HEAD_DIM == BLOCK_D:
            k = tl.load(k_rows[:, None] + dims[None, :]).to(DOT_DTYPE)
            v = tl.load(v_rows[:, None] + dims[None, :]).to(DOT_DTYPE)
        else:
            in_head = (dims < HEAD_DIM)[None, :]
            k = tl.load(k_rows[:, None] + dims[None, :], mask=in_head, other=0.0).to(DOT_DTYPE)
            v = tl.load(v_rows[:, None] + dims[None, :], mask=in_head, other=0.0).to(DOT_DTYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            visible = (keys[None, :] <= positions[:, None]) & (keys < end)[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        # Scaled after the search for the largest: one multiply-add an element.
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        probs = tl.exp2(scores * scale_log2 - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        acc = tl.dot(probs.to(DOT_DTYPE), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum, entries


# Slices of the batch's tables start anywhere and the table's width varies: neither may cost a compilation.
@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["block_table_ptr", "context_lens_ptr", "query_start_loc_ptr"],
)
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    block_table_ptr,
    context_lens_ptr,
    query_start_loc_ptr,
    scale_log2,
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_out_token,
    stride_out_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    # The last tile of a chunk walks the most keys, so it starts first.
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
    kv_head = tl.program_id(1).to(tl.int64)
    batch_row = tl.program_id(2)
    chunk_start = tl.load(query_start_loc_ptr + batch_row)
    chunk_len = tl.load(query_start_loc_ptr + batch_row + 1) - chunk_start
    if first_token >= chunk_len:
        return
    first_position = tl.load(context_lens_ptr + batch_row) - chunk_len + first_token
    num_tokens = tl.minimum(chunk_len - first_token, TOKENS)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = (chunk_start + first_token + rows // GROUP).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    is_query = (rows // GROUP < num_tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = q_ptr + (tokens * stride_q_token + heads * stride_q_head)
    q = tl.load(q_rows[:, None] + dims[None, :], mask=is_query, other=0.0).to(DOT_DTYPE)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    positions = first_position + rows // GROUP
    k_ptr += kv_head * stride_k_head
    v_ptr += kv_head * stride_v_head
    table_ptr = block_table_ptr + batch_row.to(tl.int64) * stride_table
    # Key 0 is in the first tile walked and every row sees it, so no row's maximum stays at -inf.
    shared_end = (first_position + 1) // BLOCK_N * BLOCK_N
    end = first_position + num_tokens
    entries = _table_entries(table_ptr, 0, end, BLOCK_SIZE, BLOCK_N)
    acc, row_max, row_sum, entries = _walk_keys(
        acc,
        row_max,
        row_sum,
        entries,
        q,
        positions,
        0,
        shared_end,
        end,
        k_ptr,
        v_ptr,
        table_ptr,
        scale_log2,
        stride_k_block,
        stride_k_slot,
        stride_v_block,
        stride_v_slot,
        False,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_SIZE,
        BLOCK_N,
        DOT_DTYPE,
    )
    acc, row_max, row_sum, entries = _walk_keys(
        acc,
        row_max,
        row_sum,
        entries,
        q,
        positions,
        shared_end,
        end,
        end,
        k_ptr,
        v_ptr,
        table_ptr,
        scale_log2,
        stride_k_block,
        stride_k_slot,
        stride_v_block,
        stride_v_slot,
        True,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_SIZE,
        BLOCK_N,
        DOT_DTYPE,
    )
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    out_rows = out_ptr + (tokens * stride_out_token + heads * stride_out_head)
    tl.store(out_rows[:, None] + dims[None, :], out, mask=is_query)
