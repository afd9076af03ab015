"""Launches in a block of compile_ahead compile, on other threads, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels import compile_ahead
from tests.kernels.no_gpu import run_program

PROGRAM = """
import threading
import torch, triton
from kernels.activation import silu_mul
from kernels.compile_ahead import can_compile_ahead, compile_ahead
from kernels.norm import rms_norm

compiled = []
def note(**event):
    if not event["cache_hit"]:
        compiled.append((event["src"].name, threading.current_thread() is threading.main_thread()))
triton.knobs.compilation.listener = note

assert can_compile_ahead()
run, cpu = triton.JITFunction.run, torch.device("cpu")
def launch(dtype):
    x = torch.ones(3, 64, dtype=dtype)
    silu_mul(x, use_triton=True)
    rms_norm(x, torch.ones(64, dtype=dtype), 1e-6, use_triton=True)

with compile_ahead(cpu, compiles=False):
    launch(torch.bfloat16)
assert not compiled, compiled

def elsewhere():
    launch(torch.float16)
    other.append([name for name, _ in compiled])
other = []
with compile_ahead(cpu):
    thread = threading.Thread(target=elsewhere)  # another thread's launches compile there, before they return
    thread.start()
    thread.join()
    launch(torch.bfloat16)
    launch(torch.bfloat16)  # no second time
assert other == [["_silu_mul_kernel", "_rms_norm_kernel"]], other
assert sorted(compiled[2:]) == [("_rms_norm_kernel", False), ("_silu_mul_kernel", False)], compiled

try:
    with compile_ahead(cpu):
        raise KeyError("the block's own error")
except KeyError:
    pass
assert triton.JITFunction.run is run
launch(torch.bfloat16)
assert len(compiled) == 4, compiled
launch(torch.float32)  # not compiled ahead: when it is launched
assert compiled[4:] == [("_silu_mul_kernel", True), ("_rms_norm_kernel", True)], compiled
print("ran")
"""

REFUSED = """
import torch
from kernels.compile_ahead import compile_ahead
from kernels.triton_support import tl, triton

@triton.jit
def wrong(x_ptr):
    tl.store(x_ptr, tl.static_assert(False, "as it must"))

with compile_ahead(torch.device("cpu")):
    wrong[(1,)](torch.ones(1))
try:
    wrong[(1,)](torch.ones(1))
except Exception as error:
    print("as it must" in str(error))
"""


def test_launches_compile_on_other_threads(tmp_path: Path) -> None:
    assert run_program(PROGRAM, TRITON_CACHE_DIR=tmp_path) == "ran\n"


def test_a_kernel_that_does_not_compile_says_so_when_it_is_launched(tmp_path: Path) -> None:
    program = tmp_path / "refused.py"
    program.write_text(REFUSED)  # Triton reads a kernel's source from its file
    run = f"import runpy; runpy.run_path({str(program)!r})"
    assert run_program(run, TRITON_CACHE_DIR=tmp_path) == "True\n"


@pytest.mark.parametrize("missing", ["HAS_TRITON", "AsyncCompileMode", "compiler", "nothing"])
def test_it_is_known_where_nothing_can_be_compiled_ahead(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_ahead, "INTERPRETING", missing == "compiler")
    if missing == "HAS_TRITON":
        monkeypatch.setattr(compile_ahead, "HAS_TRITON", False)
    if missing == "AsyncCompileMode":
        monkeypatch.delattr(compile_ahead.triton, "AsyncCompileMode")
    assert compile_ahead.can_compile_ahead() is (missing == "nothing")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Compiled ahead and loaded by other threads, a kernel runs as ever; what it was compiled on is left as it was."""
    from kernels.sampling_triton import greedy

    logits = torch.randn(3, 777, device="cuda", dtype=torch.float16)
    kept, slots = torch.full((3,), 5, device="cuda"), torch.arange(3, device="cuda")
    with compile_ahead.compile_ahead(logits.device):
        greedy(logits, keep_in=(kept, slots))
    assert kept.tolist() == [5, 5, 5]
    assert torch.equal(greedy(logits, keep_in=(kept, slots)), logits.argmax(1))
    assert torch.equal(kept, logits.argmax(1))
