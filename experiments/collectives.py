"""What of a decode step the ranks spend in collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine import LLM

WARM_UP_STEPS = 3


def collective_columns(llm: LLM, prompts: Sequence[Sequence[int]], num_steps: int = 8) -> dict[str, float]:
    """The columns of collectives, of decode steps of these prompts on rank 0.

    collective_us: in collectives, waiting for other ranks included; collective_step_us: the whole step;
    collective_share: the one over the other. Measured apart from what is timed: over NCCL it takes a profiler, which
    slows the host, so collective_step_us may be above time_us, and the share below that of a step without profiler.
    The prompts must fit in the pool with as many tokens as steps; those in the prefix cache cost no prefill.
    """
    from engine import SamplingParams

    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=len(prompts) + 2 * num_steps, ignore_eos=True)
    names = [engine.add_request(prompt, params) for prompt in prompts]
    left = WARM_UP_STEPS
    try:
        while left:
            engine.step_finished()
            last = engine.last_step
            left -= last.num_decode_tokens == len(prompts) and not last.num_prefill_tokens
        # Between the two, as many steps start as are stepped: starting waits for the one that is under way.
        llm.runner.start_collective_timer()
        for _ in range(num_steps):
            engine.step_finished()
        seconds, elapsed_s = llm.runner.stop_collective_timer()
    finally:
        for name in names:
            engine.abort(name, report=False)
    return {
        "collective_us": 1e6 * seconds / num_steps,
        "collective_step_us": 1e6 * elapsed_s / num_steps,
        "collective_share": seconds / elapsed_s,
    }
