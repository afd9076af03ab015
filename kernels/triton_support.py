"""What the kernels need to know of Triton: is it here, does it interpret, can it run on this device.

Kernels import `triton` and `tl` from this file, so that every module with a Triton kernel also imports
where Triton is not installed (it is required on Linux only): there `triton.jit` leaves the function as
it is, and `triton_unavailable` says why it cannot be launched.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

__all__ = [
    "INTERPRETING",
    "MAX_GRID_ROWS",
    "cdiv",
    "dot_dtype",
    "gl",
    "gluon",
    "gluon_unavailable",
    "hopper",
    "next_power_of_2",
    "on_device",
    "tl",
    "triton",
    "triton_unavailable",
]


MAX_GRID_ROWS = 65_535
"""Programs that CUDA allows in a grid's second and third dimension."""


class _MissingTriton:
    """Lets kernels be defined, never launched: decorators return their function, names answer with this."""

    constexpr = object

    def jit(self, fn: Any = None, **_options: Any) -> Any:
        return fn if fn is not None else lambda function: function

    def __getattr__(self, name: str) -> Any:
        return self


triton: Any
tl: Any
try:
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]

    HAS_TRITON = True
    # TRITON_INTERPRET=1, as triton.jit sees it.
    INTERPRETING: bool = triton.knobs.runtime.interpret
except ImportError:
    triton = tl = _MissingTriton()
    HAS_TRITON = INTERPRETING = False


gluon: Any
gl: Any
hopper: Any
"""Gluon's instructions for compute capability 9.0, with `meet`, a barrier of a partition's warps, and the host's
TensorDescriptor."""
try:
    from triton.experimental import gluon  # type: ignore[no-redef]
    from triton.experimental.gluon import language as gl  # type: ignore[no-redef]
    from triton.experimental.gluon.language.nvidia import hopper as _instructions
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    _names = ("async_copy", "fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait")
    hopper = SimpleNamespace(
        TensorDescriptor=TensorDescriptor,
        meet=gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier,  # Triton 3.6, and since
        **{name: getattr(_instructions, name) for name in _names},
    )
    GLUON_MISSING = None
except (ImportError, AttributeError) as error:  # experimental: another Triton may name it otherwise
    gluon = gl = hopper = _MissingTriton()
    GLUON_MISSING = f"Triton's Gluon is not as kernels need it: {error}"


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. As next_power_of_2, for the host: Triton's own take 5 us a call, and a step has hundreds."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n, 1 at least."""
    return 1 << max(n - 1, 0).bit_length()


def gluon_unavailable() -> str | None:
    """Why kernels in Gluon, Triton's language of layouts and warps, cannot be compiled, or None if they can."""
    return GLUON_MISSING


def triton_unavailable(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on `device`, or None if they can."""
    if not HAS_TRITON:
        return "triton is not installed"
    if device.type == "cuda" or INTERPRETING:
        return None
    return f"on {device.type}, triton needs TRITON_INTERPRET=1 set before it is imported"


def dot_dtype(dtype: torch.dtype) -> Any:
    """The Triton dtype in which operands of `tl.dot` loaded as `dtype` are multiplied.

    The interpreter computes bf16 on its raw 16 bits without a word, so there every operand (the
    probabilities of the second product too) is cast to fp32 first; on a GPU it stays as it is.
    """
    if INTERPRETING:
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


_AS_IT_IS = contextlib.nullcontext()


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which `tensor`'s device is current: Triton launches on the current device."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _AS_IT_IS  # nearly always: entering a device costs as much as some launches' arithmetic
