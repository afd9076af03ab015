"""An executor without a network, whose every token depends on all KV it reads back through the block tables."""

from __future__ import annotations

import hashlib

from engine.scheduling.step import SampledToken, SequenceRow, StepInput

UNWRITTEN = b"unwritten"


class PagedHashExecutor:
    """Stands in for the model: the "KV" of a token is a digest of the sequence up to it, kept in a paged pool.

    The next token is a digest of the KV of all positions, read through the row's block table. So one wrong, stale,
    unwritten or foreign block changes the output, as it would (less visibly) in a real engine.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 50) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.pool = [[UNWRITTEN] * block_size for _ in range(num_blocks)]
        self.steps: list[StepInput] = []

    def execute(self, step: StepInput) -> list[SampledToken]:
        self.steps.append(step)
        written: set[tuple[int, int]] = set()
        for row in step.rows:
            self._write(row, written)
        return [SampledToken(self._next_token(row)) for row in step.rows if row.sampling is not None]

    def _place(self, row: SequenceRow, position: int) -> tuple[int, int]:
        return row.block_table[position // self.block_size], position % self.block_size

    def _write(self, row: SequenceRow, written: set[tuple[int, int]]) -> None:
        for i, token in enumerate(row.token_ids):
            position = row.start + i
            previous = b""
            if position:
                block, offset = self._place(row, position - 1)
                previous = self.pool[block][offset]
            block, offset = self._place(row, position)
            assert (block, offset) not in written, "two tokens of one step share a slot"
            written.add((block, offset))
            self.pool[block][offset] = _digest(previous, token)

    def _next_token(self, row: SequenceRow) -> int:
        end = row.start + len(row.token_ids)
        context = b"".join(self.pool[b][o] for b, o in (self._place(row, p) for p in range(end)))
        assert UNWRITTEN not in context, "attention reads KV that was never written"
        assert row.sampling is not None
        draw = str(row.sampling.uniform).encode()
        return (
            int.from_bytes(hashlib.blake2b(context + draw, digest_size=4).digest(), "little")
            % self.vocab_size
        )


def _digest(previous: bytes, token: int) -> bytes:
    return hashlib.blake2b(previous + token.to_bytes(8, "little"), digest_size=16).digest()
