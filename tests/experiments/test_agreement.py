"""What counts as agreement of two models, and where they part."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from experiments.agreement import (
    MULTIPLES,
    Distance,
    Tolerance,
    compare_forced,
    compare_rounding,
    fp32_limit,
    margins,
    matching_prefix,
)
from experiments.divergence import capture, first_beyond, module_errors, module_names

STRICT = Tolerance(margin=0.0, logprob=1e-6, activation=1e-4)
LOOSE = Tolerance(margin=0.25, logprob=0.2, activation=1e-2)


def test_equal_logits_agree() -> None:
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    result = compare_forced(logits, logits.clone(), [1, 2, 3, 4, 5], STRICT)
    assert result.agrees
    assert (result.num_tokens, result.num_mismatched, result.num_excused) == (5, 0, 0)
    assert (result.max_logprob_diff, result.max_kl, result.top_k_agreement) == (0.0, 0.0, 1.0)
    assert (result.first_mismatch, result.first_beyond) == (None, None)


def test_a_constant_added_to_all_logits_is_no_difference() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    assert compare_forced(logits, logits + 3.0, [0, 1, 2], STRICT).agrees


def test_logprob_difference_and_kl_have_their_known_values() -> None:
    """Two outcomes: p = (3/4, 1/4) against q = (1/2, 1/2)."""
    reference, other = torch.tensor([[math.log(3), 0.0]]), torch.zeros(1, 2)
    result = compare_forced(reference, other, [0], STRICT, top_k=1)
    assert result.max_logprob_diff == pytest.approx(math.log(1.5))
    assert result.mean_kl == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))


def test_tolerances_grow_with_the_logits() -> None:
    reference, other = torch.tensor([[1.0, 0.9]]), torch.tensor([[0.95, 0.96]])
    for scale in (0.01, 1.0, 100.0):
        assert compare_forced(scale * reference, scale * other, [0], Tolerance(0.11, 0.06, 0)).agrees
        assert not compare_forced(scale * reference, scale * other, [0], Tolerance(0.09, 0.06, 0)).agrees


def test_a_mismatch_is_excused_only_within_the_references_margin() -> None:
    reference = torch.tensor([[1.0, 0.9, 0.0], [1.0, 0.5, 0.0], [1.0, 0.0, 0.5]])
    other = torch.tensor([[0.9, 1.0, 0.0], [0.9, 1.0, 0.0], [1.0, 0.0, 0.5]])
    result = compare_forced(reference, other, [0, 0, 0], LOOSE, top_k=2)
    assert (result.num_mismatched, result.num_excused, result.first_mismatch) == (2, 1, 0)
    assert not result.agrees
    assert compare_forced(reference[:1], other[:1], [0], LOOSE).agrees
    assert not compare_forced(reference[:1], other[:1], [0], STRICT).agrees
    assert margins(reference).tolist() == pytest.approx([0.1, 0.5, 0.5])


def test_a_difference_without_a_mismatch_is_found_too() -> None:
    reference, other = torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([[2.0, 0.0], [9.0, 0.0]])
    result = compare_forced(reference, other, [0, 1], LOOSE)
    assert (result.num_mismatched, result.first_beyond, result.agrees) == (0, 1, False)


def test_top_k_agreement_counts_sets() -> None:
    reference, other = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[3.0, 4.0, 1.0, 2.0]])
    assert compare_forced(reference, other, [0], LOOSE, top_k=2).top_k_agreement == 1.0
    assert compare_forced(reference, other, [0], LOOSE, top_k=3).top_k_agreement == pytest.approx(2 / 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_never_agree(value: float) -> None:
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    broken = logits.clone()
    broken[1, 3] = value
    result = compare_forced(logits, broken, [0, 1], Tolerance(margin=100.0, logprob=100.0, activation=1.0))
    assert not result.agrees
    assert result.first_beyond == 1


def test_logits_of_unequal_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="for 2 tokens"):
        compare_forced(torch.zeros(2, 4), torch.zeros(2, 5), [0, 1], STRICT)


# --- rounding: two models by their distances from fp32 --------------------------------------------------------

# Logits as spread as those of Qwen3-32B with dummy weights, and what bf16 does to them there.
SPREAD, NOISE = 1.4, 0.07


def rounded(reference: torch.Tensor, seed: int, noise: float = NOISE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return reference + noise * torch.randn(reference.shape, generator=generator)


@pytest.fixture(scope="module")
def exact() -> torch.Tensor:
    return SPREAD * torch.randn(128, 5000, generator=torch.Generator().manual_seed(0))


def test_distances_have_their_known_values() -> None:
    """Two tokens of 500 ids: the percentile is the second of all errors from above. A constant is none."""
    p, q = (torch.full((2, 500), 1 / 500, dtype=torch.float64) for _ in range(2))
    q[0, :2] = torch.tensor([1.5 / 500, 0.5 / 500])
    q[1, :2] = torch.tensor([1.25 / 500, 0.75 / 500])
    found = Distance.between(p.log() + 7.0, q.log() - 3.0)
    errors = [abs(math.log(ratio)) for ratio in (1.5, 0.5, 1.25, 0.75)]
    assert found.mean == pytest.approx(sum(errors) / 1000)
    assert (found.max, found.p999) == pytest.approx((math.log(2), math.log(1.5)))


def test_fp32_may_be_off_by_a_share_of_what_half_precision_is() -> None:
    half = Distance(mean=1.0, p999=2.0, max=4.0)
    assert fp32_limit(half, torch.bfloat16) == Distance(1 / 1024, 2 / 1024, 4 / 1024)
    assert fp32_limit(half, torch.float16) == Distance(1 / 128, 2 / 128, 4 / 128)
    limit = fp32_limit(half, torch.bfloat16)
    assert limit.is_within(limit)
    for field in ("mean", "p999", "max"):
        assert not replace(limit, **{field: 5.0}).is_within(limit)
        assert not replace(limit, **{field: math.nan}).is_within(limit)
    endless = Distance(1.0, 1.0, math.inf)
    assert not endless.is_within(endless)


def test_models_that_only_round_agree_however_far_they_are_apart(exact: torch.Tensor) -> None:
    for noise in (1e-3, NOISE, 0.3):
        one, other = rounded(exact, 1, noise), rounded(exact, 2, 1.1 * noise)
        result = compare_rounding(exact, one, other)
        assert result.agrees
        assert result.num_unexplained == 0
        assert result.other.mean == pytest.approx(1.1 * result.one.mean, rel=0.02)
        assert result.one.mean == pytest.approx(noise * math.sqrt(2 / math.pi), rel=0.05)
    assert result.num_mismatched > 0
    assert not compare_forced(one, other, [0] * 128, Tolerance(0.02, 0.025, 0.1)).agrees


def test_a_model_that_is_farther_than_rounding_takes_the_other_does_not_agree(exact: torch.Tensor) -> None:
    near, far = rounded(exact, 1), rounded(rounded(exact, 2), 3, 0.9 * NOISE)
    assert not compare_rounding(exact, near, far).agrees
    assert not compare_rounding(exact, far, near).agrees, "the one taken for right may be the wrong one"


def test_one_wrong_token_or_id_is_enough(exact: torch.Tensor) -> None:
    one, right = rounded(exact, 1), rounded(exact, 2)
    assert compare_rounding(exact, one, right).agrees
    token, id_ = right.clone(), right.clone()
    token[77] = rounded(exact[77], 3, 3 * NOISE)
    id_[3, 11] += 2 * compare_rounding(exact, one, right).one.max
    for wrong in (token, id_):
        result = compare_rounding(exact, one, wrong)
        assert not result.agrees
        assert result.other.mean < 1.1 * result.one.mean


def test_best_ids_may_differ_only_where_fp32_has_them_close() -> None:
    """The errors are of one size throughout, so distances are alike; only where they fall tells."""
    exact = torch.zeros(50, 1000)
    exact[:, 0], exact[:, 1] = 4.0, 3.9
    one, other = rounded(exact, 1, 1e-3), rounded(exact, 2, 1e-3)
    one[:, 5:8], other[:, 5:8] = 0.1, -0.1  # a few larger errors, of the size of the margin
    one[0, 0], one[0, 1] = 3.95, 3.96
    result = compare_rounding(exact, one, other)
    assert (result.agrees, result.num_mismatched, result.num_unexplained) == (True, 1, 0)
    assert result.widest_gap == pytest.approx(0.1)
    assert result.allowed_gap == pytest.approx(math.sqrt(2) * result.one.p999)
    exact[:, 1] = one[:, 1] = other[:, 1] = 3.8
    one[0, 0], one[0, 1] = 3.89, 3.9
    result = compare_rounding(exact, one, other)
    assert result.one.is_within(result.other.times(**MULTIPLES))
    assert result.other.is_within(result.one.times(**MULTIPLES))
    assert (result.agrees, result.num_unexplained) == (False, 1)


def test_what_is_reported_of_rounding(exact: torch.Tensor) -> None:
    report = compare_rounding(exact, rounded(exact, 1), rounded(exact, 2)).as_json()
    assert report["multiples"].keys() == report["multiples_allowed"].keys() == MULTIPLES.keys()
    assert report["multiples"]["mean"] == report["other"]["mean"] / report["one"]["mean"]
    assert compare_rounding(exact, exact, exact).as_json()["multiples"] == dict.fromkeys(MULTIPLES)
    assert compare_rounding(exact, exact, exact).agrees


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_distances_that_are_not_finite_never_agree(exact: torch.Tensor, value: float) -> None:
    broken = rounded(exact, 1)
    broken[1, 3] = value
    for one, other in ((broken, rounded(exact, 2)), (rounded(exact, 2), broken), (broken, broken)):
        assert not compare_rounding(exact, one, other).agrees


def test_distances_of_unequal_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits of \(2, 4\) and \(2, 5\)"):
        compare_rounding(torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 5))


@pytest.mark.parametrize(
    ("expected", "actual", "length"),
    [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 9, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [1], 0)],
)
def test_matching_prefix(expected: list[int], actual: list[int], length: int) -> None:
    assert matching_prefix(expected, actual) == length


def test_the_first_module_beyond_tolerance_is_named() -> None:
    names = module_names(2)
    assert names.index("layers.0.mlp") < names.index("layers.1.self_attn") < names.index("norm")
    reference = {name: torch.full((4,), 2.0) for name in names if "q_norm" not in name}
    other = {name: tensor.clone() for name, tensor in reference.items()}
    other["embed_tokens"][0] += 1e-5
    other["layers.1.self_attn"][1] += 0.5
    other["lm_head"][0] = torch.nan
    errors = module_errors(reference, other, names)
    found = first_beyond(errors, 1e-3)
    assert found is not None
    assert (found.layer, found.operation, found.rel_err) == (1, "self_attn", 0.25)
    assert str(found) == "layer 1 self_attn (0.25)"
    assert errors[-1].rel_err == math.inf
    assert first_beyond(errors[:-1], 0.3) is None


def test_capture_keeps_what_the_last_token_gave() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = torch.nn.Identity()
            self.pair = torch.nn.Identity()

        def forward(self, x: torch.Tensor) -> None:
            self.pair((self.same(x), x)[0]).mul_(0)  # in place, after the hooks

    net = Net()
    modules = dict(net.named_modules())
    x = torch.arange(6.0).view(3, 2)
    seen = capture(modules, ["same", "absent", "pair"], lambda: net(x.clone()), batched=False)
    assert {name: tensor.tolist() for name, tensor in seen.items()} == {"same": [4, 5], "pair": [4, 5]}
    seen = capture(modules, ["same"], lambda: net(x[None].clone()), batched=True)
    assert seen["same"].tolist() == [4, 5]
    assert not net.same._forward_hooks
