"""Decode attention with torch alone: gather the context's tokens, then the built-in attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.decode.contract import DecodeKernel, DecodeProblem, check_inputs

# Rows are taken so many at a time that their gathered keys stay under this many bytes (one row at least): on a
# CPU for its caches' sake, elsewhere to bound the memory.
GATHER_LIMIT = {"cpu": 2 << 20}
GATHER_LIMIT_ELSEWHERE = 256 << 20


class TorchDecode(DecodeKernel):
    """Gathers [rows, max_context_len] tokens of K and V, then calls scaled_dot_product_attention.

    Places past a row's context repeat its last token and are masked: memory outside the contexts is
    never read. The query heads of a KV head are passed as its queries, so nothing is repeated for GQA.
    """

    name = "torch"

    def plan(self, problem: DecodeProblem) -> dict[str, Any]:
        return {"max_context_len": problem.max_context_len}

    def workspace(self, problem: DecodeProblem, device: torch.device) -> Tensor | None:
        """The gathered keys and values of one chunk of rows; on a CPU, fresh memory costs more than the gather."""
        if device.type != "cpu":
            return None
        token_numel = problem.num_kv_heads * problem.head_dim
        tokens = max(problem.max_context_len, _token_limit(token_numel * problem.dtype.itemsize, device))
        tokens = min(tokens, problem.batch_size * problem.max_context_len)
        return torch.empty(2 * tokens * token_numel, dtype=problem.dtype, device=device)

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
        max_context_len: int | None = None,
        **options: Any,
    ) -> Tensor:
        """max_context_len: no context is longer (checked on a CPU); None reads it, for which a GPU is waited for."""
        if options:
            raise TypeError(f"torch takes no option {sorted(options)}")
        check_inputs(q, k_cache, v_cache, block_table, context_lens, out)
        out = torch.empty_like(q) if out is None else out
        batch_size = q.shape[0]
        if max_context_len is None:
            max_context_len = int(context_lens.max()) if batch_size else 0
        elif q.device.type == "cpu" and batch_size and int(context_lens.max()) > max_context_len:
            raise ValueError(
                f"context_lens has {int(context_lens.max())}, above max_context_len {max_context_len}"
            )
        if max_context_len == 0:
            return out.zero_()
        token_numel = k_cache.shape[2] * k_cache.shape[3]
        tokens = _token_limit(token_numel * k_cache.element_size(), q.device)
        step = min(max(1, tokens // max_context_len), max(1, batch_size))
        needed = 2 * step * max_context_len * token_numel
        if workspace is None:
            workspace = torch.empty(needed, dtype=q.dtype, device=q.device)
        if workspace.dim() != 1 or workspace.dtype != q.dtype or workspace.numel() < needed:
            raise ValueError(
                f"workspace is {tuple(workspace.shape)} {workspace.dtype}, this call needs [{needed}] {q.dtype}"
            )
        for first in range(0, batch_size, step):
            rows = slice(first, first + step)
            gathered = workspace[:needed].view(2, -1, *k_cache.shape[2:])
            lens = context_lens[rows, None].long()
            _attend(
                q[rows],
                k_cache,
                v_cache,
                block_table[rows],
                lens,
                scale,
                max_context_len,
                gathered,
                out[rows],
            )
        return out


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lens: Tensor,
    scale: float | None,
    max_context_len: int,
    gathered: Tensor,
    out: Tensor,
) -> None:
    """A chunk of rows. lens: [rows, 1] int64; gathered: scratch [2, >= rows * max_context_len, heads, head_dim]."""
    rows, num_q_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    steps = torch.arange(max_context_len, device=q.device)
    positions = torch.minimum(steps, (lens - 1).clamp_(min=0))
    blocks = block_table.gather(1, positions // block_size).long()
    # A row without context has no table entry that may be read: block 0 stands in, its result is dropped.
    empty = lens == 0
    blocks.masked_fill_(empty, 0)
    offsets = positions % block_size
    keys, values = (
        _gather(cache, blocks, offsets, scratch).view(rows, max_context_len, num_kv_heads, head_dim)
        for cache, scratch in zip((k_cache, v_cache), gathered)
    )
    attended = F.scaled_dot_product_attention(
        q.reshape(rows, num_kv_heads, num_q_heads // num_kv_heads, head_dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=(steps < lens)[:, None, None, :],
        scale=scale,
    )
    out.copy_(attended.reshape(rows, num_q_heads, head_dim))
    out.masked_fill_(empty[:, :, None], 0)


def _gather(cache: Tensor, blocks: Tensor, offsets: Tensor, scratch: Tensor) -> Tensor:
    """[tokens, num_kv_heads, head_dim]: the token at `offsets` in each of `blocks`, in scratch if it can be."""
    block_size = cache.shape[1]
    if cache.stride(0) == block_size * cache.stride(1):
        # The cache is one sequence of tokens: rows of memory, copied whole.
        slots = (blocks * block_size + offsets).flatten()
        return torch.index_select(cache.flatten(0, 1), 0, slots, out=scratch[: slots.numel()])
    return cache[blocks.flatten(), offsets.flatten()]


def _token_limit(token_bytes: int, device: torch.device) -> int:
    """Tokens whose keys stay under the limit of one chunk."""
    return GATHER_LIMIT.get(device.type, GATHER_LIMIT_ELSEWHERE) // token_bytes
