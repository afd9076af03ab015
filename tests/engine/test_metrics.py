"""What requests and steps say of themselves, under a clock that only work moves (cases W4, W5)."""

from __future__ import annotations

import time

import pytest

from engine import LLM
from engine.outputs import RequestMetrics
from engine.sampling_params import SamplingParams
from tests.engine.checkpoints import QWEN3
from tests.engine.fake_engine import make_engine
from tests.engine.fake_executor import PagedHashExecutor

LAUNCH_S, WAIT_S = 0.25, 1.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedExecutor(PagedHashExecutor):
    """Launching takes LAUNCH_S and the result WAIT_S; the device says that it worked for 0.75 s after 0.5 s of rest."""

    def __init__(self, clock: Clock, *arguments: int) -> None:
        super().__init__(*arguments)
        self.clock = clock

    def launch(self, step):
        self.clock.now += LAUNCH_S
        return TimedResult(self.clock, super().launch(step).tokens)


class TimedResult:
    device_times = (None, None)

    def __init__(self, clock, tokens):
        self.clock, self.tokens = clock, tokens

    def result(self):
        self.clock.now += WAIT_S
        self.device_times = (0.75, 0.5)
        return self.tokens


def timed_engine(num_kv_blocks=64, **options):
    clock = Clock()
    block_size = options.setdefault("block_size", 4)
    executor = TimedExecutor(clock, num_kv_blocks, block_size)
    return clock, make_engine(executor=executor, num_kv_blocks=num_kv_blocks, clock=clock, **options)


def greedy(max_tokens):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def finish(core):
    outputs = {}
    while core.has_unfinished_requests():
        outputs |= {output.request_id: output for output in core.step() if output.finished}
    return outputs


def test_a_requests_times():
    clock, core = timed_engine(max_num_seqs=1, record_token_times=True)
    core.add_request([1, 2, 3], greedy(3), "first")
    clock.now += 2.0
    core.add_request([4, 5], greedy(2), "second")
    outputs = finish(core)
    first, second = outputs["first"].metrics, outputs["second"].metrics
    step_s = LAUNCH_S + WAIT_S
    assert (first.queue_s, first.ttft_s, first.tpot_s) == (2.0, 2.0 + step_s, step_s)
    assert first.inter_token_s == (step_s, step_s)
    assert (first.max_inter_token_s, first.latency_s) == (step_s, 2.0 + 3 * step_s)
    assert (first.num_output_tokens, first.num_cached_tokens, first.num_preemptions) == (3, 0, 0)
    assert (second.queue_s, second.ttft_s) == (3 * step_s, 4 * step_s)
    totals = core.stats()
    assert totals["num_first_tokens"] == 2
    assert totals["queue_s"] == first.queue_s + second.queue_s
    assert totals["ttft_s"] == first.ttft_s + second.ttft_s
    assert totals["inter_token_s"] == 3 * step_s


def test_what_has_not_happened_is_none():
    _, core = timed_engine(max_num_seqs=1)
    core.add_request([1], greedy(9), "running")
    core.add_request([2], greedy(9), "waiting")
    core.step()
    core.abort("running")
    core.abort("waiting")
    running, waiting = (output.metrics for output in core.step())
    assert (running.tpot_s, running.max_inter_token_s, running.inter_token_s) == (None, None, None)
    assert running.ttft_s == running.latency_s == LAUNCH_S + WAIT_S
    assert (waiting.queue_s, waiting.ttft_s, waiting.tpot_s, waiting.latency_s) == (None,) * 4
    assert waiting == RequestMetrics(arrival_time=0.0)


def test_the_longest_wait_for_a_token_shows_a_preemption():
    _, core = timed_engine(num_kv_blocks=8, enable_prefix_caching=False)
    ids = [core.add_request([i] * 6, greedy(20)) for i in range(4)]
    metrics = [output.metrics for output in map(finish(core).get, ids)]
    step_s = LAUNCH_S + WAIT_S
    assert metrics[0].max_inter_token_s == step_s
    preempted = [m for m in metrics if m.num_preemptions]
    assert preempted
    assert max(m.max_inter_token_s for m in preempted) > 2 * step_s
    for m in metrics:
        assert m.tpot_s * (m.num_output_tokens - 1) == pytest.approx(m.last_token_time - m.first_token_time)
        assert step_s <= m.tpot_s <= m.max_inter_token_s


@pytest.mark.parametrize("overlap", [False, True])
def test_a_steps_composition_and_times(overlap):
    _, core = timed_engine(overlap=overlap, max_num_seqs=2)
    prompt = list(range(9))
    steps = []

    def step():
        counted = core.totals.num_steps
        core.step()
        if core.totals.num_steps > counted:
            steps.append(core.last_step)

    core.add_request(prompt, greedy(1))
    while core.has_unfinished_requests():
        step()
    (first,) = steps
    assert (first.num_prefill_tokens, first.num_decode_tokens, first.num_admitted) == (9, 0, 1)
    assert (first.num_cached_tokens, first.num_waiting, first.num_free_kv_blocks) == (0, 0, 61)
    assert (first.host_s, first.wait_s) == (LAUNCH_S, WAIT_S)
    assert (first.device_s, first.device_idle_s) == (0.75, None)  # it had rested before
    for _ in range(3):
        core.add_request(prompt, greedy(3))
    while core.has_unfinished_requests():
        step()
    second, third = steps[1:3]
    assert (second.num_admitted, second.num_cached_tokens, second.num_prefill_tokens) == (2, 16, 2)
    assert (second.num_waiting, second.num_requests, second.device_idle_s) == (1, 2, None)
    assert (third.num_decode_tokens, third.num_admitted, third.num_waiting) == (2, 0, 1)
    assert (third.device_s, third.device_idle_s) == (0.75, 0.5)
    totals = core.stats()
    assert totals["num_steps"] == len(steps)
    assert totals["host_s"] == LAUNCH_S * len(steps)
    assert totals["wait_s"] == WAIT_S * len(steps)
    assert totals["device_s"] == 0.75 * len(steps)
    assert totals["device_idle_s"] == 0.5 * (len(steps) - 2)
    assert totals["num_hit_tokens"] == 24
    assert totals["num_cached_tokens"] == 24


def test_hits_are_counted_at_every_admission():
    _, core = timed_engine(num_kv_blocks=8)
    for i in range(3):
        core.add_request([i] * 6, greedy(18))
    finish(core)
    stats = core.stats()
    assert stats["num_preemptions"] > 0
    assert stats["num_hit_tokens"] > stats["num_cached_tokens"] == 0


def test_a_cpu_has_no_clock_of_its_own():
    options = {"device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True, "num_kv_blocks": 64}
    with LLM(QWEN3, **options) as llm:
        (output,) = llm.generate([[1, 2, 3]], greedy(4), use_tqdm=False)
        assert output.metrics.ttft_s > 0 < output.metrics.tpot_s
        last = llm.engine.last_step
        assert (last.device_s, last.device_idle_s) == (None, None)
        assert 0 < last.host_s < last.duration_s
        assert llm.stats()["device_s"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"overlap_scheduling": False}], ids=str)
def test_the_device_times_its_steps(options):
    model = QWEN3 | {"head_dim": 64, "hidden_size": 1024, "num_hidden_layers": 8}
    options = options | {"load_format": "dummy", "skip_tokenizer_init": True, "num_kv_blocks": 512}
    with LLM(model, device="cuda", **options) as llm:
        prompts = [[i] * 20 for i in range(8)]
        for _ in range(2):  # the first compiles
            before, start = llm.stats(), time.perf_counter()
            llm.generate(prompts, greedy(50), use_tqdm=False)
            elapsed_s = time.perf_counter() - start
        stats = {name: value - before[name] for name, value in llm.stats().items() if name.endswith("_s")}
        busy_s, idle_s = stats["device_s"], stats["device_idle_s"]
        assert busy_s > 0
        assert idle_s >= 0
        assert 0.5 * elapsed_s < busy_s + idle_s < 1.01 * elapsed_s
        assert stats["host_s"] + stats["wait_s"] < elapsed_s
