"""A decode kernel of another package: the least that its author writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode import DecodeKernel, check_inputs


class RowByRow(DecodeKernel):
    """One scaled_dot_product_attention a row."""

    name = "example_row_by_row"

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
        check_inputs(q, k_cache, v_cache, block_table, context_lens, out)
        out = torch.zeros_like(q) if out is None else out.zero_()
        for row, length in enumerate(context_lens.tolist()):
            blocks = block_table[row, : -(-length // k_cache.shape[1])].long()
            keys, values = (
                cache[blocks].flatten(0, 1)[:length].transpose(0, 1) for cache in (k_cache, v_cache)
            )
            if length:
                out[row] = torch.nn.functional.scaled_dot_product_attention(
                    q[row][:, None], keys, values, scale=scale, enable_gqa=True
                )[:, 0]
        return out
