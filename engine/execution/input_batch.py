"""The tensors of one step, built from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.layers.attention_metadata import AttentionMetadata, KernelChoice
from engine.scheduling.step import SequenceRow, StepInput
from kernels.decode import DecodeProblem
from kernels.prefill import PrefillProblem


@dataclass(frozen=True)
class AttentionShape:
    """What the attention kernels' planning needs besides the batch: one rank's heads and the cache's layout."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device

    def decode_problem(self, batch_size: int, max_context_len: int) -> DecodeProblem:
        return DecodeProblem(
            batch_size=batch_size,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            max_context_len=max_context_len,
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
class InputBatch:
    """input_ids, positions: [num_tokens] int64. sample_index: [num_sampled] int64, the tokens whose logits are
    sampled, in the order of the rows that have a sampling part."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    sample_index: torch.Tensor
    metadata: AttentionMetadata


def build_input_batch(step: StepInput, shape: AttentionShape, kernels: KernelChoice) -> InputBatch:
    """Lay out a step's tokens: one per decode row first, then the prefill chunks one after another."""
    rows = step.rows
    input_ids = np.fromiter((token for row in rows for token in row.token_ids), np.int64)
    positions = np.concatenate([np.arange(row.start, row.start + len(row.token_ids)) for row in rows])
    slots = np.concatenate([_slots(row, shape.block_size) for row in rows])
    ends = np.cumsum([len(row.token_ids) for row in rows])
    sample_index = ends[[row.sampling is not None for row in rows]] - 1

    device = shape.device
    decode_lens = [row.start + 1 for row in step.decodes]
    decode_plan: dict[str, Any] = {}
    decode_workspace = None
    if step.decodes:
        problem = shape.decode_problem(len(step.decodes), max(decode_lens))
        decode_plan = kernels.decode.plan(problem)
        decode_workspace = kernels.decode.workspace(problem, device)
    query_lens = [len(row.token_ids) for row in step.prefills]
    metadata = AttentionMetadata(
        slot_mapping=_to_device(slots, torch.int64, device),
        num_decodes=len(step.decodes),
        decode_block_table=_block_table(step.decodes, device),
        decode_context_lens=_to_device(decode_lens, torch.int32, device),
        decode_plan=decode_plan,
        decode_workspace=decode_workspace,
        num_prefill_tokens=sum(query_lens),
        prefill_block_table=_block_table(step.prefills, device),
        prefill_context_lens=_to_device(
            [r.start + len(r.token_ids) for r in step.prefills], torch.int32, device
        ),
        query_start_loc=_to_device(np.concatenate([[0], np.cumsum(query_lens)]), torch.int32, device),
        max_query_len=max(query_lens, default=0),
    )
    return InputBatch(
        _to_device(input_ids, torch.int64, device),
        _to_device(positions, torch.int64, device),
        _to_device(sample_index, torch.int64, device),
        metadata,
    )


def _slots(row: SequenceRow, block_size: int) -> np.ndarray:
    """Where each of the row's tokens writes its KV: block * block_size + offset."""
    positions = np.arange(row.start, row.start + len(row.token_ids))
    blocks = np.asarray(row.block_table, np.int64)
    return blocks[positions // block_size] * block_size + positions % block_size


def _block_table(rows: Sequence[SequenceRow], device: torch.device) -> torch.Tensor:
    """[rows, widest table] int32; entries past a row's table are never read, and hold 0."""
    width = max((len(row.block_table) for row in rows), default=0)
    table = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row.block_table)] = row.block_table
    return _to_device(table, torch.int32, device)


def _to_device(values: np.ndarray | Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    tensor = torch.as_tensor(np.asarray(values), dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
