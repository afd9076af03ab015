"""One step ahead: what is preempted, ended or lost while a step is under way (cases P7 and S1's kind, with overlap)."""

from __future__ import annotations

import pytest

from engine.sampling_params import SamplingParams
from engine.scheduling.step import SampledToken
from tests.engine.fake_engine import alone, make_engine, run
from tests.engine.fake_executor import PagedHashExecutor, Ready


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


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_num_seqs", [2, 5])
@pytest.mark.parametrize("num_kv_blocks", [6, 8])
def test_every_preemption_is_counted(overlap, max_num_seqs, num_kv_blocks):
    """Also one that leaves nothing to launch until the step under way is collected."""
    core = make_engine(
        overlap=overlap,
        num_kv_blocks=num_kv_blocks,
        block_size=5,
        max_num_batched_tokens=8,
        max_num_seqs=max_num_seqs,
    )
    ids = [core.add_request(range(n, 2 * n), greedy(12)) for n in (1, 2, 5, 17, 1, 3, 2)]
    outputs, by_step = {}, 0
    while core.has_unfinished_requests():
        before = core.totals.num_steps
        outputs |= {output.request_id: output for output in core.step()}
        by_step += core.last_step.num_preempted if core.totals.num_steps > before else 0
    preempted = sum(outputs[request_id].num_preemptions for request_id in ids)
    assert core.stats()["num_preemptions"] == by_step == preempted > 0


class FailingExecutor(PagedHashExecutor):
    """Fails in its nth launch, or when that launch's result is asked for: out of memory, Ctrl-C, a lost worker."""

    def __init__(self, num_blocks: int, block_size: int, nth: int, when: str) -> None:
        super().__init__(num_blocks, block_size)
        self.nth, self.when = nth, when

    def launch(self, step):
        fails = len(self.steps) == self.nth
        if fails and self.when == "launch":
            self.steps.append(step)
            raise MemoryError("no memory")
        ready = super().launch(step)
        return FailingResult() if fails else ready


class FailingResult:
    def result(self):
        raise MemoryError("no memory")


@pytest.mark.parametrize("when", ["launch", "result"])
@pytest.mark.parametrize("nth", range(0, 10, 2))
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_kv_blocks", [9, 40])
def test_a_step_that_fails_is_done_again(when, nth, overlap, num_kv_blocks):
    executor = FailingExecutor(num_kv_blocks, 4, nth, when)
    core = make_engine(
        executor=executor,
        num_kv_blocks=num_kv_blocks,
        block_size=4,
        max_num_batched_tokens=6,
        overlap=overlap,
    )
    prompts = [list(range(n, 2 * n)) for n in (9, 5, 9)]
    params = [SamplingParams(temperature=t, max_tokens=8, seed=3) for t in (0.0, 1.0, 1.0)]
    ids = [core.add_request(prompt, p) for prompt, p in zip(prompts, params)]
    outputs, failures = {}, 0
    for _ in range(500):
        if not core.has_unfinished_requests():
            break
        try:
            outputs |= {output.request_id: output for output in core.step() if output.finished}
        except MemoryError:
            failures += 1
            assert not core.scheduler.running
            arrivals = [request.arrival for request in core.scheduler.waiting]
            assert arrivals == sorted(arrivals)
        core.block_manager.check_invariants()
    assert failures == 1
    for request_id, prompt, p in zip(ids, prompts, params):
        assert outputs[request_id].token_ids == alone(prompt, p, block_size=4).token_ids
    assert core.block_manager.num_free_blocks == num_kv_blocks
    assert core.stats()["num_preemptions"] == sum(output.num_preemptions for output in outputs.values())


@pytest.mark.parametrize("overlap", [False, True])
def test_kv_that_led_to_an_error_serves_nobody_else(overlap):
    """P7's kind: a prefix poisoned by a passing fault (a bit flip, an overflow) would be served for ever."""

    class BadOnce(PagedHashExecutor):
        bad = True

        def launch(self, step):
            tokens = super().launch(step).result()
            if self.bad and tokens:
                self.bad = False
                return Ready([SampledToken(None)] * len(tokens))
            return Ready(tokens)

    core = make_engine(executor=BadOnce(64, 4), block_size=4, max_num_batched_tokens=8, overlap=overlap)
    prompt = list(range(20))
    core.add_request(prompt, greedy(2), "bad")
    bad = run(core)["bad"]
    assert (bad.finish_reason, bad.token_ids) == ("error", ())
    core.add_request(prompt, greedy(2), "good")
    good = run(core)["good"]
    assert good.num_cached_tokens == 0
    assert good.token_ids == alone(prompt, greedy(2), block_size=4).token_ids
