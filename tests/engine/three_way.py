"""Transformers, the engine eagerly, and the engine through CUDA graphs: one checkpoint, the same prompts, one dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine import LLM, SamplingParams
from engine.models.checkpoint import resolve_model
from engine.tokenizer import load_tokenizer
from experiments.agreement import TOLERANCES, ForcedAgreement, compare_forced, matching_prefix, within_margin
from tests.engine.checkpoints import reference_model
from tests.engine.test_smollm2 import QUESTIONS, SYSTEM, conversation

WAYS = {"graph": False, "eager": True}
"""enforce_eager of each way of the engine; without a GPU both are eager."""


@dataclass(frozen=True)
class PromptAgreement:
    """One prompt. forced: logits before each token of Transformers' own continuation, compared in pairs of ways.

    same: how many tokens of greedy continuations agree from the start, the engine's made in one batch. unexcused: pairs
    whose first difference is not where Transformers' two best tokens are as good as equal. error: mean error of the
    log-probabilities of the forced tokens against the same weights in fp32, by way.
    """

    num_prompt_tokens: int
    num_new: int
    forced: dict[str, ForcedAgreement]
    same: dict[str, int]
    unexcused: tuple[str, ...]
    error: dict[str, float]

    @property
    def agrees(self) -> bool:
        return not self.unexcused and all(forced.agrees for forced in self.forced.values())

    def row(self) -> dict[str, Any]:
        return asdict(self) | {"agrees": self.agrees}


def compare_three_ways(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    *,
    device: str,
    dtype: torch.dtype,
    num_new: int,
    **options: Any,
) -> list[PromptAgreement]:
    """Continue each prompt greedily by num_new tokens in all ways, and teacher-force what Transformers says."""
    theirs = reference_model(directory, dtype).to(device)
    chosen = {"transformers": [_greedy(theirs, prompt, num_new) for prompt in prompts]}
    forced = {
        "transformers": [_logits(theirs, p, tokens) for p, tokens in zip(prompts, chosen["transformers"])]
    }
    for way, enforce_eager in WAYS.items():
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        with LLM(
            directory,
            device=device,
            dtype=dtype,
            enforce_eager=enforce_eager,
            skip_tokenizer_init=True,
            num_kv_blocks=sum(-(-(len(prompt) + num_new) // 16) + 2 for prompt in prompts),
            **options,
        ) as llm:
            if torch.device(device).type == "cuda":
                assert llm.runner.uses_cuda_graphs is not enforce_eager
            outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
            chosen[way] = [list(output.token_ids) for output in outputs]
            llm.reset_prefix_cache()
            forced[way] = [
                llm.forced_logits(list(prompt), tokens, eager=enforce_eager).cpu()
                for prompt, tokens in zip(prompts, chosen["transformers"])
            ]
    agreements = []
    exact = reference_model(directory).to(device)
    for i, prompt in enumerate(prompts):
        tokens = {way: ids[i] for way, ids in chosen.items()}
        agreements.append(
            _agreement(theirs, exact, prompt, tokens, {way: x[i] for way, x in forced.items()}, dtype)
        )
    return agreements


def _agreement(
    theirs: Any,
    exact: Any,
    prompt: Sequence[int],
    tokens: dict[str, list[int]],
    forced: dict[str, torch.Tensor],
    dtype: torch.dtype,
) -> PromptAgreement:
    tolerance = TOLERANCES[dtype]
    given = tokens["transformers"]
    pairs = [("transformers", "graph"), ("transformers", "eager"), ("eager", "graph")]
    same, unexcused = {}, []
    for one, other in pairs:
        name = f"{one}/{other}"
        same[name] = first = matching_prefix(tokens[one], tokens[other])
        if first < len(given):
            logits = forced["transformers"]
            if one != "transformers":  # they went the same way as each other, perhaps not as Transformers
                logits = _logits(theirs, prompt, tokens[one])
            if not within_margin(logits, tolerance)[first]:
                unexcused.append(name)
    truth = _logits(exact, prompt, given).log_softmax(-1)
    column = torch.tensor(given)[:, None]
    return PromptAgreement(
        num_prompt_tokens=len(prompt),
        num_new=len(given),
        forced={
            f"{one}/{other}": compare_forced(forced[one], forced[other], given, tolerance)
            for one, other in pairs
        },
        same=same,
        unexcused=tuple(unexcused),
        error={
            way: float((logits.log_softmax(-1) - truth).gather(1, column).abs().mean())
            for way, logits in forced.items()
        },
    )


@torch.inference_mode()
def _greedy(model: Any, prompt: Sequence[int], num_new: int) -> list[int]:
    ids = torch.tensor([list(prompt)], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def _logits(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab_size] fp32 on the CPU: before each token, all positions in one pass."""
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    return model(ids).logits[0, len(prompt) - 1 : -1].float().cpu()


def real_prompts(directory: Path) -> list[list[int]]:
    """Questions for a chat model, alone and after a long system prompt that some share."""
    tokenizer = load_tokenizer(None, resolve_model(directory, "auto"))
    systems = [None] * len(QUESTIONS) + [SYSTEM] * 3
    questions = zip([*QUESTIONS, *QUESTIONS], systems)
    return [tokenizer.apply_chat_template(conversation(question, system)) for question, system in questions]
