"""Offline throughput: requests of random lengths, all waiting at the start."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.suites import options
from experiments.workload import Request
from experiments.workload_suite import Phase, WorkloadSuite, random_prompt

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ThroughputOptions:
    """See conf/suite/throughput.yaml. Lengths are drawn evenly from min to max, both included."""

    num_seqs: int
    min_input_len: int
    max_input_len: int
    min_output_len: int
    max_output_len: int
    tensor_parallel: Any
    rounds: int

    def __post_init__(self) -> None:
        for name in (
            "num_seqs",
            "min_input_len",
            "max_input_len",
            "min_output_len",
            "max_output_len",
            "rounds",
        ):
            options.positive(name, getattr(self, name))
        object.__setattr__(
            self, "tensor_parallel", options.positives("tensor_parallel", self.tensor_parallel)
        )
        for kind in ("input", "output"):
            low, high = getattr(self, f"min_{kind}_len"), getattr(self, f"max_{kind}_len")
            if low > high:
                raise ValueError(f"bench.min_{kind}_len is {low}, above max_{kind}_len {high}")


class Throughput(WorkloadSuite):
    name = "throughput"
    options = ThroughputOptions

    def cases(self, options: Any) -> list[dict[str, Any]]:
        return [
            {
                "tp": tp,
                "batch_size": options.num_seqs,
                "context_len": options.max_input_len,
                "output_len": options.max_output_len,
                "min_input_len": options.min_input_len,
                "min_output_len": options.min_output_len,
            }
            for tp in options.tensor_parallel
        ]

    def phases(self, case: Mapping[str, Any], vocab_size: int, rng: random.Random) -> list[Phase]:
        requests = []
        for _ in range(case["batch_size"]):
            length = rng.randint(case["min_input_len"], case["context_len"])
            output_len = rng.randint(case["min_output_len"], case["output_len"])
            requests.append(Request(random_prompt(rng, length, vocab_size), output_len))
        return [Phase(requests)]

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        from experiments.bar_plots import bar_grid
        from experiments.tables import median_of

        table, over = self.summary(rows), median_of(rows)
        return {
            "throughput": bar_grid(
                table,
                y="output_tok_s",
                groups="tp",
                labels=("tensor parallel", "output tokens per second"),
                title=f"Throughput, {rows['batch_size'].max()} requests of random lengths ({over})",
            )
        }


SUITE = Throughput()
