"""The oracle of prefill attention: one query head at a time, every score written out, in fp32 or fp64."""

from typing import Any

import torch
from torch import Tensor

from kernels.prefill.contract import PrefillKernel, check_inputs


class ReferencePrefill(PrefillKernel):
    """softmax(scale * q k^T + causal mask) v as it is defined. Slow, and reads lengths back to the host."""

    name = "reference"

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
        compute_dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Tensor:
        """See PrefillKernel. `compute_dtype` is the type of every intermediate (float32 or float64)."""
        if options:
            raise TypeError(f"reference takes no option {sorted(options)}")
        check_inputs(q, k_cache, v_cache, block_table, context_lens, query_start_loc, max_query_len, out)
        out = torch.empty_like(q) if out is None else out
        block_size, num_kv_heads, head_dim = k_cache.shape[1:]
        group = q.shape[1] // num_kv_heads
        scale = head_dim**-0.5 if scale is None else scale
        starts = query_start_loc.tolist()
        for row, context_len in enumerate(context_lens.tolist()):
            start, end = starts[row], starts[row + 1]
            positions = torch.arange(context_len - (end - start), context_len, device=q.device)
            keys = torch.arange(context_len, device=q.device)
            blocks = block_table[row, : -(-context_len // block_size)].long()[keys // block_size]
            hidden = keys[None, :] > positions[:, None]
            for head in range(q.shape[1]):
                k = k_cache[blocks, keys % block_size, head // group].to(compute_dtype)
                v = v_cache[blocks, keys % block_size, head // group].to(compute_dtype)
                scores = (q[start:end, head].to(compute_dtype) @ k.T) * scale
                probs = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
                out[start:end, head] = (probs @ v).to(out.dtype)
        return out
