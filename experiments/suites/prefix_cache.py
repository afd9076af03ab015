"""Prompts that share a prefix: prefill with the prefix in the cache, against as many unrelated prompts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.stats import paired_ratio
from experiments.suites import options
from experiments.workload import Request
from experiments.workload_suite import Phase, WorkloadSuite, random_prompt

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class PrefixCacheOptions:
    """See conf/suite/prefix_cache.yaml."""

    num_seqs: int
    input_lens: Any
    unique_lens: Any
    output_len: int
    tensor_parallel: Any
    rounds: int
    sampling: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling", options.sampling("sampling", self.sampling))
        for name in ("num_seqs", "output_len", "rounds"):
            options.positive(name, getattr(self, name))
        for name in ("input_lens", "unique_lens", "tensor_parallel"):
            object.__setattr__(self, name, options.positives(name, getattr(self, name)))
        if max(self.unique_lens) >= min(self.input_lens):
            raise ValueError(
                f"bench.unique_lens holds {max(self.unique_lens)}, not below input_lens {min(self.input_lens)}"
            )


class PrefixCache(WorkloadSuite):
    """cache_state "cold": unrelated prompts and an empty cache; "hot": the shared prefix was served before."""

    name = "prefix_cache"
    options = PrefixCacheOptions
    columns = WorkloadSuite.columns | {"unique_len": "Int64"}

    def cases(self, options: Any) -> list[dict[str, Any]]:
        axes = (options.tensor_parallel, options.input_lens, options.unique_lens)
        return [
            {
                "tp": tp,
                "batch_size": options.num_seqs,
                "context_len": input_len,
                "output_len": options.output_len,
                "unique_len": unique_len,
            }
            for tp, input_len, unique_len in itertools.product(*axes)
        ]

    def phases(self, case: Mapping[str, Any], vocab_size: int, rng: random.Random) -> list[Phase]:
        def requests(prompts: list[list[int]]) -> list[Request]:
            return [Request(prompt, case["output_len"]) for prompt in prompts]

        length, unique, count = case["context_len"], case["unique_len"], case["batch_size"]
        cold = [random_prompt(rng, length, vocab_size) for _ in range(count)]
        prefix = random_prompt(rng, length - unique, vocab_size)
        hot = [prefix + random_prompt(rng, unique, vocab_size) for _ in range(count)]
        other = prefix + random_prompt(rng, unique, vocab_size)
        columns = {"unique_len": unique}
        return [
            Phase(requests(cold), columns | {"cache_state": "cold"}),
            Phase(requests(hot), columns | {"cache_state": "hot"}, prime=requests([other])),
        ]

    def summary(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Hot lines carry how many times shorter the prefill is than the cold one's of the same round."""
        table = super().summary(rows)
        ok = rows[rows["status"] == "ok"]
        keys = ["variant", "tp", "context_len", "unique_len"]
        for key, group in ok.groupby(keys):
            states = {state: part.sort_values("round") for state, part in group.groupby("cache_state")}
            if len({len(part) for part in states.values()}) != 1 or set(states) != {"cold", "hot"}:
                continue
            ratio = paired_ratio(states["cold"]["prefill_s"].tolist(), states["hot"]["prefill_s"].tolist())
            line = (table[keys] == list(key)).all(axis=1) & (table["cache_state"] == "hot")
            for name, value in (("", ratio.value), ("_low", ratio.low), ("_high", ratio.high)):
                table.loc[line, f"speedup{name}"] = value
            table.loc[line, "speedup_over"] = "cold"
        return table

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        from experiments.plots import line_grid
        from experiments.tables import median_of

        table, over = self.summary(rows), median_of(rows)
        prefill = {
            f"prefill_ms{end}": 1e3 * table[f"prefill_s{end}"]
            for end in ("", "_low", "_high")
            if f"prefill_s{end}" in table
        }
        table = table.assign(**(prefill or {"prefill_ms": None}))
        common: dict[str, Any] = {
            "x": "context_len",
            "columns": "tp",
            "rows": "unique_len",
            "styles": "cache_state",
        }
        states = f"unrelated (cold), prefix cached (hot)\n{over}"
        return {
            "prefill": line_grid(
                table,
                y="prefill_ms",
                labels=("prompt length (tokens)", "prefill of all prompts (ms)"),
                title=f"Prefill of {rows['batch_size'].max()} prompts: {states}",
                **common,
            ),
            "ttft": line_grid(
                table,
                y="ttft_ms_p50",
                labels=("prompt length (tokens)", "time to first token, p50 (ms)"),
                title=f"Time to first token: {states}",
                **common,
            ),
        }


SUITE = PrefixCache()
