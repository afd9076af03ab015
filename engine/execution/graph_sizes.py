"""For which sizes of a step CUDA graphs are captured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from engine.config import MAX_GRAPH_CHUNK_TOKENS
from engine.execution.step_rows import StepSize
from engine.scheduling.step import StepInput

LAUNCH_WEIGHTS = 2e11
"""Weights times rows of a layer whose products take a GPU as long as the host takes to launch the layer: some 0.7 ms
on the host (a dozen launches), at two FLOPs each and 600 TFLOP/s."""

CHUNK_COUNTS = (1, 4, 16, 64)
"""Chunks that a graph holds. Programs of the attention of chunks that are not there end at once, but they start."""

FINE_TOKENS = (
    *(16, 32, 64, 96, 128, 192),
    *range(256, 2048, 256),
    *range(2048, MAX_GRAPH_CHUNK_TOKENS + 1, 1024),
)
"""Tokens of the chunks together, where a size is of steps that recur."""

COARSE_TOKENS, COARSE_CHUNKS = (256, 1024, 4096, MAX_GRAPH_CHUNK_TOKENS), 16
"""The same, and chunks, where a size is to hold most steps."""


def launch_rows(layer_weights: int) -> int:
    """Rows beyond which launching a step one kernel after another keeps a GPU busy: see LAUNCH_WEIGHTS."""
    return max(1, int(LAUNCH_WEIGHTS / layer_weights))


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Decode rows to capture: 1, 2, 4, 8, then every 8 up to 64, then every 32; the last is max_num_seqs itself."""
    return _up_to(max_num_seqs, (1, 2, 4, *range(8, 64, 8), *range(64, 512, 32), 512))


class GraphSizes:
    """Steps of up to 512 decode rows, and of those with up to 64 chunks of most_chunk_tokens prompt tokens together.

    With chunks there are two grains. The few coarse sizes hold most steps, and are soon captured; the many fine ones
    are for steps that recur. launch_rows: see the function of that name; a coarse size has at most a quarter more rows.
    """

    def __init__(self, max_num_seqs: int, most_chunk_tokens: int, launch_rows: int) -> None:
        self.launch_rows = launch_rows
        self._decodes = decode_sizes(max_num_seqs)
        self._fine_decodes = [0, *_up_to(max_num_seqs, (4, 16, 64, 256, 512))]
        self._coarse_decodes = _up_to(max_num_seqs, (16, 512))
        most = min(most_chunk_tokens, MAX_GRAPH_CHUNK_TOKENS)
        self._fine_tokens = _up_to(most, FINE_TOKENS) if most else []
        self._coarse_tokens = _up_to(most, COARSE_TOKENS) if most else []

    @property
    def most_decodes(self) -> int:
        """Steps of more decode rows have no graph."""
        return self._decodes[-1]

    @property
    def largest_with_chunks(self) -> StepSize | None:
        """None if steps with chunks have no graphs."""
        if not self._fine_tokens:
            return None
        return _with_chunks(self._fine_decodes[-1], self._fine_tokens[-1], CHUNK_COUNTS[-1])

    def holding(self, step: StepInput) -> list[StepSize]:
        """The sizes that hold a step, the least first; none: it runs without a graph."""
        if not step.chunks:
            decodes = _least(self._decodes, len(step.decode_slots))
            return [] if decodes is None else [StepSize(decodes, samples=decodes)]
        exact = StepSize.of(step)
        fine = _padded(exact, self._fine_decodes, self._fine_tokens, CHUNK_COUNTS)
        coarse = _padded(exact, self._coarse_decodes, self._coarse_tokens, (COARSE_CHUNKS,))
        if fine is None:
            return []
        if coarse is None or coarse == fine or coarse.rows > 1.25 * self.launch_rows:
            return [fine]
        return [fine, coarse]


def _padded(
    exact: StepSize, decodes: Iterable[int], tokens: Iterable[int], chunks: Sequence[int]
) -> StepSize | None:
    axes = (decodes, exact.decodes), (tokens, exact.tokens), (chunks, exact.chunks)
    held = [least for sizes, number in axes if (least := _least(sizes, number)) is not None]
    if len(held) < len(axes):
        return None
    size = _with_chunks(*held)
    quarter = -(-size.tokens // 4)  # the attention's grid is so much smaller
    is_short = len(chunks) > 1 and size.chunks > 1 and exact.max_query_len <= quarter
    return replace(size, max_query_len=quarter) if is_short else size


def _with_chunks(decodes: int, tokens: int, chunks: int) -> StepSize:
    """Any chunk may be all the tokens, and any may be sampled."""
    return StepSize(decodes, tokens, chunks, samples=decodes + chunks, max_query_len=tokens)


def _up_to(most: int, sizes: Iterable[int]) -> list[int]:
    *smaller, largest = sizes
    return [*(size for size in smaller if size < most), min(most, largest)]


def _least(sizes: Iterable[int], number: int) -> int | None:
    return next((size for size in sizes if size >= number), None)
