"""Compile Triton kernels ahead of time for GPUs that are not here, and say what they would use.

    from tests.kernels.aot import Launch, compile_launches

    reports = compile_launches([
        Launch(
            kernel="kernels.decode.split_kv:_attend_split",
            types={"q_ptr": "*bf16", "scale": "fp32"},   # every run-time argument not named is an "i32"
            constexprs={"HEAD_DIM": 128, "DOT_DTYPE": tl.bfloat16},
            num_warps=4,
            num_stages=3,
        ),
    ])
    for report in reports:                                # one per launch and capability
        report.check()                                    # compiled, fits shared memory, no spills

The compiler runs in a process without TRITON_INTERPRET, since in this process `triton.jit` may already stand
for the interpreter; it starts with the first launch and ends with this process. As the launcher would for
aligned tensors, pointers and integers are marked divisible by 16, except the arguments for which the kernel
says do_not_specialize.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# Bytes of shared memory that one program may use, by compute capability (CUDA programming guide).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}

REPOSITORY = Path(__file__).resolve().parents[2]

EXTENT = [
    pytest.param(False, id="usual"),
    pytest.param(True, id="everything", marks=pytest.mark.slow),
]
"""Values of `everything`: every launch for every GPU, or the usual ones for an H200. A compilation takes a second."""


@dataclass(frozen=True)
class Launch:
    """One specialisation of a kernel: "module:function", run-time types, constexprs and launch options."""

    kernel: str
    types: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    label: str = ""


@dataclass(frozen=True)
class Report:
    """What one launch would use on one kind of GPU. Bytes, except registers (a thread)."""

    launch: Launch
    capability: int
    registers: int
    spilled: int
    shared: int
    ptx: str

    def check(self, max_spilled: int = 0) -> None:
        """Raise AssertionError unless it fits the GPU and spills at most max_spilled bytes a thread."""
        assert self.spilled <= max_spilled, f"{self} spills more than {max_spilled} bytes"
        assert self.shared <= SHARED_LIMIT[self.capability], f"{self} exceeds the shared memory"

    def __str__(self) -> str:
        return (
            f"{self.launch.kernel.split(':')[1]} {self.launch.label} sm_{self.capability}: "
            f"{self.registers} registers, {self.spilled} B spilled, {self.shared} B shared"
        )


def compile_launches(
    launches: Sequence[Launch], capabilities: Sequence[int] = tuple(SHARED_LIMIT)
) -> list[Report]:
    """Compile every launch for every capability; a compile error is raised with the compiler's words."""
    process = _compiler()
    assert process.stdin is not None
    assert process.stdout is not None
    pickle.dump((list(launches), list(capabilities)), process.stdin)
    process.stdin.flush()
    try:
        figures = pickle.load(process.stdout)
    except EOFError:
        _compiler.cache_clear()  # the next call starts another
        raise RuntimeError(f"the compiler has died, with exit code {process.wait()}") from None
    if isinstance(figures, str):
        raise RuntimeError(figures[-6000:])
    pairs = [(launch, capability) for launch in launches for capability in capabilities]
    return [Report(launch, capability, *found) for (launch, capability), found in zip(pairs, figures)]


def compile_usual(launches: Sequence[Launch], usual: int, everything: bool) -> list[Report]:
    """The first `usual` launches for an H200, or everything: all of them for every GPU."""
    return compile_launches(launches) if everything else compile_launches(launches[:usual], (90,))


@functools.cache
def _compiler() -> subprocess.Popen[bytes]:
    """The process that compiles: it imports torch and Triton once for all tests of this process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.kernels.aot import answer; answer()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment | {"PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
    )
    atexit.register(process.communicate)  # nothing more to compile: it ends
    return process


def answer() -> None:
    """The compiler's process: launches and capabilities on stdin, the figures of each pair, or the error, on stdout."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    while sys.stdin.buffer.peek(1):
        launches, capabilities = pickle.load(sys.stdin.buffer)
        try:
            found: Any = [_compile(launch, capability) for launch in launches for capability in capabilities]
        except Exception:
            found = traceback.format_exc()
        pickle.dump(found, answers)
        answers.flush()


def _compile(launch: Launch, capability: int) -> tuple[int, int, int, str]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module, name = launch.kernel.split(":")
    function = getattr(importlib.import_module(module), name)
    signature, attributes, constexprs = {}, {}, dict(launch.constexprs)
    for index, parameter in enumerate(function.params):
        if parameter.name in launch.constexprs:
            signature[parameter.name] = "constexpr"
            continue
        if parameter.is_constexpr and parameter.has_default:
            signature[parameter.name] = "constexpr"
            constexprs[parameter.name] = parameter.default
            continue
        kind = launch.types.get(parameter.name, "i32")
        if parameter.is_constexpr:
            raise ValueError(f"{launch.kernel}: constexpr {parameter.name} has no value")
        signature[parameter.name] = kind
        fixed = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if not fixed and (kind.startswith("*") or kind.startswith("i")):
            attributes[(index,)] = [["tt.divisibility", 16]]
    unknown = (set(launch.types) | set(launch.constexprs)) - set(function.arg_names)
    if unknown:
        raise ValueError(f"{launch.kernel} has no arguments {sorted(unknown)}")
    source = GluonASTSource if function.is_gluon() else ASTSource
    try:
        compiled = triton.compile(
            source(function, signature, constexprs=constexprs, attrs=attributes),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
        )
    except Exception as error:
        raise RuntimeError(f"{launch.kernel} {launch.label} does not compile for sm_{capability}") from error
    registers, spilled = _resources(compiled.asm["cubin"], triton.knobs.nvidia.cuobjdump.path)
    return registers, spilled, compiled.metadata.shared, compiled.asm["ptx"]


def _resources(cubin: bytes, cuobjdump: str) -> tuple[int, int]:
    """Registers and local memory (stack and spills, bytes) a thread, as the cubin itself says."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return found["REG"], found["STACK"] + found["LOCAL"]
