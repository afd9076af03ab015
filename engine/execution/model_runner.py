"""One rank's device work: weights, KV cache, the forward pass of a step, and sampling."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig
from engine.execution import kv_cache
from engine.execution.all_reduce_choice import choose_all_reduce
from engine.execution.batch_state import BatchState, SamplingKind
from engine.execution.collective_timer import CollectiveTimer
from engine.execution.cuda_graphs import CAPTURE_COST, StepGraphs
from engine.execution.decode_plan import MOST_RAGGED, ContextBucket, DecodePlan, DecodePlanner
from engine.execution.device_clock import DeviceClock
from engine.execution.graph_sizes import GraphSizes, decode_sizes, launch_rows
from engine.execution.inference import in_own_dtype
from engine.execution.input_batch import AttentionShape, ChunkRows, join_rows
from engine.execution.kernel_choice import choose_kernels
from engine.execution.loader import load_model
from engine.execution.rehearsal import HARDEST_SAMPLING, rehearse
from engine.execution.sampler import PendingTokens, choose_tokens
from engine.execution.sharded_sampling import greedy_tokens, likeliest_logits
from engine.execution.step_rows import StepRows, StepSize, lay_out
from engine.execution.trace import Trace, trace_path
from engine.execution.upload import upload
from engine.models.checkpoint import ModelSource
from engine.models.decoder import layer_shape
from engine.parallel.group import ParallelGroup
from engine.scheduling.step import Chunk, NewBlocks, SlotSetting, StepInput
from kernels.compile_ahead import can_compile_ahead, compile_ahead
from kernels.decode.planner import device_sm_count
from kernels.persistent import unsupported_block_size
from kernels.prefill import PrefillProblem
from kernels.slot_state import DecodeRows, DrawSettings, draw_settings, keep_newest, start_decodes
from kernels.tuned_tables import device_name


class ModelRunner:
    """Executes steps on one device, in the order they are launched. failure: None, or that it is closed."""

    def __init__(
        self, config: EngineConfig, source: ModelSource, *, device: torch.device, group: ParallelGroup
    ) -> None:
        self.config = config
        self.device = device
        self.group = group
        self._clock = DeviceClock(device)
        self._collective_timer = CollectiveTimer(group, device)
        self._trace = Trace(device)
        self.model_config = source.config
        self.max_model_len = config.resolve_max_model_len(source.config.max_position_embeddings)
        dtype = config.resolve_dtype(source.config.dtype)
        heads = source.config.heads_per_rank(group.size)
        self.shape = AttentionShape(
            num_q_heads=heads.num_q_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=source.config.head_dim,
            block_size=config.block_size,
            dtype=dtype,
            device=device,
        )
        self.kernels = choose_kernels(config, device, self._prompts())
        self._check_kernels()
        self._check_ranks()
        self.group = choose_all_reduce(
            config,
            group,
            device,
            use_triton=self.kernels.use_triton,
            largest=decode_sizes(config.max_num_seqs)[-1] * source.config.hidden_size * dtype.itemsize,
        )
        self.planner = DecodePlanner(self.kernels.decode, self.shape.decode_problem)
        started = time.perf_counter()
        # No position beyond max_model_len is ever run, so the table of rotary angles ends there.
        shortened = replace(source.config, max_position_embeddings=self.max_model_len)
        self.model = load_model(
            replace(source, config=shortened),
            load_format=config.load_format,
            device=device,
            dtype=dtype,
            group=self.group,
            kernels=self.kernels,
            seed=config.seed,
        )
        if self.kernels.persistent_layers:
            self.model.prepare_persistent_layers()
        self.load_s = time.perf_counter() - started
        self.kv_cache = self.new_kv_cache(0)
        max_blocks = -(-self.max_model_len // config.block_size)
        self.state = BatchState(
            config.max_num_seqs, max_blocks, source.config.vocab_size, device, num_ranks=group.size
        )
        self.graphs: StepGraphs | None = None
        self.failure: RuntimeError | None = None

    @property
    def uses_cuda_graphs(self) -> bool:
        """On a CUDA device, unless enforce_eager is set or something in a step has to wait for the device."""
        capturable = self.kernels.use_triton and self.kernels.decode.capturable
        capturable = capturable and self.group.is_capturable
        return self.device.type == "cuda" and capturable and not self.config.enforce_eager

    def prepare(self) -> None:
        """Compile, and take as many KV blocks as the rank with the least room can hold; then steps can be launched."""
        if self._compiles_ahead:
            with compile_ahead(self.device, compiles=self.group.rank == 0):
                self._rehearse()
            self.group.smallest(0, self.device)  # the others find what rank 0 has compiled in Triton's cache
        self.allocate_kv_cache(self.group.smallest(self.num_blocks_that_fit(), self.device))
        self._clock = DeviceClock(self.device)

    def report(self) -> dict[str, Any]:
        """What this rank runs, and what it has taken: seconds to load, and the most bytes held on host and device."""
        on_cuda = self.device.type == "cuda"
        return {
            "num_kv_blocks": self.num_kv_blocks,
            "decode_attention": self.kernels.decode.name,
            "layer_fusion": self.config.layer_fusion,
            "prefill_attention": self.kernels.prefill.name,
            "use_triton": self.kernels.use_triton,
            "uses_cuda_graphs": self.uses_cuda_graphs,
            "num_captures": 0 if self.graphs is None else self.graphs.num_captures,
            "all_reduce": "torch" if self.group.small_all_reduce is None else "one_shot",
            "load_s": self.load_s,
            "host_peak_bytes": _host_peak_bytes(),
            "device_peak_bytes": torch.cuda.max_memory_allocated(self.device) if on_cuda else None,
        }

    def capture_at_once(self, at_once: bool) -> None:
        """Whether each CUDA graph is captured when it first occurs, as what is to be checked or warmed up needs it, or
        when it is worth it: see StepGraphs."""
        if self.graphs is not None:
            self.graphs.capture_cost = 0.0 if at_once else CAPTURE_COST

    def start_collective_timer(self) -> None:
        """Time this rank's collectives from now on."""
        self._collective_timer.start()

    def stop_collective_timer(self) -> tuple[float, float]:
        """Seconds that they took since then, and seconds since then: see CollectiveTimer."""
        return self._collective_timer.stop()

    def start_trace(self) -> None:
        """Trace this rank's process and device from now on."""
        self._trace.start()

    def stop_trace(self, path: str) -> None:
        """End the trace and write it: see trace.trace_path."""
        self._trace.stop(trace_path(path, self.group.rank, self.group.size))

    def close(self) -> None:
        """Drop weights, KV and memory shared with other ranks. Calling it again does nothing."""
        if self.failure is not None:
            return
        self.failure = RuntimeError("the engine is closed")
        self.graphs = None
        self.group = replace(self.group, small_all_reduce=None)
        del self.model, self.kv_cache, self.state
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- compilation ----------------------------------------------------------------------------------------

    @property
    def _compiles_ahead(self) -> bool:
        """On a CUDA device, for the kernels of this project: those of others may do anything while they run nothing."""
        own = all(
            type(kernel).__module__.startswith("kernels.")
            for kernel in (self.kernels.decode, self.kernels.prefill)
        )
        own = own and self.kernels.use_triton and not self.kernels.persistent_layers
        return self.device.type == "cuda" and own and can_compile_ahead()

    @in_own_dtype
    def _rehearse(self) -> None:
        rehearse(self)

    # --- KV cache -------------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        return kv_cache.block_bytes(
            self.model_config, self.shape.num_kv_heads, self.shape.block_size, self.shape.dtype
        )

    def num_blocks_that_fit(self) -> int:
        """Blocks this rank can hold: num_kv_blocks if given, else what memory allows, else the default for a CPU.

        On a GPU that is gpu_memory_utilization of its memory, less what others use, weights, and the measured peak
        of the largest step that max_num_batched_tokens and max_num_seqs allow and of the largest graphs. On a CPU it
        is CPU_KV_BYTES. Never more than max_num_seqs sequences of max_model_len can use.
        """
        if self.config.num_kv_blocks is not None:
            return self.config.num_kv_blocks
        if self.device.type == "cuda":
            budget = self._free_bytes_at_peak()
        else:
            budget = kv_cache.CPU_KV_BYTES
        useful = self.config.max_num_seqs * -(-self.max_model_len // self.shape.block_size)
        num_blocks = min(budget // self.block_bytes, useful)
        if num_blocks < 1:
            raise ValueError(
                f"no memory for KV: {budget} bytes are left and a block takes {self.block_bytes}; lower "
                "max_num_batched_tokens or block_size, or raise gpu_memory_utilization"
            )
        return num_blocks

    @property
    def num_kv_blocks(self) -> int:
        return self.kv_cache.shape[2]

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Give the runner a KV cache."""
        self.kv_cache = self.new_kv_cache(num_blocks)
        self.graphs = self._new_graphs() if self.uses_cuda_graphs else None

    def new_kv_cache(self, num_blocks: int) -> torch.Tensor:
        return kv_cache.allocate(
            self.model_config,
            num_blocks,
            num_kv_heads=self.shape.num_kv_heads,
            block_size=self.shape.block_size,
            dtype=self.shape.dtype,
            device=self.device,
        )

    def _new_graphs(self) -> StepGraphs:
        return StepGraphs(
            self._run,
            self.planner,
            self._graph_sizes(),
            self.state.padding_slot,
            self.max_model_len,
            self.device,
        )

    def _graph_sizes(self) -> GraphSizes:
        rows = launch_rows(sum(weight.numel() for weight in self.model.layers[0].parameters()))
        most = rows if self.config.graph_chunk_tokens == "auto" else self.config.graph_chunk_tokens
        most = min(most, self.config.max_num_batched_tokens) if self.kernels.prefill.capturable else 0
        return GraphSizes(self.config.max_num_seqs, most, rows)

    def _free_bytes_at_peak(self) -> int:
        """Run the largest work there can be on a throw-away cache, and see what it leaves of this engine's share."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        step = self._largest_step()
        self.allocate_kv_cache(1 + max(max(new.block_ids) for new in step.new_blocks))
        held_by_cache = self.kv_cache.nbytes
        self.launch(step).result()
        torch.cuda.empty_cache()  # as a capture does: what the step has left would be taken off what graphs hold
        held_before = torch.cuda.memory_reserved(self.device)
        self._replay_largest()
        torch.cuda.synchronize(self.device)
        held_by_graphs = torch.cuda.memory_reserved(self.device) - held_before
        peak = torch.cuda.max_memory_allocated(self.device) - held_by_cache + held_by_graphs
        self.graphs = None
        self.kv_cache = self.new_kv_cache(0)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        used_outside = total - free - torch.cuda.memory_reserved(self.device)
        return int(total * self.config.gpu_memory_utilization) - used_outside - peak

    def _replay_largest(self) -> None:
        """The graphs of the most rows, for contexts all alike and for ragged ones, which may take more splits."""
        if self.graphs is None:
            return
        slots, longest = tuple(range(self.graphs.sizes.most_decodes)), self.max_model_len
        kind = self.state.sampling_kind(slots)
        for mean in (longest, longest // MOST_RAGGED):
            # Every replay counts a token more, and the prompts before may have left room for less than that.
            self.state.num_computed[: len(slots)] = 0
            self.graphs.replay(StepInput((), (), slots, longest, mean, ()), kind)
        self.graphs.capture_largest(kind)

    def _largest_step(self) -> StepInput:
        """Prompts that fill the token budget, every one sampled with top-k and top-p, its log-probability asked for."""
        budget, length = self.config.max_num_batched_tokens, self.max_model_len - 1
        num_seqs = min(self.config.max_num_seqs, budget)
        settings, new_blocks, chunks, next_block = [], [], [], 0
        for slot in range(num_seqs):
            num_tokens = min(length, budget // num_seqs + (slot < budget % num_seqs))
            num_blocks = -(-num_tokens // self.shape.block_size)
            settings.append(replace(HARDEST_SAMPLING, slot=slot))
            new_blocks.append(NewBlocks(slot, 0, tuple(range(next_block, next_block + num_blocks))))
            chunks.append(Chunk(slot, 0, (0,) * num_tokens, True))
            next_block += num_blocks
        return StepInput(tuple(settings), tuple(new_blocks), (), 0, 0, tuple(chunks))

    def _prompts(self) -> PrefillProblem:
        """The most that a step's chunks can be."""
        chunk = min(self.config.max_num_batched_tokens, self.max_model_len)
        return self.shape.prefill_problem(self.config.max_num_seqs, chunk, self.max_model_len)

    def _check_kernels(self) -> None:
        """Refuse, by name and reason, a kernel that cannot serve this model's heads, block size or dtype."""
        rows, length = self.config.max_num_seqs, self.max_model_len
        refusals = {
            "decode_attention": self.kernels.decode.supports(self.shape.decode_problem(rows, length)),
            "prefill_attention": self.kernels.prefill.supports(self._prompts()),
        }
        for field, reason in refusals.items():
            if reason is not None:
                name = getattr(self.kernels, field.removesuffix("_attention")).name
                raise ValueError(f"{field} {name!r} cannot run this model: {reason}")
        most = self.config.graph_chunk_tokens
        if most not in ("auto", 0) and self.uses_cuda_graphs and not self.kernels.prefill.capturable:
            name = self.kernels.prefill.name
            raise ValueError(
                f"graph_chunk_tokens is {most}, and no CUDA graph can hold prefill_attention {name!r}"
            )
        if self.kernels.persistent_layers:
            reason = (
                unsupported_block_size(self.shape.block_size) or layer_shape(self.model_config).unsupported()
            )
            if reason is not None:
                raise ValueError(f"layer_fusion 'persistent' cannot run this model: {reason}")

    def _check_ranks(self) -> None:
        """Refuse different GPUs, for which a step would be planned, and captured, on one rank and not on another."""
        if self.group.size == 1 or not self.uses_cuda_graphs:
            return
        gpu = f"{device_name(self.device)} of {device_sm_count(self.device)} multiprocessors"
        if not self.group.agrees(gpu, self.device):
            raise ValueError(
                f"tensor_parallel_size {self.group.size} with CUDA graphs needs GPUs of one kind, and rank "
                f"{self.group.rank} has an {gpu}; enforce_eager=True runs on different ones"
            )

    # --- steps ----------------------------------------------------------------------------------------------

    @in_own_dtype
    def launch(self, step: StepInput) -> PendingTokens:
        """Start a step; its result holds the next token of each decode slot, then of each chunk that samples."""
        span = self._clock.start()
        self.state.apply(step)
        sampled = step.sampled_slots
        kind = self.state.sampling_kind(sampled)
        replayed = None if self.graphs is None else self.graphs.replay(step, kind)
        token_ids, logits = self.run_eagerly(step, kind) if replayed is None else replayed
        return PendingTokens(token_ids, logits, self.state.num_logprobs(sampled), span)

    def run_eagerly(self, step: StepInput, kind: SamplingKind) -> tuple[torch.Tensor, torch.Tensor]:
        size = StepSize.of(step)
        (rows,) = upload(self.device, lay_out(step, size, self.state.padding_slot))
        contexts = ContextBucket.of(step.max_decode_context, step.mean_decode_context, self.max_model_len)
        plan = self.planner.plan(size.decodes, contexts) if size.decodes else None
        return self._run(StepRows.view(rows, size), kind, plan)

    def _run(
        self, rows: StepRows, kind: SamplingKind, plan: DecodePlan | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A step that a graph can capture: it holds for other rows, and for every context that the plan holds for."""
        state, block_size, use_triton = self.state, self.shape.block_size, self.kernels.use_triton
        decodes = chunks = settings = None
        if plan is not None:
            drawn = kind.any_drawn and rows.chunks is None
            decodes, settings = start_decodes(
                state, rows.decode_slots, block_size, drawn=drawn, use_triton=use_triton
            )
        if rows.chunks is not None:
            chunks = ChunkRows.build(state, rows.chunks, block_size)
        hidden = self.forward(decodes, chunks, plan)
        if rows.chunks is not None:
            state.num_computed[rows.chunks.slots] = rows.chunks.ends
            hidden = hidden[rows.sampled_rows]
            if kind.any_drawn:
                settings = draw_settings(state, rows.sampled_slots, use_triton=use_triton)
        return self.sample(hidden, rows.sampled_slots, kind, settings)

    def forward(
        self, decodes: DecodeRows | None, chunks: ChunkRows | None, plan: DecodePlan | None
    ) -> torch.Tensor:
        batch = join_rows(decodes, chunks, plan=plan, device=self.device)
        return self.model(batch.input_ids, batch.positions, batch.metadata, self.kv_cache)

    def sample(
        self, hidden: torch.Tensor, slots: torch.Tensor, kind: SamplingKind, settings: DrawSettings | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(token_ids [rows], logits [rows, ids]); each token becomes its slot's newest. settings: if kind.any_drawn.

        The logits are those of all ids if kind.num_candidates is 0; else they are only good for this choice.
        """
        head, use_triton = self.model.lm_head, self.kernels.use_triton
        keep_in = (self.state.newest, slots) if use_triton and self.group.size == 1 else None
        if kind.num_candidates and not kind.any_drawn:
            logits = head.local_logits(hidden)
            token_ids = greedy_tokens(logits, head, use_triton=use_triton)
        else:
            if kind.num_candidates:
                logits = likeliest_logits(head.local_logits(hidden), head, kind.num_candidates)
            else:
                logits = self.model.compute_logits(hidden)
            token_ids = choose_tokens(logits, settings, kind, use_triton=use_triton, keep_in=keep_in)
            token_ids = self.group.broadcast(token_ids)
        if keep_in is None:
            keep_newest(self.state, slots, token_ids, use_triton=use_triton)
        return token_ids, logits

    def forced_logits_on_host(self, *arguments: Any, **options: Any) -> np.ndarray:
        """forced_logits, in a form that another process can take."""
        return self.forced_logits(*arguments, **options).cpu().numpy()

    @in_own_dtype
    def forced_logits(
        self, token_ids: Sequence[int], num_prompt_tokens: int, block_table: Sequence[int], *, eager: bool
    ) -> torch.Tensor:
        """[len(token_ids) - num_prompt_tokens, vocab_size] fp32: the logits before each token after the prompt.

        The prompt runs as prefill chunks, every later token as a decode step, with this engine's own kernels, and its
        graphs where it can have them and eager is False. Uses slot 0: no request may be running.
        """
        if self.failure is not None:
            raise self.failure
        budget, graphs = self.config.max_num_batched_tokens, None if eager else self.graphs
        self.state.apply(
            StepInput(
                (SlotSetting(0, 0.0, 0, 1.0, 0, None),), (NewBlocks(0, 0, tuple(block_table)),), (), 0, 0, ()
            )
        )
        rows = []
        for start in range(0, num_prompt_tokens, budget):
            end = min(start + budget, num_prompt_tokens)
            chunk = Chunk(0, start, tuple(token_ids[start:end]), end == num_prompt_tokens)
            rows.append(self._logits_of(StepInput((), (), (), 0, 0, (chunk,)), graphs))
        for position in range(num_prompt_tokens, len(token_ids) - 1):
            self.state.newest[0] = token_ids[position]
            rows.append(self._logits_of(StepInput((), (), (0,), position + 1, position + 1, ()), graphs))
        return torch.cat(rows)

    def _logits_of(self, step: StepInput, graphs: StepGraphs | None) -> torch.Tensor:
        """[rows, vocab_size] fp32, which no later step overwrites."""
        replayed = None
        if graphs is not None:
            with graphs.captured_at_once():
                replayed = graphs.replay(step, SamplingKind(any_logits=True))
        logits = (replayed or self.run_eagerly(step, SamplingKind()))[1]
        assert logits is not None  # the kind asks for them
        return logits.to(torch.float32, copy=True)


def _host_peak_bytes() -> int:
    """The most memory that this process has held resident, pages of files included."""
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
