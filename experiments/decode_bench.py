"""Decode attention as an operation for kernel_bench: its inputs, its oracle, and the kernels as candidates."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from experiments.kernel_bench import BoundCall, Candidate
from experiments.settings import Variant
from kernels import costs, decode
from kernels.costs import Cost
from kernels.decode.reference import attend
from kernels.fp8_cache import quantise_cache

# Blocks of the pool for each one that the contexts use: block tables are shuffled over all of it.
POOL_FACTOR = 1.25


@dataclass(frozen=True)
class DecodeInputs:
    """What a decode kernel reads. Slots that hold no token of any context are NaN. Scales: of caches in fp8."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    context_lens: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def scales(self) -> dict[str, Any]:
        """Options of a kernel that reads fp8; none for other caches."""
        found = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: scale for name, scale in found.items() if scale is not None}


@dataclass(frozen=True)
class DecodeBench:
    """Decode attention of `context_lens` (a host tuple, one a row) and the variants to compare on it.

    contiguous: each row's blocks in order, row after row, instead of shuffled. shared_prefix_len: tokens in whole
    blocks that every row begins with. Both as DecodeProblem means them. kv_dtype: "float8_e4m3fn" for caches
    quantised with a scale a KV head; kernels are then compared with the reference on the same fp8 values.
    """

    context_lens: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    device: torch.device
    variants: Sequence[Variant]
    contiguous: bool = False
    shared_prefix_len: int = 0
    kv_dtype: str | None = None

    @cached_property
    def problem(self) -> decode.DecodeProblem:
        return decode.DecodeProblem(
            batch_size=len(self.context_lens),
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            max_context_len=max(self.context_lens),
            mean_context_len=sum(self.context_lens) // len(self.context_lens),
            dtype=getattr(torch, self.dtype),
            device=self.device,
            contiguous=self.contiguous,
            shared_prefix_len=self.shared_prefix_len,
            kv_dtype=self._kv_dtype,
        )

    @property
    def _kv_dtype(self) -> torch.dtype:
        return getattr(torch, self.kv_dtype or self.dtype)

    @property
    def cost(self) -> Cost:
        """As costs.py has it, less the reads of a shared prefix after the first row's."""
        apart = costs.decode_attention(
            self.context_lens,
            self.num_q_heads,
            self.num_kv_heads,
            self.head_dim,
            self.problem.dtype,
            self.block_size,
            kv_dtype=self._kv_dtype,
        )
        prefix_bytes = costs.kv_bytes(
            self.shared_prefix_len, self.num_kv_heads, self.head_dim, self._kv_dtype
        )
        return Cost(apart.bytes - (len(self.context_lens) - 1) * prefix_bytes, apart.flops)

    @property
    def input_bytes(self) -> int:
        return self.cost.bytes

    @property
    def interpreted_size(self) -> int:
        return sum(self.context_lens)

    def make_inputs(self, generator: torch.Generator) -> DecodeInputs:
        """Standard normal queries, keys and values; the blocks of a row anywhere in a pool larger than needed."""
        device, dtype = self.device, self.problem.dtype
        counts = [-(-length // self.block_size) for length in self.context_lens]
        num_shared = self.shared_prefix_len // self.block_size
        num_blocks = int(sum(counts) * POOL_FACTOR) + 1
        order = torch.randperm(num_blocks, generator=generator, device=device, dtype=torch.int32)
        if self.contiguous:
            order = order.sort().values
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
        shape = (num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        k_cache, v_cache = (
            torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(2)
        )
        start = 0
        for row, (length, count) in enumerate(zip(self.context_lens, counts)):
            table[row, :count] = order[start : start + count]
            table[row, :num_shared] = table[0, :num_shared]
            start += count
            for cache in (k_cache, v_cache):
                cache[table[row, count - 1].long(), (length - 1) % self.block_size + 1 :] = float("nan")
        for cache in (k_cache, v_cache):
            cache[order[start:].long()] = float("nan")
        q_shape = (len(counts), self.num_q_heads, self.head_dim)
        q = torch.randn(q_shape, generator=generator, device=device, dtype=dtype)
        lens = torch.tensor(self.context_lens, dtype=torch.int32, device=device)
        if self.kv_dtype is None:
            return DecodeInputs(q, k_cache, v_cache, table, lens)
        (k_cache, k_scale), (v_cache, v_scale) = quantise_cache(k_cache), quantise_cache(v_cache)
        return DecodeInputs(q, k_cache, v_cache, table, lens, k_scale, v_scale)

    def reference(self, inputs: DecodeInputs) -> Sequence[Tensor]:
        return [
            attend(
                inputs.q,
                inputs.k_cache,
                inputs.v_cache,
                inputs.block_table,
                inputs.context_lens,
                None,
                torch.float32,
                **inputs.scales,
            )
        ]

    def candidates(self) -> Sequence[Candidate]:
        return [self._candidate(variant) for variant in self.variants]

    def _candidate(self, variant: Variant) -> Candidate:
        kernel = decode.get(variant.decode)

        def bind(inputs: DecodeInputs) -> BoundCall:
            start = time.perf_counter()
            plan = kernel.plan(self.problem)
            plan_us = 1e6 * (time.perf_counter() - start)  # prepare is no part of it: few kernels have one
            plan |= kernel.prepare(self.problem, inputs.block_table, inputs.context_lens)
            plan |= inputs.scales | dict(variant.options)
            workspace = kernel.workspace(self.problem, self.device)
            return BoundCall(_call(kernel, inputs, plan, workspace), plan_us)

        def probe() -> Any:
            tiny = DecodeBench(
                (self.block_size,),
                self.num_kv_heads,
                self.num_kv_heads,
                self.head_dim,
                self.block_size,
                self.dtype,
                self.device,
                (),
                kv_dtype=self.kv_dtype,
            )
            inputs = tiny.make_inputs(torch.Generator(device=self.device).manual_seed(0))
            caches = (inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.context_lens)
            kernel(inputs.q, *caches, **inputs.scales)

        return Candidate(
            name=variant.name,
            bind=bind,
            probe=probe,
            columns={"decode_attention": variant.decode},
            unsupported=kernel.supports(self.problem),
        )


def _call(
    kernel: Any, inputs: DecodeInputs, plan: dict[str, Any], workspace: Tensor | None
) -> Callable[[], tuple[Tensor]]:
    """A call without arguments, into an output full of NaN until then."""
    out = torch.full_like(inputs.q, float("nan"))

    def call() -> tuple[Tensor]:
        kernel(
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            inputs.block_table,
            inputs.context_lens,
            out=out,
            workspace=workspace,
            **plan,
        )
        return (out,)

    return call
