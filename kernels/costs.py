"""The bytes and floating-point operations that an operation cannot do without: the roofline's only source.

Bytes: every input that must be read counts once and every output once, whatever a kernel does with them in between
(a KV head is read once for all query heads of its group; scratch counts nothing). FLOPs: a multiply-add is two;
an exponential, a division and a square root count one each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

INDEX_BYTES = 4  # block_table, context_lens, query_start_loc: int32
SCALE_BYTES = 4  # of an fp8 cache, a KV head: fp32
SLOT_BYTES = 8  # slot_mapping, positions, token ids: int64
SETTING_BYTES = 8  # temperature, top_k, top_p and the uniform number of a sampled row: fp64 and int64


@dataclass(frozen=True)
class Cost:
    """bytes moved through device memory and floating-point operations done, at least."""

    bytes: int
    flops: int

    def __post_init__(self) -> None:
        if self.bytes < 0 or self.flops < 0:
            raise ValueError(f"a cost cannot be negative: {self}")

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.bytes * times, self.flops * times)

    def floor_us(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The least time in microseconds on a device with these ceilings: the slower of memory and arithmetic."""
        if bytes_per_s <= 0 or flops_per_s <= 0:
            raise ValueError(f"ceilings must be positive, got {bytes_per_s} B/s and {flops_per_s} FLOP/s")
        return 1e6 * max(self.bytes / bytes_per_s, self.flops / flops_per_s)


def kv_bytes(num_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of num_tokens tokens in one layer."""
    return 2 * num_tokens * num_kv_heads * head_dim * dtype.itemsize


def decode_attention(
    context_lens: Sequence[int],
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
    kv_dtype: torch.dtype | None = None,
) -> Cost:
    """One query token a row against its context: K and V of every context, q and out, the table and lengths.

    kv_dtype: of the caches; where it is not dtype, two scales (fp32) a KV head are read too.
    """
    tokens = sum(context_lens)
    rows = len(context_lens)
    queries = rows * num_q_heads * head_dim * dtype.itemsize
    table = INDEX_BYTES * (sum(-(-length // block_size) for length in context_lens) + rows)
    scales = 0 if kv_dtype in (None, dtype) else 2 * num_kv_heads * SCALE_BYTES
    return Cost(
        bytes=kv_bytes(tokens, num_kv_heads, head_dim, kv_dtype or dtype) + scales + 2 * queries + table,
        flops=4 * num_q_heads * head_dim * tokens,
    )


def prefill_attention(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
) -> Cost:
    """Causal attention of each row's last query_len tokens over its context (those tokens included)."""
    if len(query_lens) != len(context_lens):
        raise ValueError(f"query_lens has {len(query_lens)} rows, context_lens has {len(context_lens)}")
    visible = 0
    for query_len, context_len in zip(query_lens, context_lens):
        if query_len > context_len:
            raise ValueError(f"query_len is {query_len}, more than its context_len {context_len}")
        # Query i of the chunk sees context_len - query_len + i + 1 keys.
        visible += query_len * context_len - query_len * (query_len - 1) // 2
    read = [length for length, query_len in zip(context_lens, query_lens) if query_len]
    queries = sum(query_lens) * num_q_heads * head_dim * dtype.itemsize
    table = INDEX_BYTES * (sum(-(-length // block_size) for length in read) + 2 * len(context_lens) + 1)
    return Cost(
        bytes=kv_bytes(sum(read), num_kv_heads, head_dim, dtype) + 2 * queries + table,
        flops=4 * num_q_heads * head_dim * visible,
    )


def rms_norm(num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Cost:
    """Read x and the weight, write the result: square, add, scale and weigh each element."""
    elements = num_tokens * hidden_size
    return Cost((2 * elements + hidden_size) * dtype.itemsize, 4 * elements + 3 * num_tokens)


def add_rms_norm(num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Cost:
    """rms_norm of x + residual, which is written as well."""
    elements = num_tokens * hidden_size
    return rms_norm(num_tokens, hidden_size, dtype) + Cost(2 * elements * dtype.itemsize, elements)


def silu_mul(num_tokens: int, intermediate_size: int, dtype: torch.dtype) -> Cost:
    """gate / (1 + exp(-gate)) * up: read both halves, write one."""
    elements = num_tokens * intermediate_size
    return Cost(3 * elements * dtype.itemsize, 5 * elements)


def rope(num_tokens: int, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Cost:
    """q and k read and written in place, each token's fp32 cosines and sines and its position read."""
    elements = num_tokens * (num_q_heads + num_kv_heads) * head_dim
    tables = num_tokens * (head_dim * 4 + SLOT_BYTES)
    return Cost(2 * elements * dtype.itemsize + tables, 3 * elements)


def kv_write(num_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Cost:
    """New keys and values read and written to their slots."""
    return Cost(2 * kv_bytes(num_tokens, num_kv_heads, head_dim, dtype) + num_tokens * SLOT_BYTES, 0)


def linear(
    num_tokens: int, in_features: int, out_features: int, dtype: torch.dtype, bias: bool = False
) -> Cost:
    """x @ weight.T (+ bias): weight and x read, the product written."""
    elements = in_features * out_features + num_tokens * (in_features + out_features) + bias * out_features
    flops = 2 * num_tokens * in_features * out_features + bias * num_tokens * out_features
    return Cost(elements * dtype.itemsize, flops)


def embedding(num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Cost:
    """Each token's id and row read, the row written."""
    return Cost(num_tokens * (2 * hidden_size * dtype.itemsize + SLOT_BYTES), 0)


def greedy(num_rows: int, vocab_size: int, dtype: torch.dtype) -> Cost:
    """The logits read once, one id a row written; a comparison an element."""
    return Cost(num_rows * (vocab_size * dtype.itemsize + SLOT_BYTES), num_rows * vocab_size)


def sample(num_rows: int, vocab_size: int, dtype: torch.dtype) -> Cost:
    """As greedy, with a row's four settings. What is kept by top-k and top-p, a few tokens, counts nothing."""
    return greedy(num_rows, vocab_size, dtype) + Cost(4 * SETTING_BYTES * num_rows, 0)
