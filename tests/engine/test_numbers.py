"""Numbers far out: long contexts and late positions against fp64, and logits that are not finite in the engine."""

from __future__ import annotations

import math

import pytest
import torch

from engine import LLM, SamplingParams
from engine.layers.rotary import RotaryEmbedding
from engine.models.rope import RopeConfig
from kernels import decode
from kernels.rope import apply_rope
from tests.engine.checkpoints import LLAMA, QWEN3, edit_config, reference_model, write_random_checkpoint
from tests.engine.greedy_reference import reference_ids

LAST = 40_959
"""Qwen3's last position."""


# --- long contexts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "reference"])
@pytest.mark.parametrize("context_len", [40_960, 131_072])
def test_decode_attention_over_128k_tokens_is_exact_to_fp32(name, context_len):
    block_size, head_dim = 256, 64
    generator = torch.Generator().manual_seed(context_len)
    num_blocks = context_len // block_size
    q = torch.randn(1, 2, head_dim, generator=generator) * 3
    k, v = (torch.randn(num_blocks, block_size, 1, head_dim, generator=generator) for _ in range(2))
    table = torch.randperm(num_blocks, generator=generator)[None].int()
    out = decode.get(name)(q, k, v, table, torch.tensor([context_len], dtype=torch.int32))
    keys, values = (cache[table[0].long()].reshape(context_len, head_dim).double() for cache in (k, v))
    scores = keys @ q[0].double().T / math.sqrt(head_dim)
    exact = scores.softmax(0).T @ values
    assert (out[0] - exact).abs().max() / exact.abs().max() < 1e-5


def test_logits_after_a_long_prompt_equal_those_of_fp64(tmp_path):
    config = QWEN3 | {"num_hidden_layers": 2, "max_position_embeddings": 4096}
    directory = write_random_checkpoint(tmp_path, config)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 307, (1, 1512), generator=generator)
    with torch.inference_mode():
        exact = reference_model(directory).double()(ids).logits[0, 1499:-1]
    with LLM(str(directory), device="cpu", skip_tokenizer_init=True, max_num_batched_tokens=700) as llm:
        logits = llm.forced_logits(ids[0, :1500], ids[0, 1500:])
    assert (logits - exact).abs().max() / exact.abs().max() < 2e-5


# --- late positions -----------------------------------------------------------------------------------------


def test_the_rotary_table_ends_where_sequences_do(tmp_path):
    """A config may promise millions of positions; what is never run takes no memory, and the last one has its row."""
    directory = write_random_checkpoint(tmp_path, QWEN3)
    edit_config(directory, max_position_embeddings=1 << 24)  # 8 GiB at a head size of 128
    prompt = [i % 307 for i in range(60)]
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with LLM(directory, device="cpu", skip_tokenizer_init=True, max_model_len=64, num_kv_blocks=8) as llm:
        assert llm.model.rotary_emb.cos_sin.shape[0] == 64
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.token_ids == reference_ids(reference_model(directory), prompt, 4)


@pytest.mark.parametrize("use_triton", [False, True])
def test_rope_at_the_last_position(use_triton):
    """Angles are products in fp32, as Transformers takes them: 41k radians carry at most 5e-3 of rounding."""
    inv_freq = RopeConfig("default", 1e6).inverse_frequencies(128)
    table = RotaryEmbedding(
        inv_freq, LAST + 1, scale=1.0, use_triton=use_triton, device=torch.device("cpu")
    ).cos_sin
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(3, heads, 128, generator=generator) for heads in (4, 2))
    positions = torch.tensor([LAST, 0, 12_345])
    before = q.clone(), k.clone()
    apply_rope(q, k, positions, table, use_triton=use_triton)
    exact_angles = positions.double()[:, None] * 1e6 ** -(torch.arange(0, 128, 2).double() / 128)
    for angles, tolerance in ((exact_angles, 5e-3), ((positions[:, None] * inv_freq).double(), 1e-6)):
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        for x, rotated in zip(before, (q, k)):
            first, second = x.double().chunk(2, -1)
            exact = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
            assert (rotated - exact).abs().max() / exact.abs().max() < tolerance


# --- logits that are not finite -----------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 1, "top_k": 9}, {"seed": 1, "top_p": 0.8}])
def test_logits_that_are_not_finite_end_their_request_and_no_other(poison, overlap, params):
    """One token's embedding is poisoned: whoever has it in the prompt ends with an error, beside others that do not."""
    options = {"load_format": "dummy", "device": "cpu", "num_kv_blocks": 40, "max_num_batched_tokens": 24}
    good, bad = [[1, 2, 3], [4] * 20, [8, 9]], [[1, 2, 7], [7] + [4] * 20, [7]]
    sampling = SamplingParams(**({"max_tokens": 6, "ignore_eos": True} | params))
    with LLM(LLAMA, overlap_scheduling=overlap, **options) as llm:
        expected = [output.token_ids for output in llm.generate(good, sampling, use_tqdm=False)]
        if any(7 in tokens for tokens in expected):
            pytest.fail("token 7 must not be generated: choose another")
        with torch.no_grad():
            llm.model.embed_tokens.weight[7] = poison
        llm.reset_prefix_cache()
        mixed = [prompt for pair in zip(good, bad) for prompt in pair]
        outputs = llm.generate(mixed, sampling, use_tqdm=False)
        assert [output.token_ids for output in outputs[::2]] == expected
        for output in outputs[1::2]:
            assert (output.finish_reason, output.token_ids) == ("error", ())
            assert "NaN" in output.error
        assert llm.engine.block_manager.num_free_blocks == 40
        assert llm.stats()["num_finished"] == {"length": 6, "error": 3}
