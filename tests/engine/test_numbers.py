"""Numbers far out: long contexts and late positions against fp64, and logits that are not finite in the engine."""

from __future__ import annotations

import math

import pytest
import torch

from engine import LLM, SamplingParams
from engine.layers.rotary import RotaryEmbedding
from engine.models.rope import RopeConfig
from kernels.rope import apply_rope
from tests.engine.checkpoints import LLAMA, QWEN3, edit_config, reference_model, write_random_checkpoint
from tests.engine.greedy_reference import reference_ids

LAST = 40_959
"""Qwen3's last position."""


# --- long contexts ------------------------------------------------------------------------------------------


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


ROPES = [
    RopeConfig("default", 1e6),
    RopeConfig("linear", 1e4, factor=8.0),
    RopeConfig(  # Llama 3.1
        "llama3",
        5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    RopeConfig("yarn", 1e6, factor=4.0, original_max_position_embeddings=32_768),  # Qwen3, stretched
]


def exact_frequency(rope: RopeConfig, pair: int, head_dim: int) -> float:
    """Radians a position of one pair of dimensions, in fp64, as the papers have it."""
    frequency = rope.rope_theta ** (-2 * pair / head_dim)
    if rope.rope_type == "default":
        return frequency
    slowed, context = frequency / rope.factor, rope.original_max_position_embeddings
    if rope.rope_type == "linear":
        return slowed
    if rope.rope_type == "llama3":
        turns = context * frequency / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    else:
        first, last = (
            head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))
            for turns in (32, 1)
        )
        kept = 1 - (pair - math.floor(first)) / (math.ceil(last) - math.floor(first))
    kept = min(max(kept, 0.0), 1.0)
    return slowed * (1 - kept) + frequency * kept


@pytest.mark.parametrize("use_triton", [False, True])
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.rope_type)
def test_rope_at_the_last_position(rope, use_triton):
    """Against fp64. An angle in radians carries at most 6 roundings to fp32, of frequency and product, as Transformers'
    does; so a slow pair, which tells far tokens apart, is right to fp32, and the fastest to 6 * 131,071 * 2^-24 = 0.05.
    """
    head_dim, positions = 128, torch.tensor([LAST, 0, 12_345, 131_071])
    inv_freq, cpu = rope.inverse_frequencies(head_dim), torch.device("cpu")
    rotary = RotaryEmbedding(inv_freq, 131_072, scale=rope.cos_sin_scale, use_triton=use_triton, device=cpu)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4, heads, head_dim, generator=generator) for heads in (4, 2))
    before = q.clone(), k.clone()
    apply_rope(q, k, positions, rotary.cos_sin, use_triton=use_triton)
    frequencies = [exact_frequency(rope, pair, head_dim) for pair in range(head_dim // 2)]
    scale = 0.1 * math.log(4) + 1 if rope.rope_type == "yarn" else 1.0
    exact_angles = positions.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    fp32_angles = (positions[:, None] * inv_freq).double()
    for angles, roundings in ((exact_angles, 6), (fp32_angles, 0)):
        cos, sin = scale * angles.cos()[:, None], scale * angles.sin()[:, None]
        bound = (roundings * angles + 16)[:, None] * 2.0**-24
        for x, rotated in zip(before, (q, k)):
            first, second = x.double().chunk(2, -1)
            exact = first * cos - second * sin, second * cos + first * sin
            error = torch.hypot(
                *(ours - theirs for ours, theirs in zip(rotated.double().chunk(2, -1), exact))
            )
            assert (error / (scale * torch.hypot(first, second)) < bound).all()


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
