"""The oracle: softmax attention as it is written on paper, row by row, in at least fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode.contract import DecodeKernel, check_inputs
from kernels.fp8_cache import FP8, check_scales


class ReferenceDecode(DecodeKernel):
    """softmax(scale * q k^T) v per sequence and head, in fp32 (fp64 for fp64 inputs, or as asked).

    Slow and plain on purpose: it gathers a row's blocks, drops what lies past the context and multiplies. Keys and
    values of an fp8 cache are multiplied by their KV head's scale first.
    """

    name = "reference"
    capturable = False
    kv_dtypes = (FP8,)

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
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """compute_dtype: torch.float64 for a finer oracle; the result is in q's dtype all the same.

        k_scale, v_scale: [num_kv_heads] float32 each, with caches in fp8 alone.
        """
        if options:
            raise TypeError(f"reference takes no option {sorted(options)}")
        check_inputs(q, k_cache, v_cache, block_table, context_lens, out, self.kv_dtypes)
        check_scales(k_cache, k_scale, v_scale)
        if out is None:
            out = torch.empty_like(q)
        compute_dtype = compute_dtype or _at_least_fp32(q)
        caches = (k_cache, v_cache, block_table, context_lens)
        return out.copy_(attend(q, *caches, scale, compute_dtype, k_scale, v_scale))


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    scale: float | None,
    compute_dtype: torch.dtype,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
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
        keys, values = (
            cache[blocks].flatten(0, 1)[:context_len].to(compute_dtype) for cache in (k_cache, v_cache)
        )
        if k_scale is not None and v_scale is not None:
            keys, values = keys * k_scale[:, None], values * v_scale[:, None]
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group_size, (kv_head + 1) * group_size)
            scores = q[row, heads].to(compute_dtype) @ keys[:, kv_head].T * scale
            result[row, heads] = torch.softmax(scores, dim=-1) @ values[:, kv_head]
    return result


def _at_least_fp32(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
