"""One decode step of the real engine as a point: correct first, then timed, against the step's own roofline."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from experiments.backends.engine import (
    DecodeRun,
    DecodeStep,
    EngineSetup,
    engine_options,
    slack_for,
    time_decode_steps,
)
from experiments.backends.greedy import check_last_token
from experiments.checked_engine import checked_engine
from experiments.collectives import collective_columns
from experiments.failures import IncorrectError
from experiments.passes import EnginePass
from experiments.provenance import is_throttled
from experiments.records import Row
from experiments.roofline import decode_step_cost
from experiments.settings import Settings, Variant
from experiments.stats import median_interval
from experiments.suites.protocol import Point, PointContext

WARM_UP_STEPS = 3


def step_point(
    settings: Settings,
    variant: Variant,
    *,
    suite: str,
    tp: int,
    batch_size: int,
    context_len: int,
    num_steps: int,
    engine_pass: EnginePass | None = None,
) -> Point:
    """A decode step of the engine with one variant's kernels; num_steps timed steps in each round.

    engine_pass: the rounds it measures; all of the run's if None.
    """
    engine_options(settings)  # refuses what LLM would, before anything runs
    setup = EngineSetup(settings, variant, tp)
    params = setup.columns() | {
        "level": "step",
        "batch_size": batch_size,
        "context_len": context_len,
        "num_steps": num_steps,
        **(engine_pass or EnginePass(0, 0, settings.size.rounds)).params,
        "seed": settings.seed,
        "model_config": setup.settings.model.argument,
        "engine": dict(settings.engine),
        "variant_options": dict(variant.options),
    }
    return setup.point(suite, params)


def measure_step(point: Point, context: PointContext, *, max_interpreted_tokens: int) -> list[Row]:
    """Rows of a step point, one a round."""
    params, settings = point.params, context.settings
    variant = next(v for v in settings.variants if v.name == params["variant"])
    setup = EngineSetup(settings, variant, params["tp"])
    batch_size, context_len, num_steps = params["batch_size"], params["context_len"], params["num_steps"]
    total = params["rounds"] * num_steps
    # The context grows by a token a step; its mean over the timed steps is what was asked for.
    prompt_len = max(context_len - WARM_UP_STEPS - (total + 1) // 2, 1)
    budget = settings.engine["max_num_batched_tokens"]
    slack = slack_for(batch_size * prompt_len, batch_size, budget)
    longest = prompt_len + WARM_UP_STEPS + total + slack
    too_large = None
    if batch_size * context_len > max_interpreted_tokens:
        too_large = (
            f"{batch_size * context_len} tokens of context exceed bench.max_interpreted_tokens = "
            f"{max_interpreted_tokens}"
        )
    with checked_engine(
        setup, point, context, batch_size=batch_size, longest=longest, too_large=too_large
    ) as engine:
        prompts = setup.prompts([prompt_len] * batch_size, context.shared_seed(point))
        run = time_decode_steps(engine.llm, prompts, total, WARM_UP_STEPS)
        columns = engine.columns | {"throttled": is_throttled(context.device)}
        error = check_last_token(engine.llm, run, setup.dtype_name)
        if error is not None:
            raise IncorrectError(error, columns)
        columns |= engine.peak_memory() | {"num_preemptions": run.num_preemptions}
        if setup.tp > 1:
            columns |= collective_columns(engine.llm, prompts)
    return [
        _round_row(
            point,
            context,
            setup,
            run,
            number,
            run.steps[number * num_steps : (number + 1) * num_steps],
            columns,
        )
        for number in range(params["rounds"])
    ]


def _round_row(
    point: Point,
    context: PointContext,
    setup: EngineSetup,
    run: DecodeRun,
    number: int,
    steps: Sequence[DecodeStep],
    columns: dict[str, Any],
) -> Row:
    samples = [1e6 * step.duration_s for step in steps]
    time_us = median(samples)
    interval = median_interval(samples)
    middle = steps[len(steps) // 2].context_lens
    cost = decode_step_cost(
        setup.model_config,
        middle,
        tp=setup.tp,
        dtype=setup.dtype,
        block_size=setup.settings.engine["block_size"],
    )
    prompt_tokens = sum(map(len, run.prompts))
    return context.row(
        point,
        **columns,
        status="ok",
        round=point.params["first_round"] + number,
        time_us=time_us,
        time_us_low=interval.low if interval.low == interval.low else None,
        time_us_high=interval.high if interval.high == interval.high else None,
        samples_us=samples,
        step_ms=time_us / 1000,
        decode_s=sum(samples) / 1e6,
        decode_tok_s=len(run.prompts) * len(steps) / (sum(samples) / 1e6),
        prompt_tokens=prompt_tokens,
        output_tokens=len(run.prompts) * len(steps),
        prefill_s=run.prefill_s,
        prefill_tok_s=prompt_tokens / run.prefill_s,
        mean_context_len=sum(map(sum, (step.context_lens for step in steps)))
        / (len(steps) * len(run.prompts)),
        timing_method="perf_counter",
        **context.ceilings.columns(cost, setup.dtype_name, time_us),
    )
