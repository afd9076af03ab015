"""Drawn tokens against exact probabilities: ties, top-k, top-p and both, every row with parameters of its own."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from kernels.sampling import sample

# Probabilities are proportional to powers of 2. Ties lie across the cuts of top-k and top-p.
POWERS = [3, 1, 4, 3, 0, 4, 3, 1, 3, 2, 0, 3]
# (top_k, top_p); a cumulative sum is never p itself, where rounding would decide.
SETTINGS = [
    (-1, Fraction(1)),
    (1, Fraction(1)),
    (4, Fraction(1)),  # cuts through the five tokens of power 3
    (-1, Fraction(3, 5)),  # as does this
    (5, Fraction(4, 5)),  # p of what k has left
    (9, Fraction(1, 2)),
    (12, Fraction(99, 100)),
]


def exact_probabilities(top_k: int, top_p: Fraction) -> list[Fraction]:
    """Top-k by rank, lower ids first among equals; of the renormalised rest, the fewest that reach top_p."""
    ranked = sorted(range(len(POWERS)), key=lambda token: (-POWERS[token], token))
    ranked = ranked[: top_k if top_k > 0 else None]
    weights = {token: Fraction(2 ** POWERS[token]) for token in ranked}
    total, before, kept = sum(weights.values()), Fraction(0), {}
    for token in ranked:
        if before >= top_p * total:
            break
        kept[token] = weights[token]
        before += weights[token]
    return [kept.get(token, Fraction(0)) / before for token in range(len(POWERS))]


def chi_square_limit(freedom: int) -> float:
    """The 99.99th percentile (Wilson and Hilferty, 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("use_triton", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_every_row_of_a_mixed_batch_follows_its_own_distribution(use_triton, temperature, device):
    """Triton's path on a GPU only: its interpreter takes minutes, and test_sampling_triton.py compares the two."""
    draws = 20_000
    rows = draws * len(SETTINGS)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)) % len(SETTINGS)
    logits = torch.tensor(POWERS, dtype=torch.float64) * (math.log(2) * temperature)
    uniform = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ids = sample(
        logits.float().expand(rows, -1).to(device),
        torch.full((rows,), temperature),
        torch.tensor([top_k for top_k, _ in SETTINGS])[order],
        torch.tensor([float(top_p) for _, top_p in SETTINGS])[order],
        uniform,
        use_triton=use_triton,
    ).cpu()
    for setting, (top_k, top_p) in enumerate(SETTINGS):
        exact = torch.tensor([float(p) for p in exact_probabilities(top_k, top_p)], dtype=torch.float64)
        possible = exact > 0
        counts = torch.bincount(ids[order == setting], minlength=len(POWERS)).double()
        assert counts.sum() == draws
        assert not counts[~possible].any()
        expected = exact[possible] * draws
        statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
        freedom = len(expected) - 1
        assert statistic == 0 if freedom == 0 else statistic < chi_square_limit(freedom)


def test_the_settings_cut_through_ties():
    """Else the test above would not see which of equal tokens are kept."""
    for top_k, top_p in SETTINGS[2:5]:
        kept = [p > 0 for p in exact_probabilities(top_k, top_p)]
        assert any(kept[a] != kept[b] for a in range(12) for b in range(12) if POWERS[a] == POWERS[b])
