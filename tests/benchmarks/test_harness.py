"""What the benchmarks here stand on: samples played back exactly, nothing timed that is wrong, usable saved numbers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.kernel_bench import BoundCall, Candidate
from kernels import costs
from kernels.costs import Cost
from tests.benchmarks.comparison import INTERPRETED, Comparison, Contender, Unsupported
from tests.benchmarks.sample_clock import SampleClock

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def test_a_clock_plays_samples_back() -> None:
    clock = SampleClock()
    clock.load([3.0, 1e6, 0.25])
    seen = []
    for _ in range(3):
        start = clock.now()
        clock.advance()
        seen.append(clock.now() - start)
    assert seen == pytest.approx([3e-6, 1.0, 2.5e-7])
    with pytest.raises(StopIteration):
        clock.advance()


@dataclass(frozen=True)
class Doubling:
    """Twice a vector."""

    dtype: str = "float32"
    input_bytes: int = 8
    interpreted_size: int = 1

    @property
    def cost(self) -> Cost:
        return Cost(8, 4)

    def make_inputs(self, generator: torch.Generator) -> Tensor:
        return torch.rand(4, generator=generator)

    def reference(self, inputs: Tensor) -> list[Tensor]:
        return [2 * inputs]

    def candidates(self) -> list[Candidate]:
        return []


def contender(
    problem: Doubling, run: Callable[[Tensor], Tensor], unsupported: str | None = None, peer: bool = False
) -> Contender:
    def bind(inputs: Tensor) -> BoundCall:
        return BoundCall(lambda: (run(inputs),))

    return Contender(problem, Candidate("", bind, lambda: None, unsupported=unsupported), peer)


def crash(_: Tensor) -> Tensor:
    raise RuntimeError("no kernel\nfor you")


def test_only_what_is_right_is_timed() -> None:
    problem = Doubling()
    comparison = Comparison(
        "doubling",
        {
            "right": contender(problem, lambda x: x + x),
            "wrong": contender(problem, lambda x: 2.01 * x),
            "silent": contender(problem, lambda x: torch.full_like(x, float("nan"))),
            "unable": contender(problem, lambda x: x, unsupported="needs a moon"),
            "odd peer": contender(problem, crash, peer=True),
            "crashing": contender(problem, crash),
        },
        CPU,
    )
    assert comparison.check("right") < 1e-6
    for label in ("wrong", "silent"):
        with pytest.raises(AssertionError, match="max_rel_err is"):
            comparison.check(label)
    with pytest.raises(Unsupported, match="needs a moon"):
        comparison.check("unable")
    with pytest.raises(Unsupported, match=r"^RuntimeError: no kernel$"):
        comparison.check("odd peer")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no kernel"):
            comparison.check("crashing")
    found = comparison.timings(list(comparison.contenders), "hot")
    assert list(found) == ["right"]
    assert [len(timing.samples_us) for timing in found["right"]] == [3, 3, 3]
    assert comparison.timings(list(comparison.contenders), "hot") is found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The file and the output of a short run on a CPU, whatever machine this is."""
    file = tmp_path_factory.mktemp("saved") / "numbers.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    modules = [f"tests/benchmarks/test_{name}.py" for name in ("decode_attention", "elementwise")]
    options = ["--benchmark-only", f"--benchmark-json={file}", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *modules, "-k", "1x128 or silu_mul", *options],
        cwd=ROOT,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return file, done.stdout


def test_saved_numbers_are_grouped_by_shape_and_say_what_they_mean(saved: tuple[Path, str]) -> None:
    file, output = saved
    written: dict[str, Any] = json.loads(file.read_text())
    assert written["machine_info"]["accelerator"]["device"] == "cpu"
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in written["benchmarks"]:
        groups.setdefault(entry["group"], []).append(entry)
    decode = "decode 1x128, 8/2 heads of 32, blocks of 16, float32"
    assert {group: [entry["params"]["label"] for entry in found] for group, found in groups.items()} == {
        f"{decode}, cold": ["torch", "sdpa_contiguous"],
        f"{decode}, hot": ["torch", "sdpa_contiguous"],
        "silu_mul, 4 tokens, tiny_qwen3, float32, cold": ["torch"],
        "silu_mul, 4 tokens, tiny_qwen3, float32, hot": ["torch"],
    }
    cost = costs.decode_attention([128], 8, 2, 32, torch.float32, 16)
    for entry in groups[f"{decode}, cold"]:
        info, stats = entry["extra_info"], entry["stats"]
        assert (info["bytes"], info["flops"]) == (cost.bytes, cost.flops)
        assert (info["cache_state"], info["timing_method"]) == ("cold", "perf_counter")
        assert info["max_rel_err"] < 1e-4
        assert stats["rounds"] == len(stats["data"]) == 9
        assert info["bytes_per_s"] == pytest.approx(cost.bytes / stats["median"])
        assert info["fraction_of_read_bandwidth"] == pytest.approx(
            info["bytes_per_s"] / info["read_bandwidth"]
        )
        assert 1e-6 < stats["min"] < 1
    assert INTERPRETED in output


def test_saved_numbers_can_be_compared(saved: tuple[Path, str]) -> None:
    file, _ = saved
    other = shutil.copy(file, file.with_name("other.json"))
    command = [sys.executable, "-m", "pytest_benchmark", "compare", str(file), str(other), "--columns=median"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sdpa_contiguous") == 4  # cold and hot, twice each
