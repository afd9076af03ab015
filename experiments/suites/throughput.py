"""Offline throughput: requests of random lengths, all waiting at the start."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.suites import options
from experiments.suites.protocol import Point, PointContext
from experiments.workload import Request
from experiments.workload_suite import Phase, WorkloadSuite

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


NANO_VLLM_LAST_ID = 10_000


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
    sampling: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling", options.sampling("sampling", self.sampling))
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
    """The first round's requests are those of nano-vllm's bench.py with the same seed, so that figures can stand beside
    its own: all prompts (token ids 0 to 10,000), then all output lengths. 256 of 100-1024 by seed 0 are 142,827
    prompt tokens and 133,966 output tokens."""

    name = "throughput"
    options = ThroughputOptions

    def draws(self, point: Point, context: PointContext) -> random.Random:
        return random.Random(context.settings.seed)

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
        count, last_id = case["batch_size"], min(NANO_VLLM_LAST_ID, vocab_size - 1)
        lengths = (case["min_input_len"], case["context_len"])
        prompts = [[rng.randint(0, last_id) for _ in range(rng.randint(*lengths))] for _ in range(count)]
        output_lens = [rng.randint(case["min_output_len"], case["output_len"]) for _ in range(count)]
        return [Phase([Request(*shape) for shape in zip(prompts, output_lens)])]

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
