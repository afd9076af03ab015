"""A peer, not a paged kernel: torch's scaled_dot_product_attention on KV that lies contiguous."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.decode.contract import DecodeKernel, DecodeProblem, check_inputs
from kernels.paged_cache import rows_in_order

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class SdpaDecode(DecodeKernel):
    """What decode attention costs without paging: for problems marked `contiguous` (see DecodeProblem), no other.

    The pool is viewed as [batch, tokens, num_kv_heads, head_dim]; nothing is gathered and the table is not read
    (on a CPU it is checked).
    """

    name = "sdpa"

    def supports(self, problem: DecodeProblem) -> str | None:
        reason = super().supports(problem)
        if reason is None and not problem.contiguous:
            reason = "sdpa needs contiguous KV of equal lengths (problem.contiguous)"
        return reason

    def plan(self, problem: DecodeProblem) -> dict[str, Any]:
        return {"contiguous_len": problem.max_context_len} if problem.contiguous else {}

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
        contiguous_len: int | None = None,
        backend: str | None = None,
        **options: Any,
    ) -> Tensor:
        """contiguous_len: every context's length, and the promise that the blocks lie in order.

        backend: "flash", "cudnn", "efficient" or "math"; None leaves the choice to torch.
        """
        if options:
            raise TypeError(f"sdpa takes no option {sorted(options)}")
        check_inputs(q, k_cache, v_cache, block_table, context_lens, out)
        if contiguous_len is None:
            raise ValueError("sdpa reads contiguous KV only: contiguous_len must promise its length")
        if backend is not None and backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
        if q.device.type == "cpu":
            _check_contiguous(block_table, context_lens, contiguous_len)
        out = torch.empty_like(q) if out is None else out
        keys, values = (
            rows_in_order(name, cache, *block_table.shape)[:, :contiguous_len].transpose(1, 2)
            for name, cache in (("k_cache", k_cache), ("v_cache", v_cache))
        )
        chosen = sdpa_kernel(BACKENDS[backend]) if backend else contextlib.nullcontext()
        with chosen:
            attended = F.scaled_dot_product_attention(
                q[:, :, None], keys, values, scale=scale, enable_gqa=q.shape[1] != k_cache.shape[2]
            )
        return out.copy_(attended[:, :, 0])


def _check_contiguous(block_table: Tensor, context_lens: Tensor, length: int) -> None:
    in_order = torch.arange(block_table.numel(), dtype=torch.int32, device="cpu").view_as(block_table)
    if not bool((context_lens == length).all()) or not torch.equal(block_table, in_order):
        raise ValueError(f"block_table and context_lens are not {length} contiguous tokens a row")
