"""Comparing implementations of one operation at one shape: correct first, then timed, interleaved, cold and hot."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from experiments.failures import describe, inside, status_of
from experiments.input_guard import InputGuard
from experiments.interpreter import is_interpreted
from experiments.provenance import is_throttled
from experiments.records import Row
from experiments.stats import median_interval
from experiments.suites.protocol import Point, PointContext
from kernels import timing
from kernels.costs import Cost

# Of max_rel_err, by the dtype of inputs and outputs: a few roundings of the output, and for the 16-bit types the
# rounding of the probabilities before the second product.
TOLERANCES = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}

INTERPRETED = "checked in Triton's interpreter on a CPU, where time means nothing"

Call = Callable[[], Any]


@dataclass(frozen=True)
class BoundCall:
    """A candidate with its inputs: `call` returns its outputs; those it does not allocate held NaN before.

    read: from what `call` returns to what is compared with the reference, where these differ (token ids); never timed.
    """

    call: Callable[[], tuple[Tensor, ...]]
    plan_us: float | None = None
    read: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = tuple

    def outputs(self) -> tuple[Tensor, ...]:
        """Of one call, to be compared with the reference."""
        return self.read(self.call())


@dataclass(frozen=True)
class Candidate:
    """One implementation. bind: inputs -> BoundCall; unsupported: why it cannot run.

    columns: what its rows say of it besides its name, which is their `variant`.
    probe: a call at a tiny shape, by which Triton's interpreter is noticed before much is asked of it.
    """

    name: str
    bind: Callable[[Any], BoundCall]
    probe: Call
    columns: Mapping[str, Any] = field(default_factory=dict)
    unsupported: str | None = None


class Problem(Protocol):
    """An operation at a shape. dtype: by name. input_bytes: of one input set, for rotation over cold ones.

    interpreted_size: tokens (of context), to decide whether Triton's interpreter is asked.
    """

    @property
    def dtype(self) -> str: ...

    @property
    def cost(self) -> Cost: ...

    @property
    def input_bytes(self) -> int: ...

    @property
    def interpreted_size(self) -> int: ...

    def make_inputs(self, generator: torch.Generator) -> Any:
        """Fresh random inputs on the device."""

    def reference(self, inputs: Any) -> Sequence[Tensor]:
        """What the outputs should be, in fp32."""

    def candidates(self) -> Sequence[Candidate]:
        """The implementations to compare."""


def measure(
    problem: Problem,
    point: Point,
    context: PointContext,
    *,
    cache_states: Sequence[str],
    max_interpreted_size: int,
) -> list[Row]:
    """Rows of every candidate: one a round and cache state for those that are timed, one that says why not for others.

    max_interpreted_size: of problem.interpreted_size beyond which the interpreter is not asked.
    """
    generator = torch.Generator(device=context.device).manual_seed(context.seed(point))
    inputs = problem.make_inputs(generator)
    expected = tuple(problem.reference(inputs))
    guard = InputGuard(inputs)
    rows, to_time, checked = [], {}, {}
    for candidate in problem.candidates():
        with inside(candidate.name):
            verdict = _check(candidate, problem, inputs, expected, max_interpreted_size)
        written = guard.restore()
        if written and verdict["status"] in ("ok", "not_timed"):
            verdict |= {"status": "incorrect", "error": f"it wrote to its inputs: {', '.join(written)}"}
            verdict.pop("plan_us", None)
        columns = {"variant": candidate.name, **candidate.columns, **verdict}
        if verdict["status"] == "ok":
            to_time[candidate.name] = candidate
            checked[candidate.name] = columns
        else:
            rows.append(context.row(point, **columns))
    del expected, guard
    for cache_state in cache_states if to_time else ():
        rows += _time(problem, to_time, checked, inputs, generator, cache_state, point, context)
    order = {candidate.name: i for i, candidate in enumerate(problem.candidates())}
    return sorted(rows, key=lambda row: order[row["variant"]])


def relative_error(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error of any row (last dimension), over that row's largest expected magnitude; inf if not finite."""
    worst = 0.0
    for output, reference in zip(outputs, expected, strict=True):
        error = (output.float() - reference.float()).abs().amax(-1)
        scale = reference.float().abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)
        # An expected row of zeros (no context) must be met exactly: its scale is tiny.
        relative = (error / scale).max().item() if error.numel() else 0.0
        worst = max(worst, relative if relative == relative else float("inf"))
    return worst


def _check(
    candidate: Candidate,
    problem: Problem,
    inputs: Any,
    expected: tuple[Tensor, ...],
    max_interpreted_size: int,
) -> dict[str, Any]:
    """The columns that say whether a candidate may be timed."""
    if candidate.unsupported is not None:
        return {"status": "unsupported", "error": candidate.unsupported}
    tolerance = TOLERANCES[problem.dtype]
    try:
        interpreted = is_interpreted(candidate.probe)
        if interpreted and problem.interpreted_size > max_interpreted_size:
            return {
                "status": "not_timed",
                "error": f"not run in Triton's interpreter, where it counts as {problem.interpreted_size} tokens: more "
                f"than bench.max_interpreted_tokens = {max_interpreted_size}",
            }
        bound = candidate.bind(inputs)
        error = relative_error(bound.outputs(), expected)
    except Exception as exception:
        return {"status": status_of(exception), "error": describe(exception)}
    found = {"max_rel_err": error if error < float("inf") else None, "tolerance": tolerance}
    if not error <= tolerance:
        shown = (
            f"{error:.3g}" if error < float("inf") else "not finite (an output was not written, or is NaN)"
        )
        reason = f"max_rel_err is {shown}, the tolerance for {problem.dtype} is {tolerance:g}"
        return found | {"status": "incorrect", "error": reason}
    if interpreted:
        return found | {"status": "not_timed", "error": INTERPRETED}
    return found | {"status": "ok", "plan_us": bound.plan_us}


def _time(
    problem: Problem,
    candidates: Mapping[str, Candidate],
    checked: Mapping[str, Mapping[str, Any]],
    inputs: Any,
    generator: torch.Generator,
    cache_state: str,
    point: Point,
    context: PointContext,
) -> list[Row]:
    size = context.settings.size
    try:
        count = timing.num_input_sets(problem.input_bytes, context.device, cache_state)  # type: ignore[arg-type]
        input_sets = [inputs, *(problem.make_inputs(generator) for _ in range(count - 1))]
        calls = {}
        for name, candidate in candidates.items():
            with inside(name):
                calls[name] = [candidate.bind(input_set).call for input_set in input_sets]
        timings = timing.time_interleaved(
            calls,
            device=context.device,
            cache_state=cache_state,  # type: ignore[arg-type]
            rounds=size.rounds,
            samples=size.samples,
            rng=random.Random(context.seed(point)),
            inside=inside,
        )
    except Exception as exception:
        failure = {"status": status_of(exception), "error": describe(exception), "cache_state": cache_state}
        return [context.row(point, **(dict(columns) | failure)) for columns in checked.values()]
    throttled = is_throttled(context.device)
    rows = []
    for name, rounds in timings.items():
        for number, found in enumerate(rounds):
            interval = median_interval(found.samples_us)
            rows.append(
                context.row(
                    point,
                    **checked[name],
                    cache_state=cache_state,
                    round=number,
                    time_us=found.median,
                    time_us_low=interval.low if interval.low == interval.low else None,
                    time_us_high=interval.high if interval.high == interval.high else None,
                    samples_us=list(found.samples_us),
                    timing_method=found.method,
                    throttled=throttled,
                    **context.ceilings.columns(problem.cost, problem.dtype, found.median),
                )
            )
    return rows
