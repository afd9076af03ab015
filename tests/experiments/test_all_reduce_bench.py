"""All-reduces against each other: what is wrong is not timed, what cannot be had says why, and no rank is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.parallel.group import ParallelGroup
from experiments.all_reduce_bench import METHODS, ROUNDS, SAMPLES, Contender, Rank, _wait, measure
from experiments.columns import STATUSES
from kernels.timing import time_interleaved

CPU = torch.device("cpu")


def test_on_cpus_torchs_is_timed_and_the_others_say_why_not() -> None:
    result = measure("cpu", 2)
    assert result["ended_early"] is None
    assert list(result["medians"]) == ["1 x 1024", "2 x 1024"]
    assert [row["variant"] for row in result["rows"]] == [*METHODS] * 2
    for row in result["rows"]:
        assert row["status"] in STATUSES
        if row["variant"] == "torch":
            assert row["status"] == "ok", row
            assert [len(samples) for samples in row["samples_us"]] == [SAMPLES] * ROUNDS
            assert row["time_us_low"] <= row["time_us"] <= row["time_us_high"]
        else:
            assert (row["status"], row["error"]) == (
                "unsupported",
                "it needs a GPU for each rank, and these ranks talk over gloo",
            )


class Alone(ParallelGroup):
    """Two ranks of which the other has the same numbers, or, of bytes, others."""

    bytes_differ = False

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        other = tensor ^ 1 if self.bytes_differ and tensor.dtype == torch.uint8 else tensor
        return torch.cat([tensor, other], dim=dim)

    def gather_texts(self, text: str, device: torch.device) -> list[str]:
        return [text, text]


def failure_of(run: Any, group: ParallelGroup | None = None) -> dict[str, str] | None:
    x = torch.empty(2, 8, dtype=torch.bfloat16)
    return Rank(group or Alone(0, 2), CPU, "none", "none").failure(Contender(x, lambda: run(x)))


def test_a_sum_has_to_be_right_before_it_is_timed() -> None:
    assert failure_of(lambda x: x + x) is None
    assert failure_of(lambda x: (x + x) * 1.001) is None  # rounds back
    wrong = failure_of(lambda x: x * 2.02)
    assert wrong is not None
    assert wrong["status"] == "incorrect"
    assert wrong["error"].startswith("turn 4: off by")
    nothing = failure_of(lambda x: x * float("nan"))
    assert nothing is not None
    assert nothing["status"] == "incorrect"


def test_ranks_have_to_have_the_same_bits() -> None:
    class Others(Alone):
        bytes_differ = True

    assert failure_of(lambda x: x + x, Others(0, 2)) == {
        "status": "incorrect",
        "error": "turn 4: ranks have different bits",
    }


def test_what_raises_is_a_row_with_its_first_line() -> None:
    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("one_shot_all_reduce: no\nmore")

    assert failure_of(fail) == {"status": "error", "error": "one_shot_all_reduce: no"}


@pytest.mark.parametrize("raises", [True, False])
def test_ranks_that_end_early_are_named_and_none_is_left(raises: bool) -> None:
    ended: list[str] = []

    def join(timeout: float) -> bool:
        if raises:
            raise RuntimeError("process 1 terminated with signal SIGKILL")
        return False

    process = SimpleNamespace(kill=lambda: ended.append("killed"), join=lambda: ended.append("gone"))
    text = _wait(SimpleNamespace(join=join, processes=[process, process]), timeout_s=0.0)
    assert text == ("process 1 terminated with signal SIGKILL" if raises else "not done within 0 s")
    assert ended == ["killed", "gone"] * 2


# --- on GPUs ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_graphs_repeat_their_calls_as_often_as_was_agreed() -> None:
    x, calls, asked = torch.zeros(8, device="cuda"), [], []

    def call() -> None:
        calls.append(x.add_(1))

    def agree(times: int) -> int:
        asked.append(times)
        return 3

    time_interleaved({"add": [call]}, device=x.device, cache_state="hot", rounds=1, samples=1, agree=agree)
    assert asked[0] > 3
    assert len(calls) == 1 + 1 + 3  # once before, then captured once, and as agreed


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_every_method_is_right_on_two_gpus() -> None:
    result = measure("cuda", 2)
    assert result["ended_early"] is None
    assert len(result["medians"]) == 24
    for row in result["rows"]:
        assert (row["status"], row.get("error")) == ("ok", None), row
        assert row["timing_method"] == "cuda_graph"
