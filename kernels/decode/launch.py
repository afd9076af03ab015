"""What the Triton decode kernels share on the host: the problems they take, and padding."""

from __future__ import annotations

import torch

from kernels.decode.contract import DecodeProblem
from kernels.triton_support import triton_unavailable

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


def unsupported_by_triton(problem: DecodeProblem) -> str | None:
    """Why the Triton decode kernels cannot solve `problem`, or None."""
    reason = triton_unavailable(problem.device)
    if reason is not None:
        return reason
    if problem.dtype not in SUPPORTED_DTYPES:
        return f"dtype is {problem.dtype}, supported: {', '.join(map(str, SUPPORTED_DTYPES))}"
    if problem.head_dim > MAX_HEAD_DIM:
        return f"head_dim is {problem.head_dim}, the most is {MAX_HEAD_DIM}"
    return None


def padded_dim(head_dim: int) -> int:
    """head_dim up to the power of two that Triton's blocks and the least dot product take."""
    return max(16, 1 << (head_dim - 1).bit_length())
