"""Counter-based random numbers: number `counter` of stream `seed`, computed rather than stepped to.

A stream has no state, so a draw can neither be replayed nor skipped, and nobody else's draws can move it (the idea of
Salmon et al. 2011). The mixing function is SplitMix64's (Steele et al. 2014), in wrapping 64-bit integers, which torch
and Triton compute alike on every device.
"""

from __future__ import annotations

from torch import Tensor

from kernels.triton_support import tl, triton

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """float64 in [0, 1) with 53 random bits, elementwise for int64 tensors of one shape."""
    bits = _mix(_mix(seed + _GOLDEN) + counter * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's is arithmetic, so the copies of the sign are masked off."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def uniform_in_kernel(seed, counter):
    """`uniform` inside a Triton kernel: the same bits, for int64 seed and counter of one shape."""
    golden = 0x9E3779B97F4A7C15 - (1 << 64)
    bits = _mix_in_kernel(_mix_in_kernel(seed + golden) + counter * golden)
    return _shift_right_in_kernel(bits, 11).to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def _mix_in_kernel(x):
    x = (x ^ _shift_right_in_kernel(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shift_right_in_kernel(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shift_right_in_kernel(x, 31)


@triton.jit
def _shift_right_in_kernel(x, BITS: tl.constexpr):
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)
