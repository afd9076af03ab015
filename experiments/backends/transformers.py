"""Transformers as the reference: greedy ids, teacher-forced logits and activations of one prompt at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from engine.execution.loader import load_model
from engine.layers.attention_metadata import KernelChoice
from engine.models.checkpoint import resolve_model
from engine.models.config import ARCHITECTURES, ModelConfig
from engine.models.decoder import Decoder
from engine.parallel.group import ParallelGroup
from engine.transformers_guard import import_transformers
from kernels import decode, prefill


class TransformersReference:
    """A causal language model run by Transformers, with nothing left to its defaults.

    model: a Transformers model with a `generate` method, on its device. Its own generation settings are dropped: a
    repetition penalty or a temperature of the checkpoint's must not reach a greedy reference. A context manager;
    close() frees the memory.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.model.generation_config = import_transformers().GenerationConfig(do_sample=False, num_beams=1)
        self.device = next(model.parameters()).device

    @classmethod
    def from_directory(
        cls, directory: Path, *, dtype: torch.dtype, device: torch.device
    ) -> TransformersReference:
        """Load a checkpoint by Transformers' own loader. It runs no code that comes with the checkpoint."""
        transformers = import_transformers()
        transformers.utils.logging.disable_progress_bar()  # it would write into the sweep's own
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="eager",
            trust_remote_code=False,
            local_files_only=True,
        )
        return cls(model.to(device))

    @classmethod
    def from_decoder(
        cls, config: Mapping[str, Any], decoder: Decoder, *, dtype: torch.dtype
    ) -> TransformersReference:
        """The model of `config` (config.json's fields) with a copy of the decoder's weights, beside it.

        For weights that no checkpoint holds. The decoder must be the whole model, not one rank of several.
        """
        transformers = import_transformers()
        fields = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
        hf_config = transformers.AutoConfig.for_model(_model_type(config), **fields)
        with decoder.norm.weight.device:
            model = transformers.AutoModelForCausalLM.from_config(
                hf_config, dtype=dtype, attn_implementation="eager"
            )
        own = {shard.name: shard.target for shard in decoder.weight_shards()}
        names = {name for name, _ in model.named_parameters()}
        if names != set(own):
            raise ValueError(f"the two models differ in parameters {sorted(names ^ set(own))[:4]}")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(own[name])
        return cls(model)

    @classmethod
    def from_dummy(
        cls,
        config: Mapping[str, Any],
        *,
        drawn_as: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> TransformersReference:
        """The model of `config` with the dummy weights that an engine of that seed and dtype `drawn_as` draws."""
        kernels = KernelChoice(decode.get("torch"), prefill.get("torch"), use_triton=False)
        decoder = load_model(
            resolve_model(config, "dummy"),
            load_format="dummy",
            device=device,
            dtype=drawn_as,
            group=ParallelGroup.single(),
            kernels=kernels,
            seed=seed,
        )
        return cls.from_decoder(config, decoder, dtype=dtype)

    @torch.inference_mode()
    def generate(
        self, prompt_ids: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int] = ()
    ) -> list[int]:
        """The greedy continuation of one prompt, the end-of-sequence id included if it came to one."""
        input_ids = self._as_batch(prompt_ids)
        output = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(eos_token_ids) or None,
            pad_token_id=0,
        )
        return output[0, len(prompt_ids) :].tolist()

    @torch.inference_mode()
    def forced_logits(self, prompt_ids: Sequence[int], continuation_ids: Sequence[int]) -> Tensor:
        """[len(continuation_ids), vocab_size] fp32 on the device: the logits before each given token, in one pass."""
        input_ids = self._as_batch([*prompt_ids, *continuation_ids[:-1]])
        output = self.model(input_ids, use_cache=False, logits_to_keep=len(continuation_ids))
        return output.logits[0].float()

    def close(self) -> None:
        """Drop the weights; calling it again does nothing."""
        if hasattr(self, "model"):
            del self.model
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def __enter__(self) -> TransformersReference:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def modules(self) -> dict[str, nn.Module]:
        """The network's modules by the names that the engine's decoder gives them too."""
        return {name.removeprefix("model."): module for name, module in self.model.named_modules()}

    def _as_batch(self, token_ids: Iterable[int]) -> Tensor:
        return torch.tensor([list(token_ids)], device=self.device)


def _model_type(config: Mapping[str, Any]) -> str:
    return ARCHITECTURES[ModelConfig.from_hf(config).architecture].model_type
