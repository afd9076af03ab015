"""One decode step of the real engine as a point: correct first, then timed, against the step's own roofline."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from experiments.backends.engine import (
    DecodeRun,
    DecodeStep,
    EngineSetup,
    check_greedy,
    check_last_token,
    engine_options,
    greedy_reference,
    slack_for,
    time_decode_steps,
)
from experiments.failures import UnsupportedError
from experiments.kernel_bench import INTERPRETED
from experiments.provenance import is_throttled
from experiments.records import Row
from experiments.roofline import decode_step_cost
from experiments.settings import Settings, Variant
from experiments.stats import median_interval
from experiments.suites.protocol import Point, PointContext

WARM_UP_STEPS = 3
CHECK_LENGTHS = (5, 33, 70)
CHECK_TOKENS = 8


def step_point(
    settings: Settings,
    variant: Variant,
    *,
    suite: str,
    tp: int,
    batch_size: int,
    context_len: int,
    num_steps: int,
) -> Point:
    """A decode step of the engine with one variant's kernels; num_steps timed steps in each round."""
    engine_options(settings)  # refuses what LLM would, before anything runs
    setup = EngineSetup(settings, variant, tp)
    params = setup.columns() | {
        "level": "step",
        "batch_size": batch_size,
        "context_len": context_len,
        "num_steps": num_steps,
        "rounds": settings.size.rounds,
        "seed": settings.seed,
        "model_config": setup.settings.model.argument,
        "engine": dict(settings.engine),
        "variant_options": dict(variant.options),
    }
    return Point(suite, params, on_engine=True)


def measure_step(point: Point, context: PointContext, *, max_interpreted_tokens: int) -> list[Row]:
    """Rows of a step point: one a round, or one that says why there is no time."""
    params, settings = point.params, context.settings
    variant = next(v for v in settings.variants if v.name == params["variant"])
    setup = EngineSetup(settings, variant, params["tp"])
    batch_size, context_len, num_steps = params["batch_size"], params["context_len"], params["num_steps"]
    interpreted = decode_is_interpreted(setup, context.device)
    tokens = batch_size * context_len
    if interpreted and tokens > max_interpreted_tokens:
        reason = f"{tokens} tokens of context exceed bench.max_interpreted_tokens = {max_interpreted_tokens}"
        return [context.row(point, status="not_timed", error=f"not run in Triton's interpreter: {reason}")]
    total = WARM_UP_STEPS + settings.size.rounds * num_steps
    # The context grows by a token a step; its mean over the timed steps is what was asked for.
    prompt_len = max(context_len - WARM_UP_STEPS - (total - WARM_UP_STEPS + 1) // 2, 1)
    check_tokens = 3 if interpreted else CHECK_TOKENS
    check_lengths = CHECK_LENGTHS[:2] if interpreted else CHECK_LENGTHS
    reference = greedy_reference(setup, check_lengths, check_tokens, context.seed(point))
    longest = max(
        prompt_len
        + total
        + slack_for(batch_size * prompt_len, batch_size, settings.engine["max_num_batched_tokens"]),
        max(check_lengths) + check_tokens + 1,
    )
    if longest > setup.model_config.max_position_embeddings:
        limit = setup.model_config.max_position_embeddings
        raise UnsupportedError(
            f"the point reaches {longest} tokens, the model's max_position_embeddings is {limit}"
        )
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(context.device)
    with setup.open(**_pool(setup, batch_size, longest, len(check_lengths))) as llm:
        columns = _kernel_columns(llm)
        check = check_greedy(llm, reference, setup.dtype_name)
        columns |= {"tokens_checked": check.checked, "tokens_excused": check.excused}
        if check.error is not None:
            return [context.row(point, **columns, status="incorrect", error=check.error)]
        if interpreted:
            return [context.row(point, **columns, status="not_timed", error=INTERPRETED)]
        prompts = setup.prompts([prompt_len] * batch_size, context.seed(point) + 1)
        run = time_decode_steps(llm, prompts, settings.size.rounds * num_steps, WARM_UP_STEPS)
        throttled = is_throttled(context.device)
        error = check_last_token(llm, run, setup.dtype_name)
        if error is not None:
            return [context.row(point, **columns, status="incorrect", error=error)]
        if context.device.type == "cuda":
            columns["peak_memory_bytes"] = torch.cuda.max_memory_allocated(context.device)
    columns |= {"throttled": throttled, "num_preemptions": run.num_preemptions}
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
        for number in range(settings.size.rounds)
    ]


def decode_is_interpreted(setup: EngineSetup, device: torch.device) -> bool:
    """Whether the variant's decode kernel would run in Triton's interpreter."""
    from experiments.decode_bench import DecodeBench
    from experiments.interpreter import is_interpreted

    heads = setup.model_config.heads_per_rank(setup.tp)
    bench = DecodeBench(
        context_lens=(1,),
        num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=setup.model_config.head_dim,
        block_size=setup.settings.engine["block_size"],
        dtype=setup.dtype_name,
        device=device,
        variants=[setup.variant],
    )
    return is_interpreted(bench.candidates()[0].probe)


def _pool(setup: EngineSetup, batch_size: int, longest: int, num_checks: int) -> dict[str, Any]:
    """A pool that holds the batch and nothing more, unless the configuration says how large it is."""
    options: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": max(batch_size, num_checks)}
    if setup.settings.engine["num_kv_blocks"] is None:
        rows = max(batch_size, num_checks)
        options["num_kv_blocks"] = rows * -(-longest // setup.settings.engine["block_size"]) + 1
    return options


def _kernel_columns(llm: Any) -> dict[str, Any]:
    """The kernels that run, where the configuration says auto."""
    kernels = llm.runner.kernels
    return {"decode_attention": kernels.decode.name, "prefill_attention": kernels.prefill.name}


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
        round=number,
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
