"""How well two models agree on the next tokens: what counts as a difference, and what may excuse one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

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


MULTIPLES = {"mean": 1.25, "p999": 1.25, "max": 1.5}
"""By the field of Distance: how many times as far from fp32 as the other one of two half-precision models may be.

Ranks round their parts of a sum before they are added up, so two ranks are somewhat farther than one: on a CPU the mean
by 1.01 to 1.06 in 4 to 64 layers, and the largest of all errors, which one token decides, by 0.9 to 1.2.
"""

FP32_SHARE = 64
"""How much of half precision's distance from fp32 two orders of summing may make in fp32, times the ratio of eps.

By eps alone bf16's distance shrinks to 1/65536; what is allowed is 1/1024. Narrow models on a CPU need 1/20000, wide
ones more: where an element is rounded once, a sum is rounded with every term, and 25,600 of them (Qwen3-32B's
down_proj), added one after another, end 50 x 2^-24 of the sum's size away from two halves added like that.
"""


@dataclass(frozen=True)
class Distance:
    """|log-probability - reference's|, in nats, of the whole vocabulary at all tokens: mean, 99.9th percentile, max."""

    mean: float
    p999: float
    max: float

    @classmethod
    def between(cls, reference: Tensor, other: Tensor) -> Distance:
        """Of two models' logits [tokens, vocab_size] before the same tokens; infinite if one is not a number.

        Raises ValueError unless they have one shape.
        """
        if reference.shape != other.shape:
            raise ValueError(f"logits of {tuple(reference.shape)} and {tuple(other.shape)}")
        ours, theirs = (torch.log_softmax(logits.double(), dim=-1) for logits in (other, reference))
        errors = (ours - theirs).abs().nan_to_num(nan=torch.inf).flatten()
        highest = errors.topk(1 + errors.numel() // 1000).values
        return cls(mean=float(errors.mean()), p999=float(highest[-1]), max=float(highest[0]))

    def times(self, mean: float, p999: float, max: float) -> Distance:
        return Distance(self.mean * mean, self.p999 * p999, self.max * max)

    def is_within(self, limit: Distance) -> bool:
        """No farther in any respect, and finite."""
        ours, limits = asdict(self), asdict(limit)
        return math.isfinite(self.max) and all(ours[key] <= limits[key] for key in ours)


def fp32_limit(half: Distance, dtype: torch.dtype) -> Distance:
    """How far two fp32 models may be apart if half precision (`dtype`) takes one `half` away: see FP32_SHARE."""
    share = FP32_SHARE * torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
    return half.times(share, share, share)


@dataclass(frozen=True)
class RoundingAgreement:
    """Two half-precision models, judged by how far each is from fp32 with the same weights, not by how far apart.

    Why: rounding takes each model away from fp32 in a direction of its own, and the farther the more layers there are,
    so no fixed bound on the difference of two correct models holds for all depths and is of use for few. But their
    distances from fp32 are alike, and averages over a vocabulary hardly scatter. A model that does something else than
    round is farther away than one that does not: an error of its own adds to rounding's in quadrature, so it is found
    from 0.75 times rounding's own size on (in any one token, from about that token's largest rounding error on). A
    smaller one has to be found in fp32, where rounding hides nothing.

    one, other: their distances from fp32. Neither may be more than MULTIPLES times the other: if the one taken for
    right is much farther, something is wrong with it, or with the reference, too. num_mismatched: tokens where their
    argmax differs. num_unexplained: those of them where fp32 has the two ids farther apart than allowed_gap, in nats:
    sqrt(2) times one's 99.9th percentile, as far as two independent errors of that size move two logits apart.
    """

    one: Distance
    other: Distance
    num_tokens: int
    num_mismatched: int
    num_unexplained: int
    widest_gap: float
    allowed_gap: float

    @property
    def agrees(self) -> bool:
        alike = all(
            near.is_within(far.times(**MULTIPLES))
            for near, far in ((self.one, self.other), (self.other, self.one))
        )
        return alike and not self.num_unexplained

    def as_json(self) -> dict[str, Any]:
        """All fields, and what is allowed with what there is: other's distances over one's."""
        one, other = asdict(self.one), asdict(self.other)
        ratios = {key: other[key] / one[key] if one[key] else None for key in MULTIPLES}
        return {"multiples_allowed": MULTIPLES, "multiples": ratios} | asdict(self)


def compare_rounding(reference: Tensor, one: Tensor, other: Tensor) -> RoundingAgreement:
    """Compare two models' logits [tokens, vocab_size], in half precision, with those in fp32 (reference).

    All three are of the same weights, before the same tokens. Raises ValueError unless they have one shape.
    """
    distance, other_distance = Distance.between(reference, one), Distance.between(reference, other)
    allowed_gap = math.sqrt(2) * distance.p999
    best, other_best = one.argmax(-1, keepdim=True), other.argmax(-1, keepdim=True)
    gaps = (reference.double().gather(1, best) - reference.double().gather(1, other_best)).abs()
    return RoundingAgreement(
        one=distance,
        other=other_distance,
        num_tokens=len(reference),
        num_mismatched=int((best != other_best).sum()),
        num_unexplained=int((gaps > allowed_gap).sum()),
        widest_gap=float(gaps.max()),
        allowed_gap=allowed_gap,
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
