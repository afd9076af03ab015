"""What users type: lists and sweeps, models by path, kernels by name, and errors that list what there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from experiments import arguments
from tests.experiments.test_conf import composed

ROOT = Path(__file__).resolve().parents[2]


def prepare(*typed: str, cwd: Path = ROOT) -> list[str]:
    return arguments.prepare(typed, cwd)


def test_model_may_be_a_yaml_a_directory_or_a_hub_id(tmp_path: Path) -> None:
    checkpoint = tmp_path / "my ckpt"
    checkpoint.mkdir()
    assert prepare("model=qwen3_8b") == ["model=qwen3_8b"]
    assert prepare("model=my ckpt", cwd=tmp_path) == [f"model.path='{checkpoint}'"]
    assert prepare("model=Qwen/Qwen3-0.6B") == ["model.path='Qwen/Qwen3-0.6B'"]
    assert prepare("model=qwen3_8b,qwen3_4b") == ["model=qwen3_8b,qwen3_4b"]


def test_attention_may_name_kernels_without_a_yaml() -> None:
    assert prepare("attention=[split_kv,mine]") == ["attention=[split_kv]", "+attention.mine={decode: mine}"]
    assert prepare("attention=mine") == ["attention=[]", "+attention.mine={decode: mine}"]
    assert prepare("attention=split_kv,torch") == ["attention=split_kv,torch"]
    assert prepare("attention=[split_kv],[torch]") == ["attention=[split_kv],[torch]"]


def test_kernels_keep_the_order_in_which_they_are_named() -> None:
    """The first is the baseline of attribution, whether it has a yaml or not."""
    for names in (["planned", "torch", "sdpa", "split_kv_again"], ["torch", "planned", "reference"]):
        config = composed(*prepare(f"attention=[{','.join([*names, names[0]])}]"))
        assert list(config["attention"]) == names
        assert config["attention"].get("split_kv_again", {"decode": "split_kv"}) == {"decode": "split_kv"}
    assert composed(*prepare("attention=[planned,all]"))["attention"]["all"] == {"decode": "*"}


def test_a_sweep_gets_a_folder_that_no_other_sweep_has() -> None:
    first, second = (arguments.sweep_folder(prepare("-m", "+suite=x")) for _ in range(2))
    assert first != second
    assert first.parent == ROOT / "outputs" / "multirun"
    assert arguments.sweep_folder(prepare("-m", "hydra.sweep.dir=/there")) == Path("/there")


def test_a_sweep_goes_below_its_root_whatever_the_characters_of_their_names(tmp_path: Path) -> None:
    for typed, root in (("'my runs'", "my runs"), ('"a,b"', "a,b"), ("plain", "plain")):
        cwd = tmp_path / "it's, (here)"
        prepared = prepare("-m", "+suite=throughput", f"run.root={typed}", cwd=cwd)
        assert arguments.sweep_folder(prepared).parent == cwd / root / "multirun"
        with initialize_config_dir(version_base="1.3", config_dir=str(arguments.CONF)):
            config = compose("config", overrides=prepared[1:], return_hydra_config=True)
        assert config.hydra.sweep.dir == str(arguments.sweep_folder(prepared))
    prepared = prepare("-m", "run.root='~/runs'", cwd=tmp_path)
    assert arguments.sweep_folder(prepared).parent == Path.home() / "runs" / "multirun"
    assert arguments.sweep_folder(["hydra.sweep.dir='/over there'"]) == Path("/over there")


def test_completion_queries_pass_untouched() -> None:
    assert prepare("-sc", "query=bash", "model=./x") == ["-sc", "query=bash", "model=./x"]


def test_hydras_completion_knows_groups_and_options() -> None:
    for line, expected in (
        ("decodelab +suite=lo", "+suite=long_decode"),
        ("decodelab model=qwen3_8", "model=qwen3_8b"),
        ("decodelab +suite=long_decode bench.bat", "bench.batch_sizes="),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "experiments.run", "-sc", "query=bash"],
            env=os.environ | {"COMP_LINE": line, "COMP_POINT": str(len(line))},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=180,
            check=True,
        )
        assert done.stdout.split() == [expected]


def run(*typed: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.run", *typed],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ((), "long_decode"),
        (("+suite=nonsense",), "long_decode"),
        (("+suite=decode_kernel", "model=nonsense"), "qwen3_8b"),
        (("+suite=decode_kernel", "attention=nonsense"), "single_pass"),
        (("+suite=decode_kernel", "bench.batch_sizes=1,2"), "--multirun"),
        (("+suite=decode_kernel", "bench.batch_size=1"), "batch_size"),
        (("+suite=decode_kernel", "+bench.batch_size=1"), "batch_sizes"),
        (("+suite=decode_kernel", "bench.batch_sizes=[0]"), "bench.batch_sizes must be an integer >= 1"),
        (("+suite=decode_kernel", "bench.cache_states=[warm]"), "cold, hot"),
        (("+suite=long_decode", "+engine.typo=1", "bench.levels=step"), "prefill_attention"),
        (("+suite=decode_kernel", "device=cuda:99"), "are visible"),
        (("+suite=decode_kernel", "device=99"), "are visible"),
        (("+suite=decode_kernel", "device=tpu"), "cuda:N"),
        (("+suite=decode_kernel", "run.resume=true"), "run.folder"),
        (("+suite=decode_kernel", "model=./missing"), "there is no directory"),
        (("+suite=decode_kernel", "run.isolate=maybe"), "true, false or auto"),
        (("+suite=decode_kernel", "plugins=[no_such_module]"), "no_such_module"),
    ],
)
def test_senseless_requests_are_refused_with_what_there_is(
    typed: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    from experiments.run import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run"])
    assert main(typed) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not (tmp_path / "outputs").exists()


def test_help_explains_the_suites_and_how_to_repeat(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0
    for words in ("+suite=long_decode", "decode_kernel", "qwen3_32b", "run.resume", "experiments.compare"):
        assert words in done.stdout
