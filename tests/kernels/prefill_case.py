"""Prefill inputs for tests: a poisoned paged pool, and the answer computed without any of our code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# What fills block-table entries past a context. Read as a block id, it lies far outside every pool.
GARBAGE_BLOCK = 2**31 - 1
PADDING_TOKENS = 3
# Where the kernels run: on a GPU machine Triton is compiled, elsewhere interpreted.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNTOUCHED = 7.0


@dataclass(frozen=True)
class PrefillCase:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    context_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_table,
            self.context_lens,
            self.query_start_loc,
            self.max_query_len,
        )

    def expected(self, scale: float | None = None) -> Tensor:
        """Position by position in fp64 from the dense keys; UNTOUCHED where nothing may be written."""
        out = torch.full(self.q.shape, UNTOUCHED, dtype=torch.float64, device=self.q.device)
        scale = self.q.shape[2] ** -0.5 if scale is None else scale
        starts = self.query_start_loc.tolist()
        for row, (keys, values) in enumerate(zip(self.keys, self.values)):
            group = self.q.shape[1] // max(keys.shape[1], 1)
            k = keys.double().repeat_interleave(group, dim=1)
            v = values.double().repeat_interleave(group, dim=1)
            chunk = starts[row + 1] - starts[row]
            for i in range(chunk):
                visible = len(keys) - chunk + i + 1
                query = self.q[starts[row] + i].double()
                weights = torch.einsum("hd,nhd->nh", query, k[:visible]).mul(scale).softmax(0)
                out[starts[row] + i] = torch.einsum("nh,nhd->hd", weights, v[:visible])
        return out

    def untouched_out(self) -> Tensor:
        return torch.full(self.q.shape, UNTOUCHED, dtype=self.q.dtype, device=self.q.device)


def make_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = DEVICE,
    seed: int = 0,
) -> PrefillCase:
    """Chunks of query_lens at the ends of contexts of context_lens, over a shuffled pool full of NaN.

    q is a view inside a packed qkv buffer, the caches are views of one buffer, and PADDING_TOKENS tokens
    follow the last chunk.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-length // block_size) for length in context_lens]
    order = torch.randperm(sum(num_blocks) + 5, generator=generator)
    shape = (len(order), 2, block_size, num_kv_heads, head_dim)
    pool = torch.full(shape, float("nan"), dtype=dtype, device=device)
    table = torch.full((len(context_lens), max(num_blocks, default=0) + 2), GARBAGE_BLOCK, dtype=torch.int32)
    keys, values, used = [], [], 0
    for row, length in enumerate(context_lens):
        blocks = order[used : used + num_blocks[row]]
        used += num_blocks[row]
        table[row, : len(blocks)] = blocks
        kv = torch.randn(length, 2, num_kv_heads, head_dim, generator=generator).to(dtype).to(device)
        token = torch.arange(length)
        pool[blocks[token // block_size].to(device), :, (token % block_size).to(device)] = kv
        keys.append(kv[:, 0])
        values.append(kv[:, 1])
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    total = int(starts[-1]) + PADDING_TOKENS
    qkv = torch.randn(total, num_q_heads + 2 * num_kv_heads, head_dim, generator=generator)
    return PrefillCase(
        q=qkv.to(dtype).to(device)[:, :num_q_heads],
        k_cache=pool[:, 0],
        v_cache=pool[:, 1],
        block_table=table.to(device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        query_start_loc=starts.to(device),
        max_query_len=max(query_lens, default=0),
        keys=keys,
        values=values,
    )
