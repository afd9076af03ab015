"""Run a Decoder on whole sequences: a pool full of NaN, shuffled block tables, steps of the caller's choosing."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from engine.layers.attention_metadata import AttentionMetadata, KernelChoice
from engine.models.decoder import Decoder
from kernels import decode, prefill


def choose(
    decode_name: str = "torch", prefill_name: str = "torch", *, use_triton: bool = False
) -> KernelChoice:
    return KernelChoice(decode.get(decode_name), prefill.get(prefill_name), use_triton)


class PagedBatch:
    """Sequences with KV in one pool. A step runs some tokens of some of them and returns their logits.

    num_kv_heads: of this rank; None: the model's. Built on AttentionMetadata alone, not on the engine's own batches.
    """

    def __init__(
        self,
        model: Decoder,
        sequences: Sequence[Sequence[int]],
        *,
        block_size: int,
        num_kv_heads: int | None = None,
    ) -> None:
        config, weight = model.config, model.norm.weight
        self.model, self.sequences, self.block_size = model, sequences, block_size
        self.device = weight.device
        lengths = [-(-len(sequence) // block_size) for sequence in sequences]
        num_blocks = sum(lengths) + 3
        ids = list(range(num_blocks))
        random.Random(block_size).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(length)] for length in lengths]
        heads = (num_kv_heads or config.num_kv_heads, config.head_dim)
        pool = (config.num_layers, 2, num_blocks, block_size, *heads)
        self.kv_cache = torch.full(pool, torch.nan, dtype=weight.dtype, device=self.device)
        self.done = [0] * len(sequences)

    @torch.inference_mode()
    def step(
        self, counts: Mapping[int, int], *, decodes: Sequence[int] = (), padding: int = 0
    ) -> dict[int, torch.Tensor]:
        """Run the next counts[i] tokens of sequence i as a prefill chunk, and one token of each i in decodes.

        padding: tokens without a sequence at the end. Returns for each sequence the logits of all its tokens in this
        step, [tokens, vocab_size]; those of the padding under -1.
        """
        sizes = {**dict.fromkeys(decodes, 1), **counts}
        input_ids, positions, slots = [], [], []
        for i, count in sizes.items():
            for position in range(self.done[i], self.done[i] + count):
                block, offset = divmod(position, self.block_size)
                input_ids.append(self.sequences[i][position])
                positions.append(position)
                slots.append(self.tables[i][block] * self.block_size + offset)
            self.done[i] += count
        starts = [0]
        for count in counts.values():
            starts.append(starts[-1] + count)
        metadata = AttentionMetadata(
            slot_mapping=self._tensor([*slots, *[-1] * padding], torch.int64),
            num_decodes=len(decodes),
            decode_block_table=self._block_table(decodes),
            decode_context_lens=self._tensor([self.done[i] for i in decodes], torch.int32),
            decode_plan={},
            decode_workspace=None,
            num_prefill_tokens=starts[-1],
            prefill_block_table=self._block_table(list(counts)),
            prefill_context_lens=self._tensor([self.done[i] for i in counts], torch.int32),
            query_start_loc=self._tensor(starts, torch.int32),
            max_query_len=max(counts.values(), default=0),
        )
        zeros = [0] * padding
        hidden = self.model(
            self._tensor([*input_ids, *zeros], torch.int64),
            self._tensor([*positions, *zeros], torch.int64),
            metadata,
            self.kv_cache,
        )
        logits = self.model.compute_logits(hidden).split([*sizes.values(), padding])
        return dict(zip([*sizes, -1], logits))

    def _block_table(self, rows: Sequence[int]) -> torch.Tensor:
        """Entries past a row's table name a block that does not exist: they are never read."""
        width = max((len(self.tables[i]) for i in rows), default=0)
        table = [self.tables[i] + [2**30] * (width - len(self.tables[i])) for i in rows]
        return self._tensor(table, torch.int32).view(len(rows), width)

    def _tensor(self, values: Sequence[object], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
