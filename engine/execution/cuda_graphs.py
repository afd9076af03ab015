"""CUDA graphs of steps, sampling included: one launch for a step of decode rows, and for one with short prompts too."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.execution.batch_state import SamplingKind
from engine.execution.decode_plan import ContextBucket, DecodePlan, DecodePlanner
from engine.execution.graph_sizes import CHUNK_COUNTS, GraphSizes
from engine.execution.step_rows import EMPTY_STEP, StepRows, StepSize, lay_out
from engine.execution.upload import upload
from engine.scheduling.step import StepInput

RunStep = Callable[[StepRows, SamplingKind, DecodePlan | None], tuple[torch.Tensor, torch.Tensor]]
"""(rows, kind, plan of the decode rows) to (token_ids [samples], logits [samples, vocab_size]), all on the device."""

MOST_PLANS = 6
"""Graphs of one batch size and sampling kind, at most, that differ in how attention is planned."""

MOST_CHUNK_GRAPHS = 96
"""Graphs of steps with chunks, at most."""

CAPTURE_COST = 3.0
"""What a capture takes, in steps of which the host launches one kernel after another."""

CAPTURE_PAUSE = 16
"""Steps with chunks between two captures of such steps, at least: everybody waits for a capture."""


@dataclass(frozen=True, eq=False)
class _Graph:
    size: StepSize
    graph: torch.cuda.CUDAGraph
    rows: torch.Tensor
    """What lay_out gives."""
    token_ids: torch.Tensor
    logits: torch.Tensor | None


class StepGraphs:
    """Replays steps of the sizes that GraphSizes gives, each padded to one of them.

    Padding rows name the padding slot, so they write no KV and change no sequence. A capture follows a run of the same
    work outside the graph, which compiles and loads every kernel, on padding rows only. A graph holds for a size, a
    sampling kind and a plan of attention; a plan follows the bucket of the contexts' lengths, with 0 for padding, and
    buckets that lead to the same calls share a graph. All graphs share one memory pool, since one runs at a time, and
    one buffer for logits: what a graph kept of its own would be lost to the others, and there are graphs of every size,
    kind and plan.

    Graphs of decode rows alone are captured when they first occur; of more than MOST_PLANS of a size and kind, the one
    least recently used is dropped. With chunks there are many sizes, most of which occur seldom: one is captured when,
    had it been there, it would have saved what the capture takes; the one that would have saved most goes first, and
    after each there is a pause. Until then the step runs by a graph of a coarser size or without one. MOST_CHUNK_GRAPHS
    are kept. What runs once, to warm up or to be checked, sets capture_cost to 0: then each is captured when it first
    occurs.
    """

    def __init__(
        self,
        run: RunStep,
        planner: DecodePlanner,
        sizes: GraphSizes,
        padding_slot: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.sizes = sizes
        self.capture_cost = CAPTURE_COST
        self._run = run
        self._planner = planner
        self._padding_slot = padding_slot
        self._max_model_len = max_model_len
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[StepSize, SamplingKind], OrderedDict[Hashable, _Graph]] = {}
        self._chunk_graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._missed: dict[Hashable, float] = defaultdict(float)
        self._since_capture = CAPTURE_PAUSE
        self._logits: torch.Tensor | None = None
        self._loaded: tuple[_Graph, StepInput] | None = None
        self.num_captures = 0

    def replay(self, step: StepInput, kind: SamplingKind) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """(token_ids [rows], logits [rows, vocab_size]) of the rows that a step samples, until the next replay.

        None if the step has no graph: nothing has run then. The logits are None unless kind.any_logits.
        """
        find = self._find_with_chunks if step.chunks else self._find_or_capture
        captured = find(step, kind)
        if captured is None:
            return None
        if not self._is_loaded(captured, step):
            rows = torch.from_numpy(lay_out(step, captured.size, self._padding_slot)).pin_memory()
            captured.rows.copy_(rows, non_blocking=True)
            self._loaded = (captured, step)
        captured.graph.replay()
        num_rows, logits = len(step.sampled_slots), captured.logits
        return captured.token_ids[:num_rows], None if logits is None else logits[:num_rows]

    @contextmanager
    def captured_at_once(self) -> Iterator[None]:
        """What has no graph gets one when it is first replayed."""
        before, self.capture_cost = self.capture_cost, 0.0
        try:
            yield
        finally:
            self.capture_cost = before

    def capture_largest(self, kind: SamplingKind) -> None:
        """Capture the largest step with chunks, for what it takes."""
        size, longest = self.sizes.largest_with_chunks, self._max_model_len
        if size is not None:
            plan = self._planner.plan(size.decodes, ContextBucket.of(longest, longest, longest))
            self._capture(size, kind, plan)

    def _is_loaded(self, captured: _Graph, step: StepInput) -> bool:
        """Whether the rows of a graph are those of this step: decode rows change seldom."""
        if self._loaded is None or step.chunks:
            return False
        return self._loaded[0] is captured and self._loaded[1].decode_slots == step.decode_slots

    def _plan(self, size: StepSize, step: StepInput) -> DecodePlan | None:
        if not size.decodes:
            return None
        mean = step.mean_decode_context * len(step.decode_slots) // size.decodes
        contexts = ContextBucket.of(step.max_decode_context, mean, self._max_model_len)
        return self._planner.plan(size.decodes, contexts)

    def _find_or_capture(self, step: StepInput, kind: SamplingKind) -> _Graph | None:
        size = next(iter(self.sizes.holding(step)), None)
        plan = None if size is None else self._plan(size, step)
        if size is None or plan is None:
            return None
        graphs = self._graphs.setdefault((size, kind), OrderedDict())
        if plan.key not in graphs:
            graphs[plan.key] = self._capture(size, kind, plan)  # which waits until no graph runs
            if len(graphs) > MOST_PLANS:
                graphs.popitem(last=False)
        graphs.move_to_end(plan.key)
        return graphs[plan.key]

    def _find_with_chunks(self, step: StepInput, kind: SamplingKind) -> _Graph | None:
        """The graph of the least size that there is, or that is worth its capture now."""
        graphs, sizes = self._chunk_graphs, self.sizes.holding(step)
        plans = [self._plan(size, step) for size in sizes]
        keys = [(size, kind, None if plan is None else plan.key) for size, plan in zip(sizes, plans)]
        found = next((i for i, key in enumerate(keys) if key in graphs), len(keys))
        for size, key in zip(sizes[:found], keys):
            wasted = 1.0 if found == len(keys) else (sizes[found].rows - size.rows) / self.sizes.launch_rows
            self._missed[key] += wasted
        self._since_capture += 1
        worth = self._worth_capturing(keys[:found])
        if worth is not None:
            found, self._since_capture = worth, 0
            del self._missed[keys[found]]
            graphs[keys[found]] = self._capture(sizes[found], kind, plans[found])
            if len(graphs) > MOST_CHUNK_GRAPHS:
                graphs.popitem(last=False)
        if found == len(keys):
            return None
        graphs.move_to_end(keys[found])
        return graphs[keys[found]]

    def _worth_capturing(self, keys: Sequence[Hashable]) -> int | None:
        """Which of the graphs that a step lacks to capture now."""
        if not keys or not self.capture_cost:
            return 0 if keys else None
        most = max(range(len(keys)), key=lambda i: self._missed[keys[i]])
        is_due = self._since_capture > CAPTURE_PAUSE
        return most if is_due and self._missed[keys[most]] >= self.capture_cost else None

    def _capture(self, size: StepSize, kind: SamplingKind, plan: DecodePlan | None) -> _Graph:
        self.num_captures += 1
        (flat,) = upload(self._device, lay_out(EMPTY_STEP, size, self._padding_slot))
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
        return _Graph(size, graph, flat, token_ids, kept)

    def _logits_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """[rows, vocab_size], for the logits of all graphs whose logits are read."""
        if self._logits is None:
            self._logits = like.new_empty((self.sizes.most_decodes + CHUNK_COUNTS[-1], like.shape[1]))
        return self._logits


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that all captures on a device share.

    torch keeps a workspace of cuBLAS for every stream until the process ends (32 MiB on Hopper), and a graph holds its
    address: a stream a capture would leave that much behind each time, and freeing it would pull it from live graphs.
    """
    return torch.cuda.Stream(device)
