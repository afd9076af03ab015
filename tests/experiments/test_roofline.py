"""Bytes and FLOPs of a decode step, against a count by hand."""

from __future__ import annotations

import pytest
import torch

from engine.models.config import ModelConfig
from experiments.roofline import Ceilings, decode_step_cost
from kernels.costs import Cost

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


def test_a_step_reads_the_weights_once_and_the_contexts() -> None:
    config = ModelConfig.from_hf(QWEN3_0_6B)
    layer = 1024 * (2048 + 2 * 1024) + 2048 * 1024 + 3 * 1024 * 3072
    weights = 28 * layer + 151936 * 1024
    kv = 28 * 2 * 8 * 128 * 4096
    cost = decode_step_cost(config, [4096], tp=1, dtype=torch.bfloat16, block_size=16)
    least = 2 * (weights + kv)
    assert least < cost.bytes < 1.01 * least  # activations are all that is left
    assert cost.flops == pytest.approx(2 * weights + 28 * 4 * 16 * 128 * 4096, rel=0.01)


def test_a_rank_reads_its_share() -> None:
    config = ModelConfig.from_hf(QWEN3_0_6B)
    whole, half = (
        decode_step_cost(config, [8192] * 4, tp=tp, dtype=torch.bfloat16, block_size=16) for tp in (1, 2)
    )
    assert half.bytes == pytest.approx(whole.bytes / 2, rel=0.01)


def test_the_slower_of_memory_and_arithmetic_is_the_floor() -> None:
    ceilings = Ceilings(2e12, {"bfloat16": 1e15})
    assert ceilings.floor_us(Cost(2_000_000, 1), "bfloat16") == pytest.approx(1.0)
    assert ceilings.floor_us(Cost(1, 10**9), "bfloat16") == pytest.approx(1.0)
    columns = ceilings.columns(Cost(2_000_000, 1), "bfloat16", 4.0)
    assert columns["roofline_fraction"] == pytest.approx(0.25)
    assert ceilings.columns(Cost(1, 1), "bfloat16", None)["roofline_fraction"] is None
