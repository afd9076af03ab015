"""Prefill attention with torch's own scaled_dot_product_attention, one sequence at a time.

What the engine runs where Triton does not: exact in fp32 and quick on a CPU. It gathers each sequence's
blocks into contiguous keys and values and reads the lengths back to the host, so on a GPU it serves for
comparison only.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.prefill.contract import PrefillKernel, check_inputs, positive_scale

# Queries of a chunk that follow cached keys need an explicit mask; this many at a time bound its size
# and skip most of the keys that none of them sees.
QUERIES_PER_MASK = 1024


class TorchPrefill(PrefillKernel):
    name = "torch"

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
        """See PrefillKernel; there are no options."""
        if options:
            raise TypeError(f"torch takes no option {sorted(options)}")
        check_inputs(q, k_cache, v_cache, block_table, context_lens, query_start_loc, max_query_len, out)
        out = torch.empty_like(q) if out is None else out
        q, scale = positive_scale(q, scale)
        block_size = k_cache.shape[1]
        starts = query_start_loc.tolist()
        for row, context_len in enumerate(context_lens.tolist()):
            start, end = starts[row], starts[row + 1]
            if start == end:
                continue
            blocks = block_table[row, : -(-context_len // block_size)]
            k = k_cache[blocks].flatten(0, 1)[:context_len].transpose(0, 1)
            v = v_cache[blocks].flatten(0, 1)[:context_len].transpose(0, 1)
            out[start:end] = _causal(q[start:end].transpose(0, 1), k, v, scale).transpose(0, 1)
        return out


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of the last q.shape[1] positions over all of k: [heads, tokens, head_dim], causal."""
    num_queries, context_len = q.shape[1], k.shape[1]
    if num_queries == context_len:
        return _attend(q, k, v, scale, is_causal=num_queries > 1)
    if num_queries == 1:
        return _attend(q, k, v, scale)
    pieces = []
    for first in range(0, num_queries, QUERIES_PER_MASK):
        piece = q[:, first : first + QUERIES_PER_MASK]
        first_position = context_len - num_queries + first
        visible = first_position + piece.shape[1]
        mask = torch.ones(piece.shape[1], visible, dtype=torch.bool, device=q.device).tril(first_position)
        pieces.append(_attend(piece, k[:, :visible], v[:, :visible], scale, mask))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    return functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True
    )[0]
