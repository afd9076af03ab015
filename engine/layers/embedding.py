"""Token embedding and output head, split over the ranks by vocabulary.

Each rank holds ceil(vocab_size / size) ids, so the last ones may hold fewer real ids than rows. Those padding rows
are zero, are never looked up, and their logits are -inf or cut off: they cannot win.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.layers.linear import new_parameter
from engine.layers.weight_shard import WeightShard
from engine.parallel.group import ParallelGroup


@dataclass(frozen=True)
class VocabRange:
    """The ids of one rank: start .. start + num_ids, in a parameter of num_rows >= num_ids rows."""

    start: int
    num_ids: int
    num_rows: int

    @classmethod
    def of(cls, vocab_size: int, group: ParallelGroup) -> VocabRange:
        num_rows = -(-vocab_size // group.size)
        start = min(group.rank * num_rows, vocab_size)
        return cls(start, min(num_rows, vocab_size - start), num_rows)


class VocabParallel(nn.Module):
    """What embedding and head have in common: weight [num_rows, hidden] of this rank's ids, padding rows zero."""

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        *,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.full_shape = (vocab_size, hidden)
        self.ids = VocabRange.of(vocab_size, group)
        if weight is None:
            weight = new_parameter((self.ids.num_rows, hidden), dtype, device)
            weight[self.ids.num_ids :].zero_()
        self.weight = weight

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        weight = self.weight[: self.ids.num_ids]
        yield WeightShard(f"{name}.weight", self.full_shape, weight, 0, self.ids.start)


class VocabParallelEmbedding(VocabParallel):
    """Rows of ids; every rank gets all of them."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """[tokens] int64, each in [0, vocab_size), to [tokens, hidden]."""
        if self.group.size == 1:
            return self.weight[input_ids]  # of few rows, functional.embedding took 13 us on an H200
        local = input_ids - self.ids.start
        elsewhere = (local < 0) | (local >= self.ids.num_ids)
        rows = functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))


class VocabParallelHead(VocabParallel):
    """Logits. weight: the embedding's parameter when the model ties them; it is then shared, not copied."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab_size] in the model's dtype, all of it on every rank."""
        logits = functional.linear(hidden, self.weight)
        return self.group.all_gather(logits, dim=-1)[:, : self.full_shape[0]]

    def local_logits(self, hidden: Tensor) -> Tensor:
        """[rows, num_rows]: the logits of this rank's ids, from ids.start on; -inf where there is no id."""
        logits = functional.linear(hidden, self.weight)
        logits[:, self.ids.num_ids :] = -torch.inf
        return logits
