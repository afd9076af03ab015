"""Serving requests with the engine as time goes on, and what a user of them would have seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from engine import LLM
    from engine.outputs import RequestOutput

PERCENTILES = (50, 90, 99)

GREEDY: Mapping[str, Any] = {"temperature": 0.0}


@dataclass(frozen=True)
class Request:
    """prompt: token ids. output_len: tokens to generate, whatever they are. arrival_s: after the start."""

    prompt: Sequence[int]
    output_len: int
    arrival_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.prompt or self.output_len < 1 or self.arrival_s < 0:
            raise ValueError(
                f"a request needs a prompt, output_len >= 1 and arrival_s >= 0, got {len(self.prompt)} prompt tokens, "
                f"{self.output_len} and {self.arrival_s}"
            )


@dataclass(frozen=True)
class Served:
    """One request's end. Times are seconds after the start; arrival_s is when it should have come, so that waiting to
    be let in counts. error: why it has not all its tokens, or None."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    arrival_s: float
    first_token_s: float | None
    last_token_s: float | None
    token_s: tuple[float, ...]
    error: str | None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: n tokens have n - 1 intervals."""
        if self.first_token_s is None or self.last_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def latency_s(self) -> float | None:
        """From arrival to the last token."""
        return None if self.last_token_s is None else self.last_token_s - self.arrival_s


@dataclass(frozen=True)
class WorkloadRun:
    """All requests' ends, in the order they were given.

    prefill_s: of the steps that computed any prompt token; decode_s: of the steps that only decoded, which gave
    num_decode_tokens. num_steps: of both kinds.
    """

    served: tuple[Served, ...]
    elapsed_s: float
    prefill_s: float
    decode_s: float
    num_decode_tokens: int
    num_steps: int


def serve(
    llm: LLM,
    requests: Sequence[Request],
    sleep: Callable[[float], None] = time.sleep,
    *,
    sampling: Mapping[str, Any] = GREEDY,
) -> WorkloadRun:
    """Add each request when its time comes and step the engine until all have ended.

    Times are of engine.clock. A request that the engine refuses is served with that error. sampling: what of
    SamplingParams all requests share (temperature, top_k, top_p).
    """
    engine, clock = llm.engine, llm.engine.clock
    waiting = sorted(range(len(requests)), key=lambda i: (requests[i].arrival_s, i), reverse=True)
    outputs: dict[int, RequestOutput] = {}
    refused: dict[int, str] = {}
    index: dict[str, int] = {}
    seconds = {"prefill": 0.0, "decode": 0.0}
    num_decode_tokens = num_steps = 0
    start = before = clock()
    try:
        while len(outputs) + len(refused) < len(requests):
            while waiting and requests[waiting[-1]].arrival_s <= clock() - start:
                i = waiting.pop()
                try:
                    index[_add(llm, requests[i], sampling)] = i
                except ValueError as error:
                    refused[i] = str(error)
            if not engine.has_unfinished_requests():
                if waiting:
                    sleep(max(requests[waiting[-1]].arrival_s - (clock() - start), 0.0))
                before = clock()
                continue
            counted = engine.totals.num_steps
            for output in engine.step_finished():
                if output.request_id in index:
                    outputs[index.pop(output.request_id)] = output
            if engine.totals.num_steps == counted:
                continue  # launched ahead; its time goes to the step whose result comes next
            now, last = clock(), engine.last_step
            seconds["prefill" if last.num_prefill_tokens else "decode"] += now - before
            num_decode_tokens += 0 if last.num_prefill_tokens else last.num_decode_tokens
            num_steps += 1
            before = now
        elapsed = clock() - start
    finally:
        for name in index:
            engine.abort(name, report=False)
    served = [_served(requests[i], outputs.get(i), refused.get(i), start) for i in range(len(requests))]
    return WorkloadRun(
        tuple(served), elapsed, seconds["prefill"], seconds["decode"], num_decode_tokens, num_steps
    )


def _add(llm: LLM, request: Request, sampling: Mapping[str, Any]) -> str:
    from engine import SamplingParams

    params = SamplingParams(**sampling, max_tokens=request.output_len, ignore_eos=True)
    return llm.engine.add_request(request.prompt, params)


def _served(request: Request, output: RequestOutput | None, refusal: str | None, start: float) -> Served:
    if output is None:
        return Served(len(request.prompt), 0, 0, 0, request.arrival_s, None, None, (), refusal)
    metrics = output.metrics
    error = output.error
    if error is None and len(output.token_ids) != request.output_len:
        error = f"{len(output.token_ids)} of {request.output_len} tokens: {output.finish_reason}"
    first, last = metrics.first_token_time, metrics.last_token_time
    return Served(
        num_prompt_tokens=len(output.prompt_token_ids),
        num_output_tokens=len(output.token_ids),
        num_cached_tokens=output.num_cached_tokens,
        num_preemptions=output.num_preemptions,
        arrival_s=request.arrival_s,
        first_token_s=None if first is None else first - start,
        last_token_s=None if last is None else last - start,
        token_s=tuple(t - start for t in metrics.token_times or ()),
        error=error,
    )


# Columns that only rows of workloads have.
COLUMNS = {
    "temperature": "float64",  # of every request, like top_k and top_p
    "top_k": "Int64",
    "top_p": "float64",
    "elapsed_s": "float64",
    "output_tok_s": "float64",  # over the whole elapsed time
    "total_tok_s": "float64",  # prompt and output tokens over the whole elapsed time
    "num_requests": "Int64",
    "num_failed": "Int64",
    "graph_captures": "Int64",  # CUDA graphs that were captured meanwhile, each for as long as several steps take
    "kernels_compiled": "Int64",  # Triton's, meanwhile: tenths of a second each, unless its cache has them; tp 1 only
    **{f"{name}_ms_p{p}": "float64" for name in ("ttft", "tpot", "itl", "latency") for p in PERCENTILES},
}


def columns(run: WorkloadRun) -> dict[str, Any]:
    """A row's columns: measured counts, rates, and percentiles over the requests (ITL: over all intervals)."""
    done = [served for served in run.served if served.error is None]
    prompt = sum(served.num_prompt_tokens for served in done)
    output = sum(served.num_output_tokens for served in done)
    cached = sum(served.num_cached_tokens for served in done)
    intervals = [b - a for served in done for a, b in zip(served.token_s, served.token_s[1:])]
    found: dict[str, Any] = {
        "time_us": 1e6 * run.elapsed_s,
        "elapsed_s": run.elapsed_s,
        "num_requests": len(run.served),
        "num_failed": len(run.served) - len(done),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": cached,
        "hit_rate": cached / prompt if prompt else None,
        "prefill_s": run.prefill_s,
        "decode_s": run.decode_s,
        "prefill_tok_s": _rate(prompt - cached, run.prefill_s),
        "decode_tok_s": _rate(run.num_decode_tokens, run.decode_s),
        "step_ms": None,
        "output_tok_s": _rate(output, run.elapsed_s),
        "total_tok_s": _rate(prompt + output, run.elapsed_s),
        "num_preemptions": sum(served.num_preemptions for served in run.served),
        "timing_method": "perf_counter",
    }
    found |= percentiles("ttft", [served.ttft_s for served in done])
    found |= percentiles("tpot", [served.tpot_s for served in done])
    found |= percentiles("latency", [served.latency_s for served in done])
    return found | percentiles("itl", intervals)


def percentiles(name: str, seconds: Sequence[float | None]) -> dict[str, float | None]:
    """NAME_ms_p50, _p90 and _p99 of times in seconds, interpolated linearly; null where there is none."""
    known = [1e3 * value for value in seconds if value is not None]
    return {f"{name}_ms_p{p}": float(np.percentile(known, p)) if known else None for p in PERCENTILES}


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 and count > 0 else None
