"""An executor without a network, whose every token depends on all KV it reads back through the block tables."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from engine.scheduling.step import SampledToken, SlotSetting, StepInput

UNWRITTEN = b"unwritten"


@dataclass
class Slot:
    """What an executor keeps of the sequence in one slot."""

    setting: SlotSetting
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    newest: int = -1


@dataclass(frozen=True)
class Ready:
    """A result that is already there."""

    tokens: list[SampledToken]

    def result(self) -> list[SampledToken]:
        return self.tokens


class PagedHashExecutor:
    """Stands in for the model: the "KV" of a token is a digest of the sequence up to it, kept in a paged pool.

    The next token is a digest of the KV of all positions, read through the slot's block table. So one wrong, stale,
    unwritten or foreign block changes the output, as it would (less visibly) in a real engine.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 50) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.pool = [[UNWRITTEN] * block_size for _ in range(num_blocks)]
        self.slots: dict[int, Slot] = {}
        self.steps: list[StepInput] = []

    def launch(self, step: StepInput) -> Ready:
        self.steps.append(step)
        for setting in step.settings:
            self.slots[setting.slot] = Slot(setting)
        for new in step.new_blocks:
            table = self.slots[new.slot].block_table
            assert len(table) == new.first_block
            table.extend(new.block_ids)
        written: set[tuple[int, int]] = set()
        sampling = list(step.decode_slots)
        for name in step.decode_slots:
            slot = self.slots[name]
            self._write(slot, slot.num_computed, (slot.newest,), written)
        for chunk in step.chunks:
            self._write(self.slots[chunk.slot], chunk.start, chunk.token_ids, written)
            if chunk.samples:
                sampling.append(chunk.slot)
        contexts = [self.slots[name].num_computed for name in step.decode_slots]
        assert step.max_decode_context == max(contexts, default=0)
        assert step.mean_decode_context == (sum(contexts) // len(contexts) if contexts else 0)
        return Ready([SampledToken(self._sample(self.slots[name])) for name in sampling])

    def _place(self, slot: Slot, position: int) -> tuple[int, int]:
        return slot.block_table[position // self.block_size], position % self.block_size

    def _write(
        self, slot: Slot, start: int, token_ids: tuple[int, ...], written: set[tuple[int, int]]
    ) -> None:
        for position, token in enumerate(token_ids, start):
            previous = b""
            if position:
                block, offset = self._place(slot, position - 1)
                previous = self.pool[block][offset]
            block, offset = self._place(slot, position)
            assert (block, offset) not in written, "two tokens of one step share a slot"
            written.add((block, offset))
            self.pool[block][offset] = _digest(previous, token)
        slot.num_computed = start + len(token_ids)

    def _sample(self, slot: Slot) -> int:
        places = [self._place(slot, position) for position in range(slot.num_computed)]
        context = b"".join(self.pool[block][offset] for block, offset in places)
        assert UNWRITTEN not in context, "attention reads KV that was never written"
        draw = f"{slot.setting.seed}/{slot.num_computed}".encode() if slot.setting.temperature else b""
        digest = hashlib.blake2b(context + draw, digest_size=4).digest()
        slot.newest = int.from_bytes(digest, "little") % self.vocab_size
        return slot.newest


def _digest(previous: bytes, token: int) -> bytes:
    return hashlib.blake2b(previous + token.to_bytes(8, "little"), digest_size=16).digest()
