"""The whole engine against Transformers: the same greedy ids, whatever the batch, the blocks and the schedule."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from engine import LLM, SamplingParams
from kernels import prefill
from tests.engine.checkpoints import LLAMA, QWEN3, reference_model, write_random_checkpoint
from tests.engine.greedy_reference import reference_ids, uneven_prompts

NUM_NEW = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
MODELS = {
    "qwen3 tied": (QWEN3, {}),
    "qwen3 untied sharded": (QWEN3 | {"tie_word_embeddings": False}, {"max_shard_size": "40KB"}),
    "llama": (LLAMA, {}),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """These models are too small to share: threads only cost."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """By name, (directory, prompts, Transformers' ids) of a small random model, each made once."""

    @functools.cache
    def make(name):
        config, options = MODELS[name]
        directory = write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"), config, **options)
        prompts = uneven_prompts(config["vocab_size"])
        model = reference_model(directory)
        return directory, prompts, [reference_ids(model, prompt, NUM_NEW) for prompt in prompts]

    return make


@pytest.fixture(params=sorted(MODELS))
def checkpoint(request, checkpoints):
    return checkpoints(request.param)


def ids_of(directory, prompts, params=GREEDY, **options) -> tuple[list[tuple[int, ...]], LLM]:
    llm = LLM(str(directory), device="cpu", skip_tokenizer_init=True, **options)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.block_manager.check_invariants()
    assert llm.engine.block_manager.num_free_blocks == llm.engine.block_manager.num_blocks
    return [output.token_ids for output in outputs], llm


KERNELS = list(itertools.product(("torch", "reference"), ("torch", "reference")))


def cases() -> list:
    """Models, block sizes, budgets, caching and policies, each with one of the four pairs of kernels.

    Every two settings meet in those that run by default, for one model by itself; the others are slow.
    """
    found = []
    settings = itertools.product(range(3), range(3), range(2), range(2))
    for (model, name), (block, budget, caching, policy) in itertools.product(enumerate(MODELS), settings):
        usual = caching == (block + budget) % 2 and policy == (block + budget) // 2 % 2
        usual = usual and model in (0, (block + 2 * budget) % 3)
        decode, prefill = KERNELS[(budget + caching + 2 * policy) % len(KERNELS)]
        case = ((1, 4, 16)[block], (1, 7, 64)[budget], caching == 0, ("mixed", "prefill_first")[policy])
        found.append(pytest.param(name, *case, decode, prefill, marks=[] if usual else pytest.mark.slow))
    return found


@pytest.mark.parametrize(
    ("checkpoint", "block_size", "budget", "caching", "policy", "decode", "prefill"),
    cases(),
    indirect=["checkpoint"],
)
def test_batched_ids_equal_transformers_one_by_one(
    checkpoint, block_size, budget, caching, policy, decode, prefill
):
    directory, prompts, expected = checkpoint
    if budget == 1:  # one token a step is slow
        prompts, expected = prompts[:6], expected[:6]
    ids, llm = ids_of(
        directory,
        prompts,
        block_size=block_size,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        scheduling=policy,
        decode_attention=decode,
        prefill_attention=prefill,
        num_kv_blocks=-(-400 // block_size),  # a quarter of what all of them need: they preempt each other
    )
    assert ids == expected
    stats = llm.stats()
    if budget == 64:
        assert stats["num_preemptions"] > 0
        assert (stats["num_cached_tokens"] > 0) is caching


def test_a_roomy_pool_gives_the_same_without_preemption(checkpoint):
    directory, prompts, expected = checkpoint
    ids, llm = ids_of(directory, prompts)
    assert ids == expected
    assert llm.stats()["num_preemptions"] == 0


@pytest.mark.parametrize(
    ("checkpoint", "decode"),
    [
        ("qwen3 tied", "split_kv"),
        ("llama", "single_pass"),
        pytest.param("qwen3 untied sharded", "split_kv", marks=pytest.mark.slow),
        pytest.param("llama", "split_kv", marks=pytest.mark.slow),
        pytest.param("qwen3 tied", "single_pass", marks=pytest.mark.slow),
    ],
    indirect=["checkpoint"],
)
def test_triton_kernels_in_the_interpreter_give_the_same(checkpoint, decode):
    directory, prompts, expected = checkpoint
    ids, _ = ids_of(
        directory,
        prompts[:2],
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
        decode_attention=decode,
        prefill_attention="triton",
        use_triton=True,
        max_model_len=64,
        max_num_batched_tokens=48,
    )
    assert ids == [tokens[:3] for tokens in expected[:2]]


def test_unwritten_kv_never_reaches_a_result(checkpoint):
    directory, prompts, expected = checkpoint
    llm = LLM(str(directory), device="cpu", skip_tokenizer_init=True, num_kv_blocks=60, block_size=16)
    llm.runner.kv_cache.fill_(float("nan"))
    outputs = llm.generate(prompts[:8], GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == expected[:8]


def test_forced_logits_are_those_of_transformers(checkpoint):
    directory, prompts, expected = checkpoint
    llm = LLM(str(directory), device="cpu", skip_tokenizer_init=True, max_num_batched_tokens=32)
    prompt, continuation = prompts[2], list(expected[2][:10])
    logits = llm.forced_logits(prompt, continuation)
    with torch.inference_mode():
        theirs = reference_model(directory)(torch.tensor([prompt + continuation])).logits[
            0, len(prompt) - 1 : -1
        ]
    torch.testing.assert_close(logits, theirs, atol=2e-5, rtol=0)
    assert llm.engine.block_manager.num_free_blocks == llm.engine.block_manager.num_blocks


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(directory, eos) of a small Qwen3 whose generation_config lists two EOS ids."""
    return write_random_checkpoint(tmp_path_factory.mktemp("tiny"), QWEN3, eos_token_id=[5, 9])


@pytest.fixture
def tiny_llm(tiny):
    with LLM(str(tiny), device="cpu", skip_tokenizer_init=True, num_kv_blocks=64, max_model_len=128) as llm:
        yield llm


@pytest.mark.parametrize("decode", ["split_kv_fused", "fixed_split", "stream_k", "shared_prefix"])
def test_the_other_triton_kernels_in_the_interpreter_give_the_same(tiny, tiny_llm, decode):
    prompts = [[7, 8, 9], list(range(40))]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    expected = tiny_llm.generate(prompts, params, use_tqdm=False)
    ids, _ = ids_of(tiny, prompts, params, decode_attention=decode, num_kv_blocks=64, max_model_len=128)
    assert ids == [output.token_ids for output in expected]


def test_generate_keeps_the_order_of_prompts_and_takes_params_for_each(tiny_llm):
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    outputs = tiny_llm.generate([[1, 2], [3], [4, 5, 6]], params, use_tqdm=False)
    assert [len(output.token_ids) for output in outputs] == [9, 1, 5]
    assert [output.prompt_token_ids for output in outputs] == [(1, 2), (3,), (4, 5, 6)]
    (single,) = tiny_llm.generate([1, 2], params[0], use_tqdm=False)
    assert single.token_ids == outputs[0].token_ids
    with pytest.raises(ValueError, match="sampling_params has 3 entries for 1 prompts"):
        tiny_llm.generate([[1]], params)


def test_one_bad_prompt_refuses_the_call_and_leaves_others_alone(tiny_llm):
    tiny_llm.engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=3), "mine")
    with pytest.raises(ValueError, match="outside the vocabulary"):
        tiny_llm.generate([[1], [999_999]], use_tqdm=False)
    outputs = []
    while tiny_llm.engine.has_unfinished_requests():
        outputs += tiny_llm.engine.step()
    assert {output.request_id for output in outputs} == {"mine"}


def test_generate_does_not_swallow_the_ends_of_others(tiny_llm):
    tiny_llm.engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=2), "mine")
    tiny_llm.generate(
        [[4, 5]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False
    )
    (mine,) = tiny_llm.engine.step()
    assert (mine.request_id, mine.finished) == ("mine", True)


def test_logprobs_are_the_models_own_before_temperature_and_filters(tiny_llm):
    params = SamplingParams(temperature=0.5, top_k=3, max_tokens=4, logprobs=5, seed=1, ignore_eos=True)
    (output,) = tiny_llm.generate([[1, 2, 3]], params, use_tqdm=False)
    expected = torch.log_softmax(tiny_llm.forced_logits([1, 2, 3], output.token_ids), dim=-1)
    for token, logprobs, row in zip(output.token_ids, output.logprobs, expected):
        assert token in logprobs
        assert len(logprobs) in (5, 6)
        for token_id, value in logprobs.items():
            assert value == pytest.approx(row[token_id].item(), abs=1e-4)


def test_a_seeded_request_is_the_same_alone_and_in_company(tiny_llm):
    params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=16, seed=11, ignore_eos=True)
    (alone,) = tiny_llm.generate([[7, 8, 9]], params, use_tqdm=False)
    crowd = [[i, i + 1] for i in range(10)]
    others = SamplingParams(temperature=1.3, top_k=20, max_tokens=20, ignore_eos=True)
    outputs = tiny_llm.generate([*crowd, [7, 8, 9]], [others] * 10 + [params], use_tqdm=False)
    assert outputs[-1].token_ids == alone.token_ids


YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}


@pytest.mark.parametrize("rope", [{}, YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torchs_default_device_and_dtype_are_not_the_engines(rope, dtype):
    """torch.set_default_device("cuda") is common in notebooks; "meta" shows on a CPU what follows it."""

    def generate():
        with LLM(QWEN3 | rope, load_format="dummy", device="cpu", num_kv_blocks=8, dtype=dtype) as llm:
            outputs = llm.generate([[5, 6, 7]], [SamplingParams(seed=1, max_tokens=6, logprobs=1)], False)
            return outputs[0].token_ids, outputs[0].logprobs, llm.forced_logits([5, 6], [7, 8]).tolist()

    expected = generate()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        assert generate() == expected
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("use_triton", [False, True])
def test_autocast_around_a_call_changes_nothing(tiny, use_triton):
    options = {"device": "cpu", "skip_tokenizer_init": True, "num_kv_blocks": 8, "use_triton": use_triton}
    with LLM(str(tiny), **options) as llm:

        def generate():
            outputs = llm.generate([[5, 6, 7]], SamplingParams(seed=1, max_tokens=2, logprobs=1), False)
            return outputs[0].token_ids, outputs[0].logprobs, llm.forced_logits([5, 6], [7, 8]).tolist()

        expected = generate()
        with torch.autocast("cpu", torch.bfloat16):
            assert generate() == expected


def test_a_mapping_with_dummy_weights_runs_and_repeats():
    def ids(seed):
        with LLM(QWEN3, load_format="dummy", device="cpu", num_kv_blocks=16, seed=seed) as llm:
            return llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)

    assert ids(0)[0].token_ids == ids(0)[0].token_ids != ids(1)[0].token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_attention": "nope"}, r"decode_attention: .*nope.*single_pass.*split_kv"),
        ({"prefill_attention": "nope"}, r"prefill_attention: .*nope.*triton"),
        ({"prefill_attention": "flash_varlen"}, r"prefill_attention 'flash_varlen' does not run on cpu here"),
        ({"device": "cuda:99"}, r"device is 'cuda:99', but \d+ CUDA device"),
        ({"device": "gpu"}, r"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
        ({"dtype": "int8"}, r"dtype must be one of auto, float32, float16, bfloat16, got 'int8'"),
        ({"block_size": 0}, r"block_size must be an integer >= 1, got 0"),
        ({"max_num_seqs": 0}, r"max_num_seqs must be an integer >= 1, got 0"),
        ({"max_num_batched_tokens": -1}, r"max_num_batched_tokens must be an integer >= 1, got -1"),
        ({"num_kv_blocks": 0}, r"num_kv_blocks must be an integer >= 1, got 0"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization must be in \(0, 1\], got 1.5"),
        ({"max_model_len": 10_000}, r"max_model_len is 10000, the model's max_position_embeddings is 512"),
        ({"scheduling": "fifo"}, r"scheduling must be one of mixed, prefill_first, got 'fifo'"),
        ({"load_format": "pt"}, r"load_format must be one of auto, dummy, got 'pt'"),
        *(
            (
                {"graph_chunk_tokens": most},
                rf"graph_chunk_tokens must be 'auto' or an integer from 0 to 8192, got {most}",
            )
            for most in (-1, 8193, False, 0.0)
        ),
        ({"layer_fusion": "auto"}, r"layer_fusion must be one of off, persistent, got 'auto'"),
        ({"tensor_parallel_size": 9}, r"tensor_parallel_size must be at most 8, got 9"),
        ({"enable_prefix_caching": 1}, r"enable_prefix_caching must be True or False, got 1"),
        ({"seed": "x"}, r"seed must be an integer, got 'x'"),
        ({"use_triton": "yes"}, r"use_triton must be True, False or 'auto', got 'yes'"),
    ],
)
def test_bad_options_name_field_value_and_limit(tiny, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny), skip_tokenizer_init=True, **({"device": "cpu"} | options))


@pytest.mark.parametrize("name", prefill.CONTIGUOUS_ONLY)
def test_no_engine_runs_a_kernel_that_knows_no_paging(tiny, name, monkeypatch):
    """Not even where the device could."""
    monkeypatch.setattr(type(prefill.get(name)), "unavailable", lambda self, device: None)
    with pytest.raises(
        ValueError, match=rf"prefill_attention '{name}' cannot run this model: .* contiguous KV"
    ):
        LLM(str(tiny), device="cpu", skip_tokenizer_init=True, prefill_attention=name)


def test_an_unknown_option_is_a_type_error(tiny):
    with pytest.raises(TypeError, match="typo"):
        LLM(str(tiny), typo=1)


def test_close_can_be_called_twice(tiny):
    llm = LLM(str(tiny), device="cpu", skip_tokenizer_init=True, num_kv_blocks=4)
    llm.close()
    llm.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate([[1, 2]], use_tqdm=False),
        lambda llm: llm.engine.add_request([1, 2]),
        lambda llm: llm.forced_logits([1, 2], [3]),
        lambda llm: llm.model,
    ],
)
def test_a_closed_engine_says_so(tiny, call):
    llm = LLM(str(tiny), device="cpu", skip_tokenizer_init=True, num_kv_blocks=4)
    llm.close()
    assert llm.stats()["num_kv_blocks"] == 4
    with pytest.raises(RuntimeError, match="the engine is closed"):
        call(llm)


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_under_way_end_with_their_engine(tiny, overlap):
    llm = LLM(str(tiny), device="cpu", skip_tokenizer_init=True, num_kv_blocks=4, overlap_scheduling=overlap)
    request_id = llm.engine.add_request([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    for _ in range(2):
        llm.engine.step()
    llm.close()
    assert not llm.engine.has_unfinished_requests()
    (ended,) = llm.engine.step()
    assert (ended.request_id, ended.finish_reason, ended.error) == (
        request_id,
        "error",
        "the engine is closed",
    )
    assert len(ended.token_ids) == (1 if overlap else 2)
    assert llm.engine.step() == []
