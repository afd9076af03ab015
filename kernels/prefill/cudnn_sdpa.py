"""A peer, not a paged kernel: cuDNN through torch's scaled_dot_product_attention, for whole prompts of one length."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.paged_cache import rows_in_order
from kernels.prefill.contiguous import ContiguousPrefill
from kernels.prefill.contract import PrefillProblem, positive_scale


class CudnnSdpaPrefill(ContiguousPrefill):
    """scaled_dot_product_attention that may choose cuDNN only: where cuDNN refuses, the call raises RuntimeError.

    Its causal mask is aligned to the first query and the first key, so that it is right only where each context is its
    own queries; and it takes one length a batch.
    """

    name = "cudnn_sdpa"
    max_head_dim = 128  # some versions take more on some GPUs

    def is_built(self) -> bool:
        return torch.backends.cudnn.is_available()

    def supports(self, problem: PrefillProblem) -> str | None:
        if (reason := super().supports(problem)) is not None:
            return reason
        if not problem.equal_lengths:
            return f"{self.name} needs rows of equal lengths (problem.equal_lengths)"
        if problem.max_query_len != problem.max_context_len:
            return (
                f"{self.name} needs whole prompts, got max_query_len {problem.max_query_len} of max_context_len "
                f"{problem.max_context_len}: its causal mask begins at the first key"
            )
        if problem.max_context_len < 2:
            return f"max_context_len is {problem.max_context_len}, the least that cuDNN takes is 2"
        return None

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
        **options: Any,
    ) -> Tensor:
        """See PrefillKernel and ContiguousPrefill. contiguous_len: of every chunk and every context alike.

        Raises ValueError too where q is not so many tokens a row. A given `out` costs a copy.
        """
        tensors = (q, k_cache, v_cache, block_table, context_lens, query_start_loc, max_query_len, out)
        length = self.check_call(*tensors, contiguous_len, options)
        batch, row_blocks = len(context_lens), -(-length // k_cache.shape[1])
        if len(q) != batch * length:
            raise ValueError(
                f"q has {len(q)} tokens, expected {batch} rows of contiguous_len {length}, no padding"
            )
        keys, values = (
            rows_in_order(name, cache, batch, row_blocks)[:, :length].transpose(1, 2)
            for name, cache in (("k_cache", k_cache), ("v_cache", v_cache))
        )
        if not len(q):
            return torch.empty_like(q) if out is None else out
        q, scale = positive_scale(q, scale)
        queries = q.unflatten(0, (batch, length)).transpose(1, 2)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            attended = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k_cache.shape[2]
            )
        result = attended.transpose(1, 2).flatten(0, 1)
        return result if out is None else out.copy_(result)
