"""A peer, not a paged kernel: the variable-length flash attention that torch carries, on KV that lies contiguous."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.paged_cache import rows_in_order
from kernels.prefill.contiguous import ContiguousPrefill
from kernels.prefill.contract import PrefillProblem, positive_scale

# The operation below torch.nn.attention.varlen. That function takes grouped heads and used lengths in newer versions
# only, and the newest may choose cuDNN behind it; this is flash, and its arguments here are the same since torch 2.5.
_flash = torch.ops.aten._flash_attention_forward


class FlashVarlenPrefill(ContiguousPrefill):
    """FlashAttention-2 over all rows in one launch: any lengths, any prefix, grouped heads, fp16 and bf16.

    Every row has the same room in the pool; `seqused_k` says how much of it the context fills. The causal mask is
    aligned to the last query and the last key, as the contract's.
    """

    name = "flash_varlen"
    max_head_dim = 256

    def is_built(self) -> bool:
        return torch.backends.cuda.is_flash_attention_available()

    def plan(self, problem: PrefillProblem) -> dict[str, Any]:
        """Also where rows begin, so that no call launches anything but attention."""
        options = super().plan(problem)
        if options:
            row_len = -(-problem.max_context_len // problem.block_size) * problem.block_size
            options["row_starts"] = _row_starts(problem.batch_size, row_len, problem.device)
        return options

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
        contiguous_len: int | None = None,
        row_starts: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """See PrefillKernel and ContiguousPrefill. row_starts: [batch + 1] int32, the plan's; None makes it here.

        A given `out` costs a copy, under a mask of the tokens that are no padding.
        """
        tensors = (q, k_cache, v_cache, block_table, context_lens, query_start_loc, max_query_len, out)
        length = self.check_call(*tensors, contiguous_len, options)
        batch, row_blocks = len(context_lens), -(-length // k_cache.shape[1])
        caches = (("k_cache", k_cache), ("v_cache", v_cache))
        keys, values = (rows_in_order(name, cache, batch, row_blocks).flatten(0, 1) for name, cache in caches)
        if not max_query_len or not len(keys):
            return torch.empty_like(q) if out is None else out
        if row_starts is None:
            row_starts = _row_starts(batch, row_blocks * k_cache.shape[1], q.device)
        queries, scale = positive_scale(q, scale)
        attended: Tensor = _flash(
            queries,
            keys,
            values,
            query_start_loc.contiguous(),
            row_starts,
            # Told of one query a row, torch folds the query heads of a group into the batch, and takes it that there
            # are neither empty chunks nor padding. A larger bound than the longest chunk is as right.
            max(max_query_len, 2),
            length,
            0.0,
            True,
            False,
            scale=scale,
            seqused_k=context_lens.contiguous(),
        )[0]
        if out is None:
            return attended
        used = torch.arange(len(q), device=q.device) < query_start_loc[-1]
        return out.copy_(torch.where(used[:, None, None], attended, out))


def _row_starts(batch: int, row_len: int, device: torch.device) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * row_len
