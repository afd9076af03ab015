"""The contract of paged GQA decode attention: the problem, the kernel protocol, the checks of its inputs.

One query token a sequence, whose key and value are already in the cache. Query head h uses KV head
h // (num_q_heads // num_kv_heads). Token t of row b lies in block block_table[b, t // block_size] at
offset t % block_size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.fp8_cache import FP8, fp8_unsupported
from kernels.paged_cache import check_paged_inputs


@dataclass(frozen=True)
class DecodeProblem:
    """What is known of a call on the host, without reading a tensor. Lengths count tokens.

    shared_prefix_len: all rows begin with so many common tokens, in the same blocks (a shorter row with what it has).
    contiguous: each row's blocks follow one another in the pool, row after row, max_blocks a row, and every context is
    max_context_len; for kernels that know no paging.
    kv_dtype: of the caches, where it is not `dtype`, which is then that of q and out alone.
    mean_context_len: about how long the contexts are on average, for plans of ragged batches; None: all are
    max_context_len. It may make a call faster, never wrong.
    """

    batch_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    max_context_len: int
    dtype: torch.dtype
    device: torch.device
    shared_prefix_len: int = 0
    contiguous: bool = False
    kv_dtype: torch.dtype | None = None
    mean_context_len: int | None = None

    def __post_init__(self) -> None:
        for field in ("batch_size", "num_q_heads", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}, the least is 1")
        if self.max_context_len < 0:
            raise ValueError(f"max_context_len is {self.max_context_len}, the least is 0")
        if not 0 <= self.shared_prefix_len <= self.max_context_len:
            raise ValueError(
                f"shared_prefix_len is {self.shared_prefix_len}, "
                f"expected 0 to max_context_len {self.max_context_len}"
            )
        mean = self.mean_context_len
        if mean is not None and not 0 <= mean <= self.max_context_len:
            raise ValueError(
                f"mean_context_len is {mean}, expected 0 to max_context_len {self.max_context_len}"
            )
        # One form for each problem.
        if self.kv_dtype == self.dtype:
            object.__setattr__(self, "kv_dtype", None)
        if mean == self.max_context_len:
            object.__setattr__(self, "mean_context_len", None)
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads is {self.num_q_heads}, not a multiple of num_kv_heads {self.num_kv_heads}"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads


class DecodeKernel(ABC):
    """One decode attention kernel. Stateless: everything it needs comes with the call."""

    name: str
    capturable: bool = True
    """Whether a CUDA graph can capture a call: it waits for nothing and reads no tensor on the host."""
    kv_dtypes: tuple[torch.dtype, ...] = ()
    """What the caches may be besides q's dtype; kernels/fp8_cache.py says which options go with fp8."""

    def unavailable(self, device: torch.device) -> str | None:
        """Why the kernel cannot run on `device`, or None if it can."""
        return None

    def supports(self, problem: DecodeProblem) -> str | None:
        """Why the kernel cannot solve `problem`, or None if it can."""
        reason = self.unavailable(problem.device)
        if reason is None and problem.kv_dtype is not None:
            if problem.kv_dtype not in self.kv_dtypes:
                return f"kv_dtype is {problem.kv_dtype}, {self.name} takes caches in q's {problem.dtype} only"
            return fp8_unsupported(problem.device) if problem.kv_dtype == FP8 else None
        return reason

    def plan(self, problem: DecodeProblem) -> dict[str, Any]:
        """Options for calls of this problem, chosen on the host without reading tensors.

        They hold for every call whose contexts do not exceed problem.max_context_len.
        """
        return {}

    def workspace(self, problem: DecodeProblem, device: torch.device) -> Tensor | None:
        """Scratch for this problem and any with a smaller batch or context; None if none is needed.

        Its contents need no initial value and mean nothing after the call.
        """
        return None

    def prepare(
        self, problem: DecodeProblem, block_table: Tensor, context_lens: Tensor, scale: float | None = None
    ) -> dict[str, Any]:
        """Further options that hold for these very tables and lengths, of kernels that must read them on the host.

        Empty for kernels of this project: they read nothing back. A call without them prepares for itself.
        """
        return {}

    @abstractmethod
    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        scale: float | None = None,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Attention of one query token a row over that row's context.

        q: [batch, num_q_heads, head_dim]; strides are read from the tensor, as of all others.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], last dimension contiguous, in q's dtype
            or one of kv_dtypes.
        block_table: [batch, max_blocks] int32; entries past a row's context are never read.
        context_lens: [batch] int32, tokens in the cache, this one included; a row with 0 gives zeros.
        scale: of the scores; None for head_dim ** -0.5.
        out: like q, written and returned; None to allocate.
        workspace: what `workspace` gave for this problem or a larger one; None to allocate.
        options: what `plan` gave; each has a default.

        Raises ValueError, naming the argument, for tensors that do not fit together.
        """


def check_inputs(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor | None = None,
    kv_dtypes: Sequence[torch.dtype] = (),
) -> None:
    """Raise ValueError, naming the argument, unless the tensors meet the contract. Reads no values.

    kv_dtypes: what both caches may be instead of q's dtype.
    """
    check_paged_inputs(q, k_cache, v_cache, block_table, context_lens, kv_dtypes)
    if q.shape[0] != block_table.shape[0]:
        raise ValueError(f"q has {q.shape[0]} rows, block_table has {block_table.shape[0]}")
    if out is None:
        return
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, "
            f"expected q's {tuple(q.shape)} {q.dtype} on {q.device}"
        )
    if out.stride(-1) != 1 and out.numel():
        raise ValueError(f"out's last dimension must be contiguous, got strides {tuple(out.stride())}")


def problem_of(
    q: Tensor, k_cache: Tensor, block_table: Tensor, max_context_len: int | None = None
) -> DecodeProblem:
    """The problem of a call, from shapes alone; by default contexts may fill the whole table."""
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    if max_context_len is None:
        max_context_len = block_table.shape[1] * block_size
    return DecodeProblem(
        batch_size=max(q.shape[0], 1),
        num_q_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        max_context_len=max_context_len,
        dtype=q.dtype,
        device=q.device,
        kv_dtype=k_cache.dtype,
    )
