"""CUDA graphs of decode steps: the whole step, sampling included, as one launch."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from engine.execution.batch_state import SamplingKind
from engine.execution.decode_plan import ContextBucket, DecodePlan, DecodePlanner

RunDecode = Callable[[torch.Tensor, SamplingKind, DecodePlan], tuple[torch.Tensor, torch.Tensor]]
"""(slots [rows] int64, kind, plan) to (token_ids [rows], logits [rows, vocab_size]), all on the device."""

Step = tuple[int, SamplingKind]
"""Rows and sampling of a graph."""

MOST_PLANS = 6
"""Graphs of one batch size and sampling kind, at most, that differ in how attention is planned."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, 8, then every 8 up to 64, then every 32; the last is max_num_seqs itself."""
    sizes = [size for size in (1, 2, 4, *range(8, 64, 8), *range(64, 512, 32)) if size < max_num_seqs]
    return [*sizes, min(max_num_seqs, 512)]


@dataclass(frozen=True, eq=False)
class _Graph:
    graph: torch.cuda.CUDAGraph
    slots: torch.Tensor
    token_ids: torch.Tensor
    logits: torch.Tensor | None


class DecodeGraphs:
    """Replays decode steps for batches up to the largest size, each padded to the next size.

    Padding rows name the padding slot, so they write no KV and change no sequence. A graph is captured when its size,
    its sampling kind and its plan of attention first occur: after a run of the same work outside the graph, which
    compiles and loads every kernel, on padding rows only. A plan follows the bucket of the contexts' lengths, and
    buckets that lead to the same calls share a graph; of more than MOST_PLANS, the one least recently used is dropped.
    All graphs share one memory pool, since one runs at a time, and one buffer for logits: what a graph kept of its own
    would be lost to the others, and there are graphs of every size, kind and plan.
    """

    def __init__(
        self,
        run: RunDecode,
        planner: DecodePlanner,
        max_num_seqs: int,
        padding_slot: int,
        device: torch.device,
    ) -> None:
        self._run = run
        self._planner = planner
        self._sizes = graph_sizes(max_num_seqs)
        self._padding_slot = padding_slot
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Step, OrderedDict[Hashable, _Graph]] = {}
        self._logits: torch.Tensor | None = None
        self._loaded: tuple[_Graph, tuple[int, ...]] | None = None
        self.num_captures = 0

    @property
    def largest(self) -> int:
        """Batches beyond this many rows run without a graph."""
        return self._sizes[-1]

    def replay(
        self, slots: tuple[int, ...], kind: SamplingKind, contexts: ContextBucket
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(token_ids [rows], logits [rows, vocab_size]) of one decode step; both are overwritten by the next replay.

        The logits are None unless kind.any_logits. contexts: no slot's context is longer than its max_context_len.
        """
        size = next(size for size in self._sizes if size >= len(slots))
        captured = self._find_or_capture(size, kind, self._planner.plan(size, contexts))
        if self._loaded is None or self._loaded[0] is not captured or self._loaded[1] != slots:
            padded = [*slots, *[self._padding_slot] * (size - len(slots))]
            host = torch.tensor(padded, dtype=torch.int64).pin_memory()
            captured.slots.copy_(host, non_blocking=True)
            self._loaded = (captured, slots)
        captured.graph.replay()
        logits = captured.logits
        return captured.token_ids[: len(slots)], None if logits is None else logits[: len(slots)]

    def _find_or_capture(self, size: int, kind: SamplingKind, plan: DecodePlan) -> _Graph:
        graphs = self._graphs.setdefault((size, kind), OrderedDict())
        if plan.key not in graphs:
            graphs[plan.key] = self._capture(size, kind, plan)  # which waits until no graph runs
            if len(graphs) > MOST_PLANS:
                graphs.popitem(last=False)
        graphs.move_to_end(plan.key)
        return graphs[plan.key]

    def _capture(self, size: int, kind: SamplingKind, plan: DecodePlan) -> _Graph:
        self.num_captures += 1
        slots = torch.full((size,), self._padding_slot, dtype=torch.int64, device=self._device)
        current = torch.cuda.current_stream(self._device)
        side = _capture_stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            _, logits = self._run(slots, kind, plan)
        current.wait_stream(side)
        torch.cuda.synchronize(self._device)
        kept = self._logits_buffer(logits)[:size] if kind.any_logits else None
        del logits
        graph = torch.cuda.CUDAGraph()
        # thread_local: a rank's other thread, and NCCL's, may wait for events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            token_ids, logits = self._run(slots, kind, plan)
            if kept is not None:
                kept.copy_(logits)
        return _Graph(graph, slots, token_ids, kept)

    def _logits_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """[largest, vocab_size], for the logits of all graphs whose logits are read."""
        if self._logits is None:
            self._logits = like.new_empty((self.largest, like.shape[1]))
        return self._logits


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that all captures on a device share.

    torch keeps a workspace of cuBLAS for every stream until the process ends (32 MiB on Hopper), and a graph holds its
    address: a stream a capture would leave that much behind each time, and freeing it would pull it from live graphs.
    """
    return torch.cuda.Stream(device)
