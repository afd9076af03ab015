"""Compilations of a block are counted, each once, and only those of the block."""

from __future__ import annotations

from pathlib import Path

from kernels.compile_count import count_compilations
from tests.kernels.no_gpu import run_program

PROGRAM = """
import torch, triton
from kernels.activation import silu_mul
from kernels.compile_count import count_compilations

heard = []
triton.knobs.compilation.listener = listener = lambda **event: heard.append(event["cache_hit"])
def launch(dtype):
    silu_mul(torch.ones(3, 64, dtype=dtype), use_triton=True)

launch(torch.float32)
with count_compilations() as count:
    launch(torch.float32)
    found = [count.num_compiled]
    launch(torch.float16)
    launch(torch.float16)
    found.append(count.num_compiled)
    with count_compilations() as inner:
        launch(torch.bfloat16)
    found += [inner.num_compiled, count.num_compiled]
launch(torch.float64)
print(found, count.num_compiled, heard, triton.knobs.compilation.listener is listener)
"""


def test_compilations_are_counted(tmp_path: Path) -> None:
    """What the cache on disk holds counts too, the first time: it is read, and put on the device."""
    for hit in ("False", "True"):
        heard = ", ".join([hit] * 4)
        assert run_program(PROGRAM, TRITON_CACHE_DIR=tmp_path) == f"[0, 1, 1, 2] 2 [{heard}] True\n"


def test_the_interpreter_compiles_nothing() -> None:
    with count_compilations() as count:
        pass
    assert count.num_compiled == 0
