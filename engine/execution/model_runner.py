"""One rank's device work: weights, KV cache, the forward pass of a step, and sampling."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.execution import kv_cache
from engine.execution.input_batch import AttentionShape, build_input_batch
from engine.execution.kernel_choice import choose_kernels
from engine.execution.loader import load_model
from engine.execution.sampler import sample_tokens
from engine.models.checkpoint import ModelSource
from engine.parallel.group import ParallelGroup
from engine.scheduling.step import SampledToken, SamplingRow, SequenceRow, StepInput


class ModelRunner:
    """Executes steps on one device. It keeps weights and KV, and nothing about requests: a StepInput says it all."""

    def __init__(
        self, config: EngineConfig, source: ModelSource, *, device: torch.device, group: ParallelGroup
    ) -> None:
        self.config = config
        self.device = device
        self.model_config = source.config
        self.max_model_len = config.resolve_max_model_len(source.config.max_position_embeddings)
        self.kernels = choose_kernels(config, device)
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
        self._check_kernels()
        self.model = load_model(
            source,
            load_format=config.load_format,
            device=device,
            dtype=dtype,
            group=group,
            kernels=self.kernels,
            seed=config.seed,
        )
        self.kv_cache = self._allocate_kv_cache(0)

    # --- KV cache -------------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        return kv_cache.block_bytes(
            self.model_config, self.shape.num_kv_heads, self.shape.block_size, self.shape.dtype
        )

    def num_blocks_that_fit(self) -> int:
        """Blocks this rank can hold: num_kv_blocks if given, else what memory allows, else the default for a CPU.

        On a GPU that is gpu_memory_utilization of its memory, less what others use, weights, and the measured peak
        of the largest step that max_num_batched_tokens and max_num_seqs allow. On a CPU it is CPU_KV_BYTES. Never
        more than max_num_seqs sequences of max_model_len can use.
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

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self.kv_cache = self._allocate_kv_cache(num_blocks)

    def _allocate_kv_cache(self, num_blocks: int) -> torch.Tensor:
        return kv_cache.allocate(
            self.model_config,
            num_blocks,
            num_kv_heads=self.shape.num_kv_heads,
            block_size=self.shape.block_size,
            dtype=self.shape.dtype,
            device=self.device,
        )

    def _free_bytes_at_peak(self) -> int:
        """Run the largest step on a throw-away cache and see what it leaves of this engine's share of the GPU."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        step = self._largest_step()
        self.kv_cache = self._allocate_kv_cache(1 + max(max(row.block_table) for row in step.rows))
        held_by_cache = self.kv_cache.nbytes
        self.execute(step)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - held_by_cache
        self.kv_cache = self._allocate_kv_cache(0)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        used_outside = total - free - torch.cuda.memory_reserved(self.device)
        return int(total * self.config.gpu_memory_utilization) - used_outside - peak

    def _largest_step(self) -> StepInput:
        """Prompts that fill the token budget, every one of them sampled with top-k and top-p."""
        budget, length = self.config.max_num_batched_tokens, self.max_model_len - 1
        num_seqs = min(self.config.max_num_seqs, budget)
        lengths = [min(length, budget // num_seqs + (i < budget % num_seqs)) for i in range(num_seqs)]
        sampling = SamplingRow(temperature=1.0, top_k=50, top_p=0.9, uniform=0.5, num_logprobs=None)
        rows, next_block = [], 0
        for i, num_tokens in enumerate(lengths):
            num_blocks = -(-num_tokens // self.shape.block_size)
            table = tuple(range(next_block, next_block + num_blocks))
            next_block += num_blocks
            rows.append(SequenceRow(f"profile-{i}", 0, (0,) * num_tokens, table, sampling))
        return StepInput(decodes=(), prefills=tuple(rows))

    def _check_kernels(self) -> None:
        """Refuse, by name and reason, a kernel that cannot serve this model's heads, block size or dtype."""
        rows, length = self.config.max_num_seqs, self.max_model_len
        chunk = min(self.config.max_num_batched_tokens, length)
        refusals = {
            "decode_attention": self.kernels.decode.supports(self.shape.decode_problem(rows, length)),
            "prefill_attention": self.kernels.prefill.supports(
                self.shape.prefill_problem(rows, chunk, length)
            ),
        }
        for field, reason in refusals.items():
            if reason is not None:
                name = getattr(self.kernels, field.removesuffix("_attention")).name
                raise ValueError(f"{field} {name!r} cannot run this model: {reason}")

    # --- steps ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, step: StepInput) -> list[SampledToken]:
        """Run a step and return the next token of each row that samples, in the order of step.rows."""
        logits = self._logits(step)
        rows = [row.sampling for row in step.rows if row.sampling is not None]
        return sample_tokens(logits, rows) if rows else []

    @torch.inference_mode()
    def forced_logits(
        self, token_ids: list[int], num_prompt_tokens: int, block_table: list[int]
    ) -> torch.Tensor:
        """[len(token_ids) - num_prompt_tokens, vocab_size] fp32: the logits before each token after the prompt.

        The prompt runs as prefill chunks, every later token as a decode step, with this engine's own kernels.
        """
        table, greedy = tuple(block_table), SamplingRow(0.0, -1, 1.0, 0.0, None)

        def row(start: int, end: int) -> SequenceRow:
            sampling = greedy if end >= num_prompt_tokens else None
            return SequenceRow("forced", start, tuple(token_ids[start:end]), table, sampling)

        chunk = self.config.max_num_batched_tokens
        steps = [
            StepInput((), (row(start, min(start + chunk, num_prompt_tokens)),))
            for start in range(0, num_prompt_tokens, chunk)
        ]
        steps += [StepInput((row(i, i + 1),), ()) for i in range(num_prompt_tokens, len(token_ids) - 1)]
        return torch.cat([self._logits(step).float() for step in steps])

    def _logits(self, step: StepInput) -> torch.Tensor:
        """[rows that sample, vocab_size] in the model's dtype."""
        batch = build_input_batch(step, self.shape, self.kernels)
        hidden = self.model(batch.input_ids, batch.positions, batch.metadata, self.kv_cache)
        return self.model.compute_logits(hidden[batch.sample_index])
