"""What counts as agreement of two models, and where they part."""

from __future__ import annotations

import math

import pytest
import torch

from experiments.agreement import Tolerance, compare_forced, margins, matching_prefix
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
