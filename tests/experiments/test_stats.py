"""Intervals that cover, and a comparison that does not see differences where there are none."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from experiments import stats


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (5, 2.5706), (9, 2.2622), (30, 2.0423)]
)
def test_student_t_quantiles_are_the_tables(degrees: int, quantile: float) -> None:
    assert stats.student_t_quantile(0.975, degrees) == pytest.approx(quantile, abs=1e-4)


def test_the_median_lies_in_its_interval_which_lies_in_the_samples() -> None:
    samples = [3.0, 1.0, 2.0, 9.0, 2.5, 2.2]
    found = stats.median_interval(samples)
    assert found.value == pytest.approx(2.35)
    assert min(samples) <= found.low <= found.value <= found.high <= max(samples)
    assert math.isnan(stats.median_interval([1.0]).low)


@pytest.mark.parametrize("num_rounds", [6, 8, 10])
def test_intervals_of_the_paired_ratio_cover_the_truth(num_rounds: int) -> None:
    rng = np.random.default_rng(num_rounds)
    covered = 0
    for i in range(400):
        drift = np.exp(0.2 * rng.normal(size=num_rounds))  # common to both of a pair
        a = 2.0 * drift * np.exp(0.03 * rng.normal(size=num_rounds))
        b = 1.0 * drift * np.exp(0.03 * rng.normal(size=num_rounds))
        found = stats.paired_ratio(a, b, seed=i)
        covered += found.low <= 2.0 <= found.high
    assert covered >= 0.92 * 400


@pytest.mark.parametrize("noise", ["quiet", "loud", "outliers", "drifting"])
def test_a_a_the_same_kernel_twice_is_called_different_in_5_percent_at_most(noise: str) -> None:
    rng = np.random.default_rng(7)
    different = 0
    for i in range(200):
        drift = np.cumsum(0.02 * rng.normal(size=6)) if noise == "drifting" else 0.0
        scale = 0.05 if noise == "loud" else 0.01
        draws = [rng.standard_t(2, 6) if noise == "outliers" else rng.normal(size=6) for _ in range(2)]
        times = {name: list(100 * np.exp(drift + scale * draw)) for name, draw in zip("ab", draws)}
        different += stats.winner(times, seed=i) is not None
    assert different <= 10


def test_a_real_difference_is_seen_and_the_winner_named() -> None:
    rng = np.random.default_rng(1)
    fast, slow = (list(scale * np.exp(0.01 * rng.normal(size=6))) for scale in (100.0, 110.0))
    assert stats.winner({"fast": fast, "slow": slow}) == "fast"
    assert stats.winner({"fast": fast}) is None
    assert stats.winner({"fast": fast, "slow": slow, "as_fast": [t * 1.001 for t in fast]}) is None


def test_too_few_rounds_and_differences_below_the_margin_name_nobody() -> None:
    exact = [100.0] * 5
    assert stats.winner({"a": exact, "b": [t * 2 for t in exact]}) is None
    exact = [100.0] * 8
    assert stats.winner({"a": exact, "b": [t * 1.005 for t in exact]}) is None
    assert stats.winner({"a": exact, "b": [t * 1.02 for t in exact]}) == "a"


@pytest.mark.slow
def test_a_a_with_a_real_kernel(tmp_path: Path) -> None:
    """The torch kernel under two names, 200 comparisons on this machine."""
    import random

    import torch

    from kernels.timing import time_interleaved

    x = torch.randn(64, 256)
    different = 0
    for i in range(200):
        timings = time_interleaved(
            {"a": [lambda: x @ x.T], "b": [lambda: x @ x.T]},
            device=torch.device("cpu"),
            cache_state="hot",
            rounds=6,
            samples=3,
            rng=random.Random(i),
        )
        times = {name: [timing.median for timing in found] for name, found in timings.items()}
        different += stats.winner(times, seed=i) is not None
    assert different <= 10
