"""What suites of whole workloads share: an engine for each variant, phases of requests, a row a round and phase."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from experiments import workload
from experiments.passes import in_turn
from experiments.records import Row
from experiments.settings import Settings
from experiments.suites.protocol import Point, PointContext, Suite
from experiments.workload import Request, WorkloadRun

if TYPE_CHECKING:
    import pandas as pd

    from engine.models.config import ModelConfig


@dataclass(frozen=True)
class Phase:
    """Requests to be served and timed. columns: what its row says of it.

    prime: requests served before and not timed, to fill the prefix cache; without any the cache is emptied instead.
    """

    requests: Sequence[Request]
    columns: Mapping[str, Any] = field(default_factory=dict)
    prime: Sequence[Request] = ()


_MEASURED = (
    *("prompt_tokens", "output_tokens", "cached_tokens", "hit_rate", "prefill_s", "decode_s"),
    "num_preemptions",
)


PLOTTED = (
    *("output_tok_s", "prefill_s", "good_fraction"),
    *(f"{name}_ms_p{p}" for name in ("ttft", "tpot") for p in workload.PERCENTILES),
)


WARM_TOKENS = 2048
"""Longer outputs bring a capture now and then, where a context passes a power of two."""


class WorkloadSuite(Suite):
    """Points are variants x cases; a case is the params that phases() makes requests of.

    Options have `rounds`, how often a point's phases are repeated with fresh prompts, and `sampling`, of all requests;
    they may have `engine_passes`.
    """

    columns = workload.COLUMNS
    engine_options: Mapping[str, Any] = {}

    @abstractmethod
    def cases(self, options: Any) -> list[dict[str, Any]]:
        """Params of the points: tp, batch_size, context_len, output_len and whatever else phases() needs."""

    @abstractmethod
    def phases(self, case: Mapping[str, Any], vocab_size: int, rng: random.Random) -> list[Phase]:
        """One round of a case."""

    def draws(self, point: Point, context: PointContext) -> random.Random:
        """What a point's requests are drawn from, its warm-up and its first round alike."""
        return random.Random(context.shared_seed(point))

    def concurrency(self, case: Mapping[str, Any]) -> int:
        """Sequences that the engine is to hold at once."""
        return case["batch_size"]

    def longest(self, case: Mapping[str, Any]) -> int:
        """Tokens of the longest sequence."""
        return case["context_len"] + case["output_len"]

    def points(self, settings: Settings) -> list[Point]:
        from experiments.backends.engine import EngineSetup, engine_options

        engine_options(settings)  # refuses what LLM would, before anything runs
        chosen = self.parse_options(settings)
        points = []
        passes = getattr(chosen, "engine_passes", 1)
        for case in self.cases(chosen):
            for engine_pass, variant in in_turn(settings.variants, chosen.rounds, passes):
                setup = EngineSetup(settings, variant, case["tp"])
                params = setup.columns() | case
                params |= {
                    "level": "workload",
                    **chosen.sampling,
                    **engine_pass.params,
                    "seed": settings.seed,
                    "model_config": settings.model.argument,
                    "engine": dict(settings.engine),
                    "variant_options": dict(variant.options),
                }
                points.append(setup.point(self.name, params))
        return points

    def run(self, point: Point, context: PointContext) -> list[Row]:
        from experiments.backends.engine import EngineSetup
        from experiments.checked_engine import checked_engine
        from kernels.compile_count import count_compilations

        params = point.params
        variant = next(v for v in context.settings.variants if v.name == params["variant"])
        setup = EngineSetup(context.settings, variant, params["tp"])
        sampling = {name: params[name] for name in ("temperature", "top_k", "top_p")}
        rows = []
        with checked_engine(
            setup,
            point,
            context,
            batch_size=self.concurrency(params),
            longest=self.longest(params),
            record_token_times=True,
            **self.engine_options,
        ) as engine:
            phases = self.phases(params, setup.model_config.vocab_size, self.draws(point, context))
            engine.llm.runner.capture_at_once(True)
            for requests in warm_up(phases, context.device.type):
                workload.serve(engine.llm, requests, sampling=sampling)
            engine.llm.runner.capture_at_once(False)
            rng = self.draws(point, context)
            for number in range(params["rounds"]):
                for phase in self.phases(params, setup.model_config.vocab_size, rng):
                    engine.llm.reset_prefix_cache()
                    if phase.prime:
                        workload.serve(engine.llm, phase.prime, sampling=sampling)
                    captures = engine.num_captures()
                    with count_compilations() as compilations:
                        run = workload.serve(engine.llm, phase.requests, sampling=sampling)
                    columns = engine.columns | engine.peak_memory() | dict(phase.columns)
                    columns["graph_captures"] = engine.num_captures() - captures
                    in_ranks = params["tp"] > 1  # whose processes nobody counts in
                    columns["kernels_compiled"] = None if in_ranks else compilations.num_compiled
                    rows.append(
                        self._row(point, context, setup, run, params["first_round"] + number, columns)
                    )
        return rows

    def _row(
        self,
        point: Point,
        context: PointContext,
        setup: Any,
        run: WorkloadRun,
        number: int,
        columns: Mapping[str, Any],
    ) -> Row:
        from experiments.provenance import is_throttled

        cost = workload_cost(setup.model_config, run, point.params["tp"], setup.dtype)
        measured = workload.columns(run) | {"throttled": is_throttled(context.device)}
        errors = [served.error for served in run.served if served.error is not None]
        if errors:
            status = {
                "status": "error",
                "error": f"{len(errors)} of {len(run.served)} requests failed: {errors[0]}",
            }
            return context.row(point, **columns, **status, round=number)
        measured |= context.ceilings.columns(cost, setup.dtype_name, measured["time_us"])
        return context.row(point, **columns, **measured, status="ok", round=number)

    def dtypes(self, settings: Settings) -> tuple[str, ...]:
        from experiments.backends.engine import EngineSetup

        return (EngineSetup(settings, settings.variants[0]).dtype_name,)

    def summary(self, rows: pd.DataFrame) -> pd.DataFrame:
        from experiments.tables import KEYS, summarise

        medians = [name for name in (*self.columns, *_MEASURED) if name not in KEYS]
        return summarise(rows, medians=medians, intervals=PLOTTED)


def warm_up(phases: Sequence[Phase], device_type: str) -> list[list[Request]]:
    """What is served untimed before the first round, one list after another.

    On a GPU all that a round serves, as it comes there and to its end, or WARM_TOKENS: a CUDA graph is captured when a
    batch of its size and plan of attention occurs, while requests come and end and contexts grow. Elsewhere a few
    tokens of the first phase, all at once, compile everything.
    """
    if device_type != "cuda":
        return [[Request(request.prompt, min(request.output_len, 4)) for request in phases[0].requests]]
    return [
        [replace(request, output_len=min(request.output_len, WARM_TOKENS)) for request in requests]
        for phase in phases
        for requests in (phase.prime, phase.requests)
        if requests
    ]


def workload_cost(config: ModelConfig, run: WorkloadRun, tp: int, dtype: Any) -> Any:
    """What a workload cannot do without: weights read in every step it took, each decoded token's context, one
    multiplication of every computed token by the layers' weights, and of every output token's row by the head's; one
    rank's share."""
    from experiments.roofline import decode_step_cost, head_cost
    from kernels import costs
    from kernels.costs import Cost

    heads = config.heads_per_rank(tp)
    one = decode_step_cost(config, [1], tp=tp, dtype=dtype, block_size=1)
    head = head_cost(config, 1, tp=tp, dtype=dtype)
    computed = contexts = pairs = outputs = 0
    for served in run.served:
        prompt, cached, output = served.num_prompt_tokens, served.num_cached_tokens, served.num_output_tokens
        decoded = max(output - 1, 0)
        computed += prompt - cached + decoded
        read = decoded * prompt + decoded * (decoded + 1) // 2
        contexts += read
        outputs += output
        pairs += read + (prompt * (prompt + 1) - cached * (cached + 1)) // 2
    kv = config.num_layers * costs.kv_bytes(contexts, heads.num_kv_heads, config.head_dim, dtype)
    pair = 4 * config.num_layers * heads.num_q_heads * config.head_dim  # `one` has a token's pair with itself
    products = (one.flops - head.flops - pair) * computed + head.flops * outputs
    return Cost(one.bytes * run.num_steps + kv, products + pair * pairs)


def random_prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    """`length` token ids; two such prompts share a first block only by chance."""
    return [rng.randrange(vocab_size) for _ in range(length)]
