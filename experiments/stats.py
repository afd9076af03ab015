"""Medians, bootstrap intervals and paired comparisons, with numbers of samples as small as a benchmark's.

Intervals are expanded percentile bootstraps (Hesterberg, "What Teachers Should Know About the Bootstrap", 2015,
section 4.3): the plain percentile interval is too narrow for few samples, so its tails are taken further out, at
Phi(-sqrt(n / (n - 1)) t(alpha/2, n - 1)) instead of alpha/2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

RESAMPLES = 4000
CONFIDENCE = 0.95

# A bootstrap interval lies within its samples. With n fair coins all on one side in 2^(1 - n) of the cases, it takes
# six pairs before an interval that leaves 1 means 95%.
MIN_PAIRS = 6

# Two timings of the same code differ by up to this much for reasons that are not the code's: addresses, placement.
EQUIVALENCE = 0.01


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% interval; the interval is NaN where there are too few samples for one."""

    value: float
    low: float
    high: float


def median_interval(samples: Sequence[float], seed: int = 0) -> Interval:
    """The median of samples and its bootstrap interval."""
    return _bootstrap(np.asarray(samples, dtype=float), np.median, seed)


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float], seed: int = 0) -> Interval:
    """The geometric mean of the pairs' ratios and its bootstrap interval.

    Pair i was measured close in time (one interleaved round), so that what slowed both cancels out.
    """
    if len(numerator) != len(denominator):
        raise ValueError(f"{len(numerator)} numerators for {len(denominator)} denominators")
    logs = np.log(np.asarray(numerator, dtype=float) / np.asarray(denominator, dtype=float))
    interval = _bootstrap(logs, np.mean, seed)
    return Interval(*(math.exp(value) for value in (interval.value, interval.low, interval.high)))


def unpaired_ratio(numerator: Sequence[float], denominator: Sequence[float], seed: int = 0) -> Interval:
    """The ratio of geometric means of samples that have nothing in common, and its bootstrap interval."""
    logs = [np.log(np.asarray(samples, dtype=float)) for samples in (numerator, denominator)]
    value = float(logs[0].mean() - logs[1].mean())
    smaller = min(len(samples) for samples in logs)
    if smaller < 2:
        return Interval(math.exp(value), math.nan, math.nan)
    rng = np.random.default_rng(seed)
    means = [
        samples[rng.integers(0, len(samples), size=(RESAMPLES, len(samples)))].mean(axis=1)
        for samples in logs
    ]
    tail = expanded_tail(smaller)
    low, high = np.quantile(means[0] - means[1], [tail, 1 - tail])
    return Interval(math.exp(value), math.exp(min(low, value)), math.exp(max(high, value)))


def differs(ratio: Interval, num_pairs: int, margin: float = EQUIVALENCE) -> bool:
    """Whether a paired ratio shows a difference: its interval leaves 1 by more than the equivalence margin, and there
    are pairs enough for that to mean something."""
    return num_pairs >= MIN_PAIRS and leaves_one(ratio, margin)


def leaves_one(ratio: Interval, margin: float = EQUIVALENCE) -> bool:
    """Whether a ratio's interval lies on one side of 1, by more than the margin."""
    return ratio.low > 1 + margin or ratio.high < 1 / (1 + margin)


def winner(samples: dict[str, Sequence[float]], seed: int = 0) -> str | None:
    """The name whose paired samples are below those of every other, or None if that is not shown.

    samples: of each name, one time a round, in the same order of rounds.
    """
    if len(samples) < 2:
        return None
    best = min(samples, key=lambda name: float(np.median(samples[name])))
    for name, times in samples.items():
        ratio = paired_ratio(samples[best], times, seed)
        if name != best and not (ratio.value < 1 and differs(ratio, len(times))):
            return None
    return best


def _bootstrap(samples: np.ndarray, statistic: object, seed: int) -> Interval:
    if samples.ndim != 1 or not len(samples):
        raise ValueError(f"samples must be a sequence of at least one number, got shape {samples.shape}")
    compute = statistic
    assert callable(compute)
    value = float(compute(samples))
    if len(samples) < 2:
        return Interval(value, math.nan, math.nan)
    rng = np.random.default_rng(seed)
    draws = samples[rng.integers(0, len(samples), size=(RESAMPLES, len(samples)))]
    tail = expanded_tail(len(samples))
    low, high = np.quantile(compute(draws, axis=1), [tail, 1 - tail])
    return Interval(value, min(float(low), value), max(float(high), value))


def expanded_tail(num_samples: int, confidence: float = CONFIDENCE) -> float:
    """The share of bootstrap results to leave out on each side for intervals of the given confidence."""
    n = num_samples
    quantile = student_t_quantile((1 + confidence) / 2, n - 1)
    return NormalDist().cdf(-math.sqrt(n / (n - 1)) * quantile)


def student_t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution, by bisection of its distribution function."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_t_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _student_t_cdf(t: float, degrees: int) -> float:
    """For t >= 0, by the finite series of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    theta = math.atan(t / math.sqrt(degrees))
    cos2 = math.cos(theta) ** 2
    if degrees % 2:
        term, total = math.cos(theta), 0.0
        for k in range(1, (degrees - 1) // 2 + 1):
            total += term
            term *= 2 * k / (2 * k + 1) * cos2
        area = 2 / math.pi * (theta + math.sin(theta) * total)
    else:
        term, total = 1.0, 0.0
        for k in range(1, degrees // 2 + 1):
            total += term
            term *= (2 * k - 1) / (2 * k) * cos2
        area = math.sin(theta) * total
    return 0.5 + area / 2
