"""Which rows a step runs and which of them it samples: one int64 array, padded to the size of a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.scheduling.step import StepInput

EMPTY_STEP = StepInput((), (), (), 0, 0, ())


@dataclass(frozen=True)
class StepSize:
    """Rows that a step's tensors have, of which the last ones may be padding.

    decodes: decode rows. tokens: of all chunks together. chunks: how many. samples: rows that are sampled; those of a
    step without chunks are its decode rows. max_query_len: tokens of the longest chunk, or more.
    """

    decodes: int
    tokens: int = 0
    chunks: int = 0
    samples: int = 0
    max_query_len: int = 0

    @classmethod
    def of(cls, step: StepInput) -> StepSize:
        """Without padding."""
        lens = [len(chunk.token_ids) for chunk in step.chunks]
        samples = len(step.sampled_slots)
        return cls(len(step.decode_slots), sum(lens), len(lens), samples, max(lens, default=0))

    @property
    def rows(self) -> int:
        """Rows that every layer computes."""
        return self.decodes + self.tokens

    @property
    def columns(self) -> dict[str, int]:
        """Integers of each field of StepRows, in their order in the array."""
        if not self.chunks:
            return {"decode_slots": self.decodes}
        return {
            "decode_slots": self.decodes,
            "sampled_slots": self.samples,
            "sampled_rows": self.samples,
            "token_ids": self.tokens,
            "positions": self.tokens,
            "chunk_of_token": self.tokens,
            "chunk_slots": self.chunks,
            "chunk_ends": self.chunks,
            "query_start_loc": self.chunks + 1,
        }


def lay_out(step: StepInput, size: StepSize, padding_slot: int) -> np.ndarray:
    """The rows of a step as StepRows.view reads them: int64, flat. size: StepSize.of(step), or a graph's."""
    found: dict[str, Iterable[int]] = {"decode_slots": step.decode_slots}
    padding = {"decode_slots": padding_slot}
    if size.chunks:
        lens = np.array([len(chunk.token_ids) for chunk in step.chunks], np.int64)
        starts = np.array([chunk.start for chunk in step.chunks], np.int64)
        ends = np.cumsum(lens)
        last_rows = size.decodes + ends - 1
        found |= {
            "sampled_slots": step.sampled_slots,
            "sampled_rows": [
                *range(len(step.decode_slots)),
                *(row for row, chunk in zip(last_rows, step.chunks) if chunk.samples),
            ],
            "token_ids": np.concatenate(
                [ends[:0], *(np.array(chunk.token_ids, np.int64) for chunk in step.chunks)]
            ),
            "positions": np.arange(lens.sum()) - np.repeat(ends - lens - starts, lens),
            "chunk_of_token": np.repeat(np.arange(len(lens)), lens),
            "chunk_slots": [chunk.slot for chunk in step.chunks],
            "chunk_ends": starts + lens,
            "query_start_loc": [0, *ends],
        }
        padding |= {
            "sampled_slots": padding_slot,
            "sampled_rows": 0,  # any row will do
            "token_ids": 0,
            "positions": -1,
            "chunk_of_token": 0,
            "chunk_slots": padding_slot,
            "chunk_ends": -1,  # what num_computed of the padding slot always is
            "query_start_loc": int(lens.sum()),
        }
    return np.concatenate(
        [_padded(found[name], length, padding[name]) for name, length in size.columns.items()]
    )


def _padded(values: Iterable[int], length: int, padding: int) -> np.ndarray:
    column = np.full(length, padding, np.int64)
    given = values if isinstance(values, np.ndarray) else np.array(list(values), np.int64)
    column[: len(given)] = given
    return column


@dataclass(frozen=True)
class ChunkTokens:
    """The tokens of a step's chunks, one chunk after another, then padding.

    token_ids, positions, chunk_of_token: [tokens] int64; positions of padding are -1. slots, ends: [chunks] int64, the
    sequence's slot, and its length with the chunk, or of padding the padding slot and -1. query_start_loc:
    [chunks + 1] int64; chunks of padding are empty. max_query_len: tokens of the longest chunk, or more.
    """

    token_ids: Tensor
    positions: Tensor
    chunk_of_token: Tensor
    slots: Tensor
    ends: Tensor
    query_start_loc: Tensor
    max_query_len: int


@dataclass(frozen=True)
class StepRows:
    """Views of one array on the device.

    decode_slots: [decodes] int64, the rows that come first, padding slots at the end. sampled_slots: [samples] int64,
    the slots that get a token, in the order of the step's result, then padding slots. sampled_rows: [samples] int64,
    where their last token runs; None where these are the decode rows themselves.
    """

    decode_slots: Tensor
    sampled_slots: Tensor
    sampled_rows: Tensor | None
    chunks: ChunkTokens | None

    @classmethod
    def view(cls, flat: Tensor, size: StepSize) -> StepRows:
        """flat: what lay_out gives for this size."""
        columns = size.columns
        parts = dict(zip(columns, flat.split(list(columns.values()))))
        if not size.chunks:
            return cls(flat, flat, None, None)
        chunks = ChunkTokens(
            token_ids=parts["token_ids"],
            positions=parts["positions"],
            chunk_of_token=parts["chunk_of_token"],
            slots=parts["chunk_slots"],
            ends=parts["chunk_ends"],
            query_start_loc=parts["query_start_loc"],
            max_query_len=size.max_query_len,
        )
        return cls(parts["decode_slots"], parts["sampled_slots"], parts["sampled_rows"], chunks)
