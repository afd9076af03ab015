"""An engine that has shown the right greedy tokens, for points that then time it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.execution.workers import Workers
from experiments.backends.engine import EngineSetup
from experiments.backends.greedy import check_greedy, greedy_reference
from experiments.failures import IncorrectError, NotTimedError, UnsupportedError
from experiments.kernel_bench import INTERPRETED
from experiments.suites.protocol import Point, PointContext

if TYPE_CHECKING:
    from engine import LLM

CHECK_LENGTHS = (5, 33, 70)
CHECK_TOKENS = 8


@dataclass(frozen=True)
class CheckedEngine:
    """columns: what its rows say of the kernels that run and of the check."""

    llm: LLM
    columns: dict[str, Any]

    def peak_memory(self) -> dict[str, int]:
        """The column of the most memory that a GPU held since the engine was opened; nothing on a CPU."""
        if self.llm.runner.device.type != "cuda":
            return {}
        return {"peak_memory_bytes": max(report["device_peak_bytes"] for report in rank_reports(self.llm))}

    def num_captures(self) -> int:
        """CUDA graphs that were captured since the engine was opened: what a step that captures takes is its own."""
        return max(report["num_captures"] for report in rank_reports(self.llm))


def rank_reports(llm: LLM) -> list[dict[str, Any]]:
    """ModelRunner.report() of every rank, in rank order."""
    runner = llm.runner
    return runner.report() if isinstance(runner, Workers) else [runner.report()]


@contextmanager
def checked_engine(
    setup: EngineSetup,
    point: Point,
    context: PointContext,
    *,
    batch_size: int,
    longest: int,
    too_large: str | None = None,
    **options: Any,
) -> Iterator[CheckedEngine]:
    """Open the engine for batch_size sequences of `longest` tokens and compare its greedy tokens with the reference's.

    too_large: why a kernel that runs in Triton's interpreter is not to be tried, if so. Raises IncorrectError for
    other tokens, NotTimedError for an interpreted kernel that was correct or is not to be tried, UnsupportedError for
    sequences that the model has no positions for.
    """
    interpreted = decode_is_interpreted(setup, context.device)
    if interpreted and too_large is not None:
        raise NotTimedError(f"not run in Triton's interpreter: {too_large}")
    lengths, tokens = (CHECK_LENGTHS[:2], 3) if interpreted else (CHECK_LENGTHS, CHECK_TOKENS)
    longest = max(longest, max(lengths) + tokens + 1)
    limit = setup.model_config.max_position_embeddings
    if longest > limit:
        raise UnsupportedError(
            f"the point needs {longest} positions, the model's max_position_embeddings is {limit}"
        )
    reference = greedy_reference(setup, lengths, tokens, context.seed(point))
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(context.device)
    # The engine sizes its pool for these: no more than so many sequences of that length can use.
    sizes = {"max_model_len": longest, "max_num_seqs": max(batch_size, len(lengths))}
    with setup.open(**sizes, **options) as llm:
        llm.runner.capture_at_once(True)  # or no step with prompts would be checked as a graph
        check = check_greedy(llm, reference, setup.dtype_name)
        llm.runner.capture_at_once(False)
        kernels = llm.runner.kernels
        columns = {
            "decode_attention": kernels.decode.name,
            "prefill_attention": kernels.prefill.name,
            "tokens_checked": check.checked,
            "tokens_excused": check.excused,
        }
        if check.error is not None:
            raise IncorrectError(check.error, columns)
        if interpreted:
            raise NotTimedError(INTERPRETED, columns)
        llm.reset_prefix_cache()
        yield CheckedEngine(llm, columns)


def decode_is_interpreted(setup: EngineSetup, device: torch.device) -> bool:
    """Whether the variant's decode kernel would run in Triton's interpreter; "auto" never chooses such a one."""
    from experiments.decode_bench import DecodeBench
    from experiments.interpreter import is_interpreted

    if setup.variant.decode == "auto":
        return False
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
