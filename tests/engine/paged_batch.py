"""Run a Decoder on whole sequences: a pool full of NaN, shuffled block tables, steps of the caller's choosing."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from engine.execution.input_batch import AttentionShape, build_input_batch
from engine.layers.attention_metadata import KernelChoice
from engine.models.decoder import Decoder
from engine.scheduling.step import SequenceRow, StepInput
from kernels import decode, prefill


def choose(
    decode_name: str = "torch", prefill_name: str = "torch", *, use_triton: bool = False
) -> KernelChoice:
    return KernelChoice(decode.get(decode_name), prefill.get(prefill_name), use_triton)


class PagedBatch:
    """Sequences with KV in one pool. A step runs some tokens of some of them and returns their logits."""

    def __init__(
        self,
        model: Decoder,
        kernels: KernelChoice,
        sequences: Sequence[Sequence[int]],
        *,
        block_size: int,
        num_q_heads: int | None = None,
        num_kv_heads: int | None = None,
    ) -> None:
        config, weight = model.config, model.norm.weight
        self.model, self.kernels, self.sequences = model, kernels, sequences
        self.shape = AttentionShape(
            num_q_heads=num_q_heads or config.num_q_heads,
            num_kv_heads=num_kv_heads or config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=weight.dtype,
            device=weight.device,
        )
        lengths = [-(-len(sequence) // block_size) for sequence in sequences]
        ids = list(range(sum(lengths) + 3))
        random.Random(block_size).shuffle(ids)
        self.tables = [tuple(ids.pop() for _ in range(length)) for length in lengths]
        pool = (config.num_layers, 2, sum(lengths) + 3, block_size, self.shape.num_kv_heads, config.head_dim)
        self.kv_cache = torch.full(pool, torch.nan, dtype=weight.dtype, device=weight.device)
        self.done = [0] * len(sequences)

    @torch.inference_mode()
    def step(self, counts: Mapping[int, int], *, decodes: Sequence[int] = ()) -> dict[int, torch.Tensor]:
        """Run the next counts[i] tokens of sequence i as a prefill chunk, and one token of each i in decodes.

        Returns for each sequence the logits of all its tokens in this step, [tokens, vocab_size].
        """
        rows = {i: self._row(i, count) for i, count in [*((i, 1) for i in decodes), *counts.items()]}
        step = StepInput(tuple(rows[i] for i in decodes), tuple(rows[i] for i in counts))
        batch = build_input_batch(step, self.shape, self.kernels)
        hidden = self.model(batch.input_ids, batch.positions, batch.metadata, self.kv_cache)
        sizes = [len(row.token_ids) for row in rows.values()]
        return dict(zip(rows, self.model.compute_logits(hidden).split(sizes)))

    def _row(self, i: int, count: int) -> SequenceRow:
        start = self.done[i]
        self.done[i] += count
        return SequenceRow(
            str(i), start, tuple(self.sequences[i][start : start + count]), self.tables[i], None
        )
