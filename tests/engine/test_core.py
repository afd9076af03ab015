"""The step loop: outputs, stopping, aborts, errors, times (cases E1-E3, E6, W4, W5), over scripted executors."""

from __future__ import annotations

import pytest

from engine.sampling_params import SamplingParams
from engine.scheduling.step import SampledToken, StepInput
from tests.engine.fake_engine import alone, make_engine, run
from tests.engine.fake_executor import PagedHashExecutor, Ready


class ScriptedExecutor:
    """Gives each request the tokens of a script; None stands for logits that are not finite."""

    def __init__(self, script: list[int | None]) -> None:
        self.script = script
        self.given: dict[int, int] = {}

    def launch(self, step: StepInput) -> Ready:
        tokens = []
        for slot in (*step.decode_slots, *(chunk.slot for chunk in step.chunks if chunk.samples)):
            index = self.given.get(slot, 0)
            self.given[slot] = index + 1
            tokens.append(SampledToken(self.script[index]))
        return Ready(tokens)


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def scripted(script, params, eos=(), **options):
    core = make_engine(executor=ScriptedExecutor(script), eos_token_ids=eos, **options)
    core.add_request([1, 2, 3], params, "r")
    return run(core)["r"]


def test_e1_every_eos_id_ends_a_request():
    output = scripted([3, 4, 9, 6, 7], SamplingParams(max_tokens=5), eos=(5, 9))
    assert (output.token_ids, output.finish_reason) == ((3, 4, 9), "stop")


def test_e2_ignore_eos_ignores_all_of_them():
    output = scripted([3, 5, 9, 5, 9, 1, 2, 3, 4], SamplingParams(max_tokens=8, ignore_eos=True), eos=(5, 9))
    assert (len(output.token_ids), output.finish_reason) == (8, "length")


def test_e2_own_stop_ids_still_stop_under_ignore_eos():
    params = SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=[9])
    output = scripted([3, 5, 9, 5], params, eos=(5, 9))
    assert (output.token_ids, output.finish_reason) == ((3, 5, 9), "stop")


def test_e3_eos_on_the_last_allowed_token_is_a_stop():
    output = scripted([3, 4, 5], SamplingParams(max_tokens=3), eos=(5,))
    assert (output.token_ids, output.finish_reason) == ((3, 4, 5), "stop")


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([50], {}, "token id 50, outside the vocabulary of 50"),
        ([-1], {}, "token id -1, outside the vocabulary of 50"),
        ([1.5], {}, "each token id of prompt must be an integer, got 1.5"),
        ([True], {}, "each token id of prompt must be an integer, got True"),
        ("text", {}, "no tokenizer"),
        ([1], {"stop_token_ids": [50]}, "stop_token_ids holds 50"),
        ([1], {"stop": "END"}, "no tokenizer"),
        ([1], {"logprobs": 51}, "logprobs is 51, more than the vocabulary of 50"),
    ],
)
def test_e6_bad_requests_are_refused_and_a_healthy_one_completes(prompt, options, message):
    core = make_engine()
    core.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4), "healthy")
    core.step()
    with pytest.raises(ValueError, match=message):
        core.add_request(prompt, SamplingParams(**options))
    expected = alone([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4))
    assert run(core)["healthy"].token_ids == expected.token_ids


def test_a_request_id_in_use_is_refused_and_can_be_used_again_later():
    core = make_engine()
    core.add_request([1], SamplingParams(max_tokens=1), "r")
    with pytest.raises(ValueError, match="'r' is already in use"):
        core.add_request([2], SamplingParams(max_tokens=1), "r")
    run(core)
    core.add_request([2], SamplingParams(max_tokens=1), "r")
    assert run(core)["r"].prompt_token_ids == (2,)


def test_step_reports_what_changed_and_nothing_else():
    core = make_engine(max_num_batched_tokens=4)
    core.add_request([1, 2, 3, 4, 5, 6], SamplingParams(temperature=0.0, max_tokens=2), "r")
    assert core.step() == []  # a first chunk: nothing to show yet
    (first,) = core.step()
    assert (len(first.token_ids), first.finish_reason, first.finished) == (1, None, False)
    (last,) = core.step()
    assert (len(last.token_ids), last.finish_reason) == (2, "length")
    assert core.step() == []


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_abort_reports_what_it_had_and_frees_its_blocks(steps_before):
    core = make_engine(num_kv_blocks=8, block_size=4)
    core.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=10), "gone")
    core.add_request([4, 5], SamplingParams(temperature=0.0, max_tokens=10), "stays")
    for _ in range(steps_before):
        core.step()
    core.abort("gone")
    core.abort("gone")
    core.abort("never seen")
    core.block_manager.check_invariants()
    outputs = {output.request_id: output for output in core.step()}
    assert outputs["gone"].finish_reason == "abort"
    assert len(outputs["gone"].token_ids) == steps_before
    stays = run(core)["stays"]
    assert stays.token_ids == alone([4, 5], SamplingParams(temperature=0.0, max_tokens=10)).token_ids
    assert core.block_manager.num_free_blocks == 8


def test_logits_that_are_not_finite_end_only_their_request():
    class OneBadSlot(PagedHashExecutor):
        def launch(self, step):
            tokens = super().launch(step).result()
            slots = [*step.decode_slots, *(chunk.slot for chunk in step.chunks if chunk.samples)]
            bad = [slot == 0 and self.slots[slot].num_computed > 5 for slot in slots]
            return Ready([SampledToken(None) if is_bad else token for token, is_bad in zip(tokens, bad)])

    core = make_engine(executor=OneBadSlot(64, 16))
    core.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=6), "bad")
    core.add_request([4, 5], SamplingParams(temperature=0.0, max_tokens=6), "good")
    outputs = run(core)
    assert (outputs["bad"].finish_reason, len(outputs["bad"].token_ids)) == ("error", 3)
    assert "NaN" in outputs["bad"].error
    assert outputs["good"].token_ids == alone([4, 5], SamplingParams(temperature=0.0, max_tokens=6)).token_ids


def test_a_seeded_request_is_the_same_in_any_company():
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=123)
    expected = alone([7, 8, 9], params).token_ids
    core = make_engine()
    for i in range(5):
        core.add_request([i], SamplingParams(temperature=0.7, max_tokens=3 + i))
    core.step()
    core.add_request([7, 8, 9], params, "seeded")
    assert run(core)["seeded"].token_ids == expected


def test_unseeded_requests_draw_streams_of_their_own_from_the_engine_seed():
    def outputs(seed):
        core = make_engine(seed=seed)
        ids = [core.add_request([1, 2], SamplingParams(max_tokens=10)) for _ in range(2)]
        finished = run(core)
        return [finished[request_id].token_ids for request_id in ids]

    assert outputs(0) == outputs(0)
    assert outputs(0)[0] != outputs(0)[1]
    assert outputs(0) != outputs(1)


def test_w5_times_belong_to_the_request_that_they_describe():
    clock = FakeClock()

    class TickingExecutor(PagedHashExecutor):
        def launch(self, step):
            clock.now += 1.0
            return super().launch(step)

    core = make_engine(
        executor=TickingExecutor(3, 4), num_kv_blocks=3, block_size=4, clock=clock, record_token_times=True
    )
    core.add_request([1, 2, 3], SamplingParams(max_tokens=4), "first")
    core.step()
    clock.now += 0.5
    core.add_request([1, 2, 3, 4, 5, 6, 7, 8], SamplingParams(max_tokens=1), "late")
    outputs = run(core)
    first, late = outputs["first"].metrics, outputs["late"].metrics
    assert (first.arrival_time, first.first_token_time, first.last_token_time) == (0.0, 1.0, 4.5)
    assert first.token_times == (1.0, 2.5, 3.5, 4.5)
    assert late.arrival_time == 1.5
    assert late.first_token_time > first.first_token_time + 1
    assert late.first_token_time == late.last_token_time


def test_w4_recomputed_tokens_are_not_output():
    core = make_engine(num_kv_blocks=8, block_size=4, record_token_times=True, enable_prefix_caching=False)
    ids = [core.add_request([i] * 6, SamplingParams(temperature=0.0, max_tokens=20)) for i in range(4)]
    outputs = run(core)
    stats = core.stats()
    assert stats["num_preemptions"] == sum(outputs[i].num_preemptions for i in ids) > 0
    assert stats["num_output_tokens"] == 80
    assert all(len(outputs[i].metrics.token_times) == 20 for i in ids)
    assert stats["num_prefill_tokens"] > 24
    assert stats["num_free_kv_blocks"] == stats["num_kv_blocks"] == 8


def test_postponed_ends_are_reported_by_a_later_step():
    core = make_engine()
    core.add_request([1], SamplingParams(max_tokens=1), "r")
    ended = core.step()
    core.postpone(ended)
    assert core.step() == ended


class LosesItsWorkers(PagedHashExecutor):
    """Fails for good at the third step: when it is launched, or when its result is asked for."""

    failure: Exception | None = None

    def __init__(self, when: str) -> None:
        super().__init__(64, 16)
        self.when = when

    def launch(self, step):
        ready = super().launch(step)
        if len(self.steps) < 3:
            return ready
        if self.when == "launch":
            self.fail()
        return self

    def result(self):
        self.fail()

    def fail(self):
        self.failure = RuntimeError("rank 1 was killed")
        raise self.failure


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("when", ["launch", "result"])
def test_a_lost_executor_ends_every_request_with_what_it_had(when, overlap):
    core = make_engine(executor=LosesItsWorkers(when), overlap=overlap, max_num_seqs=2)
    for name in ("a", "b", "waiting"):
        core.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=9), name)
    core.add_request([1], SamplingParams(max_tokens=9), "aborted")
    core.abort("aborted")
    for _ in range(2 + (overlap and when == "result")):
        core.step()
    with pytest.raises(RuntimeError, match="rank 1 was killed"):
        core.step()
    assert not core.has_unfinished_requests()
    outputs = {output.request_id: output for output in core.step()}
    assert outputs.keys() >= {"a", "b", "waiting"}
    expected = alone([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=9)).token_ids
    for name in ("a", "b", "waiting"):
        assert (outputs[name].finish_reason, outputs[name].error) == ("error", "rank 1 was killed")
        assert outputs[name].token_ids == expected[: len(outputs[name].token_ids)]
    num_known = 1 if overlap and when == "launch" else 2
    assert [len(outputs[name].token_ids) for name in ("a", "b", "waiting")] == [num_known, num_known, 0]
    assert core.step() == []
    core.block_manager.check_invariants()
    assert core.block_manager.num_free_blocks == core.block_manager.num_blocks
    with pytest.raises(RuntimeError, match="takes no more requests: rank 1 was killed"):
        core.add_request([1], SamplingParams())


def test_ends_between_steps_are_not_lost_in_a_step_that_fails():
    core = make_engine(executor=LosesItsWorkers("launch"))
    core.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=9), "a")
    core.add_request([4], SamplingParams(temperature=0.0, max_tokens=9), "gone")
    core.step()
    core.step()
    core.abort("gone")
    with pytest.raises(RuntimeError):
        core.step()
    assert {output.request_id: output.finish_reason for output in core.step()} == {
        "a": "error",
        "gone": "abort",
    }
