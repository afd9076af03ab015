"""Split decode attention in one launch: the program that ends last merges its row's splits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode.contract import DecodeProblem
from kernels.decode.launch import Call, TritonDecodeKernel, group_constexprs
from kernels.decode.merge import chunk_for, merge_head, merge_heads, partial_numel, partial_views
from kernels.decode.online_softmax import attend_range, load_queries, normalised
from kernels.decode.planner import TileShape, head_rows, head_tiles, max_partials, padded_dim, plan_splits
from kernels.triton_support import INTERPRETING, next_power_of_2, tl, triton

# Marks a counter as such in memory that needs no initial value: see _attend_and_merge.
NONCE = 0x2B7E151628AE
NONCE_BITS = 48
MAX_SPLITS = (1 << (64 - NONCE_BITS)) // 2 - 1  # each may count twice


@triton.jit(
    do_not_specialize=["num_splits", "stride_table_row"],
    do_not_specialize_on_alignment=["table_ptr", "context_lens_ptr"],
)
def _attend_and_merge(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    context_lens_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    counter_ptr,
    scale_log2,
    num_splits,
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
    MERGE_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    HEAD_CHUNK: tl.constexpr,
    COOPERATIVE: tl.constexpr,
    NONCE: tl.constexpr,
    NONCE_BITS: tl.constexpr,
):
    """One program a (KV head and tile of its query heads, split, row), as in split_kv.

    A row's `active` splits that hold keys each publish a partial result, then add 1 to the counter of their row and
    KV head (release); the last to do so sees all the others' (acquire) and merges them, all heads and a chunk of
    splits at a time. COOPERATIVE: all of them wait for the last, and share the heads among them.

    A counter is NONCE in the lower bits and the count in the upper ones. A program that finds anything else there puts
    the count 0 in its place, if no other has done so in between, and whoever is last sets it back: so the scratch
    needs no initial value, and a captured launch can be replayed. Tensors that have the memory in between begin where
    the scratch does: one that ends within a counter has spoilt its lower bytes, so the NONCE, before the count.
    """
    NONCE_MASK: tl.constexpr = (1 << NONCE_BITS) - 1
    COUNT_MASK: tl.constexpr = (1 << (64 - NONCE_BITS)) - 1
    ONE: tl.constexpr = 1 << NONCE_BITS
    kv_head = tl.program_id(0) // HEAD_TILES
    head_in_group = (tl.program_id(0) % HEAD_TILES) * HEADS
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    first_head = kv_head * GROUP + head_in_group
    num_heads = tl.minimum(GROUP - head_in_group, HEADS)
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)

    counter_ptr += row * (NUM_KV_HEADS * HEAD_TILES) + tl.program_id(0)
    counter = tl.load(counter_ptr, volatile=True)
    context_len = tl.load(context_lens_ptr + row)
    split_len = tl.cdiv(tl.cdiv(context_len, num_splits), TILE) * TILE
    active = tl.cdiv(context_len, tl.maximum(split_len, 1))
    out_row_ptr = out_ptr + row * stride_out_row
    # The first split also serves a row without context: it writes zeros.
    if split < tl.maximum(active, 1):
        if (active > 1) & ((counter & NONCE_MASK) != NONCE):
            tl.atomic_cas(counter_ptr, counter, tl.full([], NONCE, tl.int64))
        q = load_queries(
            q_ptr + row * stride_q_row, stride_q_head, first_head, num_heads, HEADS, HEAD_DIM, DIM, DOT_DTYPE
        )
        acc, peak, total = attend_range(
            q,
            k_ptr + kv_head.to(tl.int64) * stride_k_head,
            v_ptr + kv_head.to(tl.int64) * stride_v_head,
            table_ptr + row * stride_table_row,
            split * split_len,
            tl.minimum((split + 1) * split_len, context_len),
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
        out, lse = normalised(acc, peak, total)
        mask = (heads < num_heads)[:, None] & (dims < HEAD_DIM)[None, :]
        head_ids = (first_head + heads).to(tl.int64)
        if active <= 1:
            tl.store(
                out_row_ptr + head_ids[:, None] * stride_out_head + dims[None, :],
                out.to(out_ptr.dtype.element_ty),
                mask=mask,
            )
        else:
            first_slot = (row * (NUM_KV_HEADS * GROUP) + first_head) * num_splits
            slots = first_slot + heads.to(tl.int64) * num_splits + split
            tl.store(partial_ptr + slots[:, None] * HEAD_DIM + dims[None, :], out, mask=mask)
            tl.store(lse_ptr + slots, lse, mask=heads < num_heads)
            # Every thread's stores before the one thread's release.
            tl.debug_barrier()
            one = tl.full([], ONE, tl.int64)
            arrived = tl.atomic_add(counter_ptr, one, sem="acq_rel", scope="gpu")
            arrived = ((arrived >> NONCE_BITS) & COUNT_MASK) + 1
            if COOPERATIVE:
                while arrived < active:
                    arrived = (tl.load(counter_ptr, volatile=True) >> NONCE_BITS) & COUNT_MASK
                # Acquires what the others released; the last to leave finds that all have counted twice.
                left = tl.atomic_add(counter_ptr, one, sem="acq_rel", scope="gpu")
                left = ((left >> NONCE_BITS) & COUNT_MASK) + 1
                if left == 2 * active:
                    tl.store(counter_ptr, tl.full([], NONCE, tl.int64))
                for head in range(split, num_heads, active):
                    slot = first_slot + head * num_splits
                    merged_head = merge_head(
                        partial_ptr + slot * HEAD_DIM, lse_ptr + slot, active, HEAD_DIM, DIM, HEAD_CHUNK
                    )
                    tl.store(
                        out_row_ptr + (first_head + head).to(tl.int64) * stride_out_head + dims,
                        merged_head.to(out_ptr.dtype.element_ty),
                        mask=dims < HEAD_DIM,
                    )
            elif arrived == active:
                tl.store(counter_ptr, tl.full([], NONCE, tl.int64))
                merged = merge_heads(
                    partial_ptr + first_slot * HEAD_DIM,
                    lse_ptr + first_slot,
                    num_splits,
                    active,
                    num_heads,
                    MERGE_HEADS,
                    HEAD_DIM,
                    DIM,
                    CHUNK,
                    STAGES,
                )
                merge_rows = tl.arange(0, MERGE_HEADS)
                merge_ids = (first_head + merge_rows).to(tl.int64)
                tl.store(
                    out_row_ptr + merge_ids[:, None] * stride_out_head + dims[None, :],
                    merged.to(out_ptr.dtype.element_ty),
                    mask=(merge_rows < num_heads)[:, None] & (dims < HEAD_DIM)[None, :],
                )


class SplitKVFusedDecode(TritonDecodeKernel):
    """split_kv without its second launch (cf. the semaphores of stream-K, Osama et al. 2023). Base 2 throughout.

    By default the last program to arrive merges all heads of its group. With `cooperative` the group's programs wait
    for one another and share the heads; all must then run at once, which a cooperative launch guarantees or refuses.
    """

    name = "split_kv_fused"

    def plan(self, problem: DecodeProblem) -> dict[str, Any]:
        shape = TileShape.of(problem)
        return {"num_splits": min(plan_splits(problem, shape), MAX_SPLITS), **shape.options()}

    def workspace(self, problem: DecodeProblem, device: torch.device) -> Tensor | None:
        partials = partial_numel(
            max_partials(problem, TileShape.of(problem)), problem.num_q_heads, 1, problem.head_dim
        )
        return torch.empty(_counter_numel(problem) + partials, dtype=torch.float32, device=device)

    def launch(
        self,
        call: Call,
        num_splits: int | None = None,
        tile: int | None = None,
        num_warps: int | None = None,
        num_stages: int | None = None,
        cooperative: bool = False,
    ) -> None:
        """tile, num_warps, num_stages: see TileShape; what is None is planned for a full table."""
        problem = call.problem
        shape = TileShape.of(problem, tile, num_warps, num_stages)
        num_splits = min(plan_splits(problem, shape), MAX_SPLITS) if num_splits is None else num_splits
        if not 1 <= num_splits <= MAX_SPLITS:
            raise ValueError(f"num_splits is {num_splits}, expected 1 to {MAX_SPLITS}")
        if cooperative and INTERPRETING:
            raise ValueError("cooperative needs programs that run at once, which the interpreter's do not")
        counters = _counter_numel(problem)
        workspace = call.workspace
        if workspace is None:
            partials = partial_numel(problem.batch_size, problem.num_q_heads, num_splits, problem.head_dim)
            workspace = torch.empty(counters + partials, dtype=torch.float32, device=call.q.device)
        partial, lse = partial_views(
            workspace[counters:],
            problem.batch_size,
            problem.num_q_heads,
            num_splits,
            problem.head_dim,
            like=call.q,
        )
        _attend_and_merge[(problem.num_kv_heads * head_tiles(problem), num_splits, problem.batch_size)](
            call.q,
            call.k_cache,
            call.v_cache,
            call.block_table,
            call.context_lens,
            call.out,
            partial,
            lse,
            workspace[:counters].view(torch.int64),
            call.scale_log2,
            num_splits,
            *call.q.stride()[:2],
            *call.cache_strides,
            call.block_table.stride(0),
            *call.out.stride()[:2],
            **group_constexprs(problem, shape.tile),
            **merge_constexprs(problem, shape.num_warps),
            HEAD_CHUNK=chunk_for(num_splits),
            COOPERATIVE=cooperative,
            NONCE=NONCE,
            NONCE_BITS=NONCE_BITS,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            **({"launch_cooperative_grid": True} if cooperative else {}),
        )


def merge_constexprs(problem: DecodeProblem, num_warps: int) -> dict[str, int]:
    """How merge_heads goes through a group's partial results: CHUNK splits at a time, STAGES - 1 chunks in flight."""
    rows = next_power_of_2(min(problem.group_size, head_rows(problem)))
    numel = rows * padded_dim(problem.head_dim)
    chunk = max(1, 32 * 32 * num_warps // numel)  # 32 registers of each thread
    return {"MERGE_HEADS": rows, "CHUNK": chunk, "STAGES": 4 if 4 * numel * chunk <= 16384 else 2}


def _counter_numel(problem: DecodeProblem) -> int:
    """fp32 elements that the int64 counters take, up to a multiple of 16 bytes."""
    return -(-2 * problem.batch_size * problem.num_kv_heads * head_tiles(problem) // 4) * 4
