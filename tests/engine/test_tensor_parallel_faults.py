"""Ranks that raise, die or hang, and engines that come and go: the error names the rank, and nothing is left behind."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.execution.workers import WorkerError, Workers
from engine.models.checkpoint import resolve_model
from engine.parallel.rendezvous import open_store
from tests.engine.checkpoints import QWEN3, REPOSITORY
from tests.engine.faulty_ranks import RaisingRunner, register_faulty_kernels
from tests.engine.leftovers import assert_nothing_left, snapshot, wait_until_gone

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "skip_tokenizer_init": True,
    "num_kv_blocks": 80,
}
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@contextmanager
def engine(**options: Any) -> Iterator[LLM]:
    """An engine of two ranks, after which nothing is left."""
    before = snapshot()
    llm = LLM(QWEN3, tensor_parallel_size=2, **(OPTIONS | options))
    try:
        yield llm
    finally:
        pids = [process.pid for process in llm.runner.ranks]
        llm.close()
    del llm
    wait_until_gone(pids, timeout_s=1)
    assert_nothing_left(before)


def step_until_error(
    llm: LLM, kind: type[BaseException], message: str, strike: Callable[[], None] | None = None
) -> float:
    """Seconds until step() raised. Then every request has ended with what it had, and no other is taken.

    strike: what another thread does in the midst of a step, once every request has three tokens.
    """
    names = [llm.engine.add_request(prompt, LONG) for prompt in ([1, 2, 3], [4, 5])]
    known: dict[str, int] = {}

    striker = None if strike is None else threading.Timer(0.003, strike)

    def step_on() -> None:
        struck = False
        while llm.engine.has_unfinished_requests():
            known.update({output.request_id: len(output.token_ids) for output in llm.engine.step()})
            if striker is not None and not struck and min(known.get(name, 0) for name in names) >= 3:
                striker.start()
                struck = True

    start = time.monotonic()
    with pytest.raises(kind) as caught:
        step_on()
    assert re.fullmatch(message, str(caught.value)), caught.value
    duration_s = time.monotonic() - start
    assert not llm.engine.has_unfinished_requests()
    ended = {output.request_id: output for output in llm.engine.step()}
    assert sorted(ended) == sorted(names)
    for name, output in ended.items():
        assert output.finish_reason == "error"
        assert output.error == str(llm.runner.failure)
        assert len(output.token_ids) == known[name] > 0
    with pytest.raises(RuntimeError, match="the engine has ended and takes no more requests"):
        llm.engine.add_request([1], SHORT)
    with pytest.raises(RuntimeError, match="the ranks have ended"):
        llm.forced_logits([1], [2])
    wait_until_gone([process.pid for process in llm.runner.ranks], timeout_s=1)
    return duration_s


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_t2_a_rank_that_is_killed_in_mid_step(overlap):
    with engine(overlap_scheduling=overlap) as llm:
        strike = functools.partial(os.kill, llm.runner.ranks[1].pid, signal.SIGKILL)
        assert step_until_error(llm, WorkerError, "rank 1 was killed by SIGKILL", strike) < 60
        assert llm.runner.failure.rank == 1


def test_a_rank_that_is_stopped():
    with engine(worker_timeout_s=10.0) as llm:
        strike = functools.partial(os.kill, llm.runner.ranks[1].pid, signal.SIGSTOP)
        message = r"rank 1 \(pid \d+\) hangs: no sign of life for \d+ s; .*"
        assert step_until_error(llm, WorkerError, message, strike) < 100


def test_a_rank_that_raises_and_the_kernel_of_another_module():
    register_faulty_kernels()
    with engine(decode_attention="raises_on_rank_1") as llm:
        step_until_error(llm, WorkerError, "rank 1 failed: ZeroDivisionError: the kernel's own fault")
        (note,) = llm.runner.failure.__notes__
        assert note.startswith("On rank 1:\nTraceback")
        assert "faulty_ranks.py" in note


def test_a_rank_that_does_not_come_back():
    register_faulty_kernels()
    with engine(decode_attention="sleeps_on_rank_1", worker_timeout_s=8.0) as llm:
        message = (
            r"rank 1 hangs: launch was not done within 8 s .*; rank 1 is at faulty_ranks.py:\d+ in __call__"
        )
        assert step_until_error(llm, WorkerError, message) < 100


def test_a_kernel_of_the_script_that_runs_is_refused(monkeypatch):
    register_faulty_kernels()
    monkeypatch.setattr("tests.engine.faulty_ranks.FaultyDecode.__module__", "__main__")
    with pytest.raises(ValueError, match="'sleeps_on_rank_1' is defined in the script that runs"):
        LLM(QWEN3, tensor_parallel_size=2, decode_attention="sleeps_on_rank_1", **OPTIONS)


def test_a_rank_that_fails_while_it_starts_and_one_that_refuses():
    before = snapshot()
    config = EngineConfig(device="cpu", load_format="dummy", num_kv_blocks=8, tensor_parallel_size=2)
    with pytest.raises(WorkerError, match=r"^rank 1 failed: OSError: the disk of rank 1 is gone\n"):
        Workers(config, resolve_model(QWEN3, "dummy"), runner_class=RaisingRunner)
    with pytest.raises(ValueError, match=r"^decode_attention: unknown decode kernel 'nope'; known: "):
        LLM(QWEN3, tensor_parallel_size=2, decode_attention="nope", **OPTIONS)
    assert_nothing_left(before)


def start_and_answer(results: dict[int, Any], number: int) -> None:
    with LLM(QWEN3, tensor_parallel_size=2, **OPTIONS) as llm:
        (output,) = llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)
        results[number] = output.token_ids


def test_t2_two_engines_start_at_the_same_moment():
    before = snapshot()
    results: dict[int, Any] = {}
    threads = [threading.Thread(target=start_and_answer, args=(results, number)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with LLM(QWEN3, **OPTIONS) as llm:
        (expected,) = llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)
    assert results == {0: expected.token_ids, 1: expected.token_ids}
    assert_nothing_left(before)


@pytest.mark.parametrize(
    "cycles", [1, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_engines_that_come_and_go_leave_nothing(cycles):
    """Closed, or only dropped."""
    before = snapshot()
    for number in range(1, cycles):
        start_and_answer({}, number)
    llm = LLM(QWEN3, tensor_parallel_size=2, **OPTIONS)
    pids = [process.pid for process in llm.runner.ranks]
    del llm
    assert_nothing_left(before)
    wait_until_gone(pids, timeout_s=1)


SCRIPT = """
import sys
from engine import LLM, SamplingParams
from tests.engine.checkpoints import QWEN3

print("starting", flush=True)
llm = LLM(QWEN3, load_format="dummy", device="cpu", num_kv_blocks=80, tensor_parallel_size=2)
print(*[process.pid for process in llm.runner.ranks], flush=True)
params = SamplingParams(max_tokens=400, ignore_eos=True)
llm.engine.add_request([1, 2], params)
llm.engine.add_request([1, 2, 3], params)
try:
    llm.engine.step()
    print("serving", flush=True)
    while True:
        llm.engine.step()
except KeyboardInterrupt:
    (output,) = [output for output in llm.engine.step() if output.request_id == "request-0"] or [None]
    if output is not None:
        print(output.finish_reason, output.error, flush=True)
    raise
"""


@contextmanager
def script() -> Iterator[subprocess.Popen[str]]:
    """A user's script, with no guard around its main part, in a terminal of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "starting\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(pid) for pid in process.stdout.readline().split()]


def test_ctrl_c_ends_the_ranks_and_the_requests():
    with script() as process:
        pids = ranks_of(process)
        assert len(pids) == 2
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        time.sleep(0.1)  # 400 tokens take longer, and all of the time is spent in steps
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGINT
        assert output == "error interrupted by KeyboardInterrupt\n"
        assert errors.count("Traceback") == 1  # the ranks say nothing
        wait_until_gone(pids, timeout_s=60)


def test_ctrl_c_while_the_ranks_start():
    with script() as process:
        while len(pids := [child.pid for child in psutil.Process(process.pid).children()]) < 2:
            time.sleep(0.01)
        time.sleep(0.5)  # wherever in their start that finds them
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=120)
        assert process.returncode == -signal.SIGINT
        wait_until_gone(pids, timeout_s=60)


def test_ranks_end_when_their_parent_is_killed():
    with script() as process:
        pids = ranks_of(process)
        process.kill()
        process.wait()
        wait_until_gone(pids, timeout_s=60)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """And what opens files or starts threads once in a process has done so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    open_store()
    with LLM(QWEN3, **OPTIONS) as llm:
        llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)
    yield
    torch.set_num_threads(before)
