"""Compile Triton kernels in parallel, before they are launched one after another.

    with compile_ahead(device):
        step(example_inputs)      # every launch compiles, none runs
    step(inputs)                  # finds its kernels compiled and on the device

A kernel takes half a second to a whole one, and an engine's first steps launch some thirty. Four fifths of that are
spent in MLIR, LLVM, ptxas and (before Triton 3.7) the C compiler, without Python's lock, so threads do. What is
compiled is what the example launches: another dtype, alignment or constexpr is compiled when it is first launched.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from kernels.triton_support import HAS_TRITON, INTERPRETING, triton

MAX_THREADS = 16
"""More would only wait for Python's lock."""

_ONE_AT_A_TIME = threading.Lock()


def can_compile_ahead() -> bool:
    """Whether this Triton compiles, and has what compile_ahead takes of it (3.4 and later have)."""
    return HAS_TRITON and not INTERPRETING and hasattr(triton, "AsyncCompileMode")


@contextlib.contextmanager
def compile_ahead(device: torch.device, *, compiles: bool = True) -> Iterator[None]:
    """A block in which this thread's launches of Triton kernels compile and run nothing; its end waits for them all.

    Whatever such kernels would have written is left as it was, so the block must not use it as an index. A kernel that
    does not compile, or does not fit the device, says so when it is launched after the block. Kernels that tune
    themselves do not belong in it: they would time launches of nothing.

    device: the CUDA device that the block's tensors are on. compiles=False: the launches do nothing at all, for a
    process that keeps step with one that compiles for both. Needs can_compile_ahead().
    """
    owner, run = threading.get_ident(), triton.JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != owner:
            return run(kernel, *arguments, warmup=warmup, **options)
        return run(kernel, *arguments, warmup=True, **options) if compiles else None

    # Triton has no mode in which kernel[grid](...) is a warm-up, so the method behind it is replaced for a while.
    with _ONE_AT_A_TIME, _Compilers(device) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        triton.JITFunction.run = compile_only
        try:
            yield
        finally:
            triton.JITFunction.run = run


class _Compilers(ThreadPoolExecutor):
    """Threads that compile a kernel and put it on the device, as its first launch would."""

    def __init__(self, device: torch.device) -> None:
        def use_device() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)

        threads = min(MAX_THREADS, os.cpu_count() or 1)
        super().__init__(threads, "compile_ahead", initializer=use_device)

    def submit(self, fn: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        def compile_and_load() -> Any:
            kernel = fn(*arguments, **options)
            _ = kernel.run  # loads it, and builds its launcher
            return kernel

        return super().submit(compile_and_load)
