"""CUDA graphs of steps, sampling included: one launch for a step of decode rows, and for one with short prompts too."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch

from engine.execution.batch_state import SamplingKind
from engine.execution.decode_plan import ContextBucket, DecodePlan, DecodePlanner
from engine.execution.step_rows import EMPTY_STEP, StepRows, StepSize, lay_out
from engine.scheduling.step import StepInput

RunStep = Callable[[StepRows, SamplingKind, DecodePlan | None], tuple[torch.Tensor, torch.Tensor]]
"""(rows, kind, plan of the decode rows) to (token_ids [samples], logits [samples, vocab_size]), all on the device."""

MOST_PLANS = 6
"""Graphs of one batch size and sampling kind, at most, that differ in how attention is planned."""

CHUNK_COUNTS = (1, 4, 16)
"""Chunks that a graph holds. Programs of the attention of chunks that are not there end at once, but they start."""

MOST_CHUNK_TOKENS = 2048
"""Prompt tokens that a graph holds, at most."""

MOST_CHUNK_GRAPHS = 96
"""Graphs of steps with chunks, at most."""

LAUNCH_WEIGHTS = 2e11
"""Weights times tokens of a layer whose products take a GPU as long as the host takes to launch the layer: some 0.7 ms
on the host (a dozen launches), at two FLOPs each and 600 TFLOP/s."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Decode rows to capture: 1, 2, 4, 8, then every 8 up to 64, then every 32; the last is max_num_seqs itself."""
    return _sizes_up_to(max_num_seqs, (1, 2, 4, *range(8, 64, 8), *range(64, 512, 32), 512))


def chunk_sizes(most_tokens: int) -> list[int]:
    """Prompt tokens to capture, up to most_tokens: at most a half more than there are, from 256 on 256 more."""
    if most_tokens < 1:
        return []
    return _sizes_up_to(most_tokens, (16, 32, 64, 96, 128, 192, *range(256, MOST_CHUNK_TOKENS + 1, 256)))


def most_chunk_tokens(layer_weights: int) -> int:
    """Tokens beyond which launching a step one kernel after another keeps a GPU busy: see LAUNCH_WEIGHTS."""
    return min(MOST_CHUNK_TOKENS, int(LAUNCH_WEIGHTS / layer_weights))


def _sizes_up_to(most: int, sizes: Iterable[int]) -> list[int]:
    *smaller, largest = sizes
    return [*(size for size in smaller if size < most), min(most, largest)]


@dataclass(frozen=True, eq=False)
class _Graph:
    graph: torch.cuda.CUDAGraph
    rows: torch.Tensor
    """What lay_out gives."""
    token_ids: torch.Tensor
    logits: torch.Tensor | None


class StepGraphs:
    """Replays steps of up to `largest` decode rows and most_chunk_tokens prompt tokens, each padded to the next size.

    Padding rows name the padding slot, so they write no KV and change no sequence. A graph is captured when its size,
    its sampling kind and its plan of attention first occur, with chunks when they occur again, since there are many
    sizes of those: after a run of the same work outside the graph, which compiles and loads every kernel, on padding
    rows only. A plan follows the bucket of the contexts' lengths, and buckets that lead to the same calls share a
    graph; of more than MOST_PLANS (with chunks, MOST_CHUNK_GRAPHS together), the one least recently used is dropped.
    All graphs share one memory pool, since one runs at a time, and one buffer for logits: what a graph kept of its own
    would be lost to the others, and there are graphs of every size, kind and plan.
    """

    def __init__(
        self,
        run: RunStep,
        planner: DecodePlanner,
        max_num_seqs: int,
        padding_slot: int,
        device: torch.device,
        *,
        most_chunk_tokens: int = 0,
    ) -> None:
        self._run = run
        self._planner = planner
        self._sizes = graph_sizes(max_num_seqs)
        # With chunks there are fewer sizes: the padding's part of the work is small beside theirs.
        self._sizes_beside_chunks = [0, *_sizes_up_to(max_num_seqs, (4, 16, 64, 256, 512))]
        self._chunk_sizes = chunk_sizes(most_chunk_tokens)
        self._padding_slot = padding_slot
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[StepSize, SamplingKind], OrderedDict[Hashable, _Graph]] = {}
        self._chunk_graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
        self._logits: torch.Tensor | None = None
        self._loaded: tuple[_Graph, StepInput] | None = None
        self.num_captures = 0

    @property
    def largest(self) -> int:
        """Batches beyond this many decode rows run without a graph."""
        return self._sizes[-1]

    def size_of(self, step: StepInput) -> StepSize | None:
        """The least size that holds a step, or None: it runs without a graph."""
        if not step.chunks:
            decodes = _least(self._sizes, len(step.decode_slots))
            return None if decodes is None else StepSize(decodes, samples=decodes)
        exact = StepSize.of(step)
        decodes = _least(self._sizes_beside_chunks, exact.decodes)
        chunks, tokens = _least(CHUNK_COUNTS, exact.chunks), _least(self._chunk_sizes, exact.tokens)
        if decodes is None or chunks is None or tokens is None:
            return None
        return _with_chunks(decodes, tokens, chunks)

    def replay(
        self, step: StepInput, kind: SamplingKind, contexts: ContextBucket
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """(token_ids [rows], logits [rows, vocab_size]) of the rows that a step samples, until the next replay.

        None if the step has no graph: nothing has run then. The logits are None unless kind.any_logits. contexts: no
        decode row's context is longer than its max_context_len.
        """
        size = self.size_of(step)
        captured = None if size is None else self._find_or_capture(size, kind, self._plan(size, contexts))
        if size is None or captured is None:
            return None
        if not self._is_loaded(captured, step):
            rows = torch.from_numpy(lay_out(step, size, self._padding_slot)).pin_memory()
            captured.rows.copy_(rows, non_blocking=True)
            self._loaded = (captured, step)
        captured.graph.replay()
        num_rows, logits = len(step.sampled_slots), captured.logits
        return captured.token_ids[:num_rows], None if logits is None else logits[:num_rows]

    def capture_largest(self, kind: SamplingKind, contexts: ContextBucket) -> None:
        """Capture the largest step with chunks, for what it takes."""
        if self._chunk_sizes:
            size = _with_chunks(self._sizes_beside_chunks[-1], self._chunk_sizes[-1], CHUNK_COUNTS[-1])
            self._capture(size, kind, self._plan(size, contexts))

    def _is_loaded(self, captured: _Graph, step: StepInput) -> bool:
        """Whether the rows of a graph are those of this step: decode rows change seldom."""
        if self._loaded is None or step.chunks:
            return False
        return self._loaded[0] is captured and self._loaded[1].decode_slots == step.decode_slots

    def _plan(self, size: StepSize, contexts: ContextBucket) -> DecodePlan | None:
        return self._planner.plan(size.decodes, contexts) if size.decodes else None

    def _find_or_capture(self, size: StepSize, kind: SamplingKind, plan: DecodePlan | None) -> _Graph | None:
        """None the first time that a step with chunks occurs."""
        if size.chunks:
            return self._find_with_chunks(size, kind, plan)
        assert plan is not None  # there are decode rows
        graphs = self._graphs.setdefault((size, kind), OrderedDict())
        if plan.key not in graphs:
            graphs[plan.key] = self._capture(size, kind, plan)  # which waits until no graph runs
            if len(graphs) > MOST_PLANS:
                graphs.popitem(last=False)
        graphs.move_to_end(plan.key)
        return graphs[plan.key]

    def _find_with_chunks(self, size: StepSize, kind: SamplingKind, plan: DecodePlan | None) -> _Graph | None:
        graphs, key = self._chunk_graphs, (size, kind, None if plan is None else plan.key)
        if key not in graphs:
            graphs[key] = None
            if len(graphs) > MOST_CHUNK_GRAPHS:
                graphs.popitem(last=False)
            return None
        if graphs[key] is None:
            graphs[key] = self._capture(size, kind, plan)
        graphs.move_to_end(key)
        return graphs[key]

    def _capture(self, size: StepSize, kind: SamplingKind, plan: DecodePlan | None) -> _Graph:
        self.num_captures += 1
        flat = torch.from_numpy(lay_out(EMPTY_STEP, size, self._padding_slot)).to(self._device)
        rows = StepRows.view(flat, size)
        current = torch.cuda.current_stream(self._device)
        side = _capture_stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            _, logits = self._run(rows, kind, plan)
        current.wait_stream(side)
        torch.cuda.synchronize(self._device)
        kept = self._logits_buffer(logits)[: size.samples] if kind.any_logits else None
        del logits
        graph = torch.cuda.CUDAGraph()
        # thread_local: a rank's other thread, and NCCL's, may wait for events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            token_ids, logits = self._run(rows, kind, plan)
            if kept is not None:
                kept.copy_(logits)
        return _Graph(graph, flat, token_ids, kept)

    def _logits_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """[rows, vocab_size], for the logits of all graphs whose logits are read."""
        if self._logits is None:
            self._logits = like.new_empty((self.largest + CHUNK_COUNTS[-1], like.shape[1]))
        return self._logits


def _least(sizes: Iterable[int], number: int) -> int | None:
    return next((size for size in sizes if size >= number), None)


def _with_chunks(decodes: int, tokens: int, chunks: int) -> StepSize:
    """Any chunk may be all the tokens, and any may be sampled."""
    return StepSize(decodes, tokens, chunks, samples=decodes + chunks, max_query_len=tokens)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that all captures on a device share.

    torch keeps a workspace of cuBLAS for every stream until the process ends (32 MiB on Hopper), and a graph holds its
    address: a stream a capture would leave that much behind each time, and freeing it would pull it from live graphs.
    """
    return torch.cuda.Stream(device)
