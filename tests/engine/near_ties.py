"""Whether rounding explains that two runs took different tokens: other batches and padding round otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine import SamplingParams
from kernels.random_stream import uniform
from kernels.sampling import sample
from tests.engine.checkpoints import reference_model

ROUNDING = 3e-6
"""Of the largest logit: what fp32 may differ by from one order of summation to another."""

TRIES = 200


def tokens_that_rounding_allows(
    model: Any, prompt: list[int], params: SamplingParams, common: list[int]
) -> set[int]:
    """Tokens after prompt + common from logits that are off by up to ROUNDING, by `model` in fp64."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + common])).logits[0, -1].double()
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(TRIES, len(logits), generator=generator, dtype=torch.float64) * 2 - 1
    drawn_from = uniform(torch.tensor([params.seed or 0]), torch.tensor([len(prompt) + len(common)]))
    ids = sample(
        logits + noise * (ROUNDING * logits.abs().max()),
        torch.full((TRIES,), params.temperature, dtype=torch.float64),
        torch.full((TRIES,), params.top_k),
        torch.full((TRIES,), params.top_p, dtype=torch.float64),
        drawn_from.expand(TRIES),
    )
    return set(ids.tolist())


def assert_same_but_ties(
    directory: Path, requests: Sequence[tuple[int, list[int], dict[str, Any]]], tokens: list, expected: list
) -> None:
    """Each request's tokens are those expected, or part where rounding allows both; one, and one in fifty, at most.

    requests: (step of arrival, prompt, sampling parameters), each with a seed unless greedy; the checkpoint's dtype is
    float32.
    """
    different = [i for i, (one, other) in enumerate(zip(tokens, expected, strict=True)) if one != other]
    assert len(different) <= 1 + len(requests) // 50, different
    if not different:
        return
    model = reference_model(directory, torch.float64)
    for i in different:
        _, prompt, params = requests[i]
        one, other = tokens[i], expected[i]
        first = next((n for n, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), None)
        assert first is not None, f"request {i}: one ends where the other goes on, after {one}"
        allowed = tokens_that_rounding_allows(model, prompt, SamplingParams(**params), one[:first])
        assert {one[first], other[first]} <= allowed, (i, first, one[first], other[first], allowed)
