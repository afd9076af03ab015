"""Are the engine's greedy tokens right? Against the plain reference kernels, and against its own prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from experiments.backends.engine import DecodeRun, EngineSetup

if TYPE_CHECKING:
    from engine import LLM

# Of a greedy token that is not the reference's: how far, in standard deviations of the row's logits, the reference's
# own logit of it may lie below its best. Rounding of the dtype decides between tokens as close as that.
# Roundings add up like a random walk: 2^-8 in each of 2 x 36 sublayers is 0.03 in a logit, 0.07 in the difference of
# two logits between two runs, and 4 of those are 0.27 (seen on an H200: 0.12 for a right kernel). A wrong kernel is
# off by 1.
MARGINS = {"float32": 1e-3, "float16": 4e-2, "bfloat16": 2.7e-1}


@dataclass(frozen=True)
class GreedyReference:
    """What the reference engine answers, with its logits [tokens, vocab_size] fp32 before each token, on the CPU."""

    prompts: list[list[int]]
    token_ids: list[list[int]]
    logits: list[torch.Tensor]


def greedy_reference(
    setup: EngineSetup, lengths: Sequence[int], num_tokens: int, seed: int
) -> GreedyReference:
    """Greedy continuations of random prompts by the plain reference kernels over torch operations."""
    from engine import SamplingParams

    prompts = setup.prompts(lengths, seed)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with setup.reference().open(**check_options(setup, lengths, num_tokens), use_triton=False) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens = [list(output.token_ids) for output in outputs]
        logits = [llm.forced_logits(prompt, ids).cpu() for prompt, ids in zip(prompts, tokens)]
    return GreedyReference(prompts, tokens, logits)


def check_options(setup: EngineSetup, lengths: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """Options of an engine that is to hold just these prompts and their continuations."""
    longest = max(lengths) + num_tokens + 1
    block_size = setup.settings.engine["block_size"]
    return {
        "max_model_len": longest,
        "max_num_seqs": len(lengths),
        "num_kv_blocks": (len(lengths) + 1) * -(-longest // block_size),
        "enforce_eager": True,
    }


@dataclass(frozen=True)
class GreedyCheck:
    """checked: tokens that were compared; excused: of these, differences within the margin; error: the first beyond."""

    checked: int
    excused: int
    error: str | None


def check_greedy(llm: LLM, reference: GreedyReference, dtype: str) -> GreedyCheck:
    """Generate the reference's prompts in one batch, which the last joins late; compare up to the first difference."""
    checked = excused = 0
    answers = _generate(llm, reference.prompts, len(reference.token_ids[0]))
    for number, (answer, expected, logits) in enumerate(zip(answers, reference.token_ids, reference.logits)):
        for position, (token, wanted) in enumerate(zip(answer, expected, strict=True)):
            checked += 1
            if token == wanted:
                continue
            gap = margin(logits[position], token)
            if gap > MARGINS[dtype]:
                error = (
                    f"greedy token {position} of check prompt {number} is {token}, the reference's is {wanted}, "
                    f"which is better by {gap:.3g} standard deviations of the logits (tolerance {MARGINS[dtype]:g})"
                )
                return GreedyCheck(checked, excused, error)
            excused += 1
            break
    return GreedyCheck(checked, excused, None)


def _generate(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Sequence[int]]:
    """Greedy tokens of each; the last prompt comes while the others decode, so that steps of every kind are checked."""
    from engine import SamplingParams

    engine = llm.engine
    tokens: dict[str, Sequence[int]] = {}
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    *first, last = [list(prompt) for prompt in prompts]
    request_ids = [engine.add_request(prompt, params) for prompt in first]
    for _ in range(2 if first else 0):
        tokens |= {output.request_id: output.token_ids for output in engine.step_finished()}
    request_ids.append(engine.add_request(last, params))
    while engine.has_unfinished_requests():
        tokens |= {output.request_id: output.token_ids for output in engine.step_finished()}
    return [tokens[request_id] for request_id in request_ids]


def check_last_token(llm: LLM, run: DecodeRun, dtype: str) -> str | None:
    """Whether the last decoded token of the batch's first and last row is what a prefill of all before it gives."""
    for row in {0, len(run.prompts) - 1}:
        *before, token = run.token_ids[row]
        logits = llm.forced_logits([*run.prompts[row], *before], [token])[0].cpu()
        gap = margin(logits, token)
        if not gap <= MARGINS[dtype]:
            return (
                f"token {len(before)} of row {row} is {token}; by a prefill of its context it lies {gap:.3g} standard "
                f"deviations of the logits below the best (tolerance {MARGINS[dtype]:g})"
            )
    return None


def margin(logits: torch.Tensor, token: int) -> float:
    """How far a token's logit lies below the best, in standard deviations of logits [vocab_size]; inf if not finite."""
    gap = ((logits.max() - logits[token]) / logits.std()).item()
    return gap if gap == gap else float("inf")
