"""How well two models agree on the next tokens: what counts as a difference, and what may excuse one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """When a difference between two correct implementations is still expected.

    margin, logprob: shares of the largest magnitude among a token's reference logits, since that is what rounding
    errors grow with. margin: where the reference's two best logits are closer, either token may come out on top.
    logprob: how far the log-probability of a given token may be off. activation: largest error of a module's output
    over its largest magnitude, above which outputs count as different when the place of a difference is looked for.
    """

    margin: float
    logprob: float
    activation: float


TOLERANCES = {
    torch.float32: Tolerance(margin=0.0, logprob=1e-4, activation=1e-4),
    torch.float16: Tolerance(margin=0.0025, logprob=0.004, activation=0.02),
    torch.bfloat16: Tolerance(margin=0.02, logprob=0.025, activation=0.1),
}
"""By the model's dtype: in bfloat16 about twice what SmolLM2-135M shows on a CPU (0.006, 0.011, 0.075), where the two
implementations order the same sums differently; float16 has 3 bits more."""


@dataclass(frozen=True)
class ForcedAgreement:
    """Two models' logits before each token of one given text, compared.

    num_mismatched: tokens whose argmax differs; num_excused: those of them where the reference's margin is within
    tolerance. first_mismatch: index of the first, excused or not; None if there is none. first_beyond: index of the
    first token whose log-probability is off by more than tolerance; None if there is none. logprob differences are
    those of the given tokens, in nats; max_logprob_share is the largest as the tolerance counts it. KL is of the
    reference from the other model's distribution, in nats. top_k_agreement: share of the reference's k best tokens
    among the other's k best.
    """

    num_tokens: int
    num_mismatched: int
    num_excused: int
    first_mismatch: int | None
    first_beyond: int | None
    max_logprob_diff: float
    max_logprob_share: float
    mean_logprob_diff: float
    max_kl: float
    mean_kl: float
    top_k_agreement: float

    @property
    def agrees(self) -> bool:
        return self.num_mismatched == self.num_excused and self.first_beyond is None


def compare_forced(
    reference: Tensor, other: Tensor, token_ids: Sequence[int], tolerance: Tolerance, *, top_k: int = 10
) -> ForcedAgreement:
    """Compare logits [tokens, vocab_size] of a reference and of another model before each of token_ids.

    A value that is not finite in one of them only makes the models disagree at that token.
    """
    if reference.shape != other.shape or len(reference) != len(token_ids):
        raise ValueError(
            f"logits of {tuple(reference.shape)} and {tuple(other.shape)} for {len(token_ids)} tokens"
        )
    ours, theirs = (torch.log_softmax(logits.double(), dim=-1) for logits in (other, reference))
    given = torch.as_tensor(list(token_ids), device=reference.device)[:, None]
    difference = (ours.gather(1, given) - theirs.gather(1, given)).abs().squeeze(1)
    difference = difference.nan_to_num(nan=torch.inf)
    kl = (theirs.exp() * (theirs - ours)).sum(-1).clamp(min=0).nan_to_num(nan=torch.inf)
    top_k = min(top_k, reference.shape[1])
    best, other_best = theirs.topk(top_k).indices, ours.topk(top_k).indices
    shared = (best[:, :, None] == other_best[:, None, :]).any(-1).double().mean()
    mismatched = (theirs.argmax(-1) != ours.argmax(-1)) | ~ours.isfinite().any(-1)
    share = (difference / largest_logit(reference)).nan_to_num(nan=0.0)  # 0 / 0: nothing differs
    excused = mismatched & within_margin(reference, tolerance)
    return ForcedAgreement(
        num_tokens=len(token_ids),
        num_mismatched=int(mismatched.sum()),
        num_excused=int(excused.sum()),
        first_mismatch=_first(mismatched),
        first_beyond=_first(share > tolerance.logprob),
        max_logprob_diff=float(difference.max()),
        max_logprob_share=float(share.max()),
        mean_logprob_diff=float(difference.mean()),
        max_kl=float(kl.max()),
        mean_kl=float(kl.mean()),
        top_k_agreement=float(shared),
    )


def margins(logits: Tensor) -> Tensor:
    """[tokens]: how far the best token's logit is above the next best's."""
    best = logits.double().topk(min(2, logits.shape[1]), dim=-1).values
    return best[:, 0] - best[:, -1]


def largest_logit(logits: Tensor) -> Tensor:
    """[tokens]: the largest magnitude among each token's logits, in which tolerances are counted."""
    return logits.double().abs().amax(-1)


def within_margin(reference: Tensor, tolerance: Tolerance) -> Tensor:
    """[tokens] bool: the reference's two best tokens are so close that a difference is excused."""
    return margins(reference) < tolerance.margin * largest_logit(reference)


def matching_prefix(expected: Sequence[int], actual: Sequence[int]) -> int:
    """Tokens up to the first difference."""
    for i, (a, b) in enumerate(zip(expected, actual)):
        if a != b:
            return i
    return min(len(expected), len(actual))


def _first(flags: Tensor) -> int | None:
    found = flags.nonzero()
    return int(found[0, 0]) if len(found) else None
