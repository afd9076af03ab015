"""Inputs for decode attention tests, made to catch kernels that read or write what they must not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import decode
from kernels.decode import DecodeProblem
from kernels.fp8_cache import quantise_cache

# What table entries past the context hold: none may be used as a block.
GARBAGE = (-1, 2**31 - 1, 10**9)


@dataclass(frozen=True)
class Case:
    """One call's tensors. `out` starts as NaN; memory outside the contexts is NaN."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    context_lens: Tensor
    out: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_table, self.context_lens

    @property
    def problem(self) -> DecodeProblem:
        _, block_size, num_kv_heads, head_dim = self.k_cache.shape
        batch_size, num_q_heads = self.q.shape[:2]
        longest = int(self.context_lens.max())
        heads = (num_q_heads, num_kv_heads, head_dim)
        place = (self.q.dtype, self.q.device)
        return DecodeProblem(batch_size, *heads, block_size, longest, *place, kv_dtype=self.k_cache.dtype)


def make_case(
    context_lens: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    strided: bool = False,
    seed: int = 0,
) -> Case:
    """Random q, K and V over a shuffled pool that is larger than needed.

    strided: q and out are slices of packed projections, K and V halves of each block of one buffer, the table
    part of a wider one. What lies between is NaN, and must stay so.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    num_q_heads, num_kv_heads = heads
    batch_size = len(context_lens)
    needed = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(needed) + 5
    shuffled = torch.randperm(num_blocks, generator=generator, device=device).int()

    def nan(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    block_shape = (block_size, num_kv_heads, head_dim)
    if strided:
        # 16 spare elements between heads keep the rows aligned and the strides uneven.
        kv = nan(num_blocks, 2, block_size, num_kv_heads, head_dim + 16)[..., :head_dim]
        k_cache, v_cache = kv[:, 0], kv[:, 1]
        q, out = (
            nan(batch_size, num_q_heads + 2 * num_kv_heads, head_dim)[:, :num_q_heads] for _ in range(2)
        )
    else:
        k_cache, v_cache = nan(num_blocks, *block_shape), nan(num_blocks, *block_shape)
        q, out = (nan(batch_size, num_q_heads, head_dim) for _ in range(2))
    q.normal_(generator=generator)

    width = max(needed, default=0) + 3
    garbage = torch.tensor(GARBAGE, dtype=torch.int32, device=device)
    table = garbage.repeat(batch_size, width)[:, : width + (5 if strided else 0)].contiguous()[:, :width]
    used = 0
    for row, (length, blocks) in enumerate(zip(context_lens, needed)):
        mine = shuffled[used : used + blocks]
        used += blocks
        table[row, :blocks] = mine
        for cache in (k_cache, v_cache):
            tokens = nan(blocks * block_size, num_kv_heads, head_dim)
            tokens[:length].normal_(generator=generator)
            cache[mine.long()] = tokens.view(blocks, *block_shape)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=device)
    return Case(q, k_cache, v_cache, table, lens, out)


def quantised(case: Case) -> tuple[Case, dict[str, Tensor]]:
    """The case with caches in fp8, halves of each block of one buffer, and the options that go with them.

    NaN stays NaN on a GPU; the interpreter reads it as 480, which is beyond every value there is.
    """
    (keys, k_scale), (values, v_scale) = quantise_cache(case.k_cache), quantise_cache(case.v_cache)
    kv = torch.stack([keys, values], 1)
    return replace(case, k_cache=kv[:, 0], v_cache=kv[:, 1]), {"k_scale": k_scale, "v_scale": v_scale}


def expected(case: Case, scale: float | None = None, **scales: Tensor) -> Tensor:
    """The oracle's answer in fp64, from inputs as they are. scales: of caches in fp8."""
    caches = [cache if scales else cache.double() for cache in (case.k_cache, case.v_cache)]
    return decode.get("reference")(
        case.q.double(), *caches, case.block_table, case.context_lens, scale, **scales
    )


def worst_error(out: Tensor, reference: Tensor) -> float:
    """max over rows and heads of |out - reference| / |reference| (vector norms); infinite where out is not finite."""
    difference = (out.double() - reference).norm(dim=-1)
    relative = torch.where(reference.norm(dim=-1) > 0, difference / reference.norm(dim=-1), difference)
    return float(torch.nan_to_num(relative, nan=float("inf")).max()) if relative.numel() else 0.0
