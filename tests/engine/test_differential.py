"""The whole engine, differentially: any mix of requests in any configuration, against each request alone.

Tokens must be identical, in fp64 on the CPU: greedy and seeded requests, whatever the batch, the blocks, the schedule,
the cache, the chunks, the preemptions, and the steps that overlap. In fp32 logits differ by 3e-7 from batch to batch,
and of a run's 9,000 random tokens one in a million is that near to another: one run in a hundred would fail without a
fault. In fp64 it is one in 10^10.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import LLM, RequestOutput, SamplingParams
from engine import config as engine_config
from kernels import prefill
from kernels.prefill.reference import ReferencePrefill
from tests.engine.checkpoints import QWEN3, write_random_checkpoint

MODEL = QWEN3 | {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 101}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
MAX_LEN = 48
EOS = (5, 9)
SHARED = [(7 * i + 3) % 101 for i in range(30)]
"""What prompts begin with, so that they share prefixes of every length."""


class ExactPrefill(ReferencePrefill):
    """The reference, with its intermediates in fp64 too."""

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        return super().__call__(*args, compute_dtype=torch.float64, **options)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where the checkpoint is, while engines can be asked for fp64, which is nothing for users."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engine_config.DTYPES, "float64", torch.float64)
        patch.setitem(prefill._registry._kernels, "reference", ExactPrefill())
        yield write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"), MODEL, eos_token_id=list(EOS))
    torch.set_num_threads(before)


class Alone:
    """What each request gives in an engine that runs it alone: no cache, no chunks, no company. Remembered."""

    def __init__(self, directory: Any) -> None:
        self.llm = LLM(
            directory,
            device="cpu",
            dtype=torch.float64,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            decode_attention="reference",
            prefill_attention="reference",
            num_kv_blocks=8,
            max_model_len=MAX_LEN,
        )
        self.known: dict[Any, RequestOutput] = {}

    def output(self, prompt: tuple[int, ...], params: SamplingParams) -> RequestOutput:
        key = (prompt, params)
        if key not in self.known:
            [self.known[key]] = self.llm.generate([prompt], params, use_tqdm=False)
        return self.known[key]


@pytest.fixture(scope="module")
def alone(directory):
    return Alone(directory)


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, tuple[int, ...], SamplingParams, int | None]:
    """(steps before it arrives, prompt, parameters, steps after which it is aborted or None)."""
    tail = draw(st.lists(st.integers(0, 100), min_size=1, max_size=14))
    prompt = (*SHARED[: draw(st.integers(0, 30))], *tail)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.5])),
        top_k=draw(st.sampled_from([-1, 1, 5, 200])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.3])),
        max_tokens=draw(st.integers(1, 16)),
        seed=draw(st.integers(0, 2)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (11,), (50, 51, 52)])),
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
    )
    return draw(st.integers(0, 12)), prompt, params, draw(st.none() | st.none() | st.integers(0, 10))


@st.composite
def mixes(draw: st.DrawFn, max_size: int) -> list[tuple[int, tuple[int, ...], SamplingParams, int | None]]:
    """Requests, some of them in several copies: equal prompts of one step have copies of the same blocks."""
    chosen = draw(st.lists(st.tuples(requests(), st.integers(1, 3)), min_size=1, max_size=max_size))
    return [request for request, copies in chosen for _ in range(copies)]


CONFIGS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4, 16]),
        "max_num_batched_tokens": st.sampled_from([1, 5, 16, 512]),
        "max_num_seqs": st.integers(1, 6),
        "scheduling": st.sampled_from(["mixed", "prefill_first"]),
        "enable_prefix_caching": st.booleans(),
        "enable_chunked_prefill": st.booleans(),
        "overlap_scheduling": st.booleans(),
        "decode_attention": st.sampled_from(["torch", "torch", "reference"]),
        "prefill_attention": st.sampled_from(["torch", "torch", "reference"]),
    }
)


def check_mix(alone: Alone, directory: Any, config: dict[str, Any], slack: int, mix: list[Any]) -> None:
    num_kv_blocks = (
        -(-MAX_LEN // config["block_size"]) + slack
    )  # any one fits; together they preempt each other
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.float64, "skip_tokenizer_init": True}
    options |= {"max_model_len": MAX_LEN, "num_kv_blocks": num_kv_blocks}
    with LLM(directory, **options, **config) as llm:
        llm.runner.kv_cache.fill_(float("nan"))
        engine, live, outputs = llm.engine, {}, {}
        pending = sorted(enumerate(mix), key=lambda item: item[1][0])
        aborts = {}
        for step in range(5000):
            while pending and (pending[0][1][0] <= step or not engine.has_unfinished_requests()):
                index, (_, prompt, params, abort_after) = pending.pop(0)
                try:
                    live[engine.add_request(prompt, params)] = index
                except ValueError as error:
                    refusal = str(error)
                    assert "max_num_batched_tokens" in refusal
                    assert not config["enable_chunked_prefill"]
                    continue
                if abort_after is not None:
                    aborts[list(live)[-1]] = step + abort_after
            if not pending and not engine.has_unfinished_requests():
                break
            for request_id, when in aborts.items():
                if when == step:
                    engine.abort(request_id)
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output
            engine.block_manager.check_invariants()
        for output in engine.step():
            outputs[output.request_id] = output
        assert not engine.has_unfinished_requests()
        assert engine.block_manager.num_free_blocks == num_kv_blocks
        assert set(outputs) == set(live)
    for request_id, index in live.items():
        _, prompt, params, _ = mix[index]
        expected, output = alone.output(prompt, params), outputs[request_id]
        if output.finish_reason == "abort":
            assert output.token_ids == expected.token_ids[: len(output.token_ids)]
        else:
            assert output.token_ids == expected.token_ids
            assert output.finish_reason == expected.finish_reason
        if params.logprobs is not None:
            for row, other in zip(output.logprobs, expected.logprobs):
                assert row == pytest.approx(other, abs=1e-4)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=CONFIGS, slack=st.integers(0, 8), mix=mixes(max_size=5))
def test_any_mix_in_any_configuration_equals_each_request_alone(alone, directory, config, slack, mix):
    check_mix(alone, directory, config, slack, mix)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=CONFIGS, slack=st.integers(0, 8), mix=mixes(max_size=8))
def test_many_mixes_equal_each_request_alone(alone, directory, config, slack, mix):
    check_mix(alone, directory, config, slack, mix)
