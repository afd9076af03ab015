"""The decoder against Transformers, on the same small checkpoints, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.loader import load_model
from engine.layers.attention_metadata import KernelChoice
from engine.models.checkpoint import resolve_model
from engine.models.decoder import Decoder
from engine.parallel.group import ParallelGroup
from tests.engine.checkpoints import (
    LLAMA,
    QWEN3,
    reference_model,
    smollm2_checkpoint,
    write_random_checkpoint,
)
from tests.engine.paged_batch import PagedBatch, choose

VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3-tied": QWEN3,
    "qwen3-untied": QWEN3 | {"tie_word_embeddings": False},
    "qwen3-bias": QWEN3 | {"attention_bias": True, "num_key_value_heads": 1},
    "llama-untied": LLAMA,
    "llama-tied-gqa": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 2, "rms_norm_eps": 1e-3},
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "qwen3-linear-rope": QWEN3
    | {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e3}},
    "qwen3-yarn": QWEN3
    | {
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 1e4,
        },
    },
    "llama-llama3-rope": LLAMA
    | {
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 500.0,
        },
    },
}
LENGTHS = (1, 23, 7, 16, 45)


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {key: value for key, value in VARIANTS[request.param].items() if value is not None}
    return write_random_checkpoint(tmp_path_factory.mktemp(request.param), config)


def load(
    directory: Path,
    kernels: KernelChoice,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    return load_model(
        resolve_model(directory, "auto"),
        load_format="auto",
        device=torch.device(device),
        dtype=dtype,
        group=ParallelGroup.single(),
        kernels=kernels,
        seed=0,
    )


def random_sequences(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def reference_logits(reference: Any, sequence: list[int]) -> torch.Tensor:
    return reference(torch.tensor([sequence])).logits[0]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_logits_of_prefill_then_decode_equal_transformers(checkpoint: Path, block_size: int) -> None:
    kernels = choose()
    model = load(checkpoint, kernels)
    sequences = random_sequences(model.config.vocab_size)
    reference = reference_model(checkpoint)
    expected = [reference_logits(reference, sequence) for sequence in sequences]
    # Uneven prompts prefilled together but for their last 3 tokens, of which each then decodes one a step.
    batch = PagedBatch(model, sequences, block_size=block_size)
    prompts = {i: len(sequence) - 3 for i, sequence in enumerate(sequences) if len(sequence) > 3}
    steps = [batch.step(prompts), *(batch.step({}, decodes=list(prompts)) for _ in range(3))]
    for i in prompts:
        parts = [step[i] for step in steps]
        torch.testing.assert_close(torch.cat(parts), expected[i], rtol=1e-5, atol=1e-5)


def test_a_mixed_step_equals_transformers(checkpoint: Path) -> None:
    """Decodes and chunks of several prompts in one step, the chunks beginning in the middle of blocks."""
    kernels = choose()
    model = load(checkpoint, kernels)
    sequences = random_sequences(model.config.vocab_size)
    batch = PagedBatch(model, sequences, block_size=4)
    batch.step({1: 20, 2: 5, 4: 10})
    logits = batch.step({0: 1, 2: 2, 4: 21}, decodes=[1])
    logits[4] = torch.cat([logits[4], batch.step({4: 3}, decodes=[1])[4]])
    reference = reference_model(checkpoint)
    for i, (start, end) in {0: (0, 1), 1: (20, 21), 2: (5, 7), 4: (10, 34)}.items():
        expected = reference_logits(reference, sequences[i])[start:end]
        torch.testing.assert_close(logits[i], expected, rtol=1e-5, atol=1e-5)


def test_modules_have_the_outputs_of_their_namesakes(checkpoint: Path) -> None:
    """Hooks on both networks, by name: what the correctness suite relies on to say where a difference arises."""
    kernels = choose()
    model, reference = load(checkpoint, kernels), reference_model(checkpoint)
    [sequence] = random_sequences(model.config.vocab_size, (19,))
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor):
                seen[name] = first.clone()  # RoPE then works in place on what the norms gave

        return hook

    for name, module in reference.named_modules():
        module.register_forward_hook(keep(f"reference {name.removeprefix('model.')}"))
    for name, module in model.named_modules():
        module.register_forward_hook(keep(f"own {name}"))
    reference_logits(reference, sequence)
    PagedBatch(model, [sequence], block_size=4).step({0: 19})

    per_layer = ["input_layernorm", "self_attn", "self_attn.o_proj", "post_attention_layernorm", "mlp"]
    per_layer += [
        "mlp.down_proj",
        *(["self_attn.q_norm", "self_attn.k_norm"] if model.config.qk_norm else []),
    ]
    names = [f"layers.{i}.{name}" for i in range(model.config.num_layers) for name in per_layer]
    for name in ["embed_tokens", *names, "norm", "lm_head"]:
        own, expected = seen[f"own {name}"], seen[f"reference {name}"]
        torch.testing.assert_close(
            own, expected[0], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: name + text
        )


def test_padding_tokens_write_nothing_and_touch_nobody(checkpoint: Path) -> None:
    model = load(checkpoint, choose())
    sequences = random_sequences(model.config.vocab_size)
    plain, padded = (PagedBatch(model, sequences, block_size=4) for _ in range(2))
    for options in ({"counts": {1: 20, 4: 7}}, {"counts": {2: 3}, "decodes": [1, 4]}):
        expected, actual = plain.step(**options), padded.step(**options, padding=3)
        assert actual.pop(-1).isfinite().all()
        expected.pop(-1)
        for i, logits in actual.items():
            torch.testing.assert_close(logits, expected[i], rtol=1e-5, atol=1e-5)
    assert torch.equal(padded.kv_cache.isnan(), plain.kv_cache.isnan())


def test_the_rotary_table_stays_in_fp32_and_is_right_far_out() -> None:
    """F8: theta 1e6, head_dim 128, the model moved to bf16, position 4095, against fp64."""
    from engine.layers.rotary import RotaryEmbedding
    from engine.models.rope import RopeConfig

    inv_freq = RopeConfig("default", 1e6).inverse_frequencies(128)
    table = RotaryEmbedding(inv_freq, 4096, scale=1.0, use_triton=False, device=torch.device("cpu"))
    table = table.to(torch.bfloat16)
    assert table.cos_sin.dtype == torch.float32
    exact = torch.arange(4096, dtype=torch.float64)[:, None] * 1e6 ** -(
        torch.arange(0, 128, 2, dtype=torch.float64) / 128
    )
    expected = torch.stack([exact.cos(), exact.sin()], dim=1)
    assert (table.cos_sin - expected).abs().max() < 1e-3


def test_smollm2_logits_equal_transformers() -> None:
    """A trained model: 30 layers, 9 query and 3 KV heads."""
    directory = smollm2_checkpoint()
    kernels = choose()
    model = load(directory, kernels)
    text = "Question: what is the capital of France, and which river runs through it?"
    from engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(None, resolve_model(directory, "auto"))
    assert tokenizer is not None
    token_ids = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    batch = PagedBatch(model, [token_ids], block_size=16)
    logits = torch.cat([batch.step({0: len(token_ids) - 2})[0], batch.step({}, decodes=[0])[0]])
    expected = reference_logits(reference_model(directory), token_ids)[:-1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.gpu
@pytest.mark.parametrize(("decode_name", "prefill_name"), [("torch", "torch"), ("split_kv", "triton")])
def test_on_a_gpu_logits_equal_transformers(checkpoint: Path, decode_name: str, prefill_name: str) -> None:
    kernels = choose(decode_name, prefill_name, use_triton=decode_name != "torch")
    model = load(checkpoint, kernels, device="cuda")
    sequences = random_sequences(model.config.vocab_size)
    batch = PagedBatch(model, sequences, block_size=16)
    steps = [batch.step({1: 20, 4: 40}), batch.step({}, decodes=[1, 4])]
    reference = reference_model(checkpoint)
    for i in (1, 4):
        part = torch.cat([step[i] for step in steps])
        expected = reference_logits(reference, sequences[i])[: len(part)]
        torch.testing.assert_close(part.cpu(), expected, rtol=1e-3, atol=1e-3)
