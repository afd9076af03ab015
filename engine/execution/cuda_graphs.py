"""CUDA graphs of decode steps: the whole step, sampling included, as one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.execution.batch_state import SamplingKind

RunDecode = Callable[[torch.Tensor, SamplingKind], tuple[torch.Tensor, torch.Tensor]]
"""(slots [rows] int64, kind) to (token_ids [rows], logits [rows, vocab_size]), all on the device."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, 8, then every 8 up to 64, then every 32; the last is max_num_seqs itself."""
    sizes = [size for size in (1, 2, 4, *range(8, 64, 8), *range(64, 512, 32)) if size < max_num_seqs]
    return [*sizes, min(max_num_seqs, 512)]


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    slots: torch.Tensor
    token_ids: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """Replays decode steps for batches up to the largest size, each padded to the next size.

    Padding rows name the padding slot, so they write no KV and change no sequence. A graph is captured when its size
    and sampling kind first occur: after a run of the same work outside the graph, which compiles and loads every
    kernel, on padding rows only. All graphs share one memory pool, since one runs at a time.
    """

    def __init__(self, run: RunDecode, max_num_seqs: int, padding_slot: int, device: torch.device) -> None:
        self._run = run
        self._sizes = graph_sizes(max_num_seqs)
        self._padding_slot = padding_slot
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, SamplingKind], _Graph] = {}
        self._loaded: tuple[tuple[int, SamplingKind], tuple[int, ...]] | None = None

    @property
    def largest(self) -> int:
        """Batches beyond this many rows run without a graph."""
        return self._sizes[-1]

    def replay(self, slots: tuple[int, ...], kind: SamplingKind) -> tuple[torch.Tensor, torch.Tensor]:
        """(token_ids [rows], logits [rows, vocab_size]) of one decode step; both are overwritten by the next replay."""
        key = (next(size for size in self._sizes if size >= len(slots)), kind)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        captured = self._graphs[key]
        if self._loaded != (key, slots):
            padded = [*slots, *[self._padding_slot] * (key[0] - len(slots))]
            host = torch.tensor(padded, dtype=torch.int64).pin_memory()
            captured.slots.copy_(host, non_blocking=True)
            self._loaded = (key, slots)
        captured.graph.replay()
        return captured.token_ids[: len(slots)], captured.logits[: len(slots)]

    def _capture(self, size: int, kind: SamplingKind) -> _Graph:
        slots = torch.full((size,), self._padding_slot, dtype=torch.int64, device=self._device)
        current = torch.cuda.current_stream(self._device)
        side = torch.cuda.Stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._run(slots, kind)
        current.wait_stream(side)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # thread_local: a rank's other thread, and NCCL's, may wait for events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            token_ids, logits = self._run(slots, kind)
        return _Graph(graph, slots, token_ids, logits)
