"""One step ahead: what is preempted, ended or lost while a step is under way (cases P7 and S1's kind, with overlap)."""

from __future__ import annotations

import pytest

from engine.sampling_params import SamplingParams
from tests.engine.fake_engine import alone, make_engine, run


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("num_kv_blocks", range(6, 16))
@pytest.mark.parametrize("budget", [3, 64])
def test_a_request_preempted_with_its_token_under_way_is_not_readmitted_in_that_step(
    block_size, num_kv_blocks, budget
):
    """Equal prompts of one step: the later one's blocks are copies, so its prefix stays cached when it is preempted."""
    core = make_engine(
        overlap=True, num_kv_blocks=num_kv_blocks, block_size=block_size, max_num_batched_tokens=budget
    )
    prompt = list(range(5))
    ids = []
    for _ in range(2):
        try:
            ids.append(core.add_request(prompt, greedy(12)))
        except ValueError:
            return  # the pool is too small for one of them
    outputs = run(core, max_steps=500)
    expected = alone(prompt, greedy(12), block_size=block_size).token_ids
    assert [outputs[i].token_ids for i in ids] == [expected] * 2
