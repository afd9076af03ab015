"""Tiles of keys and values by Hopper's bulk copy engine (TMA): what the decode kernels that use it share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode.contract import DecodeProblem
from kernels.decode.launch import TritonDecodeKernel
from kernels.decode.planner import TileShape, head_rows
from kernels.triton_support import INTERPRETING

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no triton here: unavailable() says so
    TensorDescriptor = None

# Keys of a tile, at most.
MAX_TILE = 64

# Elements of the output that a program accumulates, at most: more would spill on some GPUs.
MAX_ACCUMULATOR = 8192


class TmaDecodeKernel(TritonDecodeKernel):
    """A Triton decode kernel whose tiles come by TMA: a tile is a block, or an equal part of one."""

    def unavailable(self, device: torch.device) -> str | None:
        reason = super().unavailable(device)
        on_gpu = device.type == "cuda" and torch.cuda.is_available()
        if reason is None and on_gpu and torch.cuda.get_device_capability(device) < (9, 0):
            return "TMA needs a GPU of compute capability 9.0 or later"
        return reason

    def supports(self, problem: DecodeProblem) -> str | None:
        reason = super().supports(problem)
        if reason is not None:
            return reason
        if problem.head_dim not in (16, 32, 64, 128, 256):
            return f"head_dim is {problem.head_dim}, supported: powers of two from 16 to 256"
        if problem.dtype == torch.float32 and problem.head_dim > 128:
            return f"head_dim is {problem.head_dim}, the most in float32 is 128"
        if head_rows(problem) * problem.head_dim > MAX_ACCUMULATOR:
            return f"head_dim {problem.head_dim} for groups of {problem.group_size} query heads fills the registers"
        if problem.block_size % 16:
            return f"block_size is {problem.block_size}, supported: multiples of 16"
        return None


def shape_of(
    problem: DecodeProblem,
    tile: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> TileShape:
    """The given numbers; for None two small tiles in flight or more, 24 KB, in one warp: fastest on an H200.

    ValueError for a tile that is no divisor of the block size.
    """
    # One warp has no others to wait for, but holds no more of the accumulator than this.
    own_warps = 8 if problem.dtype == torch.float32 else max(1, head_rows(problem) * problem.head_dim // 2048)
    own_tile = 32 if problem.block_size % 32 == 0 else 16
    in_flight = 24 * 1024 // (2 * own_tile * problem.head_dim * problem.dtype.itemsize)
    own_stages = min(8, max(2, in_flight) + 1)
    if tile is not None and (tile < 1 or problem.block_size % tile or tile > MAX_TILE):
        raise ValueError(
            f"tile is {tile}, expected a divisor of block_size {problem.block_size} up to {MAX_TILE}"
        )
    return TileShape(tile or own_tile, num_warps or own_warps, num_stages or own_stages, prefetch=True)


def descriptor(cache: Tensor, name: str, tile: int) -> Any:
    """Of [blocks, block size, KV heads, head_dim], for boxes of `tile` keys of one head."""
    aligned = all(stride * cache.element_size() % 16 == 0 for stride in cache.stride()[:3])
    if not INTERPRETING and (not aligned or cache.data_ptr() % 16):
        raise ValueError(f"{name}: TMA needs 16-byte alignment, got strides {tuple(cache.stride())}")
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, tile, 1, cache.shape[3]])
