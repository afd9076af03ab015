"""What the host makes of sampled tokens and their log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch

from engine import LLM, SamplingParams
from engine.execution.batch_state import SamplingKind
from engine.execution.sampler import PendingTokens, choose_tokens
from kernels import sampling, sampling_triton
from kernels.slot_state import DrawSettings
from tests.engine.checkpoints import LLAMA


@pytest.mark.parametrize(("module", "use_triton"), [(sampling, False), (sampling_triton, True)])
def test_tokens_are_chosen_on_the_path_asked_for(monkeypatch, module, use_triton):
    for each in (sampling, sampling_triton):
        for name in ("greedy", "sample"):
            monkeypatch.setattr(each, name, lambda *_, each=each, name=name, **options: (each, name, options))
    logits = torch.zeros(1, 5)
    settings = DrawSettings(*torch.ones(4, 1, dtype=torch.float64))
    chosen, name, _ = choose_tokens(logits, None, SamplingKind(), use_triton=use_triton)
    assert (chosen, name) == (module, "greedy")
    kind = SamplingKind(any_drawn=True, any_top_k=True)
    chosen, name, options = choose_tokens(logits, settings, kind, use_triton=use_triton)
    assert (chosen, name) == (module, "sample")
    if use_triton:
        assert (options["any_top_k"], options["any_top_p"]) == (True, False)


def test_token_0_is_a_token_and_only_a_marked_row_has_none():
    pending = PendingTokens(torch.tensor([0, -1, 3]), torch.zeros(3, 5), [])
    assert [token.token_id for token in pending.result()] == [0, None, 3]
    assert all(token.logprobs is None for token in pending.result())


def test_each_row_has_its_likeliest_and_its_chosen_token():
    """Row 0 chose the last of five and wants two, row 2 wants one and has it, row 3 is not finite, row 1 wants none."""
    logits = torch.tensor([[2.0, 4.0, 3.0, 1.0, 5.0], [0.0] * 5, [9.0, 0.0, 0.0, 0.0, 0.0], [math.nan] * 5])
    pending = PendingTokens(torch.tensor([3, 4, 0, -1]), logits, [(0, 2), (2, 1), (3, 1)])
    first, unasked, third, spoilt = pending.result()
    exact = logits.double().log_softmax(-1)
    assert list(first.logprobs) == [4, 1, 3]
    assert first.logprobs == pytest.approx({token: float(exact[0, token]) for token in (4, 1, 3)}, rel=1e-6)
    assert third.logprobs == pytest.approx({0: float(exact[2, 0])}, abs=1e-6)
    assert unasked.logprobs is None
    assert spoilt.token_id is None


def test_the_span_ends_when_tokens_leave_and_is_read_with_the_result():
    class Span:
        ended = False

        def end(self):
            self.ended = True

        def wait(self):
            return 0.25, 0.5

    span = Span()
    pending = PendingTokens(torch.tensor([1]), None, [], span)
    assert span.ended
    assert pending.device_times == (None, None)
    pending.result()
    assert pending.device_times == (0.25, 0.5)


def test_only_a_temperature_of_0_is_greedy():
    """Ten seeds give ten continuations when tokens are drawn, and one when they are not, also in one batch."""
    options = {"load_format": "dummy", "device": "cpu", "num_kv_blocks": 80, "skip_tokenizer_init": True}
    drawn, greedy = (
        [SamplingParams(temperature=t, max_tokens=6, seed=seed, ignore_eos=True) for seed in range(10)]
        for t in (1.0, 0.0)
    )
    with LLM(LLAMA, **options) as llm:
        for params in (drawn, greedy, drawn + greedy):
            outputs = llm.generate([[1, 2, 3]] * len(params), params, use_tqdm=False)
            for temperature, expected in ((1.0, 10), (0.0, 1)):
                found = {o.token_ids for o, p in zip(outputs, params) if p.temperature == temperature}
                assert len(found) in (0, expected)
