"""The front door: load a model, generate text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Number
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from tqdm import tqdm

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.execution.runner import open_runner
from engine.execution.trace import trace_path
from engine.models.checkpoint import resolve_model
from engine.models.decoder import Decoder
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.scheduling.prefix import Prefix
from engine.scheduling.request import Request
from engine.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A Qwen3 or Llama-shaped model behind a continuous-batching engine with a paged KV cache.

    model: a Hugging Face checkpoint directory (config.json and safetensors), a hub id, or, with
        load_format="dummy", also a mapping of config.json's fields.
    tokenizer: directory or hub id of the tokenizer; None: the model's own.
    device: "auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N".
    dtype: "auto" (the checkpoint's), "float32", "float16", "bfloat16", or the torch.dtype.
    load_format: "auto" reads the weights, "dummy" draws random ones of the right shapes from `seed`.
    seed: of dummy weights and of the random streams of requests that bring none.
    tensor_parallel_size: ranks, 1 to 8. More than one are processes that this one starts, on consecutive CUDA devices
        (NCCL) or sharing the CPU (gloo); under torchrun they are the processes that it has started, all of which must
        make the same engine and the same calls. device "cuda:0,cuda:0" makes two ranks share a GPU, for tests. A rank
        that fails ends the engine, as does Ctrl-C in a step: step() raises, and the requests end with "error".
    enforce_eager: never use CUDA graphs.
    graph_chunk_tokens: steps with up to so many prompt tokens, of 64 prompts at most, run as a CUDA graph too when they
        have recurred often enough, if the prefill kernel can be captured; 0: those without prompts alone; "auto": as
        many as take the GPU less time than the host needs to launch their kernels one by one, 8,192 at most.
    use_triton: Triton or torch for norms, activation, RoPE and KV writes; "auto": Triton on a CUDA device.
    decode_attention, prefill_attention: names in kernels.decode and kernels.prefill; "auto": the device's fastest.
    layer_fusion: "persistent": all layers of a decode step of one or two rows are one launch, which attends by itself
        (kernels/persistent); on one rank and with Triton alone. "off": every layer is kernels of its own.
    all_reduce: how ranks sum: "torch" (NCCL or gloo); "one_shot": small sums, as of decode steps, by a kernel that
        reads all ranks' memory (kernels/all_reduce.py), which needs Triton and GPUs of one host, one a rank, that
        reach each other; "auto": "one_shot" where it can be had. One rank sums nothing.
    block_size: tokens in a KV block. num_kv_blocks: blocks in the pool; None: what gpu_memory_utilization of the
        GPU's memory leaves, or 1 GiB on a CPU. It may be smaller than max_model_len.
    max_model_len: tokens of a sequence at most, prompt and output; None: the model's max_position_embeddings.
    max_num_seqs, max_num_batched_tokens: sequences running at once, and tokens in one step, at most. Of the latter,
        8192 was the fastest on an H200; fewer shorten the longest gap between two tokens of a request beside prompts.
    enable_prefix_caching, enable_chunked_prefill: see BlockManager and Scheduler. scheduling: "mixed" (decodes and
        prefill chunks in one step) or "prefill_first".
    skip_tokenizer_init: token ids in, token ids out; text stays empty.
    overlap_scheduling: schedule and collect on the host while the device runs the next step; "auto": on a CUDA device.
    record_token_times: keep the time of every token in RequestOutput.metrics.token_times.
    worker_timeout_s: with ranks as processes, seconds that a step may take before they count as hung and are ended. A
        rank that dies is noticed at once, one that gives no sign of life within 30 s.

    Raises ValueError, naming the field, the value and the limit. A context manager; close() frees the memory.
    """

    def __init__(
        self,
        model: str | Path | Mapping[str, Any],
        *,
        tokenizer: str | Path | None = None,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        load_format: Literal["auto", "dummy"] = "auto",
        seed: int = 0,
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
        graph_chunk_tokens: int | Literal["auto"] = "auto",
        use_triton: bool | Literal["auto"] = "auto",
        decode_attention: str = "auto",
        prefill_attention: str = "auto",
        layer_fusion: Literal["off", "persistent"] = "off",
        all_reduce: Literal["auto", "torch", "one_shot"] = "auto",
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        scheduling: Literal["mixed", "prefill_first"] = "mixed",
        skip_tokenizer_init: bool = False,
        overlap_scheduling: bool | Literal["auto"] = "auto",
        record_token_times: bool = False,
        worker_timeout_s: float = 300.0,
    ) -> None:
        self.config = EngineConfig(
            device=device,
            dtype=dtype,
            load_format=load_format,
            seed=seed,
            tensor_parallel_size=tensor_parallel_size,
            enforce_eager=enforce_eager,
            graph_chunk_tokens=graph_chunk_tokens,
            use_triton=use_triton,
            decode_attention=decode_attention,
            prefill_attention=prefill_attention,
            layer_fusion=layer_fusion,
            all_reduce=all_reduce,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            scheduling=scheduling,
            overlap_scheduling=overlap_scheduling,
            record_token_times=record_token_times,
            worker_timeout_s=worker_timeout_s,
        )
        if not isinstance(skip_tokenizer_init, bool):
            raise ValueError(f"skip_tokenizer_init must be True or False, got {skip_tokenizer_init!r}")
        source = resolve_model(model, load_format)
        loaded_tokenizer = None if skip_tokenizer_init else load_tokenizer(tokenizer, source)
        self.runner = open_runner(self.config, source)
        self.engine = EngineCore(
            self.config,
            self.runner,
            num_kv_blocks=self.runner.num_kv_blocks,
            vocab_size=source.config.vocab_size,
            max_model_len=self.runner.max_model_len,
            eos_token_ids=source.eos_token_ids,
            overlap=self.config.resolve_overlap(self.runner.device),
            tokenizer=loaded_tokenizer,
        )

    @property
    def model(self) -> Decoder:
        """The network, for hooks and inspection; RuntimeError where ranks of their own hold its parts."""
        self.engine.refuse_after_failure()
        return self.runner.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    # --- generating -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run prompts to their end and return their outputs in the order of the prompts.

        prompts: one prompt or several; a prompt is text or a list of token ids. sampling_params: one for all, or
        one a prompt. Raises ValueError before anything runs if any of them is invalid.
        """
        prompt_list = _as_list(prompts)
        params_list = _per_prompt(sampling_params, len(prompt_list))
        request_ids: list[str] = []
        try:
            for prompt, params in zip(prompt_list, params_list):
                request_ids.append(self.engine.add_request(prompt, params))
            outputs = self._run_to_end(request_ids, use_tqdm)
        except BaseException:
            for request_id in request_ids:
                self.engine.abort(request_id, report=False)
            raise
        return [outputs[request_id] for request_id in request_ids]

    def _run_to_end(self, request_ids: list[str], use_tqdm: bool) -> dict[str, RequestOutput]:
        pending, outputs = set(request_ids), {}
        with tqdm(total=len(pending), desc="requests", disable=not use_tqdm) as bar:
            while pending:
                others = []
                for output in self.engine.step_finished():
                    if output.request_id in pending:
                        pending.remove(output.request_id)
                        outputs[output.request_id] = output
                        bar.update()
                    else:
                        others.append(output)
                self.engine.postpone(others)
        return outputs

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations (lists of {"role", "content"}), laid out by the tokenizer's chat template.

        template_options go to the template, such as enable_thinking=False for Qwen3.
        """
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer; the engine was made with skip_tokenizer_init=True")
        if not isinstance(conversations, Sequence) or isinstance(conversations, str | bytes):
            raise ValueError(
                f"conversations must be a list of messages, or of such lists, got {conversations!r:.100}"
            )
        several: list[Any] = list(conversations)
        if several and not isinstance(several[0], Sequence):
            several = [several]  # one conversation
        prompts = [self.tokenizer.apply_chat_template(messages, **template_options) for messages in several]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the text of one request as it grows; the pieces join to RequestOutput.text.

        Leaving the iterator early aborts the request; a request that ends with finish_reason "error" raises
        RuntimeError. Other queued requests move on meanwhile; the end of one that ends meanwhile is reported by a later
        engine.step().
        """
        if self.tokenizer is None:
            raise ValueError("stream needs a tokenizer; the engine was made with skip_tokenizer_init=True")
        stream = self._stream(self.engine.add_request(prompt, sampling_params))
        next(stream)  # into its try block, so that a stream that is never read aborts its request too
        return stream

    def _stream(self, request_id: str) -> Iterator[str]:
        shown, finished, error = 0, False, None
        try:
            yield ""  # to stream()
            while not finished:
                text, others = "", []
                for output in self.engine.step():
                    if output.request_id == request_id:
                        text, finished, error = output.text, output.finished, output.error
                    elif output.finished:
                        others.append(output)
                # Before the yield: whoever steps the engine meanwhile must find the ends of the others.
                self.engine.postpone(others)
                if len(text) > shown:
                    yield text[shown:]
                    shown = len(text)
            if error is not None:
                raise RuntimeError(f"request {request_id} ended with an error: {error}")
        finally:
            self.engine.abort(request_id, report=False)

    def forced_logits(
        self, prompt_token_ids: Sequence[int], continuation_ids: Sequence[int], *, eager: bool = False
    ) -> torch.Tensor:
        """[len(continuation_ids), vocab_size] fp32 on the device: the logits that precede each given token.

        Teacher forcing: the prompt runs as prefill, then one decode step for each token, with the engine's kernels.
        eager: without CUDA graphs, so that forward hooks on the model fire.
        The engine must have no unfinished requests; the prefix cache is not used.
        """
        if self.engine.has_unfinished_requests():
            raise ValueError("forced_logits needs an engine without unfinished requests")
        prompt_token_ids = self.engine.check_token_ids("prompt_token_ids", prompt_token_ids)
        continuation_ids = self.engine.check_token_ids("continuation_ids", continuation_ids)
        token_ids = (*prompt_token_ids, *continuation_ids)
        blocks = self.engine.block_manager
        request = Request(
            request_id="forced-logits",
            prompt_token_ids=token_ids[:-1],
            params=SamplingParams(),
            arrival=-1,
            max_total_tokens=len(token_ids),
            stop_token_ids=frozenset(),
            seed=0,
        )
        if len(token_ids) > self.runner.max_model_len or not blocks.can_admit(request, Prefix()):
            raise ValueError(
                f"forced_logits got {len(token_ids)} tokens; max_model_len is {self.runner.max_model_len} and "
                f"{blocks.num_free_blocks} blocks of {blocks.block_size} are free"
            )
        blocks.admit(request, Prefix())
        try:
            return self.runner.forced_logits(
                token_ids, len(prompt_token_ids), request.block_table, eager=eager
            )
        finally:
            blocks.free(request)

    # --- state ----------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep their KV."""
        self.engine.block_manager.reset_prefix_cache()

    def stats(self) -> dict[str, Any]:
        """Counters since the start and the state of the pool."""
        return self.engine.stats()

    @contextmanager
    def profile(self, path: str | Path) -> Iterator[None]:
        """Trace what runs meanwhile with torch.profiler, and write it to `path` (.json or .json.gz) at the end.

        For chrome://tracing or https://ui.perfetto.dev. With several ranks each writes a file of its own beside it,
        NAME.rank0.json and so on. Steps are slower while they are traced. ValueError if nothing can be written there.
        """
        path = os.path.abspath(path)
        trace_path(path, 0, 1)
        self.runner.start_trace()
        try:
            yield
        finally:
            self.runner.stop_trace(path)

    def close(self) -> None:
        """Drop weights and KV, and end what is unfinished with "error". Only stats() and the tokenizer can be used
        afterwards, everything else is a RuntimeError; calling it again does nothing."""
        self.runner.close()
        self.engine.end_all_if_failed()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(items, Sequence) or isinstance(items, bytes | bytearray):
        raise ValueError(f"prompts must be text, token ids, or a sequence of those, got {prompts!r:.100}")
    is_one_prompt = bool(items) and isinstance(items[0], Number)  # token ids
    return [items] if is_one_prompt else list(items)


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence):
        raise ValueError(f"sampling_params must be SamplingParams or a sequence of them, got {params!r:.100}")
    if len(params) != num_prompts:
        raise ValueError(f"sampling_params has {len(params)} entries for {num_prompts} prompts")
    return list(params)
