"""Plans of the decode kernel for batches whose contexts change all the time: few of them, each made once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernels.decode import DecodeKernel, DecodeProblem

LEAST_BUCKET = 256
"""Contexts below this many tokens are planned for like this many."""

MOST_RAGGED = 16
"""Batches whose longest context is this many times their mean, or more, are planned for alike."""


@dataclass(frozen=True)
class ContextBucket:
    """What a plan knows of a batch's context lengths, rounded so that there are few.

    max_context_len: at least the longest, a power of two or max_model_len. mean_context_len: about the mean, that many
    tokens or 1/2, 1/4, ... 1/MOST_RAGGED of them.
    """

    max_context_len: int
    mean_context_len: int

    @classmethod
    def of(cls, longest: int, mean: int, max_model_len: int) -> ContextBucket:
        """The bucket of contexts of at most `longest` tokens and `mean` on average."""
        most = min(max(LEAST_BUCKET, 1 << (longest - 1).bit_length()), max_model_len)
        ragged = min(longest // max(mean, 1), MOST_RAGGED)
        return cls(most, most >> max(ragged.bit_length() - 1, 0))

    @classmethod
    def every(cls, max_model_len: int) -> list[ContextBucket]:
        """Those that `of` gives, of any contexts."""
        longest = {min(LEAST_BUCKET << n, max_model_len) for n in range(max_model_len.bit_length())}
        buckets = {cls(most, most >> n) for most in longest for n in range(MOST_RAGGED.bit_length())}
        return sorted(buckets, key=lambda bucket: (bucket.max_context_len, bucket.mean_context_len))


@dataclass(frozen=True)
class DecodePlan:
    """How a step calls the decode kernel: options of the calls, and the problem that they were planned for."""

    kernel: DecodeKernel
    problem: DecodeProblem
    options: Mapping[str, Any]
    key: Hashable
    """Equal for plans whose calls are the same: a captured one can stand for the other."""

    def workspace(self) -> torch.Tensor | None:
        """New scratch for the calls of one step."""
        return self.kernel.workspace(self.problem, self.problem.device)


class DecodePlanner:
    """Plans by batch size and ContextBucket. problem: of (batch_size, max_context_len, mean_context_len)."""

    def __init__(self, kernel: DecodeKernel, problem: Callable[[int, int, int], DecodeProblem]) -> None:
        self._kernel = kernel
        self._problem = problem
        self._plans: dict[tuple[int, ContextBucket], DecodePlan] = {}

    def plan(self, batch_size: int, contexts: ContextBucket) -> DecodePlan:
        name = (batch_size, contexts)
        if name not in self._plans:
            self._plans[name] = self._new_plan(batch_size, contexts)
        return self._plans[name]

    def every_plan(self, batch_size: int, max_model_len: int) -> list[DecodePlan]:
        """All that batches of that size may ask for, each once."""
        plans = (self.plan(batch_size, contexts) for contexts in ContextBucket.every(max_model_len))
        return list({plan.key: plan for plan in plans}.values())

    def _new_plan(self, batch_size: int, contexts: ContextBucket) -> DecodePlan:
        problem = self._problem(batch_size, contexts.max_context_len, contexts.mean_context_len)
        options = self._kernel.plan(problem)
        workspace = self._kernel.workspace(problem, problem.device)
        # A call sees nothing of the problem but these.
        key = _key(options), None if workspace is None else (workspace.shape, workspace.dtype)
        return DecodePlan(self._kernel, problem, options, key)


def _key(options: Mapping[str, Any]) -> Hashable:
    """Equal for equal options; what cannot be compared safely (a plugin's list, a tensor) equals itself alone."""
    plain = (int, float, str, torch.dtype, type(None))
    return tuple(
        (name, type(value), value if isinstance(value, plain) else id(value))
        for name, value in sorted(options.items())
    )
