"""Implementations of one operation at one shape: checked first, then timed together, in random order over rounds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.input_guard import InputGuard
from experiments.interpreter import is_interpreted
from experiments.kernel_bench import TOLERANCES, Candidate, Problem, relative_error
from kernels import timing
from kernels.timing import CacheState, Timing

INTERPRETED = "runs in Triton's interpreter on a CPU, where time means nothing"


class Unsupported(Exception):  # noqa: N818
    """Nothing is wrong, but there is nothing to time either: the message says why."""


@dataclass(frozen=True)
class Contender:
    """An implementation and the problem it is asked: those with one problem object share its inputs.

    peer: not of this project; what it refuses to run is no fault of ours.
    """

    problem: Problem
    candidate: Candidate
    peer: bool = False


@dataclass(frozen=True)
class Effort:
    """rounds over all contenders, and samples of each in a round."""

    rounds: int
    samples: int

    @classmethod
    def on(cls, device: torch.device) -> Effort:
        return cls(rounds=5, samples=5) if device.type == "cuda" else cls(rounds=3, samples=3)


class Comparison:
    """The contenders of one shape by label. Inputs are made once and kept until the next shape's turn."""

    def __init__(self, shape: str, contenders: Mapping[str, Contender], device: torch.device) -> None:
        self.shape = shape
        self.contenders = contenders
        self.device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self._inputs: dict[int, list[Any]] = {}
        self._expected: dict[int, Sequence[Tensor]] = {}
        self._errors: dict[str, float | Exception] = {}
        self._timings: dict[tuple[frozenset[str], CacheState], dict[str, list[Timing]]] = {}

    def check(self, label: str) -> float:
        """max_rel_err of the contender, within its tolerance; else AssertionError, Unsupported, or what it raised."""
        if label not in self._errors:
            try:
                self._errors[label] = self._check(self.contenders[label])
            except Exception as verdict:
                self._errors[label] = verdict
        found = self._errors[label]
        if isinstance(found, Exception):
            raise found
        return found

    def refuse_interpreted(self, label: str) -> None:
        """Unsupported if the contender would run in Triton's interpreter."""
        candidate = self.contenders[label].candidate
        if candidate.unsupported is None and is_interpreted(candidate.probe):
            raise Unsupported(INTERPRETED)

    def timings(self, labels: Sequence[str], cache_state: CacheState) -> dict[str, list[Timing]]:
        """Of those of the labels that are right and can be timed, one Timing a round."""
        key = (frozenset(labels), cache_state)
        if key not in self._timings:
            chosen = [label for label in labels if self._can_be_timed(label)]
            effort = Effort.on(self.device)
            self._timings[key] = timing.time_interleaved(
                {label: self._calls(self.contenders[label], cache_state) for label in chosen},
                device=self.device,
                cache_state=cache_state,
                rounds=effort.rounds,
                samples=effort.samples,
                rng=random.Random(0),
            )
        return self._timings[key]

    def _can_be_timed(self, label: str) -> bool:
        try:
            self.refuse_interpreted(label)
            self.check(label)
        except Exception:  # its own benchmark says so
            return False
        return True

    def _check(self, contender: Contender) -> float:
        candidate, problem = contender.candidate, contender.problem
        if candidate.unsupported is not None:
            raise Unsupported(candidate.unsupported)
        (inputs,) = self._input_sets(problem, 1)
        if id(problem) not in self._expected:
            self._expected[id(problem)] = tuple(problem.reference(inputs))
        guard = InputGuard(inputs)
        try:
            outputs = candidate.bind(inputs).outputs()
        except Exception as error:
            if contender.peer:
                raise Unsupported(f"{type(error).__name__}: {error}".splitlines()[0]) from error
            raise
        finally:
            written = guard.restore()
        assert not written, f"it wrote to its inputs: {', '.join(written)}"
        found, limit = relative_error(outputs, self._expected[id(problem)]), TOLERANCES[problem.dtype]
        assert found <= limit, f"max_rel_err is {found:.3g}, the tolerance for {problem.dtype} is {limit:g}"
        return found

    def _calls(self, contender: Contender, cache_state: CacheState) -> list[Any]:
        count = timing.num_input_sets(contender.problem.input_bytes, self.device, cache_state)
        return [
            contender.candidate.bind(inputs).call for inputs in self._input_sets(contender.problem, count)
        ]

    def _input_sets(self, problem: Problem, count: int) -> list[Any]:
        made = self._inputs.setdefault(id(problem), [])
        made += [problem.make_inputs(self._generator) for _ in range(count - len(made))]
        return made[:count]
