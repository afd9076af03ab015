"""The long run: memory and throughput flat, the pool whole at the end.

DECODELAB_SOAK_SECONDS sets how long each of the slow ones runs.
"""

from __future__ import annotations

import os

import psutil
import pytest
import torch

from engine import LLM
from tests.engine.checkpoints import QWEN3
from tests.engine.soak import check_soak, run_soak, slowdown_of

MEBIBYTE = 1 << 20
OPTIONS = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 128, "num_kv_blocks": 25}


def soak_seconds(default: float) -> float:
    return float(os.environ.get("DECODELAB_SOAK_SECONDS", default))


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


@pytest.fixture(autouse=True)
def one_thread():
    """This model is too small to share, and threads that wait for each other spin: a busy machine would look slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def llm_on_the_cpu(overlap: bool) -> LLM:
    return LLM(QWEN3, device="cpu", max_num_batched_tokens=256, overlap_scheduling=overlap, **OPTIONS)


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_thousand_steps_of_mixed_load(overlap):
    """Counted, not timed: in the seconds of a slow machine no request may come to be preempted."""
    with llm_on_the_cpu(overlap) as llm:
        soak = run_soak(llm, 1000, resident_bytes, progress=lambda: llm.engine.totals.num_steps)
        print(soak)
        check_soak(llm, soak, growth_bytes=8 * MEBIBYTE, slowdown=0.6)


def test_what_grows_slower_is_found():
    """A slow engine beside one that has just begun: each of its steps does a few milliseconds more."""
    with llm_on_the_cpu(False) as llm, llm_on_the_cpu(False) as fresh:
        assert slowdown_of(llm, fresh, slices=12, steps=6) < 1.3
        step = llm.engine.step_finished

        def slow_step():
            sum(range(200_000))
            return step()

        llm.engine.step_finished = slow_step
        assert slowdown_of(llm, fresh, slices=12, steps=6) > 1.3


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("overlap", [False, True])
def test_an_hour_of_mixed_load(overlap):
    """Hundreds of thousands of steps, as many as a real model takes in hours; then it is as fast as a new engine."""
    with llm_on_the_cpu(overlap) as llm, llm_on_the_cpu(overlap) as fresh:
        soak = run_soak(llm, soak_seconds(1800), resident_bytes)
        print(soak)
        check_soak(llm, soak, growth_bytes=16 * MEBIBYTE, slowdown=0.5)
        slowdown = slowdown_of(llm, fresh)
        print("slowdown", slowdown)
        assert slowdown < 1.1  # two new engines on a busy machine: 0.97 to 1.01


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_minutes_of_mixed_load_on_a_gpu():
    with LLM(QWEN3 | {"head_dim": 64}, device="cuda", max_num_seqs=64, **OPTIONS) as llm:
        soak = run_soak(llm, soak_seconds(600), torch.cuda.memory_allocated)
        print(soak)
        check_soak(llm, soak, growth_bytes=MEBIBYTE, slowdown=0.1)
