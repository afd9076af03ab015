"""The engine on a CUDA device: compiled kernels, the pool sized from free memory, bf16 against Transformers."""

from __future__ import annotations

import pytest
import torch

from engine import LLM, SamplingParams
from tests.engine.checkpoints import LLAMA, QWEN3, reference_model, write_random_checkpoint
from tests.engine.greedy_reference import reference_ids, uneven_prompts

pytestmark = pytest.mark.gpu

NUM_NEW = 32
TRITON_KERNELS = ["single_pass", "split_kv", "split_kv_fused", "fixed_split", "stream_k", "shared_prefix"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
MODELS = {
    "qwen3": QWEN3 | {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "llama": LLAMA | {"head_dim": 64},
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def checkpoint(request, tmp_path_factory):
    directory = write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"), MODELS[request.param])
    prompts = uneven_prompts(307)
    model = reference_model(directory)
    return directory, prompts, [reference_ids(model, prompt, NUM_NEW) for prompt in prompts]


@pytest.mark.parametrize("decode", [*TRITON_KERNELS, "torch", "reference"])
@pytest.mark.parametrize(
    ("budget", "policy", "num_kv_blocks", "enforce_eager"),
    [
        (64, "mixed", 30, False),
        (8192, "prefill_first", 400, False),
        (8192, "mixed", 400, True),
        (64, "mixed", 30, True),
    ],
)
def test_fp32_ids_equal_transformers(checkpoint, decode, budget, policy, num_kv_blocks, enforce_eager):
    directory, prompts, expected = checkpoint
    with LLM(
        directory,
        device="cuda",
        skip_tokenizer_init=True,
        decode_attention=decode,
        enforce_eager=enforce_eager,
        max_num_batched_tokens=budget,
        scheduling=policy,
        num_kv_blocks=num_kv_blocks,
    ) as llm:
        assert llm.runner.kernels.use_triton
        assert llm.runner.kernels.prefill.name == "triton"
        llm.runner.kv_cache.fill_(float("nan"))
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.token_ids for output in outputs] == expected
        assert (llm.stats()["num_preemptions"] > 0) is (num_kv_blocks == 30)


def test_torch_paths_give_the_same_on_a_gpu(checkpoint):
    directory, prompts, expected = checkpoint
    with LLM(directory, device="cuda", skip_tokenizer_init=True, use_triton=False, num_kv_blocks=400) as llm:
        assert (llm.runner.kernels.decode.name, llm.runner.kernels.prefill.name) == ("torch", "torch")
        outputs = llm.generate(prompts[:6], GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == expected[:6]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logprobs_are_close_to_transformers(checkpoint, dtype):
    """Teacher-forced against the fp32 model: our error must not exceed Transformers' own in the same dtype by much."""
    directory, prompts, expected = checkpoint
    exact = reference_model(directory)
    theirs_model = reference_model(directory, dtype).to("cuda")
    with LLM(directory, device="cuda", dtype=dtype, skip_tokenizer_init=True, num_kv_blocks=100) as llm:
        for prompt, tokens in list(zip(prompts, expected))[:6]:
            ids = torch.tensor([prompt + list(tokens)])
            with torch.inference_mode():
                truth = exact(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                theirs = (
                    theirs_model(ids.to("cuda")).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).cpu()
                )
            ours = llm.forced_logits(prompt, tokens).log_softmax(-1).cpu()
            our_error = (ours - truth).abs().mean().item()
            their_error = (theirs - truth).abs().mean().item()
            assert our_error <= 1.5 * their_error + 1e-4


def test_the_pool_is_sized_from_free_memory():
    model = QWEN3 | {"max_position_embeddings": 40_960, "num_hidden_layers": 16, "head_dim": 128}
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    with LLM(model, load_format="dummy", dtype="bfloat16", device="cuda", gpu_memory_utilization=0.3) as llm:
        blocks = llm.engine.block_manager.num_blocks
        assert llm.runner.kv_cache.shape[2] == blocks
        reserved = torch.cuda.memory_reserved()
        # What other processes hold when the engine starts is theirs; they may be tests that start and end meanwhile.
        assert 0.2 * total - others < reserved < 0.3 * total
        prompts = [[i % 300] * 900 for i in range(64)]
        outputs = llm.generate(
            prompts, SamplingParams(max_tokens=4, top_k=50, ignore_eos=True), use_tqdm=False
        )
        assert all(len(output.token_ids) == 4 for output in outputs)
        assert torch.cuda.max_memory_reserved() < 0.31 * total


def test_engines_one_after_another_leave_nothing_behind():
    """Graphs were captured on a stream each, and cuBLAS kept 32 MiB for every one of them."""
    held = []
    for _ in range(4):
        with LLM(QWEN3, load_format="dummy", dtype="bfloat16", device="cuda", num_kv_blocks=200) as llm:
            for count in (1, 2, 3, 5, 9):
                llm.generate([[1, 2, 3]] * count, GREEDY, use_tqdm=False)
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_allocated())
    assert held[3] - held[0] < 1_000_000


def test_close_gives_the_memory_back():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    llm = LLM(QWEN3, load_format="dummy", device="cuda", num_kv_blocks=20_000)
    assert torch.cuda.memory_reserved() > before + 100_000_000
    llm.close()
    assert torch.cuda.memory_reserved() <= before + 50_000_000


def test_a_seeded_request_is_the_same_alone_and_in_company(checkpoint):
    directory, _, _ = checkpoint
    params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=16, seed=11, ignore_eos=True)
    with LLM(directory, device="cuda", skip_tokenizer_init=True, num_kv_blocks=400) as llm:
        (alone,) = llm.generate([[7, 8, 9]], params, use_tqdm=False)
        others = SamplingParams(temperature=1.3, top_k=20, max_tokens=20, ignore_eos=True)
        crowd = [[i, i + 1] for i in range(10)]
        outputs = llm.generate([*crowd, [7, 8, 9]], [others] * 10 + [params], use_tqdm=False)
    assert outputs[-1].token_ids == alone.token_ids
