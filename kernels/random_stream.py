"""Counter-based random numbers: number `counter` of stream `seed`, computed rather than stepped to.

A stream has no state, so a draw can neither be replayed nor skipped, and nobody else's draws can move it (the idea of
Salmon et al. 2011). The mixing function is SplitMix64's (Steele et al. 2014), in wrapping 64-bit integers, which torch
computes alike on every device.
"""

from __future__ import annotations

from torch import Tensor

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
