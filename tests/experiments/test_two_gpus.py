"""The list for two GPUs, on none: every suite of it has points, and the other parts run on CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import suites
from experiments.settings import Settings, resolve
from experiments.two_gpus import PARTS, SUITES, Setup, suite_overrides
from tests.experiments.test_conf import composed


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


@pytest.mark.slow
def test_the_other_parts_run_on_cpu_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.two_gpus", *PARTS, "--model=tiny_qwen3", "--device=cpu"]
    command += ["--num-tokens=8", f"--out={tmp_path}", f"--scratch={tmp_path}"]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    results = {
        part: json.loads((tmp_path / f"{part}-tiny_qwen3-tp2.json").read_text())["result"] for part in PARTS
    }
    assert results["checkpoint"]["tokens_equal_dummy"]
    assert all(results["agreement"][other]["agrees"] for other in ("eager", "one_rank"))
    assert results["kill"]["error"] == "rank 1 was killed by SIGKILL"
    assert results["kill"]["processes_left"] == []
    assert results["all_reduce"]["ended_early"] is None
