"""Every public parameter at its edges and beyond: the error names field, value and limit, and nobody else notices.

Numbers may be numpy's; numpy arrays and tensors serve as lists of token ids. A bool is never taken for a number.
"""

from __future__ import annotations

import collections
import gc
import math
import time
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams
from tests.engine.checkpoints import QWEN3, write_random_checkpoint, write_tokenizer
from tests.engine.fake_engine import make_engine, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"), QWEN3)
    return write_tokenizer(directory, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def llm(directory):
    with LLM(str(directory), device="cpu", num_kv_blocks=64, max_model_len=128) as llm:
        yield llm


def healthy(llm: LLM) -> tuple[int, ...]:
    return llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].token_ids


# --- prompts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        (1, 2, 3),
        range(1, 4),
        collections.deque([1, 2, 3]),
        [np.int64(1), np.int32(2), np.uint8(3)],
        np.array([1, 2, 3]),
        np.array([1, 2, 3], np.uint16),
        torch.tensor([1, 2, 3]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_sequence_of_integers_is_a_prompt(llm, prompt):
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == (1, 2, 3)
    assert {type(token) for token in output.prompt_token_ids} == {int}
    assert output.token_ids == healthy(llm)
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert output.token_ids == healthy(llm)


def test_rows_of_an_array_are_prompts(llm):
    outputs = llm.generate(np.array([[1, 2, 3], [1, 2, 3]]), GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == [healthy(llm)] * 2


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts must be text, token ids, or a sequence of those, got None"),
        (5, "prompts must be .* got 5"),
        (b"abc", "prompts must be .* got b'abc'"),
        ({"prompt": "x"}, "prompts must be .* got {'prompt': 'x'}"),
        ([None], "prompt must be text or a sequence of token ids, got None"),
        ([b"abc"], "prompt must be text or .* got b'abc'"),
        ([{1: 2}], "prompt must be text or .* got {1: 2}"),
        ([{1, 2}], "prompt must be text or .* got {1, 2}"),
        ([[1], 2], "prompt must be text or .* got 2"),
        ([1, [2]], r"each token id of prompt must be an integer, got \[2\]"),
        ([[1, "2"]], "each token id of prompt must be an integer, got '2'"),
        ([1.0, 2.0], "each token id of prompt must be an integer, got 1.0"),
        (np.array([1.0, 2.0]), "each token id of prompt must be an integer, got 1.0"),
        (torch.tensor([True]), "each token id of prompt must be an integer, got True"),
        ([[True]], "each token id of prompt must be an integer, got True"),
        ([1, 307], "prompt holds token id 307, outside the vocabulary of 307"),
        ([1, -1], "prompt holds token id -1, outside the vocabulary of 307"),
        ([[10**30]], "prompt holds token id 10{30}, outside the vocabulary of 307"),
        ([[]], "prompt is empty"),
        (np.array([[], []], np.int64), "prompt is empty"),
        ("", "prompt is empty"),
        ("a\ud800b", r"text holds the lone surrogate '\\ud800' at character 1"),
        ("\udfff", r"text holds the lone surrogate '\\udfff' at character 0"),
        ([1] * 128, "prompt has 128 tokens; max_model_len is 128"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(llm, prompts, message):
    expected = healthy(llm)
    waiting = llm.engine.add_request([1, 2, 3], GREEDY)
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    outputs = [output for _ in range(3) for output in llm.engine.step() if output.finished]
    assert [(output.request_id, output.token_ids) for output in outputs] == [(waiting, expected)]
    assert llm.engine.block_manager.num_free_blocks == 64


def test_no_prompts_have_no_outputs(llm):
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    assert llm.chat([], GREEDY, use_tqdm=False) == []


def test_control_characters_and_any_unicode_text_are_prompts(llm):
    text = "".join(map(chr, range(32))) + "\x7f\u200b\u202e\ufffd\ufffe\U0010ffff"
    (output,) = llm.generate(text, GREEDY, use_tqdm=False)
    assert bytes(b for b in text.encode()) == llm.tokenizer.decode(output.prompt_token_ids).encode()
    assert "".join(llm.stream(text, GREEDY)) == output.text


@pytest.mark.timeout(300)  # a second or two; what is not linear in the length would take hours
@pytest.mark.parametrize("prompt", ["ab c" * 250_000, [7] * 1_000_000], ids=["text", "ids"])
def test_a_megabyte_is_refused_in_time(llm, prompt):
    with pytest.raises(ValueError, match="prompt has 1000000 tokens; max_model_len is 128"):
        llm.generate([prompt], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("conversations", "message"),
    [
        ("hello", "conversations must be a list of messages.*got 'hello'"),
        (5, "conversations must be .* got 5"),
        ([{"role": "user", "content": "\ud800"}], "lone surrogate"),
        ([["hello"]], "a conversation must be a list of messages"),
        (["hello"], "a conversation must be a list of messages .* got 'hello'"),
        ([5], r"a conversation must be a list of messages .* got \[5\]"),
        ([{"role": "user", "content": "x"}, 5], "a conversation must be a list of messages"),
        ([[{"role": "user"}]], "prompt is empty"),
    ],
)
def test_what_is_no_conversation_is_refused(llm, conversations, message):
    with pytest.raises(ValueError, match=message):
        llm.chat(conversations, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("prompt", [None, 5, [], [307], "\ud800"])
def test_a_stream_is_refused_when_it_is_asked_for(llm, prompt):
    with pytest.raises(ValueError, match=r"prompt|surrogate"):
        llm.stream(prompt)
    assert not llm.engine.has_unfinished_requests()


# --- sampling parameters ------------------------------------------------------------------------------------


def test_numbers_may_be_numpys():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        top_p=np.float64(0.5),
        max_tokens=np.int32(7),
        seed=np.uint64(2**63),
        logprobs=np.int8(2),
        stop_token_ids=np.array([3, 4]),
    )
    assert params == SamplingParams(0.5, 5, 0.5, 7, seed=2**63, logprobs=2, stop_token_ids=(3, 4))
    assert {type(getattr(params, name)) for name in ("top_k", "max_tokens", "seed", "logprobs")} == {int}
    assert type(params.temperature) is float


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 10**400}, "temperature must be >= 0 and finite"),
        ({"temperature": -(10**400)}, "temperature must be >= 0 and finite"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"temperature": np.float32("nan")}, "temperature must be a number, got .*nan"),
        ({"temperature": 1j}, "temperature must be a number"),
        ({"top_p": math.nan}, "top_p must be a number, got nan"),
        ({"top_p": 10**400}, r"top_p must be in \(0, 1\]"),
        ({"top_p": True}, "top_p must be a number, got True"),
        ({"top_k": True}, "top_k must be an integer, got True"),
        ({"top_k": None}, "top_k must be an integer, got None"),
        ({"max_tokens": None}, "max_tokens must be an integer, got None"),
        ({"ignore_eos": np.True_}, "ignore_eos must be a bool"),
        ({"stop": None}, "stop must be a sequence, got None"),
        ({"stop": 5}, "stop must be a sequence, got 5"),
        ({"stop": b"END"}, "stop must hold non-empty strings"),
        ({"stop_token_ids": None}, "stop_token_ids must be a sequence, got None"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a sequence, got 5"),
        ({"stop_token_ids": [True]}, "stop_token_ids must be an integer, got True"),
        ({"seed": True}, "seed must be an integer, got True"),
        ({"logprobs": True}, "logprobs must be an integer, got True"),
    ],
)
def test_bad_sampling_parameters_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 5e-324},
        {"temperature": 1e-320, "top_k": 3},
        {"temperature": 1.7e308, "seed": 1},
        {"top_k": 10**30},
        {"top_p": 5e-324},
        {"top_p": math.nextafter(1, 0)},
        {"seed": 10**30},
        {"seed": -(10**30)},
        {"logprobs": 0},
        {"logprobs": 307},
        {"stop": [f"stop {i}" for i in range(1000)]},
        {"stop": "\ud800"},
        {"stop_token_ids": range(300, 307)},
    ],
)
def test_edges_run_and_leave_others_alone(llm, options):
    params = SamplingParams(**({"max_tokens": 3, "ignore_eos": True} | options))
    edge, neighbour = llm.generate([[1, 2, 3], [1, 2, 3]], [params, GREEDY], use_tqdm=False)
    assert edge.finish_reason in ("length", "stop")
    assert neighbour.token_ids == healthy(llm)
    if options.get("temperature", 1) < 1e-300 or options.get("top_p", 1) < 1e-300:
        assert edge.token_ids == healthy(llm)


def test_max_tokens_beyond_any_length_is_cut(llm):
    params = SamplingParams(temperature=0.0, max_tokens=10**30, ignore_eos=True)
    (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert (len(output.token_ids), output.finish_reason) == (125, "length")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (5, "sampling_params must be SamplingParams or a sequence of them, got 5"),
        ({"temperature": 0}, "sampling_params must be .* got {'temperature': 0}"),
        ([{"temperature": 0}], "params must be SamplingParams, got dict"),
        ([GREEDY, GREEDY], "sampling_params has 2 entries for 1 prompts"),
    ],
)
def test_what_are_no_sampling_parameters_is_refused(llm, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate([[1]], params, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


# --- requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", [5, b"x", [], ("a",)])
def test_a_request_id_is_text(request_id):
    core = make_engine()
    with pytest.raises(ValueError, match="request_id must be text"):
        core.add_request([1], GREEDY, request_id)
    assert not core.has_unfinished_requests()


def test_an_id_chosen_by_a_user_never_blocks_one_chosen_here():
    core = make_engine()
    ids = [core.add_request([1], GREEDY, f"request-{i}") for i in (1, 2, 3, 5)]
    ids += [core.add_request([1], GREEDY) for _ in range(4)]
    assert len(set(ids)) == 8
    assert set(run(core)) == set(ids)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (([1, 2], [307]), "continuation_ids holds token id 307, outside the vocabulary of 307"),
        (([-1, 2], [3]), "prompt_token_ids holds token id -1"),
        (([], [3]), "prompt_token_ids is empty"),
        (([1], []), "continuation_ids is empty"),
        (("text", [1]), "prompt_token_ids must be"),
        (([1] * 128, [1]), "forced_logits got 129 tokens; max_model_len is 128"),
    ],
)
def test_forced_logits_refuses_what_generate_would(llm, tokens, message):
    with pytest.raises(ValueError, match=message):
        llm.forced_logits(*tokens)
    assert llm.forced_logits(np.array([1, 2]), torch.tensor([3])).shape == (1, 307)


# --- the engine's options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_triton": 1}, "use_triton must be True, False or 'auto', got 1"),
        ({"overlap_scheduling": 0.0}, "overlap_scheduling must be True, False or 'auto', got 0.0"),
        ({"skip_tokenizer_init": "yes"}, "skip_tokenizer_init must be True or False, got 'yes'"),
        ({"tokenizer": 5}, "must be named by a directory or a hub id, got 5"),
        ({"tokenizer": ""}, "must be named by a directory or a hub id, got ''"),
        ({"num_kv_blocks": 10**13}, "num_kv_blocks is 10{13}.* bytes"),
        ({"num_kv_blocks": 10**30}, "num_kv_blocks is 10{30}.* bytes"),
        ({"max_model_len": 10**30}, "max_model_len is 10{30}, the model's max_position_embeddings is 512"),
        ({"max_num_seqs": 10**30}, "max_num_seqs must be at most"),
        ({"device": None}, "device must be 'auto'"),
        ({"device": "cpu:x"}, "device must be 'auto'"),
        ({"dtype": None}, "dtype must be one of"),
        ({"block_size": 10**9}, "no memory for KV"),
        ({"block_size": True}, "block_size must be an integer >= 1, got True"),
        ({"gpu_memory_utilization": math.nan}, r"gpu_memory_utilization must be in \(0, 1\], got nan"),
    ],
)
def test_bad_options_are_named(directory, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(str(directory), **({"device": "cpu"} | options))


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 1},
        {"block_size": 3},
        {"block_size": 4096},
        {"num_kv_blocks": 1},
        {"max_num_seqs": 1},
        {"max_num_seqs": 1_000_000},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 10**12},
        {"max_model_len": 512},
        {"max_model_len": 6},
        {"seed": -1},
        {"seed": 10**400},
    ],
)
def test_edges_of_the_options_run(directory, llm, options):
    with LLM(str(directory), device="cpu", **options) as other:
        assert healthy(other) == healthy(llm)


@pytest.mark.parametrize(
    "model",
    [5, None, b"abc", [], "", "a" * 5000, "a/" * 3000, "a\0b", "\ud800", "x\n", "~/../x", "a/../../b"],
)
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ValueError, match="model"):
        LLM(model, device="cpu")


# --- many requests ------------------------------------------------------------------------------------------


def admission_seconds(count: int, **options: Any) -> float:
    core = make_engine(num_kv_blocks=4000, max_num_seqs=256, **options)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    gc.collect()
    gc.disable()  # its passes over all live objects are not this test's subject
    start = time.process_time()
    ids = [core.add_request([i % 50, i % 7, i % 11], params) for i in range(count)]
    for request_id in reversed(ids[count // 2 :]):
        core.abort(request_id, report=False)
    ended = 0
    while core.has_unfinished_requests():
        ended += len(core.step_finished())
    seconds = time.process_time() - start
    gc.enable()
    assert ended == count // 2
    return seconds


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ten_thousand_requests_cost_no_more_each_than_a_thousand(overlap):
    """Queueing, aborting the later half from the end, and running the rest: linear in their number.

    The best of several: others on the machine only add to a time.
    """
    thousand, ten_thousand = (
        min(admission_seconds(count, overlap=overlap) for _ in range(tries))
        for count, tries in ((1000, 6), (10_000, 2))
    )
    assert ten_thousand < 30 * thousand
