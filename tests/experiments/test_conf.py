"""Every configuration composes, every model of conf/ is one the engine reads, every suite has both sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from engine.config import EngineConfig
from experiments import suites
from experiments.arguments import CONF, group_options
from experiments.settings import Settings, resolve

GROUPS = ("model", "engine", "attention", "suite", "size")


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        found: Any = OmegaConf.to_container(compose("config", overrides=list(overrides)), resolve=True)
    return found


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group in GROUPS for name in group_options(group)]
)
def test_every_group_option_composes_and_resolves(group: str, name: str) -> None:
    overrides = [f"+suite={name}"] if group == "suite" else [f"{group}={name}", "+suite=decode_kernel"]
    config = resolve(composed(*overrides, "device=cpu"), Path.cwd())
    settings = Settings.parse(config)
    suite = suites.get(settings.suite)
    assert suite.parse_options(settings)
    assert settings.model.name != "auto"
    assert settings.size.rounds >= 6


@pytest.mark.parametrize("suite", group_options("suite"))
@pytest.mark.parametrize("size", ["smoke", "full"])
def test_every_suite_has_points_at_both_sizes(suite: str, size: str) -> None:
    config = resolve(composed(f"+suite={suite}", f"size={size}", "device=cpu"), Path.cwd())
    settings = Settings.parse(config)
    points = suites.get(settings.suite).points(settings)
    assert points
    assert len({point.id for point in points}) == len(points)


def test_every_suite_has_a_yaml_and_every_yaml_a_suite() -> None:
    assert suites.names() == group_options("suite")


@pytest.mark.parametrize("model", [name for name in group_options("model") if name != "auto"])
def test_every_model_is_one_the_engine_reads(model: str) -> None:
    from engine.models.config import ModelConfig

    config = ModelConfig.from_hf(composed(f"model={model}")["model"]["config"])
    assert config.num_q_heads % config.num_kv_heads == 0


def test_the_default_engine_is_that_of_the_library() -> None:
    chosen = composed("+suite=decode_kernel")["engine"]
    assert chosen == {name: getattr(EngineConfig(), name) for name in chosen}


def test_qwen3_shapes_are_the_published_ones() -> None:
    shapes = {}
    for name in group_options("model"):
        if name.startswith("qwen3"):
            c = composed(f"model={name}")["model"]["config"]
            shapes[name] = (
                c["hidden_size"],
                c["num_hidden_layers"],
                c["num_attention_heads"],
                c["intermediate_size"],
                c["tie_word_embeddings"],
            )
            assert (c["head_dim"], c["num_key_value_heads"], c["vocab_size"]) == (128, 8, 151936)
    assert shapes == {
        "qwen3_0_6b": (1024, 28, 16, 3072, True),
        "qwen3_1_7b": (2048, 28, 16, 6144, True),
        "qwen3_4b": (2560, 36, 32, 9728, True),
        "qwen3_8b": (4096, 36, 32, 12288, False),
        "qwen3_14b": (5120, 40, 40, 17408, False),
        "qwen3_32b": (5120, 64, 64, 25600, False),
    }


def test_attention_may_choose_several_variants_and_one_kernel_under_two_names() -> None:
    config = composed("attention=[single_pass,split_kv,split_kv_again]", "+suite=decode_kernel", "device=cpu")
    variants = Settings.parse(resolve(config, Path.cwd())).variants
    assert [(v.name, v.decode) for v in variants] == [
        ("single_pass", "single_pass"),
        ("split_kv", "split_kv"),
        ("split_kv_again", "split_kv"),
    ]


def test_a_checkpoint_path_is_made_absolute_and_loads_its_weights(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    config = composed("+suite=decode_kernel", "model.path=ckpt", "device=cpu")
    model = Settings.parse(resolve(config, tmp_path)).model
    assert (model.path, model.load_format, model.name) == (str(tmp_path / "ckpt"), "auto", "ckpt")


def test_lists_stay_lists_and_scalars_become_them() -> None:
    for typed in ("bench.batch_sizes=[1,2]", "bench.batch_sizes=2"):
        settings = Settings.parse(resolve(composed("+suite=decode_kernel", typed, "device=cpu"), Path.cwd()))
        chosen: Any = suites.get("decode_kernel").parse_options(settings)
        assert chosen.batch_sizes == ((1, 2) if "[" in typed else (2,))


def test_overrides_of_a_size_survive_its_choice() -> None:
    settings = Settings.parse(
        resolve(composed("+suite=decode_kernel", "size.rounds=9", "device=cpu"), Path.cwd())
    )
    assert (settings.size.name, settings.size.rounds, settings.size.samples) == ("smoke", 9, 3)
    settings = Settings.parse(
        resolve(composed("+suite=decode_kernel", "run.timeout_s=5", "device=cpu"), Path.cwd())
    )
    assert settings.size.timeout_s == 5


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("run.root=null", "run.root"),
        ("run.root=[a]", "run.root"),
        ("run.folder=20261130", "run.folder"),
        ('run.folder=""', "run.folder"),
        ("run.timeout_s=abc", "run.timeout_s"),
        ("run.timeout_s=true", "run.timeout_s"),
        ("run.timeout_s=inf", "run.timeout_s"),
        ("size.timeout_s=[1]", "run.timeout_s"),
        ("size.threads=1000000", "size.threads"),
        ("run.retry_failed=true", "run.retry_failed"),
        ("plugins=my_kernel", "plugins"),
        ("plugins=null", "plugins"),
        ("plugins=[1]", "plugins"),
        ("plugins=[.near]", "plugins"),
        ("model.path=5", "model.path"),
        ('model.path=""', "model.path"),
        ("model.config=5", "model.config"),
        ("+attention.mine=5", "attention.mine"),
        ("+attention.mine={decode: torch, options: 5}", "attention.mine.options"),
        ("bench=5", "bench"),
        ("bench.suite=null", "suite"),
        ("sizes=null", "sizes"),
        ("sizes.smoke=null", "sizes.smoke"),
        ("+suite=prefill_kernel bench.shapes=5", "bench.shapes"),
        ("+suite=correctness bench.prompts=5", "bench.prompts"),
        ("+suite=correctness bench.prompts=[]", "bench.prompts"),
        ("+suite=serving bench.arrivals=[trace] bench.trace=5", "bench.trace"),
        ("+suite=serving bench.ttft_target_ms=[1,2]", "bench.ttft_target_ms"),
        ("+suite=serving bench.tpot_target_ms=[1]", "bench.tpot_target_ms"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(override: str, named: str) -> None:
    overrides = override.split() if override.startswith("+suite") else ["+suite=decode_kernel", override]
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):  # noqa: PT012
        settings = Settings.parse(resolve(composed(*overrides, "device=cpu"), Path.cwd()))
        suites.get(settings.suite).points(settings)


def test_no_kernels_named_are_the_suites_own() -> None:
    settings = Settings.parse(
        resolve(composed("+suite=decode_kernel", "attention=[]", "device=cpu"), Path.cwd())
    )
    assert "torch" in [variant.name for variant in settings.variants]


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("tensor_parallel_size=2", "bench.tensor_parallel"),
        ("max_num_seqs=4", "the suite's batches"),
        ("max_model_len=64", "the suite's lengths"),
        ("decode_attention=torch", "attention"),
        ("dtype=float16", "model.dtype"),
        ("record_token_times=true", "the suite"),
    ],
)
@pytest.mark.parametrize("suite", ["throughput", "long_decode", "correctness"])
def test_an_argument_of_the_engine_that_the_suites_choose_is_refused_and_not_ignored(
    suite: str, option: str, instead: str
) -> None:
    settings = Settings.parse(
        resolve(composed(f"+suite={suite}", f"+engine.{option}", "device=cpu"), Path.cwd())
    )
    with pytest.raises(ValueError, match=f"engine.{option.partition('=')[0]} .*{instead}"):
        suites.get(suite).points(settings)
