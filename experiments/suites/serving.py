"""Requests that arrive as time goes on: a sweep of the request rate, latency percentiles, goodput under targets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import arrivals, workload
from experiments.suites import options
from experiments.workload import Request, WorkloadRun
from experiments.workload_suite import Phase, WorkloadSuite, random_prompt

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

KINDS = ("poisson", "burst", "trace")


@dataclass(frozen=True)
class ServingOptions:
    """See conf/suite/serving.yaml."""

    arrivals: Any
    request_rates: Any
    num_requests: int
    burst_size: int
    trace: str | None
    max_num_seqs: int
    min_input_len: int
    max_input_len: int
    min_output_len: int
    max_output_len: int
    ttft_target_ms: float
    tpot_target_ms: float
    tensor_parallel: Any
    rounds: int
    sampling: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling", options.sampling("sampling", self.sampling))
        object.__setattr__(self, "arrivals", options.choices("arrivals", self.arrivals, KINDS))
        object.__setattr__(self, "request_rates", options.rates("request_rates", self.request_rates))
        object.__setattr__(
            self, "tensor_parallel", options.positives("tensor_parallel", self.tensor_parallel)
        )
        for name in ("num_requests", "burst_size", "max_num_seqs", "rounds"):
            options.positive(name, getattr(self, name))
        for name in ("ttft_target_ms", "tpot_target_ms"):
            options.rate(name, getattr(self, name))
        for kind in ("input", "output"):
            names = (f"min_{kind}_len", f"max_{kind}_len")
            low, high = (options.positive(name, getattr(self, name)) for name in names)
            if low > high:
                raise ValueError(f"bench.min_{kind}_len is {low}, above max_{kind}_len {high}")
        if "trace" in self.arrivals and not (isinstance(self.trace, str) and self.trace):
            raise ValueError(f"bench.arrivals has trace, so bench.trace must name a file, got {self.trace!r}")


class Serving(WorkloadSuite):
    """goodput_req_s: requests a second that met both targets. Times to the first token count from when a request
    should have come, not from when the engine let it in."""

    name = "serving"
    options = ServingOptions
    columns = WorkloadSuite.columns | {
        "arrivals": "string",
        "request_rate": "float64",
        "goodput_req_s": "float64",
        "good_fraction": "float64",
    }

    def cases(self, options: Any) -> list[dict[str, Any]]:
        axes = (options.tensor_parallel, options.arrivals, options.request_rates)
        shared = {
            "batch_size": options.max_num_seqs,
            "num_requests": options.num_requests,
            "burst_size": options.burst_size,
            "context_len": options.max_input_len,
            "output_len": options.max_output_len,
            "min_input_len": options.min_input_len,
            "min_output_len": options.min_output_len,
            "ttft_target_ms": options.ttft_target_ms,
            "tpot_target_ms": options.tpot_target_ms,
        }
        cases = []
        for tp, kind, rate in itertools.product(*axes):
            case = shared | {"tp": tp, "arrivals": kind, "request_rate": float(rate)}
            if kind == "trace":
                path = Path(options.trace).expanduser().resolve()
                trace = arrivals.read_trace(path, limit=options.num_requests)
                case |= {
                    "trace": str(path),
                    "trace_digest": arrivals.digest(trace),
                    "num_requests": len(trace),
                    "context_len": max(arrival.input_len for arrival in trace),
                    "output_len": max(arrival.output_len for arrival in trace),
                }
            cases.append(case)
        return cases

    def phases(self, case: Mapping[str, Any], vocab_size: int, rng: random.Random) -> list[Phase]:
        requests = [
            Request(random_prompt(rng, arrival.input_len, vocab_size), arrival.output_len, arrival.arrival_s)
            for arrival in self._arrivals(case, rng)
        ]
        return [Phase(requests, {"arrivals": case["arrivals"], "request_rate": case["request_rate"]})]

    def _arrivals(self, case: Mapping[str, Any], rng: random.Random) -> list[arrivals.Arrival]:
        count, rate = case["num_requests"], case["request_rate"]
        if case["arrivals"] == "trace":
            return arrivals.read_trace(Path(case["trace"]), speed=rate, limit=count)
        if case["arrivals"] == "poisson":
            times = arrivals.poisson_times(count, rate, rng)
        else:
            times = arrivals.burst_times(count, rate, case["burst_size"])
        input_lens = (case["min_input_len"], case["context_len"])
        return arrivals.with_lengths(times, input_lens, (case["min_output_len"], case["output_len"]), rng)

    def _row(self, point: Any, context: Any, setup: Any, run: WorkloadRun, number: int, columns: Any) -> Any:
        good = num_good(run, point.params["ttft_target_ms"], point.params["tpot_target_ms"])
        columns = dict(columns) | {
            "goodput_req_s": good / run.elapsed_s,
            "good_fraction": good / len(run.served),
        }
        return super()._row(point, context, setup, run, number, columns)

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        from experiments.plots import line_grid
        from experiments.tables import median_of

        table, over = self.summary(rows), median_of(rows)
        common: dict[str, Any] = {"x": "request_rate", "columns": "arrivals", "rows": "tp"}
        rate = "requests per second (trace: times as fast as recorded)"
        figures = {
            f"{name}_p{p}": line_grid(
                table,
                y=f"{name}_ms_p{p}",
                labels=(rate, f"{title} (ms)"),
                title=f"{title[0].upper()}{title[1:]}, p{p} over requests ({over})",
                **common,
            )
            for name, title in (("ttft", "time to first token"), ("tpot", "time per output token"))
            for p in (50, 99)
        }
        targets = "both latency targets met"
        figures["goodput"] = line_grid(
            table,
            y="good_fraction",
            labels=(rate, "fraction of requests"),
            title=f"Goodput: requests with {targets} ({over})",
            log_y=False,
            top=1.0,
            **common,
        )
        return figures


def num_good(run: workload.WorkloadRun, ttft_target_ms: float, tpot_target_ms: float) -> int:
    """Requests that ended well and met both targets; a single token has no time per output token to miss."""
    return sum(
        served.error is None
        and served.ttft_s is not None
        and 1e3 * served.ttft_s <= ttft_target_ms
        and 1e3 * (served.tpot_s or 0.0) <= tpot_target_ms
        for served in run.served
    )


SUITE = Serving()
