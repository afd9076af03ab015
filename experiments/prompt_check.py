"""One prompt, answered by the engine and by the reference: do they agree, and if not, where do they part?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine import LLM, RequestOutput
from engine.execution.workers import Workers
from experiments.agreement import (
    ForcedAgreement,
    Tolerance,
    compare_forced,
    margins,
    matching_prefix,
    within_margin,
)
from experiments.backends.transformers import TransformersReference
from experiments.divergence import ModuleError, capture, first_beyond, module_errors, module_names


@dataclass(frozen=True)
class PromptCheck:
    """What was found for one prompt. location: the first module beyond tolerance at token diff_step, if any was.

    greedy_step: index of the first token in which the greedy answers differ; None if they are the same. greedy_margin:
    the reference's top-2 margin there, in logits; None if one of the answers ended.
    """

    expected: tuple[int, ...]
    output: RequestOutput
    matching_prefix: int
    greedy_step: int | None
    greedy_margin: float | None
    greedy_excused: bool
    forced: ForcedAgreement
    tolerance: Tolerance
    diff_step: int | None = None
    location: ModuleError | None = None
    largest: ModuleError | None = None

    @property
    def error(self) -> str | None:
        """Why the engine is wrong; None if it is not."""
        complaints = []
        if self.greedy_step is not None and not self.greedy_excused:
            complaints.append(f"greedy token {self.greedy_step} differs, {_margin(self.greedy_margin)}")
        wrong = self.forced.num_mismatched - self.forced.num_excused
        if wrong:
            complaints.append(f"{wrong} of {self.forced.num_tokens} teacher-forced tokens differ")
        if self.forced.first_beyond is not None:
            complaints.append(
                f"a log-probability is off by {self.forced.max_logprob_share:.3g} of the largest logit, allowed "
                f"{self.tolerance.logprob:g}"
            )
        if not complaints:
            return None
        return "; ".join(complaints) + (f"; first at {self.location}" if self.location else "")

    @property
    def note(self) -> str | None:
        """Where the difference arises, in words."""
        if self.diff_step is None:
            return None
        if self.location is not None:
            return f"token {self.diff_step}: first beyond tolerance at {self.location}"
        if self.forced.first_mismatch is None and self.forced.first_beyond is None:
            return f"token {self.diff_step}: in the batched run only; alone the engine agrees"
        if self.largest is None:
            return f"token {self.diff_step}: modules cannot be compared, they are on ranks of their own"
        return f"token {self.diff_step}: no module beyond tolerance, largest at {self.largest}"


def _margin(margin: float | None) -> str:
    return "one of them ended" if margin is None else f"the reference's margin is {margin:.3g}"


def check_prompt(
    llm: LLM,
    reference: TransformersReference,
    prompt_ids: Sequence[int],
    expected: Sequence[int],
    output: RequestOutput,
    tolerance: Tolerance,
    *,
    top_k: int = 10,
) -> PromptCheck:
    """Judge the engine's output for one prompt, whose reference answer is `expected`; localise any difference."""
    theirs = reference.forced_logits(prompt_ids, expected)
    ours = llm.forced_logits(prompt_ids, expected).to(theirs.device)
    forced = compare_forced(theirs, ours, expected, tolerance, top_k=top_k)
    prefix = matching_prefix(expected, output.token_ids)
    greedy_step = None if tuple(expected) == tuple(output.token_ids) else prefix
    both_go_on = prefix < min(len(expected), len(output.token_ids))
    there = theirs[prefix : prefix + 1]
    greedy_margin = float(margins(there)[0]) if both_go_on else None
    greedy_excused = both_go_on and bool(within_margin(there, tolerance)[0])
    found = [step for step in (greedy_step, forced.first_mismatch, forced.first_beyond) if step is not None]
    diff_step, location, largest = None, None, None
    if found:
        diff_step = min(found)
        location, largest = locate(llm, reference, prompt_ids, expected[: diff_step + 1], tolerance)
    return PromptCheck(
        tuple(expected),
        output,
        prefix,
        greedy_step,
        greedy_margin,
        greedy_excused,
        forced,
        tolerance,
        diff_step,
        location,
        largest,
    )


def locate(
    llm: LLM,
    reference: TransformersReference,
    prompt_ids: Sequence[int],
    continuation: Sequence[int],
    tolerance: Tolerance,
) -> tuple[ModuleError | None, ModuleError | None]:
    """Compare the networks module by module at the position whose logits choose continuation's last token.

    Returns the first module beyond tolerance, or None, and the one with the largest error; two Nones if no module's
    output could be seen, as where ranks of their own hold them.
    """
    if isinstance(llm.runner, Workers):
        return None, None
    names = module_names(llm.model.config.num_layers)
    own = capture(
        dict(llm.model.named_modules()),
        names,
        lambda: llm.forced_logits(prompt_ids, continuation, eager=True),
        batched=False,
    )
    theirs = capture(
        reference.modules(), names, lambda: reference.forced_logits(prompt_ids, continuation), batched=True
    )
    errors = module_errors(theirs, own, names)
    largest = max(errors, key=lambda error: error.rel_err, default=None)
    return first_beyond(errors, tolerance.activation), largest
