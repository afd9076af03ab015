"""Driving the real engine: opening it for a variant, timing decode steps, and checking its greedy tokens first."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from experiments.failures import UnsupportedError
from experiments.settings import Settings, Variant
from experiments.suites.protocol import Point

if TYPE_CHECKING:
    from engine import LLM
    from engine.models.config import ModelConfig


@dataclass(frozen=True)
class EngineSetup:
    """A model under one variant's kernels on `tp` ranks, as the run's settings have it."""

    settings: Settings
    variant: Variant
    tp: int = 1

    @cached_property
    def model_config(self) -> ModelConfig:
        from engine.models.checkpoint import resolve_model

        return resolve_model(self.settings.model.argument, self.settings.model.load_format).config

    @property
    def dtype(self) -> torch.dtype:
        chosen = self.settings.model.dtype
        return self.model_config.dtype if chosen == "auto" else getattr(torch, chosen)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def columns(self) -> dict[str, Any]:
        """What rows say of the model, one rank's heads, and the kernels."""
        return model_columns(self.settings, self.model_config, self.dtype_name, self.tp) | {
            "variant": self.variant.name,
            "decode_attention": self.variant.decode,
            "prefill_attention": self.variant.prefill or self.settings.engine["prefill_attention"],
        }

    def point(self, suite: str, params: dict[str, Any]) -> Point:
        """A point that runs this engine."""
        return Point(suite, params, on_engine=True, unsupported=self.refusal())

    def open(self, **options: Any) -> LLM:
        """The engine, with `options` over the configured ones. The caller closes it.

        Raises UnsupportedError with the refusal, if there is one.
        """
        from engine import LLM

        reason = self.refusal()
        if reason is not None:
            raise UnsupportedError(reason)
        arguments = engine_options(self.settings) | {
            "device": self.settings.device,
            "dtype": self.settings.model.dtype,
            "load_format": self.settings.model.load_format,
            "seed": self.settings.seed,
            "tensor_parallel_size": self.tp,
            "decode_attention": self.variant.decode,
            "skip_tokenizer_init": True,
        }
        if self.variant.prefill is not None:
            arguments["prefill_attention"] = self.variant.prefill
        return LLM(self.settings.model.argument, **(arguments | options))

    def refusal(self) -> str | None:
        """Why this engine cannot be, or None: the ranks cannot share the model or this machine, or the variant's decode
        kernel cannot serve the model ("auto" always finds one that can)."""
        from kernels import decode

        reason = ranks_refusal(self.settings.device, self.model_config, self.tp)
        if reason is not None:
            return reason
        if self.variant.options:
            return "options of a decode kernel cannot be passed through the engine"
        if self.variant.decode == "auto":
            return None
        device = torch.device(self.settings.device)
        heads = self.model_config.heads_per_rank(self.tp)
        problem = decode.DecodeProblem(
            batch_size=1,
            num_q_heads=heads.num_q_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=self.model_config.head_dim,
            block_size=self.settings.engine["block_size"],
            max_context_len=self.model_config.max_position_embeddings,
            dtype=self.dtype,
            device=device,
        )
        reason = decode.get(self.variant.decode).supports(problem)
        return None if reason is None else f"decode_attention {self.variant.decode!r}: {reason}"

    def reference(self) -> EngineSetup:
        """The same weights and dtype under the plain reference kernels, on one rank."""
        return EngineSetup(self.settings, Variant("reference", "reference", "reference"), tp=1)

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Random token ids, no two prompts alike: lengths are exact, and nothing is shared by chance."""
        rng = random.Random(seed)
        return [[rng.randrange(self.model_config.vocab_size) for _ in range(length)] for length in lengths]


CHOSEN = {
    "device": "device",
    "dtype": "model.dtype",
    "load_format": "model.load_format",
    "seed": "seed",
    "tensor_parallel_size": "bench.tensor_parallel",
    "decode_attention": "attention",
    "max_num_seqs": "the suite's batches (bench.max_num_seqs of serving)",
    "max_model_len": "the suite's lengths",
    "skip_tokenizer_init": "the suite",
    "record_token_times": "the suite",
}
"""Arguments of LLM that are none of the engine group's, and what decides them."""


def engine_options(settings: Settings) -> dict[str, Any]:
    """The engine group's values; ValueError for one that LLM does not take, listing those it does, or for its value."""
    from engine import LLM
    from engine.config import EngineConfig

    known = set(inspect.signature(LLM.__init__).parameters) - {"self", "model", *CHOSEN}
    for name, instead in CHOSEN.items():
        if name in settings.engine:
            raise ValueError(f"engine.{name} cannot be set: {instead} decides it")
    unknown = sorted(set(settings.engine) - known)
    if unknown:
        raise ValueError(f"unknown option engine.{unknown[0]}; known: {', '.join(sorted(known))}")
    names = {field.name for field in fields(EngineConfig)}
    EngineConfig(**{name: value for name, value in settings.engine.items() if name in names})
    return dict(settings.engine)


def model_columns(settings: Settings, config: ModelConfig, dtype: str, tp: int) -> dict[str, Any]:
    """The columns of a model whose heads are split over `tp` ranks; null for the heads where they cannot be."""
    heads = config.heads_per_rank(tp) if division_refusal(config, tp) is None else None
    return {
        "model": settings.model.name,
        "load_format": settings.model.load_format,
        "dtype": dtype,
        "tp": tp,
        "block_size": settings.engine["block_size"],
        "num_q_heads": None if heads is None else heads.num_q_heads,
        "num_kv_heads": None if heads is None else heads.num_kv_heads,
        "head_dim": config.head_dim,
    }


def division_refusal(config: ModelConfig, tp: int) -> str | None:
    """Why the model cannot be split over `tp` ranks, or None."""
    from engine.models.config import check_parallel

    try:
        check_parallel(config, tp)
    except ValueError as error:
        return str(error)
    return None


def ranks_refusal(device: str, config: ModelConfig, tp: int) -> str | None:
    """Why no engine of `tp` ranks can run the model from `device` on, or None.

    Each rank has a GPU of its own; on a CPU ranks are processes.
    """
    from engine.config import EngineConfig

    reason = division_refusal(config, tp)
    if reason is not None:
        return reason
    try:
        EngineConfig(device=device, tensor_parallel_size=tp).resolve_devices(tp)
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class DecodeStep:
    """One timed step in which every request decoded one token. context_lens: KV tokens each attended to.

    duration_s: from the end of the step before to the end of this one, so that it holds all that a token costs, also
    where the engine prepares a step while the one before it is under way.
    """

    duration_s: float
    context_lens: tuple[int, ...]


@dataclass(frozen=True)
class DecodeRun:
    """Prompts brought through prefill, then decoded together. token_ids: of the requests, warm-up included."""

    prompts: list[list[int]]
    token_ids: list[list[int]]
    prefill_s: float
    steps: list[DecodeStep]
    num_preemptions: int


def time_decode_steps(llm: LLM, prompts: list[list[int]], num_steps: int, warm_up: int) -> DecodeRun:
    """Decode all prompts as one batch, greedily: `warm_up` steps of the whole batch untimed, then num_steps timed.

    Raises UnsupportedError if the pool cannot hold the batch, RuntimeError if it ever stops being one batch.
    """
    from engine import SamplingParams

    engine = llm.engine
    longest = max(map(len, prompts)) + num_steps + warm_up + slack_tokens(llm, prompts)
    needed = len(prompts) * engine.block_manager.blocks_for(longest)
    if needed > engine.block_manager.num_blocks:
        raise UnsupportedError(
            f"the KV pool has {engine.block_manager.num_blocks} blocks, the batch needs {needed}"
        )
    params = SamplingParams(temperature=0.0, max_tokens=longest, ignore_eos=True)
    token_ids: dict[str, list[int]] = {engine.add_request(prompt, params): [] for prompt in prompts}
    steps: list[DecodeStep] = []
    num_preemptions = 0

    def together() -> bool:
        """Whether the step that has just ended decoded the whole batch and nothing else."""
        last = engine.last_step
        return last.num_decode_tokens == len(prompts) and not last.num_prefill_tokens

    def step() -> None:
        """A step whose tokens are looked at."""
        nonlocal num_preemptions
        for output in engine.step():
            if output.request_id in token_ids:
                token_ids[output.request_id] = list(output.token_ids)
                if output.finish_reason is not None:
                    raise RuntimeError(f"a request ended early: {output.finish_reason} {output.error or ''}")
        num_preemptions += engine.last_step.num_preempted

    try:
        start = engine.clock()
        while not all(token_ids.values()):
            step()
        prefill_s = engine.clock() - start
        while warm_up:
            step()
            warm_up -= together()
        lens = [len(prompt) + len(token_ids[name]) - 1 for prompt, name in zip(prompts, token_ids)]
        before = engine.clock()
        for number in range(1, num_steps + 1):
            engine.step_finished()
            now = engine.clock()
            if not together():
                raise RuntimeError("the batch fell apart while it was timed (a request was preempted)")
            # The newest token was sampled from the step; its own KV is not written yet.
            steps.append(DecodeStep(now - before, tuple(length + number for length in lens)))
            before = now
        step()
    finally:
        for name in token_ids:
            engine.abort(name, report=False)
    return DecodeRun(prompts, list(token_ids.values()), prefill_s, steps, num_preemptions)


def slack_tokens(llm: LLM, prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that the first requests may decode while later ones still prefill: one a step at most, and some over."""
    return slack_for(sum(map(len, prompts)), len(prompts), llm.config.max_num_batched_tokens)


def slack_for(num_prompt_tokens: int, batch_size: int, max_num_batched_tokens: int) -> int:
    """See slack_tokens. A step's budget goes to decodes first, so chunks are shorter by up to the batch."""
    chunk = max(max_num_batched_tokens - batch_size, 1)
    return -(-num_prompt_tokens // chunk) + 4
