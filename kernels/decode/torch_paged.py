"""Decode attention with torch alone: gather the context's tokens, then the built-in attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.decode.contract import DecodeKernel, DecodeProblem, check_inputs

# Rows are taken so many at a time that the gathered keys (and values) stay under this many bytes.
GATHER_LIMIT = 1 << 28


class TorchDecode(DecodeKernel):
    """Gathers [rows, max_context_len] tokens of K and V, then calls scaled_dot_product_attention.

    Places past a row's context repeat its last token and are masked: memory outside the contexts is
    never read. The query heads of a KV head are passed as its queries, so nothing is repeated for GQA.
    """

    name = "torch"

    def plan(self, problem: DecodeProblem) -> dict[str, Any]:
        return {"max_context_len": problem.max_context_len}

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
        """max_context_len: no context is longer; None reads it from context_lens (a GPU is waited for)."""
        if options:
            raise TypeError(f"torch takes no option {sorted(options)}")
        check_inputs(q, k_cache, v_cache, block_table, context_lens, out)
        if out is None:
            out = torch.empty_like(q)
        batch_size = q.shape[0]
        if max_context_len is None:
            max_context_len = int(context_lens.max()) if batch_size else 0
        if max_context_len == 0:
            return out.zero_()
        row_bytes = max_context_len * k_cache.shape[2] * k_cache.shape[3] * k_cache.element_size()
        step = max(1, GATHER_LIMIT // row_bytes)
        for first in range(0, batch_size, step):
            rows = slice(first, first + step)
            _attend(
                q[rows],
                k_cache,
                v_cache,
                block_table[rows],
                context_lens[rows],
                scale,
                max_context_len,
                out[rows],
            )
        return out


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    scale: float | None,
    max_context_len: int,
    out: Tensor,
) -> None:
    batch_size, num_q_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    lens = context_lens.long()[:, None]
    steps = torch.arange(max_context_len, device=q.device)
    positions = torch.minimum(steps, (lens - 1).clamp_(min=0))
    blocks = block_table.gather(1, positions // block_size).long()
    # A row without context has no table entry that may be read: block 0 stands in, its result is dropped.
    empty = lens == 0
    blocks.masked_fill_(empty, 0)
    offsets = positions % block_size
    keys = _gather(k_cache, blocks, offsets)
    values = _gather(v_cache, blocks, offsets)
    attended = F.scaled_dot_product_attention(
        q.reshape(batch_size, num_kv_heads, num_q_heads // num_kv_heads, head_dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=(steps < lens)[:, None, None, :],
        scale=scale,
    )
    out.copy_(attended.reshape(batch_size, num_q_heads, head_dim))
    out.masked_fill_(empty[:, :, None], 0)


def _gather(cache: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
    """[rows, tokens, num_kv_heads, head_dim]: the token at `offsets` in each of `blocks`."""
    block_size = cache.shape[1]
    if cache.stride(0) == block_size * cache.stride(1):
        # The cache is one sequence of tokens: rows of memory, copied whole.
        tokens = cache.flatten(0, 1).index_select(0, (blocks * block_size + offsets).flatten())
        return tokens.view(*blocks.shape, *cache.shape[2:])
    return cache[blocks, offsets]
