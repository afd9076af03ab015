"""Batch-invariant decode attention: splits of a fixed number of keys, so a row's bits never depend on its company."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode.contract import DecodeProblem
from kernels.decode.launch import Call
from kernels.decode.merge import partial_numel
from kernels.decode.split_kv import SplitKVDecode, shape_of, shape_options

SPLIT_SIZE = 256


class FixedSplitDecode(SplitKVDecode):
    """split_kv whose splits are SPLIT_SIZE keys each, merged in a fixed order by the same two programs.

    The bits of a row depend on its own query, keys and values alone: not on the batch, the other contexts, the
    table's width or the plan (cf. He et al., "Defeating Nondeterminism in LLM Inference", 2025). The price: a grid of
    batch * ceil(max_context_len / SPLIT_SIZE) splits, most of them empty when contexts are short, and always a merge.
    """

    name = "fixed_split"

    def plan(self, problem: DecodeProblem) -> dict[str, Any]:
        return {"num_splits": _num_splits(problem), **shape_options(shape_of(problem))}

    def workspace(self, problem: DecodeProblem, device: torch.device) -> Tensor | None:
        numel = partial_numel(problem.batch_size, problem.num_q_heads, _num_splits(problem), problem.head_dim)
        return torch.empty(numel, dtype=torch.float32, device=device)

    def launch(
        self,
        call: Call,
        num_splits: int | None = None,
        split_size: int = SPLIT_SIZE,
        tile: int | None = None,
        num_warps: int | None = None,
        num_stages: int | None = None,
        prefetch: bool | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """split_size: keys a split. For equal bits, the same split_size and tile shape in every call, and
        num_splits * split_size no less than the longest context. k_scale, v_scale: see split_kv."""
        if split_size < 1:
            raise ValueError(f"split_size is {split_size}, the least is 1")
        super().launch(call, num_splits, split_size, tile, num_warps, num_stages, prefetch, k_scale, v_scale)


def _num_splits(problem: DecodeProblem) -> int:
    return max(1, -(-problem.max_context_len // SPLIT_SIZE))
