"""config.json: every value honoured or refused (F5, F6, F7, E1 of the case list)."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.checkpoint import resolve_model
from engine.models.config import ModelConfig, check_parallel
from engine.models.rope import RopeConfig
from engine.transformers_guard import import_transformers
from tests.engine.checkpoints import LLAMA, QWEN3, edit_config, write_random_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def without(config: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in fields}


def test_a_qwen3_config_is_read() -> None:
    config = ModelConfig.from_hf(QWEN3 | {"eos_token_id": [5, 9], "torch_dtype": "bfloat16"})
    assert (config.architecture, config.qk_norm, config.tie_word_embeddings) == (
        "Qwen3ForCausalLM",
        True,
        True,
    )
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (4, 2, 24)
    assert (config.eos_token_ids, config.dtype) == ((5, 9), torch.bfloat16)
    assert config.rope == RopeConfig("default", 1e6)


@pytest.mark.parametrize("config", [QWEN3, LLAMA], ids=["qwen3", "llama"])
def test_what_transformers_writes_is_read_alike(config: dict[str, Any]) -> None:
    """Both spellings of the same model: config.json of old, and as Transformers 5 writes it."""
    fields = without(config, "model_type")
    written = import_transformers().AutoConfig.for_model(config["model_type"], **fields).to_dict()
    assert "rope_theta" not in written
    assert written["rope_parameters"]["rope_theta"] == config["rope_theta"]
    assert without(vars(ModelConfig.from_hf(written)), "eos_token_ids") == without(
        vars(ModelConfig.from_hf(config)), "eos_token_ids"
    )


def test_left_out_fields_take_the_defaults_of_transformers() -> None:
    llama = ModelConfig.from_hf(without(LLAMA, "head_dim", "num_key_value_heads", "tie_word_embeddings"))
    assert (llama.head_dim, llama.num_kv_heads, llama.tie_word_embeddings) == (16, 4, False)
    qwen3 = ModelConfig.from_hf(without(QWEN3, "head_dim", "rms_norm_eps"))
    assert (qwen3.head_dim, qwen3.rms_norm_eps) == (128, 1e-6)
    assert ModelConfig.from_hf(without(QWEN3, "architectures")).architecture == "Qwen3ForCausalLM"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM.*not supported"),
    ({"architectures": ["Qwen3ForCausalLM", "LlamaForCausalLM"]}, "architectures must name one"),
    ({"architectures": None, "model_type": "gemma"}, "gemma"),
    ({"model_type": "llama"}, "model_type is 'llama'"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window is True"),
    ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ({"pretraining_tp": 2}, "pretraining_tp is 2"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ({"logit_scale": 0.0625}, "logit_scale"),
    ({"num_experts": 8}, "num_experts"),
    ({"vocab_size": 0}, "vocab_size must be an integer >= 1, got 0"),
    ({"vocab_size": None}, "no vocab_size"),
    ({"num_hidden_layers": "3"}, "num_layers must be an integer"),
    ({"num_key_value_heads": 3}, "num_q_heads is 4, not a multiple of num_kv_heads 3"),
    ({"head_dim": 15}, "head_dim must be even"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"eos_token_id": "</s>"}, "eos_token_id in config.json"),
    ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ({"dtype": "float16", "torch_dtype": "bfloat16"}, "dtype is 'float16' but torch_dtype is 'bfloat16'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "rope_type is 'yarn'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "needs factor"),
    ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "factor is 2.0"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor must be >= 1"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor is 4.0"),
    ({"rope_scaling": YARN | {"long_factor": [1.0]}}, "long_factor"),
    ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}}, "factor is 2.0 in rope_parameters"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
]


@pytest.mark.parametrize(("change", "complaint"), REFUSED)
def test_what_the_decoder_lacks_is_refused_by_name(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ModelConfig.from_hf(QWEN3 | change)


def test_llama_has_no_switch_for_its_window() -> None:
    with pytest.raises(ValueError, match="sliding_window is 4096"):
        ModelConfig.from_hf(LLAMA | {"sliding_window": 4096})


NEUTRAL: list[dict[str, Any]] = [
    {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    {"layer_types": ["full_attention"] * 3},
    {"partial_rotary_factor": 1.0, "pretraining_tp": 1, "quantization_config": None, "mlp_bias": False},
    {"rope_scaling": None, "rope_interleaved": False, "_name_or_path": "x", "transformers_version": "4.51.0"},
    {"attn_logit_softcapping": None, "use_qk_norm": False},
]


@pytest.mark.parametrize("change", NEUTRAL)
def test_what_is_switched_off_changes_nothing(change: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(QWEN3 | change) == ModelConfig.from_hf(QWEN3)


# --- rope_theta (F6) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        {"rope_theta": 1e6},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 1000000, "rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default"}},
    ],
)
def test_rope_theta_is_found_in_either_place(place: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(without(QWEN3, "rope_theta") | place).rope == RopeConfig("default", 1e6)


@pytest.mark.parametrize("place", [{}, {"rope_parameters": {"rope_type": "default"}}, {"rope_theta": None}])
def test_rope_theta_is_never_guessed(place: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rope_theta is missing"):
        ModelConfig.from_hf(without(QWEN3, "rope_theta") | place)


def test_two_values_of_rope_theta_are_a_conflict() -> None:
    with pytest.raises(ValueError, match=re.escape("rope_theta is 10000.0 in rope_parameters but 1000000.0")):
        ModelConfig.from_hf(QWEN3 | {"rope_parameters": {"rope_theta": 1e4}})


# --- scaled RoPE (F7) ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "expected"), [(4.0, 1.1386294), (2.0, 1.0693147), (1.0, 1.0)])
def test_yarn_attention_factor(factor: float, expected: float) -> None:
    config = ModelConfig.from_hf(QWEN3 | {"rope_scaling": YARN | {"factor": factor}})
    assert math.isclose(config.rope.cos_sin_scale, expected, abs_tol=1e-7)


def test_yarn_stretches_the_positions_it_is_meant_to() -> None:
    def positions(stated: int, settings: dict[str, Any]) -> int:
        config = QWEN3 | {"max_position_embeddings": stated, "rope_scaling": settings}
        return ModelConfig.from_hf(config).max_position_embeddings

    assert positions(80, YARN) == 256
    assert positions(64, YARN) == 256
    assert positions(300, YARN) == 300
    assert positions(80, {"rope_type": "yarn", "factor": 4.0}) == 80
    assert positions(80, {"rope_type": "linear", "factor": 4.0}) == 80


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        LLAMA3,
        LLAMA3 | {"factor": 32.0, "high_freq_factor": 2.0, "original_max_position_embeddings": 64},
        YARN,
        YARN | {"factor": 1.5, "beta_fast": 16, "beta_slow": 2},
        YARN | {"truncate": False, "attention_factor": 1.25},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"rope_type": "yarn", "factor": 4.0},
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_are_those_of_transformers(settings: dict[str, Any], head_dim: int) -> None:
    fields = {"head_dim": head_dim, "rope_parameters": settings | {"rope_theta": 1e6}}
    own = ModelConfig.from_hf(without(QWEN3, "rope_theta") | fields).rope
    transformers = import_transformers()
    config = transformers.Qwen3Config(
        **without(QWEN3, "rope_theta", "architectures", "model_type", "head_dim"),
        head_dim=head_dim,
        rope_parameters=settings | {"rope_theta": 1e6},
    )
    rotary = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(config)
    torch.testing.assert_close(own.inverse_frequencies(head_dim), rotary.inv_freq, rtol=0, atol=0)
    assert own.cos_sin_scale == rotary.attention_scaling


# --- EOS (E1) -----------------------------------------------------------------------------------------------


def test_an_eos_id_outside_the_vocabulary_is_refused_by_file_and_mapping(tmp_path: Path) -> None:
    """It could never be sampled, so a request would run on to its last token without a word."""
    write_random_checkpoint(tmp_path, QWEN3, eos_token_id=[5, 307])
    with pytest.raises(ValueError, match="eos_token_id holds 307, outside the vocabulary of 307") as error:
        resolve_model(tmp_path, "auto")
    assert str(tmp_path) in str(error.value)
    with pytest.raises(ValueError, match="eos_token_id holds 400, outside the vocabulary of 307"):
        resolve_model(QWEN3 | {"eos_token_id": [3, 400]}, "dummy")
    assert resolve_model(QWEN3 | {"eos_token_id": 306}, "dummy").eos_token_ids == (306,)


def test_every_eos_id_of_both_files_counts(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, QWEN3, eos_token_id=[5, 9])
    edit_config(tmp_path, eos_token_id=5)
    assert resolve_model(tmp_path, "auto").eos_token_ids == (5, 9)
    edit_config(tmp_path, eos_token_id=[7, 5])
    assert resolve_model(tmp_path, "auto").eos_token_ids == (7, 5, 9)
    edit_config(tmp_path, eos_token_id=None)
    assert resolve_model(tmp_path, "auto").eos_token_ids == (5, 9)
    (tmp_path / "generation_config.json").unlink()
    assert resolve_model(tmp_path, "auto").eos_token_ids == ()


# --- splitting over ranks (F5) ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "size", "expected"),
    [(4, 2, 1, (4, 2)), (4, 2, 2, (2, 1)), (4, 2, 4, (1, 1)), (9, 3, 3, (3, 1)), (16, 8, 8, (2, 1))],
)
def test_heads_of_a_rank(q_heads: int, kv_heads: int, size: int, expected: tuple[int, int]) -> None:
    config = ModelConfig.from_hf(QWEN3 | {"num_attention_heads": q_heads, "num_key_value_heads": kv_heads})
    heads = config.heads_per_rank(size)
    assert (heads.num_q_heads, heads.num_kv_heads) == expected


@pytest.mark.parametrize(
    ("change", "size", "complaint"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, "num_q_heads is 9.*2"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "num_kv_heads is 3.*2"),
        ({"intermediate_size": 99}, 2, "intermediate_size is 99.*2"),
        ({}, 0, "tensor_parallel_size"),
    ],
)
def test_what_cannot_be_split_is_refused(change: dict[str, Any], size: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_parallel(ModelConfig.from_hf(QWEN3 | change), size)


# --- finding a model ----------------------------------------------------------------------------------------


def test_a_mapping_is_for_dummy_weights_only() -> None:
    source = resolve_model(QWEN3 | {"eos_token_id": 3}, "dummy")
    assert (source.path, source.eos_token_ids) == (None, (3,))
    with pytest.raises(ValueError, match="load_format"):
        resolve_model(QWEN3, "auto")


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_checkpoint(tmp_path / "model", QWEN3)
    monkeypatch.chdir(tmp_path)
    source = resolve_model("model", "auto")
    assert source.path is not None
    assert source.path.is_absolute()


@pytest.mark.parametrize(
    "name",
    [
        "../escape",
        "a/../b",
        "/no/such/place",
        "~nobody/model",
        "~no-such-user/model",
        "a/b/c",
        "",
        "a..b",
        "./x",
    ],
)
def test_what_is_no_hub_id_is_not_looked_up(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("looked up"))
    with pytest.raises(ValueError, match="model"):
        resolve_model(name, "auto")


def test_a_hub_id_that_cannot_be_fetched_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"no-such-org/no-such-model.*neither an existing directory.*nor a hub id"
    ):
        resolve_model("no-such-org/no-such-model", "auto")


@pytest.mark.parametrize(("load_format", "weights"), [("auto", True), ("dummy", False)])
def test_only_what_is_needed_is_fetched(
    load_format: str, weights: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    write_random_checkpoint(tmp_path, QWEN3)
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/model", load_format).path == tmp_path.resolve()
    assert asked["name"] == "org/model"
    assert ("*.safetensors" in asked["allow_patterns"]) == weights
    assert not {"*", "*.bin", "*.py"} & set(asked["allow_patterns"])


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", "[]", "config.json must hold a JSON object"),
        ("config.json", None, "no config.json"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id in .*generation_config.json"),
    ],
)
def test_broken_configuration_files_are_named(
    tmp_path: Path, file: str, content: str | None, complaint: str
) -> None:
    write_random_checkpoint(tmp_path, QWEN3)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=complaint):
        resolve_model(tmp_path, "auto")
