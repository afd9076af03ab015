"""The prefill kernel of specialised warps: exact on numpy, whichever partition comes first.

No interpreter runs the kernel, so it runs on tests/kernels/gluon_on_numpy.py. Errors put into its source must show
there: a stand-in that forgave them would prove nothing.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.prefill import warp_specialized
from tests.kernels.gluon_on_numpy import KernelError, execute
from tests.kernels.prefill_case import PrefillCase, make_case

SOURCE = Path(warp_specialized.__file__)
TOLERANCE = 1e-13
SEEDS = range(3)
case_in_fp64 = partial(make_case, dtype=torch.float64, device="cpu")


def in_fp64(**options: Any) -> Any:
    """The module on numpy, where the kernel takes fp64."""
    module = execute(SOURCE, **options)
    module.DTYPES = (torch.float64,)
    return module


def largest_error(
    case: PrefillCase, *, seed: int, scale: float | None = None, changes: tuple[tuple[str, str], ...] = ()
) -> float:
    """Of the kernel on numpy, with what it must not write; NaN if any is."""
    module = in_fp64(seed=seed, changes=changes)
    out = case.untouched_out()
    returned = module.WarpSpecializedPrefill()(*case.args, scale=scale, out=out)
    assert returned is out
    assert module._prefill_kernel.launches == 1
    return (out - case.expected(scale)).abs().max().item()


# Chunks, contexts, query heads, KV heads, head_dim, block size.
CASES = {
    "whole prompts, chunks, nothing": ([1, 30, 0, 17, 12], [1, 400, 300, 17, 900], 8, 2, 128, 16),
    "group 7": ([5, 40, 64], [500, 130, 127], 14, 2, 64, 16),
    "group 1, blocks of 8": ([3, 129, 0], [385, 256, 0], 2, 2, 64, 8),
    "group 2, blocks of 24": ([70], [71], 4, 2, 128, 24),
    "group 5": ([20, 26], [640, 281], 5, 1, 128, 32),
    "group 8, blocks of 256": ([9, 18], [700, 256], 16, 2, 64, 256),
    "group 128": ([2], [300], 128, 1, 64, 16),
    "keys end at the edges of tiles": ([1, 1, 1, 17, 17, 17], [127, 128, 129, 143, 144, 145], 4, 1, 64, 16),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_exact_whoever_comes_first(name: str, seed: int) -> None:
    """Unwritten slots hold NaN, unread entries of the table garbage; padding tokens stay as they are."""
    chunks, contexts, num_q_heads, num_kv_heads, head_dim, block_size = CASES[name]
    case = case_in_fp64(
        chunks,
        contexts,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        seed=seed,
    )
    assert largest_error(case, seed=seed) < TOLERANCE


@pytest.mark.parametrize("seed", SEEDS)
def test_max_query_len_above_every_chunk(seed: int) -> None:
    case = case_in_fp64([5, 33, 0, 64], [300, 33, 7, 127], seed=seed)
    assert largest_error(dataclasses.replace(case, max_query_len=len(case.q)), seed=seed) < TOLERANCE


def test_only_empty_chunks() -> None:
    case = case_in_fp64([0, 0], [20, 0], num_q_heads=128, num_kv_heads=1)
    assert largest_error(dataclasses.replace(case, max_query_len=2), seed=0) == 0


@pytest.mark.parametrize("scale", [0.3, 4.0, 0.0, -0.2])
def test_scale(scale: float) -> None:
    # Large scores carry large rounding errors into the exponentials.
    tolerance = 10 * TOLERANCE if scale > 1 else TOLERANCE
    assert largest_error(case_in_fp64([40], [300]), scale=scale, seed=1) < tolerance


def test_scores_far_from_one() -> None:
    """In the thousands: the running maximum must keep exponentials finite."""
    case = case_in_fp64([40], [300])
    assert largest_error(dataclasses.replace(case, q=case.q * 1e3), seed=0) < 1e3 * TOLERANCE


def test_caches_as_engines_have_them() -> None:
    """One layer of [layers, 2, blocks, ...]; the next one's holds NaN."""
    case = case_in_fp64([40, 3], [300, 20])
    layer = torch.stack([case.k_cache, case.v_cache])
    k_cache, v_cache = torch.stack([layer, torch.full_like(layer, float("nan"))]).unbind(0)[0].unbind(0)
    assert largest_error(dataclasses.replace(case, k_cache=k_cache, v_cache=v_cache), seed=0) < TOLERANCE


def slots_apart(cache: Tensor) -> Tensor:
    """The same cache with NaN after each head and after the heads of each slot."""
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    pool = torch.full(
        (num_blocks, block_size, num_kv_heads + 1, head_dim + 8), float("nan"), dtype=cache.dtype
    )
    pool[:, :, :num_kv_heads, :head_dim] = cache
    return pool[:, :, :num_kv_heads, :head_dim]


def test_every_cache_and_out_has_its_own_strides() -> None:
    case = case_in_fp64([40, 3], [300, 20])
    for k_cache, v_cache in (
        (slots_apart(case.k_cache), case.v_cache),
        (case.k_cache, slots_apart(case.v_cache)),
        (case.k_cache.contiguous(), case.v_cache),
    ):
        unlike = dataclasses.replace(case, k_cache=k_cache, v_cache=v_cache)
        assert largest_error(unlike, seed=0) < TOLERANCE
    whole = torch.full((len(case.q), 5, 128), float("nan"), dtype=torch.float64)
    out = whole[:, :4, 64:]
    in_fp64().WarpSpecializedPrefill()(*case.args, out=out)
    torch.testing.assert_close(out[:43], case.expected()[:43], atol=TOLERANCE, rtol=0)
    out[:43] = float("nan")
    assert whole.isnan().all()


TAKE_EMPTY = "mbarrier.wait(empty.index(stage), (tile // STAGES + 1) & 1)"
TELL_CLEAN = "fence_async_shared()\n        _meet()\n        mbarrier.arrive(clean)"
AWAIT_SCORES = "s = warpgroup_mma_wait(num_outstanding=1, deps=(s_next,))"
AWAIT_OUTPUT = "acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next, p))"
FREE_KEYS = "mbarrier.arrive(k_empty.index(stage))"
FREE_VALUES = "mbarrier.arrive(v_empty.index(stage_before))"
STORED_QUERIES = "other=0.0))\n    fence_async_shared()\n    _meet()\n"
MUTATIONS = {
    # the copying warps
    "copies over a stage in use": (TAKE_EMPTY, "mbarrier.wait(empty.index(stage), (tile // STAGES) & 1)"),
    "waits for no empty stage": (TAKE_EMPTY, "pass"),
    "expects half of the bytes": ("BLOCK_N * HEAD_DIM * 2", "BLOCK_N * HEAD_DIM"),
    "copies the first columns twice": ("column + half * 64]", "column]"),
    "reads the table past the end": ("gl.minimum(tile * BLOCK_N + i * BOX, last_box)", "tile * BLOCK_N + i * BOX"),
    "stops a box too early": ("(end - 1) // BOX * BOX", "(end - 2) // BOX * BOX"),
    "zeroes before the values are there": ("_wait_full(full, last, STAGES)", "pass"),
    "zeroes from the next eight slots on": ("(end - last * BLOCK_N) // 8,", "(end - last * BLOCK_N) // 8 + 1,"),
    "zeroes a written slot": ("+ slots < end", "+ slots < end - 1"),
    "zeroes without a fence": (TELL_CLEAN, "_meet(); mbarrier.arrive(clean)"),
    "fences after it has told": (TELL_CLEAN, "_meet(); mbarrier.arrive(clean); fence_async_shared()"),
    "tells before it meets": (TELL_CLEAN, "fence_async_shared(); mbarrier.arrive(clean); _meet()"),
    "never tells": ("mbarrier.arrive(clean)", "pass"),
    "takes the first head's keys": ("kv_head * stride_k_head", "0"),
    "takes values at the keys' heads": ("kv_head * stride_v_head", "kv_head * stride_k_head"),
    "takes values at the keys' blocks": ("v_clean, table_ptr, v_block_rows", "v_clean, table_ptr, k_block_rows"),
    "takes every row's blocks from the first": ("batch_row.to(gl.int64) * stride_table", "batch_row.to(gl.int64) * 0"),
    # who waits for whom
    "awaits the wrong phase": ("(tile // STAGES) & 1)", "(tile // STAGES + 1) & 1)"),
    "awaits no first keys": ("_wait_full(k_full, 0, STAGES)", "pass"),
    "awaits no keys": ("_wait_full(k_full, tile, STAGES)", "pass"),
    "awaits no values": ("_wait_full(v_full, tile - 1, STAGES)", "pass"),
    "awaits no zeroes": ("mbarrier.wait(v_clean, 0)", "_wait_full(v_full, num_tiles - 1, STAGES)"),
    "never frees the first keys": ("mbarrier.arrive(k_empty.index(0))", "pass"),
    "never frees keys": (FREE_KEYS, "pass"),
    "never frees values": (FREE_VALUES, "pass"),
    "frees other values": (FREE_VALUES, "mbarrier.arrive(v_empty.index(stage))"),
    "frees keys in use": (f"{AWAIT_SCORES}\n        {FREE_KEYS}", f"{FREE_KEYS}; {AWAIT_SCORES}"),
    "frees values in use": (f"{AWAIT_OUTPUT}\n        {FREE_VALUES}", f"{FREE_VALUES}; {AWAIT_OUTPUT}"),
    "frees keys for both": ("mbarrier.init(k_empty.index(i), count=2)", "mbarrier.init(k_empty.index(i), count=1)"),
    "frees values for both": ("mbarrier.init(v_empty.index(i), count=2)", "mbarrier.init(v_empty.index(i), count=1)"),
    "nobody's turn is first": ("(turn + 1 - WHO) & 1", "turn & 1"),
    "keeps its turn": ("mbarrier.arrive(turns.index(1 - WHO))", "pass"),
    "weighs scores in flight": (AWAIT_SCORES, AWAIT_SCORES.replace("=1", "=2")),
    "rescales an output in flight": (AWAIT_OUTPUT, AWAIT_OUTPUT.replace("=0", "=1")),
    "multiplies unfenced queries": (STORED_QUERIES, "other=0.0))\n    _meet()\n"),
    "multiplies queries too early": (STORED_QUERIES, "other=0.0))\n    fence_async_shared()\n"),
    "loads rows too early": ("whole lines\n    _meet()\n", "whole lines\n"),
    # what is computed
    "multiplies other values": ("v_tiles.index(stage_before)", "v_tiles.index(stage)"),
    "does not rescale the output": ("acc = acc * gl.expand_dims", "acc = acc + 0 * gl.expand_dims"),
    "does not rescale the sum": ("row_sum * rescale + gl.sum", "row_sum + gl.sum"),
    "hides a query's own key": ("<= gl.expand_dims(positions, 1)", "< gl.expand_dims(positions, 1)"),
    "shows the next key": ("<= gl.expand_dims(positions, 1)", "<= gl.expand_dims(positions, 1) + 1"),
    "masks too late": ("WHO * ROWS // GROUP + 1) // BLOCK_N", "WHO * ROWS // GROUP + 2) // BLOCK_N"),
    "walks a tile too few": ("(end + BLOCK_N - 1) // BLOCK_N", "(end + BLOCK_N - 2) // BLOCK_N"),
    "attends to the first half twice": ("rows = WHO * ROWS + ", "rows = "),
    "masks the second half as the first": ("first_position + (WHO * ROWS + ", "first_position + ("),
    "writes past the chunk": ("gl.minimum(chunk_len - first_token, TOKENS)", "TOKENS"),
    "attends for empty chunks": ("if first_token >= chunk_len:", "if first_token > chunk_len:"),
    # the host
    "a grid rounded down": ("cdiv(max_query_len, BLOCK_M // group)", "max_query_len // (BLOCK_M // group)"),
    "no last block": ("(num_blocks - 1) * (block // slot) + block_size", "(num_blocks - 1) * (block // slot)"),
    "no last head": ("head * (num_kv_heads - 1) + head_dim]", "head * (num_kv_heads - 1)]"),
}  # fmt: skip


def demanding_case(seed: int) -> PrefillCase:
    """Three tiles of queries, six of keys, edges of tiles, nothing to do, both caches unlike, every block in use."""
    case = case_in_fp64(
        [5, 65, 1, 1, 1, 0],
        [700, 530, 127, 128, 129, 0],
        num_q_heads=8,
        head_dim=128,
        seed=seed,
    )
    used = case.block_table[case.block_table < len(case.k_cache)]
    table = case.block_table.clone()
    table[table < len(case.k_cache)] = torch.arange(len(used), dtype=torch.int32)
    pool = torch.stack([case.k_cache[used], case.v_cache[used]], dim=1)
    v_cache = slots_apart(case.v_cache[used])
    return dataclasses.replace(case, k_cache=pool[:, 0], v_cache=v_cache, block_table=table)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_demanding_case(seed: int) -> None:
    assert largest_error(demanding_case(seed), scale=-0.2, seed=seed) < TOLERANCE


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_error_shows(name: str) -> None:
    """As a deadlock, a race, an address, NaN or another number, by one of a few schedules."""
    for seed in range(4):
        try:
            error = largest_error(demanding_case(seed), scale=-0.2, seed=seed, changes=(MUTATIONS[name],))
        except KernelError:
            return
        if not error < TOLERANCE:
            return
    pytest.fail("nothing showed")
