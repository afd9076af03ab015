"""What the device keeps of the running sequences, one row a slot, changed by what each step says is new."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.execution.upload import upload
from engine.scheduling.step import SlotSetting, StepInput
from kernels.triton_support import next_power_of_2

MAX_CANDIDATES = 256
"""Beyond this top_k, ranks gather all logits."""


@dataclass(frozen=True)
class SamplingKind:
    """Which parts of sampling some row of a batch needs; what none needs is not launched."""

    any_drawn: bool = False
    any_top_k: bool = False
    any_top_p: bool = False
    any_logits: bool = False
    """Some row's logits are read after its token is chosen: for log-probabilities."""
    num_candidates: int = 0
    """With several ranks: so many of the likeliest ids of each decide every row. 0: some row needs all logits."""


class BatchState:
    """The tensors of kernels.slot_state.SlotState, with a row for each slot and a last one, `padding_slot`.

    The padding row fills up batches of a fixed size: its work writes no KV, attends to nothing and is never counted.
    """

    def __init__(
        self, max_num_seqs: int, max_blocks: int, vocab_size: int, device: torch.device, *, num_ranks: int = 1
    ) -> None:
        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_num_seqs + 1, dtype=dtype, device=device)

        self.device = device
        self.vocab_size = vocab_size
        self.num_ranks = num_ranks
        self.padding_slot = max_num_seqs
        self.num_computed = column(torch.int64)
        self.num_computed[self.padding_slot] = -1
        self.newest = column(torch.int64)
        self.block_table = torch.zeros((max_num_seqs + 1, max_blocks), dtype=torch.int32, device=device)
        self.temperature, self.top_p = column(torch.float64), column(torch.float64)
        self.top_k, self.seed = column(torch.int64), column(torch.int64)
        self._settings: list[SlotSetting | None] = [None] * (max_num_seqs + 1)

    def apply(self, step: StepInput) -> None:
        """Take over a step's new sequences and blocks."""
        if step.settings:
            for setting in step.settings:
                self._settings[setting.slot] = setting
            slots, temperature, top_k, top_p, seed = upload(
                self.device,
                [s.slot for s in step.settings],
                [float(s.temperature) for s in step.settings],
                [s.top_k if s.top_k < self.vocab_size else 0 for s in step.settings],
                [float(s.top_p) for s in step.settings],
                np.array([s.seed % 2**64 for s in step.settings], np.uint64).view(np.int64),
            )
            self.temperature[slots], self.top_p[slots] = temperature, top_p
            self.top_k[slots], self.seed[slots] = top_k, seed
        if step.new_blocks:
            counts = [len(new.block_ids) for new in step.new_blocks]
            rows, columns, block_ids = upload(
                self.device,
                np.repeat([new.slot for new in step.new_blocks], counts),
                np.concatenate(
                    [
                        np.arange(new.first_block, new.first_block + n)
                        for new, n in zip(step.new_blocks, counts)
                    ]
                ),
                np.concatenate([new.block_ids for new in step.new_blocks]),
            )
            self.block_table[rows, columns] = block_ids.int()

    def sampling_kind(self, slots: tuple[int, ...]) -> SamplingKind:
        """What the sampling of these slots needs, from the settings on the host."""
        settings = [s for slot in slots if (s := self._settings[slot]) is not None]
        drawn = [s for s in settings if s.temperature > 0]
        return SamplingKind(
            any_drawn=bool(drawn),
            any_top_k=any(0 < setting.top_k < self.vocab_size for setting in drawn),
            any_top_p=any(setting.top_p < 1 for setting in drawn),
            any_logits=any(setting.num_logprobs is not None for setting in settings),
            num_candidates=self._num_candidates(settings) if self.num_ranks > 1 else 0,
        )

    def _num_candidates(self, settings: list[SlotSetting]) -> int:
        """A power of two, so that there are few kinds; 0 if all logits are needed, or so many that it is cheaper."""
        needed = 1
        for setting in settings:
            whole = setting.temperature > 0 and not 0 < setting.top_k < self.vocab_size
            if whole or setting.num_logprobs is not None:
                return 0
            if setting.temperature > 0:
                needed = max(needed, setting.top_k)
        return next_power_of_2(needed) if needed <= MAX_CANDIDATES else 0

    def num_logprobs(self, slots: tuple[int, ...]) -> list[tuple[int, int]]:
        """(row, how many) of the rows that ask for log-probabilities."""
        counts = [
            (row, s.num_logprobs) for row, slot in enumerate(slots) if (s := self._settings[slot]) is not None
        ]
        return [(row, count) for row, count in counts if count is not None]
