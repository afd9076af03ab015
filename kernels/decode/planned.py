"""Whichever of the split kernels the planner expects to end first, for each problem anew: the default of the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode import split_kv, split_kv_tma, stream_k_tma
from kernels.decode.contract import DecodeKernel, DecodeProblem
from kernels.decode.launch import Call, TritonDecodeKernel
from kernels.decode.planner import is_ragged, planned_us, shares_us
from kernels.decode.split_kv import SplitKVDecode
from kernels.decode.split_kv_tma import SplitKVTmaDecode
from kernels.decode.stream_k_tma import StreamKTmaDecode
from kernels.fp8_cache import check_scales

CLOSE = 1.03
"""How much longer split_kv counts than its model says. Where the two are that close, one row of 4,096 tokens above all,
an H200 had it 1% faster than split_kv_tma in one run and 3 to 10% slower in others; by all that was measured this much
regrets least."""


class PlannedDecode(TritonDecodeKernel):
    """split_kv, split_kv_tma or stream_k_tma, by kernels/decode/cost_model.py, of those that can run.

    Equal shares are for rows of different lengths: where all are alike, splits were as fast or faster on an H200.
    """

    name = "planned"
    kv_dtypes = SplitKVDecode.kv_dtypes

    def __init__(self) -> None:
        self._variants: dict[str, TritonDecodeKernel] = {
            kernel.name: kernel for kernel in (SplitKVDecode(), SplitKVTmaDecode(), StreamKTmaDecode())
        }

    def supports(self, problem: DecodeProblem) -> str | None:
        return self._variants["split_kv"].supports(problem)

    def plan(self, problem: DecodeProblem) -> dict[str, Any]:
        variant = self._choose(problem)
        return {"variant": variant, **self._variants[variant].plan(problem)}

    def workspace(self, problem: DecodeProblem, device: torch.device) -> Tensor | None:
        # A smaller problem may be planned for another variant. All take float32.
        found = [kernel.workspace(problem, torch.device("meta")) for kernel in self._able(problem)]
        numel = max((each.numel() for each in found if each is not None), default=0)
        return torch.empty(numel, dtype=torch.float32, device=device) if numel else None

    def launch(self, call: Call, variant: str | None = None, **options: Any) -> None:
        """variant: the name of one of the kernels, with its options; None to plan for a full table."""
        variant = self._choose(call.problem) if variant is None else variant
        if variant not in self._variants:
            raise ValueError(f"variant is {variant!r}, expected one of {', '.join(self._variants)}")
        check_scales(call.k_cache, options.get("k_scale"), options.get("v_scale"))
        self._variants[variant].launch(call, **options)

    def _able(self, problem: DecodeProblem) -> list[DecodeKernel]:
        return [kernel for kernel in self._variants.values() if kernel.supports(problem) is None]

    def _choose(self, problem: DecodeProblem) -> str:
        expected = {"split_kv": CLOSE * planned_us(problem, split_kv.shape_of(problem), "split_kv")}
        if self._variants["split_kv_tma"].supports(problem) is None:
            expected["split_kv_tma"] = split_kv_tma.chosen_us(problem)
        if is_ragged(problem) and self._variants["stream_k_tma"].supports(problem) is None:
            shape = stream_k_tma.shape_of(problem)
            expected["stream_k_tma"] = shares_us(problem, shape, "stream_k_tma")
        return min(expected, key=expected.__getitem__)
