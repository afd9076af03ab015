"""Equal requests, more and more of them at once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.suites import options
from experiments.workload import Request
from experiments.workload_suite import Phase, WorkloadSuite, random_prompt

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ConcurrencyOptions:
    """See conf/suite/high_concurrency.yaml."""

    num_seqs: Any
    input_len: int
    output_len: int
    tensor_parallel: Any
    rounds: int
    sampling: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling", options.sampling("sampling", self.sampling))
        for name in ("input_len", "output_len", "rounds"):
            options.positive(name, getattr(self, name))
        for name in ("num_seqs", "tensor_parallel"):
            object.__setattr__(self, name, options.positives(name, getattr(self, name)))


class EqualRequests(WorkloadSuite):
    """All requests alike and there at the start; high_concurrency and max_output differ in what they look at."""

    options = ConcurrencyOptions

    def cases(self, options: Any) -> list[dict[str, Any]]:
        return [
            {
                "tp": tp,
                "batch_size": num_seqs,
                "context_len": options.input_len,
                "output_len": options.output_len,
            }
            for tp, num_seqs in itertools.product(options.tensor_parallel, options.num_seqs)
        ]

    def phases(self, case: Mapping[str, Any], vocab_size: int, rng: random.Random) -> list[Phase]:
        prompts = [random_prompt(rng, case["context_len"], vocab_size) for _ in range(case["batch_size"])]
        return [Phase([Request(prompt, case["output_len"]) for prompt in prompts])]


class HighConcurrency(EqualRequests):
    name = "high_concurrency"

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        from experiments.plots import line_grid
        from experiments.tables import median_of

        table, over = self.summary(rows), median_of(rows)
        common: dict[str, Any] = {"x": "batch_size", "columns": "tp"}
        requests = "requests at once"
        return {
            "throughput": line_grid(
                table,
                y="output_tok_s",
                labels=(requests, "output tokens per second"),
                title=f"Throughput against concurrency ({over})",
                **common,
            ),
            "tpot": line_grid(
                table,
                y="tpot_ms_p50",
                labels=(requests, "time per output token, p50 (ms)"),
                title=f"Time per output token against concurrency ({over})",
                **common,
            ),
            "ttft": line_grid(
                table,
                y="ttft_ms_p99",
                labels=(requests, "time to first token, p99 (ms)"),
                title=f"Time to first token against concurrency ({over})",
                **common,
            ),
        }


SUITE = HighConcurrency()
