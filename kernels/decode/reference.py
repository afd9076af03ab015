"""The oracle: softmax attention as it is written on paper, row by row, in at least fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode.contract import DecodeKernel, check_inputs


class ReferenceDecode(DecodeKernel):
    """softmax(scale * q k^T) v per sequence and head, in fp32 (fp64 for fp64 inputs, or as asked).

    Slow and plain on purpose: it gathers a row's blocks, drops what lies past the context and multiplies.
    """

    name = "reference"
    capturable = False

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
        compute_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Tensor:
        """compute_dtype: torch.float64 for a finer oracle; the result is in q's dtype all the same."""
        if options:
            raise TypeError(f"reference takes no option {sorted(options)}")
        check_inputs(q, k_cache, v_cache, block_table, context_lens, out)
        if out is None:
            out = torch.empty_like(q)
        out.copy_(
            attend(q, k_cache, v_cache, block_table, context_lens, scale, compute_dtype or _at_least_fp32(q))
        )
        return out


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    scale: float | None,
    compute_dtype: torch.dtype,
) -> Tensor:
    """The attention itself, [batch, num_q_heads, head_dim] in compute_dtype."""
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    group_size = q.shape[1] // num_kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    result = torch.zeros(q.shape, dtype=compute_dtype, device=q.device)
    for row, context_len in enumerate(context_lens.tolist()):
        if context_len == 0:
            continue
        num_blocks = -(-context_len // block_size)
        blocks = block_table[row, :num_blocks].long()
        keys = k_cache[blocks].flatten(0, 1)[:context_len].to(compute_dtype)
        values = v_cache[blocks].flatten(0, 1)[:context_len].to(compute_dtype)
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group_size, (kv_head + 1) * group_size)
            scores = q[row, heads].to(compute_dtype) @ keys[:, kv_head].T * scale
            result[row, heads] = torch.softmax(scores, dim=-1) @ values[:, kv_head]
    return result


def _at_least_fp32(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
