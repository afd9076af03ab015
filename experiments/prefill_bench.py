"""Prefill attention as an operation for kernel_bench: chunks of queries over paged KV, kernels as candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.decode_bench import DecodeBench, DecodeInputs
from experiments.kernel_bench import BoundCall, Candidate
from kernels import costs, prefill
from kernels.costs import Cost
from kernels.prefill import PrefillProblem


@dataclass(frozen=True)
class PrefillInputs:
    """q: [batch * query_len, num_q_heads, head_dim]; the rest is as for decoding."""

    q: Tensor
    paged: DecodeInputs
    query_start_loc: Tensor


def variant_of(kernel: str) -> str:
    """What a kernel's rows are called: nobody is to take one that knows no paging for one that does."""
    return kernel if prefill.get(kernel).paged else f"{kernel}_contiguous"


@dataclass(frozen=True)
class PrefillBench:
    """batch_size chunks of query_len tokens, each the end of a context of context_len.

    contiguous: each row's blocks in order, row after row, instead of shuffled, as PrefillProblem means it.
    """

    batch_size: int
    query_len: int
    context_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    device: torch.device
    kernels: Sequence[str]
    contiguous: bool = False

    @property
    def problem(self) -> PrefillProblem:
        return PrefillProblem(
            batch_size=self.batch_size,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            max_query_len=self.query_len,
            max_context_len=self.context_len,
            dtype=getattr(torch, self.dtype),
            device=self.device,
            contiguous=self.contiguous,
            equal_lengths=True,
        )

    @property
    def cost(self) -> Cost:
        return costs.prefill_attention(
            [self.query_len] * self.batch_size,
            [self.context_len] * self.batch_size,
            self.num_q_heads,
            self.num_kv_heads,
            self.head_dim,
            getattr(torch, self.dtype),
            self.block_size,
        )

    @property
    def input_bytes(self) -> int:
        return self.cost.bytes

    @property
    def interpreted_size(self) -> int:
        return self.batch_size * self.context_len

    def make_inputs(self, generator: torch.Generator) -> PrefillInputs:
        """KV as for decoding (shuffled blocks, NaN where no token is), and standard normal queries."""
        paged = DecodeBench(
            (self.context_len,) * self.batch_size,
            self.num_q_heads,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            self.dtype,
            self.device,
            (),
            contiguous=self.contiguous,
        ).make_inputs(generator)
        shape = (self.batch_size * self.query_len, self.num_q_heads, self.head_dim)
        q = torch.randn(shape, generator=generator, device=self.device, dtype=getattr(torch, self.dtype))
        starts = torch.arange(self.batch_size + 1, dtype=torch.int32, device=self.device) * self.query_len
        return PrefillInputs(q, paged, starts)

    def reference(self, inputs: PrefillInputs) -> Sequence[Tensor]:
        paged = inputs.paged
        wide = DecodeInputs(
            paged.q, paged.k_cache.float(), paged.v_cache.float(), paged.block_table, paged.context_lens
        )
        kernel = prefill.get("reference")
        return [self._call(kernel, PrefillInputs(inputs.q.float(), wide, inputs.query_start_loc), None, {})]

    def candidates(self) -> Sequence[Candidate]:
        return [self._candidate(name) for name in self.kernels]

    def _candidate(self, name: str) -> Candidate:
        kernel = prefill.get(name)

        def bind(inputs: PrefillInputs) -> BoundCall:
            options = kernel.plan(self.problem)
            options |= {"workspace": kernel.workspace(self.problem, self.device)}
            # A kernel that knows no paging is torch's, and makes its own output: another would cost it a copy.
            out = torch.full_like(inputs.q, float("nan")) if kernel.paged else None
            return BoundCall(lambda: (self._call(kernel, inputs, out, options),))

        def probe() -> Any:
            tiny = PrefillBench(
                1,
                1,
                1,
                self.num_kv_heads,
                self.num_kv_heads,
                self.head_dim,
                self.block_size,
                self.dtype,
                self.device,
                (),
            )
            return tiny._call(
                kernel, tiny.make_inputs(torch.Generator(device=self.device).manual_seed(0)), None, {}
            )

        return Candidate(
            variant_of(name), bind, probe, {"prefill_attention": name}, kernel.supports(self.problem)
        )

    def _call(
        self, kernel: Any, inputs: PrefillInputs, out: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        paged = inputs.paged
        return kernel(
            inputs.q,
            paged.k_cache,
            paged.v_cache,
            paged.block_table,
            paged.context_lens,
            inputs.query_start_loc,
            self.query_len,
            out=out,
            **options,
        )
