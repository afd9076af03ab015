"""What this device can do at best, measured: the rate of reading memory and of multiplying matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.timing import cache_bytes, time_interleaved
from kernels.triton_support import on_device, tl, triton, triton_unavailable

# A pass over so many caches finds at most a hundredth of its bytes there from the last one. A GPU's L2 need not evict
# the least recently used: 1 GiB read over and over seemed 5% faster than it is on an H200, as if all
# of its 60 MB were found there again.
CACHES = 100

# Elements of 4 bytes that one program of the read kernel loads: several 16-byte loads a thread in flight.
READ_BLOCKS = (4096, 8192, 16384)


@triton.jit
def _read(x_ptr, sums_ptr, BLOCK: tl.constexpr):
    """One program sums BLOCK elements: all of x is read, next to nothing is written."""
    program = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + program * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + program, tl.sum(x, 0))


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of a read-only pass over memory, cold: the best way's best round (its median).

    On a GPU a Triton kernel that only reads (torch.sum where Triton is missing), on a CPU torch.sum.
    """
    device = torch.device(device)
    if device.type == "cuda":
        size = min(CACHES * cache_bytes(device), torch.cuda.mem_get_info(device)[0] // 2)
    else:
        size = 4 * _cpu_cache()
    size = max(size // (4 * max(READ_BLOCKS)), 1) * (4 * max(READ_BLOCKS))
    x = torch.rand(size // 4, dtype=torch.float32, device=device)
    ways: dict[str, Sequence[Callable[[], Any]]] = {"sum": [x.sum]}
    if device.type == "cuda" and triton_unavailable(device) is None:
        ways |= {f"read_{block}": [_reader(x, block)] for block in READ_BLOCKS}
    # Passes over one buffer, but so long a one that they are cold in all but name.
    timings = time_interleaved(ways, device=device, cache_state="hot", rounds=3)
    return size / (1e-6 * min(timing.median for found in timings.values() for timing in found))


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP a second of a large square product of random matrices, the best round (its median)."""
    device = torch.device(device)
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    timings = time_interleaved({"matmul": [lambda: a @ b]}, device=device, cache_state="hot", rounds=3)
    return 2 * size**3 / (1e-6 * min(timing.median for timing in timings["matmul"]))


def _reader(x: Tensor, block: int) -> Callable[[], Any]:
    programs = x.numel() // block
    sums = torch.empty(programs, dtype=torch.float32, device=x.device)

    def read() -> None:
        with on_device(x):
            _read[(programs,)](x, sums, BLOCK=block, num_warps=8)

    return read


def _cpu_cache() -> int:
    """The CPU's cache in bytes, within what a test machine can spare four times over."""
    return min(max(cache_bytes(torch.device("cpu")), 16 << 20), 64 << 20)
