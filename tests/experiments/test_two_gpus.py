"""The list for two GPUs, on none: every suite of it has points, and the other parts run on CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution import runner
from engine.execution.workers import Workers
from experiments import suites, two_gpus
from experiments.settings import Settings, resolve
from experiments.two_gpus import (
    PARTS,
    REFERENCE,
    SUITES,
    Answers,
    Setup,
    compare_ranks,
    forced_answers,
    run_part,
    suite_overrides,
)
from tests.experiments.test_conf import composed
from tests.experiments.wrong_ranks import LargerNorm, MissingSum, SwappedHeads


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_of_the_list_has_points(name: str, tmp_path: Path) -> None:
    setup = Setup("qwen3_32b", "cpu", 2, tmp_path, None, 8)
    config = resolve(composed(*suite_overrides(setup, name)), tmp_path)
    settings = Settings.parse(config)
    points = suites.get(settings.suite).points(settings)
    assert {point.params["tp"] for point in points} >= {2}
    assert settings.model.name == "qwen3_32b"


def test_how_ranks_sum_is_told_to_the_engine_and_named_in_the_folder(tmp_path: Path) -> None:
    setup = Setup("qwen3_32b", "cpu", 2, tmp_path, None, 8, "one_shot")
    config = resolve(composed(*suite_overrides(setup, "scaling")), tmp_path)
    assert config["engine"]["all_reduce"] == "one_shot"
    assert config["run"]["folder"] == str(tmp_path / "scaling-qwen3_32b-tp2-one_shot")


# --- the same answers -------------------------------------------------------------------------------------------


def answers(seed: int, noise: float) -> Answers:
    """Those of a model whose logits are off by so much from those that all share."""
    exact = torch.randn(32, 2000, generator=torch.Generator().manual_seed(0))
    logits = exact + noise * torch.randn(exact.shape, generator=torch.Generator().manual_seed(seed))
    return Answers([[1, 2, 3, 4]] * 8, logits, logits.clone())


def test_every_one_of_the_three_questions_decides() -> None:
    def verdicts(**changed: Answers) -> tuple[bool, ...]:
        found = {"reference": answers(1, 0.0), "exact": answers(2, 1e-6), "one": answers(3, 0.05)}
        result = compare_ranks(**(found | {"ranks": answers(4, 0.05)} | changed), dtype=torch.bfloat16)
        parts = tuple(result["agrees_in"][name] for name in ("shards", "rounding", "eager"))
        assert result["agrees"] == all(parts)
        assert result["one_rank"]["within_tolerance"] is False, "for the record only"
        assert result["shards"]["matching_prefixes"] == [4] * 8
        return parts

    assert verdicts() == (True, True, True)
    assert verdicts(exact=answers(2, 1e-4)) == (False, True, True)
    assert verdicts(one=answers(3, 0.1)) == verdicts(ranks=answers(4, 0.1)) == (True, False, True)
    ranks = answers(4, 0.05)
    assert verdicts(ranks=Answers(ranks.tokens, ranks.logits, answers(5, 0.05).logits)) == (True, True, False)


def test_ranks_that_do_not_agree_fail_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup("tiny_qwen3", "cpu", 2, tmp_path, None, 8)
    for agrees in (True, False):
        monkeypatch.setitem(two_gpus.PARTS, "agreement", lambda _, agrees=agrees: {"agrees": agrees})
        assert run_part(setup, "agreement") == (not agrees)
        record = json.loads((tmp_path / "agreement-tiny_qwen3-tp2.json").read_text())
        assert record["result"]["agrees"] == agrees
        assert record["provenance"]["command"].startswith("python -m experiments.two_gpus")


def test_a_reference_in_tf32_is_refused(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ValueError, match=r"fp32 products in fp32, but .* is 'high'"):
            two_gpus.agreement(Setup("tiny_qwen3", "cpu", 2, tmp_path, None, 8))
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The setup, the model, and what one rank answers in fp32 and in bf16."""
    setup = Setup("tiny_qwen3", "cpu", 2, tmp_path_factory.mktemp("out"), None, 8)
    model = setup.config | {"dtype": "bfloat16"}
    reference = forced_answers(setup, model, None, **REFERENCE)
    one = forced_answers(setup, model, reference.tokens, tensor_parallel_size=1)
    return {"setup": setup, "model": model, "reference": reference, "one": one}


def verdict(one_rank: dict[str, Any]) -> dict[str, Any]:
    """Of two ranks as they are now."""
    setup, model, reference = (one_rank[name] for name in ("setup", "model", "reference"))
    exact = forced_answers(setup, model, reference.tokens, dtype="float32")
    ranks = forced_answers(setup, model, reference.tokens, and_eagerly=True)
    return compare_ranks(reference, exact, one_rank["one"], ranks, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [SwappedHeads, MissingSum, LargerNorm])
def test_ranks_that_compute_something_else_do_not_agree(
    one_rank: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fault: type
) -> None:
    """The fault is in one layer. bf16 alone hides the smallest of them, a norm 1% too large: fp32 does not."""
    monkeypatch.setattr(runner, "Workers", partial(Workers, runner_class=fault))
    result = verdict(one_rank)
    assert not result["agrees"]
    assert result["agrees_in"] == {"rounding": fault is LargerNorm, "shards": False, "eager": True}


@pytest.mark.slow
def test_the_other_parts_run_on_cpu_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.two_gpus", *PARTS, "--model=tiny_qwen3", "--device=cpu"]
    command += ["--num-tokens=8", f"--out={tmp_path}", f"--scratch={tmp_path}"]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    results = {
        part: json.loads((tmp_path / f"{part}-tiny_qwen3-tp2.json").read_text())["result"] for part in PARTS
    }
    assert results["checkpoint"]["tokens_equal_dummy"]
    agreement = results["agreement"]
    assert agreement["agrees"]
    assert agreement["agrees_in"] == {"rounding": True, "shards": True, "eager": True}
    assert agreement["dtype"] == "bfloat16"
    assert agreement["shards"]["matching_prefixes"] == [8] * 8
    assert agreement["eager"]["num_tokens"] == agreement["rounding"]["num_tokens"] == 64
    assert results["kill"]["error"] == "rank 1 was killed by SIGKILL"
    assert results["kill"]["processes_left"] == []
    assert results["all_reduce"]["ended_early"] is None
