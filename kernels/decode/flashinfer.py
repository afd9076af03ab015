"""A peer: FlashInfer's batch decode over paged KV, where that package is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from kernels.decode.contract import DecodeKernel, DecodeProblem, check_inputs, problem_of

WORKSPACE_BYTES = 128 << 20  # what its documentation recommends


class FlashInferDecode(DecodeKernel):
    """flashinfer.BatchDecodeWithPagedKVCacheWrapper.

    It plans on the host from the lengths of the contexts, and reads them back from the GPU for that. `prepare` does
    so once for a batch, and its result makes calls that only launch; without it every call prepares for itself.
    """

    name = "flashinfer"

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "flashinfer needs a CUDA device"
        return None if importlib.util.find_spec("flashinfer") else "flashinfer is not installed"

    def supports(self, problem: DecodeProblem) -> str | None:
        reason = super().supports(problem)
        if reason is None and problem.dtype not in (torch.float16, torch.bfloat16):
            reason = f"dtype is {problem.dtype}, supported: torch.float16, torch.bfloat16"
        if reason is None and problem.head_dim not in (64, 128, 256):
            reason = f"head_dim is {problem.head_dim}, supported: 64, 128, 256"
        return reason

    def prepare(
        self, problem: DecodeProblem, block_table: Tensor, context_lens: Tensor, scale: float | None = None
    ) -> dict[str, Any]:
        import flashinfer

        lens = context_lens.cpu()
        blocks = (lens + problem.block_size - 1) // problem.block_size
        starts = torch.zeros(len(lens) + 1, dtype=torch.int32, device="cpu")
        starts[1:] = blocks.cumsum(0)
        used = (
            torch.arange(block_table.shape[1], device=block_table.device)
            < blocks.to(block_table.device)[:, None]
        )
        last = torch.where(lens > 0, (lens - 1) % problem.block_size + 1, 0).int()
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=problem.device),
            "NHD",
            use_tensor_cores=problem.group_size >= 4,
        )
        wrapper.plan(
            starts,
            block_table[used],
            last,
            problem.num_q_heads,
            problem.num_kv_heads,
            problem.head_dim,
            problem.block_size,
            q_data_type=problem.dtype,
            kv_data_type=problem.dtype,
            sm_scale=problem.head_dim**-0.5 if scale is None else scale,
        )
        return {"wrapper": wrapper, "empty_rows": (lens == 0).nonzero()[:, 0].to(problem.device)}

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
        wrapper: Any = None,
        empty_rows: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """wrapper, empty_rows: from `prepare` for these very tables, lengths and scale."""
        if options:
            raise TypeError(f"flashinfer takes no option {sorted(options)}")
        check_inputs(q, k_cache, v_cache, block_table, context_lens, out)
        if q.shape[0] == 0:
            return torch.empty_like(q) if out is None else out
        if wrapper is None:
            prepared = self.prepare(problem_of(q, k_cache, block_table), block_table, context_lens, scale)
            wrapper, empty_rows = prepared["wrapper"], prepared["empty_rows"]
        direct = out is not None and out.is_contiguous()
        result = wrapper.run(q.contiguous(), (k_cache, v_cache), **({"out": out} if direct else {}))
        if out is not None and not direct:
            result = out.copy_(result)
        if empty_rows is not None and empty_rows.numel():
            result[empty_rows] = 0
        return result
