"""Triton's launcher where no GPU is: kernels are specialised and compiled for an H200, and launches do nothing.

For a process of its own, without TRITON_INTERPRET, before it imports anything else of kernels or engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from tests.kernels.aot import REPOSITORY


def run_program(program: str, **environment: Any) -> str:
    """What the Python program prints, run with a GPU's place taken; AssertionError with its words if it fails."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.kernels.no_gpu import replace_gpu; replace_gpu()\n{program}"],
        env=inherited | {"PYTHONPATH": str(REPOSITORY)} | {k: str(v) for k, v in environment.items()},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr[-6000:]
    return done.stdout


def replace_gpu() -> None:
    """Tensors on the CPU are launched on, as on a device 0 of compute capability 9.0."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    import kernels.triton_support

    kernels.triton_support.triton_unavailable = lambda device: None
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            launcher_cls=lambda source, metadata: lambda *arguments: None,
            utils=SimpleNamespace(
                get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
                load_binary=lambda *arguments: (object(), object(), 0, 0, 1024),
            ),
        )
    )
