"""Costs against counts worked out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import costs
from kernels.costs import Cost

BF16 = torch.bfloat16


def test_decode_attention_as_worked_out() -> None:
    """Batch 8, context 4,096, 16 query and 8 KV heads, head_dim 128."""
    assert costs.kv_bytes(8 * 4096, 8, 128, BF16) == 134217728
    cost = costs.decode_attention([4096] * 8, 16, 8, 128, BF16, block_size=16)
    assert cost.flops == 268435456
    queries, table, lengths = 2 * 8 * 16 * 128 * 2, 8 * 256 * 4, 8 * 4
    assert cost.bytes == 134217728 + queries + table + lengths


def test_decode_over_an_fp8_cache_reads_half_the_keys_and_two_scales_a_head() -> None:
    same, small = (
        costs.decode_attention([4096] * 8, 16, 8, 128, BF16, 16, kv_dtype=kv_dtype)
        for kv_dtype in (BF16, torch.float8_e4m3fn)
    )
    assert same == costs.decode_attention([4096] * 8, 16, 8, 128, BF16, 16)
    assert same.bytes - small.bytes == 134217728 // 2 - 2 * 8 * 4
    assert same.flops == small.flops


def test_ragged_decode_counts_actual_lengths() -> None:
    parts = [costs.decode_attention([n], 4, 2, 64, BF16, 16) for n in (0, 1, 17)]
    assert sum(parts, Cost(0, 0)) == costs.decode_attention([0, 1, 17], 4, 2, 64, BF16, 16)
    assert parts[0].flops == 0


def test_prefill_counts_visible_keys() -> None:
    # 3 queries after 2 cached tokens see 3, 4 and 5 keys.
    cost = costs.prefill_attention([3], [5], 2, 1, 8, torch.float32, 4)
    assert cost.flops == 4 * 2 * 8 * (3 + 4 + 5)
    assert cost.bytes == 2 * 5 * 8 * 4 + 2 * 3 * 2 * 8 * 4 + 4 * (2 + 3)


@given(st.integers(1, 50), st.integers(1, 50))
def test_prefill_in_chunks_does_the_same_flops(first: int, second: int) -> None:
    def flops(query_len: int, context_len: int) -> int:
        return costs.prefill_attention([query_len], [context_len], 4, 2, 16, BF16, 16).flops

    total = first + second
    assert flops(first, first) + flops(second, total) == flops(total, total)


def test_prefill_of_one_token_is_decode_flops() -> None:
    assert (
        costs.prefill_attention([1], [77], 4, 2, 16, BF16, 16).flops
        == costs.decode_attention([77], 4, 2, 16, BF16, 16).flops
    )


def test_a_row_without_queries_reads_no_keys() -> None:
    with_it = costs.prefill_attention([3, 0], [5, 1000], 2, 1, 8, BF16, 16)
    without = costs.prefill_attention([3], [5], 2, 1, 8, BF16, 16)
    assert with_it.flops == without.flops
    assert with_it.bytes - without.bytes == 2 * 4


@pytest.mark.parametrize(
    ("cost", "num_bytes"),
    [
        (costs.rms_norm(3, 100, BF16), 2 * (300 + 300 + 100)),
        (costs.add_rms_norm(3, 100, BF16), 2 * (2 * 300 + 2 * 300 + 100)),
        (costs.silu_mul(3, 100, BF16), 2 * (600 + 300)),
        (costs.rope(3, 4, 2, 64, BF16), 2 * 2 * 3 * 6 * 64 + 3 * (64 * 4 + 8)),
        (costs.kv_write(3, 2, 64, BF16), 2 * 2 * 2 * 3 * 2 * 64 + 3 * 8),
        (costs.linear(3, 100, 50, BF16), 2 * (5000 + 300 + 150)),
        (costs.linear(3, 100, 50, BF16, bias=True), 2 * (5000 + 300 + 150 + 50)),
        (costs.embedding(3, 100, BF16), 3 * (200 + 200 + 8)),
        (costs.greedy(3, 1000, torch.float32), 3 * (4000 + 8)),
        (costs.sample(3, 1000, torch.float32), 3 * (4000 + 8 + 32)),
    ],
)
def test_bytes_of_elementwise_operations(cost: Cost, num_bytes: int) -> None:
    assert cost.bytes == num_bytes


def test_linear_flops() -> None:
    assert costs.linear(3, 100, 50, BF16).flops == 2 * 3 * 100 * 50


def test_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    assert Cost(4_000_000, 0).floor_us(4e12, 1e15) == pytest.approx(1.0)
    assert Cost(1, 2_000_000_000).floor_us(4e12, 1e15) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="ceilings must be positive"):
        Cost(1, 1).floor_us(0, 1)


def test_costs_add_and_refuse_nonsense() -> None:
    assert Cost(1, 2) + Cost(3, 4) == Cost(4, 6)
    assert Cost(1, 2) * 3 == Cost(3, 6)
    with pytest.raises(ValueError, match="cannot be negative"):
        Cost(-1, 0)
    with pytest.raises(ValueError, match="query_len is 6, more than its context_len 5"):
        costs.prefill_attention([6], [5], 2, 1, 8, BF16, 16)
    with pytest.raises(ValueError, match="query_lens has 2 rows"):
        costs.prefill_attention([1, 1], [5], 2, 1, 8, BF16, 16)
