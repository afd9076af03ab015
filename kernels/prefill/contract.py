"""What a prefill attention kernel is: its inputs, their checks, and the problem it is asked to support.

Prefill attention is causal, of variable length, and reads keys and values from the paged cache only.
The new tokens' KV is written before the call, so one kernel serves whole prompts, later chunks of a
prompt, and prompts whose first blocks were found in the prefix cache.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.paged_cache import check_paged_inputs


@dataclass(frozen=True)
class PrefillProblem:
    """Shapes of a prefill call, known on the host.

    Lengths are in tokens: `max_query_len` is the longest chunk of the batch, `max_context_len` the
    longest sequence up to and including its chunk.

    contiguous: row b's blocks are those from b * ceil(max_context_len / block_size) on, in order; for kernels that know
    no paging. equal_lengths: every chunk is max_query_len and every context max_context_len, without padding.
    """

    batch_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    max_query_len: int
    max_context_len: int
    dtype: torch.dtype
    device: torch.device
    contiguous: bool = False
    equal_lengths: bool = False

    def __post_init__(self) -> None:
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("batch_size", "max_query_len", "max_context_len"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads {self.num_q_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )


class PrefillKernel(ABC):
    """Causal attention of chunks of queries over a paged KV cache."""

    name: str
    paged: bool = True
    """Whether it reads the block table. One that does not serves comparisons only, on problems marked `contiguous`."""
    capturable: bool = False
    """Whether a CUDA graph can capture a call, and its replay serve other chunks of up to max_query_len tokens: it
    waits for nothing and reads no tensor on the host."""

    def unavailable(self, device: torch.device) -> str | None:
        """Why the kernel cannot run on `device`, or None if it can."""
        return None

    def supports(self, problem: PrefillProblem) -> str | None:
        """Why the kernel cannot solve `problem`, or None if it can."""
        return self.unavailable(problem.device)

    def plan(self, problem: PrefillProblem) -> dict[str, Any]:
        """Options for calls of this problem, chosen on the host without reading tensors."""
        return {}

    def workspace(self, problem: PrefillProblem, device: torch.device) -> Tensor | None:
        """Scratch for this problem and any smaller one; None if none is needed."""
        return None

    @abstractmethod
    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        query_start_loc: Tensor,
        max_query_len: int,
        scale: float | None = None,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Attention of every chunk's queries over their sequence up to themselves.

        q: [total_tokens, num_q_heads, head_dim], chunks back to back; strides are read from the tensor.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], last dimension contiguous.
        block_table: [batch, max_blocks] int32; entries past a row's context are never read.
        context_lens: [batch] int32, tokens in the cache up to and including the chunk: never fewer than it.
        query_start_loc: [batch + 1] int32; row b's chunk is tokens query_start_loc[b] to [b + 1]; may be empty.
        max_query_len: the longest chunk, or more; a host int.
        scale: of the scores; None for head_dim ** -0.5.
        out: like q, written and returned; None to allocate.
        workspace: what `workspace` gave for this problem or a larger one.
        options: what `plan` gave; each has a default.

        Query i of row b sits at position context_lens[b] - query_len[b] + i and sees the keys 0 to that
        position. Tokens past query_start_loc[-1] are padding: their rows of out are left as they are.
        Raises ValueError, naming the argument, for tensors that do not fit together.
        """


def check_inputs(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    out: Tensor | None = None,
) -> None:
    """Raise ValueError, naming the argument, unless the arguments form a valid call. Reads no values."""
    check_paged_inputs(q, k_cache, v_cache, block_table, context_lens)
    batch = block_table.shape[0]
    if query_start_loc.shape != (batch + 1,) or query_start_loc.dtype != torch.int32:
        raise ValueError(
            f"query_start_loc must be [{batch + 1}] int32 (block_table's rows + 1), "
            f"got shape {tuple(query_start_loc.shape)} {query_start_loc.dtype}"
        )
    if query_start_loc.device != q.device:
        raise ValueError(f"query_start_loc is on {query_start_loc.device}, q is on {q.device}")
    if not 0 <= max_query_len <= q.shape[0]:
        raise ValueError(f"max_query_len must be 0 to {q.shape[0]} (q's tokens), got {max_query_len}")
    if out is None:
        return
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
        raise ValueError(
            f"out must be like q ({tuple(q.shape)} {q.dtype} on {q.device}), "
            f"got {tuple(out.shape)} {out.dtype} on {out.device}"
        )
    if out.stride(-1) != 1 and out.numel():
        raise ValueError(f"out's last dimension must be contiguous, got strides {tuple(out.stride())}")


def positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """q and a scale above 0 that give the same scores; None: head_dim ** -0.5.

    Kernels need it, torch's own among them: they search for the largest score before they scale it, and what the mask
    hides is -inf by then. Other scales are rare, so q is changed here: in a kernel it would then reach the tensor cores
    through registers, which makes each of its products wait for its steps, a fifth of the whole.
    """
    if scale is None:
        return q, q.shape[-1] ** -0.5
    if not scale <= 0:  # NaN too
        return q, scale
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
