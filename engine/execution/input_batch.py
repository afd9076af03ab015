"""The tensors of one step, built from the state on the device and the rows that the step brings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.execution.batch_state import BatchState
from engine.execution.decode_plan import DecodePlan
from engine.execution.step_rows import ChunkTokens
from engine.layers.attention_metadata import AttentionMetadata
from kernels.decode import DecodeProblem
from kernels.prefill import PrefillProblem
from kernels.slot_state import DecodeRows, slot_mapping


@dataclass(frozen=True)
class AttentionShape:
    """What the attention kernels' planning needs besides the batch: one rank's heads and the cache's layout."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device

    def decode_problem(
        self, batch_size: int, max_context_len: int, mean_context_len: int | None = None
    ) -> DecodeProblem:
        return DecodeProblem(
            batch_size=batch_size,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            max_context_len=max_context_len,
            mean_context_len=mean_context_len,
            dtype=self.dtype,
            device=self.device,
        )

    def prefill_problem(self, batch_size: int, max_query_len: int, max_context_len: int) -> PrefillProblem:
        return PrefillProblem(
            batch_size=batch_size,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            max_query_len=max_query_len,
            max_context_len=max_context_len,
            dtype=self.dtype,
            device=self.device,
        )


@dataclass(frozen=True)
class ChunkRows:
    """The tokens of the chunks, one chunk after another, then padding.

    input_ids, positions, slot_mapping: [tokens] int64; padding has position 0 and slot_mapping -1. context_lens:
    [chunks] int32, the sequence's length with the chunk, 0 of padding. query_start_loc: [chunks + 1] int32.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int

    @classmethod
    def build(cls, state: BatchState, chunks: ChunkTokens, block_size: int) -> ChunkRows:
        positions = chunks.positions.clamp(min=0)
        places = slot_mapping(state, chunks.slots[chunks.chunk_of_token], positions, block_size)
        return cls(
            input_ids=chunks.token_ids,
            positions=positions,
            slot_mapping=places.masked_fill_(chunks.positions < 0, -1),
            context_lens=chunks.ends.clamp(min=0).int(),
            block_table=state.block_table[chunks.slots],
            query_start_loc=chunks.query_start_loc.int(),
            max_query_len=chunks.max_query_len,
        )


@dataclass(frozen=True)
class InputBatch:
    """A forward pass: input_ids, positions [num_tokens] int64, and what attention needs to know of them."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata


def join_rows(
    decodes: DecodeRows | None,
    chunks: ChunkRows | None,
    *,
    plan: DecodePlan | None,
    device: torch.device,
) -> InputBatch:
    """Decode rows first, then the chunks. plan: of the decode rows, if there are any."""
    parts = [rows for rows in (decodes, chunks) if rows is not None]
    empty = torch.empty(0, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(
        slot_mapping=_join([rows.slot_mapping for rows in parts]),
        num_decodes=len(decodes.input_ids) if decodes else 0,
        decode_block_table=decodes.block_table if decodes else empty[None, :],
        decode_context_lens=decodes.context_lens if decodes else empty,
        decode_plan=plan.options if plan else {},
        decode_workspace=plan.workspace() if plan else None,
        num_prefill_tokens=len(chunks.input_ids) if chunks else 0,
        prefill_block_table=chunks.block_table if chunks else empty[None, :],
        prefill_context_lens=chunks.context_lens if chunks else empty,
        query_start_loc=chunks.query_start_loc if chunks else empty,
        max_query_len=chunks.max_query_len if chunks else 0,
    )
    return InputBatch(
        _join([rows.input_ids for rows in parts]), _join([rows.positions for rows in parts]), metadata
    )


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
