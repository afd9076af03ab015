"""The prefill kernel of specialised warps: exact on numpy, whichever partition comes first.

No interpreter runs the kernel, so it runs on tests/kernels/gluon_on_numpy.py. Errors put into its source must show
there: a stand-in that forgave them would prove nothing.
"""

from __future__ import annotations

import dataclasses
import random
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.prefill import tile_scheduler, warp_roles, warp_specialized
from tests.kernels.gluon_on_numpy import execute
from tests.kernels.gluon_scheduler import KernelError
from tests.kernels.prefill_case import PrefillCase, make_case

TOLERANCE = 1e-13
PROGRAMS = (1, 2, 3, 132)  # one has all items, some have many, and each one at most
case_in_fp64 = partial(make_case, dtype=torch.float64, device="cpu")


def in_fp64(*, programs: int = 2, **options: Any) -> Any:
    """The module on numpy, where the kernel takes fp64 and there are `programs` multiprocessors."""
    module: Any = execute(tile_scheduler, warp_roles, warp_specialized, **options)
    module.DTYPES = (torch.float64,)
    module.device_sm_count = lambda device: programs
    return module


def largest_error(
    case: PrefillCase, *, expected: Tensor | None = None, scale: float | None = None, **options: Any
) -> float:
    """Of the kernel on numpy, with what it must not write; NaN if any is."""
    return error_of(in_fp64(**options), case, expected, scale)


def error_of(
    module: Any, case: PrefillCase, expected: Tensor | None = None, scale: float | None = None
) -> float:
    out = case.untouched_out()
    returned = module.WarpSpecializedPrefill()(*case.args, scale=scale, out=out)
    assert returned is out
    assert len(module._prefill_kernel.grids) == 1
    expected = case.expected(scale) if expected is None else expected
    return (out - expected).abs().max().item()


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


@pytest.mark.parametrize(("seed", "programs"), list(enumerate(PROGRAMS)))
@pytest.mark.parametrize("name", CASES)
def test_exact_whoever_comes_first(name: str, seed: int, programs: int) -> None:
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
    assert largest_error(case, seed=seed, programs=programs) < TOLERANCE


@pytest.mark.parametrize("seed", range(15))
def test_exact_for_any_shape(seed: int) -> None:
    """Also in more stages, with queries loaded plainly, and with offsets of 64 bits."""
    rng = random.Random(seed)
    group, num_kv_heads = rng.choice([1, 2, 3, 4, 5, 7, 8, 32, 100, 128]), rng.choice([1, 2, 3])
    most = 8 if group > 16 else 40 if group > 4 else 150
    chunks = [rng.choice([0, 1, 2, rng.randrange(most)]) for _ in range(rng.choice([0, 1, 2, 4]))]
    chunks.insert(rng.randrange(len(chunks) + 1), 64 // group + 1)  # long enough not to go to `triton`
    case = case_in_fp64(
        chunks,
        [chunk + rng.choice([0, 0, 1, 127, 128, rng.randrange(400)]) for chunk in chunks],
        num_q_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice([64, 128]),
        block_size=rng.choice([8, 16, 24, 32, 64, 128, 256]),
        seed=seed,
    )
    module = in_fp64(seed=seed, programs=rng.choice([1, 1, *PROGRAMS]))
    module.NUM_STAGES = rng.choice([2, 2, 3, 4])
    module._is_aligned, module._is_far = (lambda q: seed % 2 == 0), (lambda tensor: seed % 3 == 0)
    assert error_of(module, case) < TOLERANCE


@pytest.mark.parametrize(("seed", "programs"), list(enumerate(PROGRAMS)))
def test_max_query_len_above_every_chunk(seed: int, programs: int) -> None:
    """As a CUDA graph has it: fewer items than there might be, and programs without any."""
    case = case_in_fp64([5, 33, 0, 64], [300, 33, 7, 127], seed=seed)
    case = dataclasses.replace(case, max_query_len=len(case.q))
    assert largest_error(case, seed=seed, programs=programs) < TOLERANCE


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


@pytest.mark.parametrize("programs", PROGRAMS)
def test_queries_that_are_not_aligned(programs: int) -> None:
    """cp.async could not copy those."""
    case = case_in_fp64([40, 3, 70], [300, 20, 70], seed=programs)
    q = torch.full((*case.q.shape[:2], 64 + 8), float("nan"), dtype=torch.float64)[..., :64].copy_(case.q)
    assert not warp_specialized._is_aligned(q)
    assert largest_error(dataclasses.replace(case, q=q), seed=0, programs=programs) < TOLERANCE


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


KEYS_THEN_TURN = "_wait_full(k_full, count, STAGES)\n            _take_turn"
TAKE_EMPTY = "mbarrier.wait(empty.index(stage), ((done + tile) // STAGES + 1) & 1)"
TELL_CLEAN = "fence_async_shared()\n            _meet()\n            mbarrier.arrive(clean.index(stage_last))"
AWAIT_SCORES = "s = warpgroup_mma_wait(num_outstanding=1, deps=(s_next,))"
AWAIT_OUTPUT = "acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next, p))"
FREE_KEYS = "mbarrier.arrive(k_empty.index(stage))"
FREE_FIRST_KEYS = "mbarrier.arrive(k_empty.index(stage), pred=is_next)"
FREE_VALUES = "mbarrier.arrive(v_empty.index(stage_before))"
# Within an item, and at its end.
SCORES_WITHIN, FIRST_SCORES = (
    f"{AWAIT_SCORES}\n            {FREE_KEYS}",
    f"{AWAIT_SCORES}\n        {FREE_FIRST_KEYS}",
)
OUTPUT_WITHIN, LAST_OUTPUT = (f"{AWAIT_OUTPUT}\n{indent}{FREE_VALUES}" for indent in (" " * 12, " " * 8))
WITHIN, LAST = "\n            acc = acc * ", "\n        # Rows as they lie"
FENCED_QUERIES = "    fence_async_shared()\n    _meet()\n\n\n"
FIRST_KEYS = "        if is_next:\n            _wait_full(k_full, count, STAGES)"
NEXT_POSITIONS = "_positions(next_position, WHO, GROUP, BLOCK_N, mma_s)"
THIS_POSITIONS = NEXT_POSITIONS.replace("next_", "")
NEXT_WEIGHTS = "_weigh(s, no_max, no_sum, scale_log2, dtype, operand)\n        row_sum"
NEXT_ITEM = "next_item(\n            number, row, first, turn, step, locs_ptr, batch, TOKENS, KV_HEADS\n        )\n\n\n"
THIS_WAS = "kv_head, token, num_tokens = next_head, next_token, next_tokens"
ROWS = "WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, plain))\n    "
ITEMS = "items = (stop - start + TOKENS - 1) // TOKENS * KV_HEADS\n    "
MUTATIONS = {
    # the copying warps
    "copies over a stage in use": (TAKE_EMPTY, TAKE_EMPTY.replace("STAGES + 1", "STAGES")),
    "waits for no empty stage": (TAKE_EMPTY, "pass"),
    "begins phases anew with an item": (TAKE_EMPTY, TAKE_EMPTY.replace("(done + tile)", "tile")),
    "begins stages anew with an item": ("stage = (done + tile) % STAGES", "stage = tile % STAGES"),
    "counts no tiles": ("done += num_tiles", "done += 0"),
    "expects half of the bytes": ("BLOCK_N * HEAD_DIM * 2", "BLOCK_N * HEAD_DIM"),
    "copies the first columns twice": ("column + half * 64]", "column]"),
    "reads the table past the end": ("gl.minimum(tile * BLOCK_N + i * BOX, last_box)", "tile * BLOCK_N + i * BOX"),
    "stops a box too early": ("(end - 1) // BOX * BOX", "(end - 2) // BOX * BOX"),
    "zeroes before the values are there": ("_wait_full(full, done - 1, STAGES)", "pass"),
    "zeroes from the next eight slots on": ("(end - last * BLOCK_N) // 8,", "(end - last * BLOCK_N) // 8 + 1,"),
    "zeroes a written slot": ("+ slots < end", "+ slots < end - 1"),
    "zeroes another stage": ("stage_last = (done - 1) % STAGES", "stage_last = done % STAGES"),
    "zeroes without a fence": (TELL_CLEAN, TELL_CLEAN.replace("fence_async_shared()", "pass")),
    "fences after it has told": (TELL_CLEAN, "_meet(); mbarrier.arrive(clean.index(stage_last)); fence_async_shared()"),
    "tells before it meets": (TELL_CLEAN, "fence_async_shared(); mbarrier.arrive(clean.index(stage_last)); _meet()"),
    "never tells": ("mbarrier.arrive(clean.index(stage_last))", "pass"),
    "tells of last tiles only": ("mbarrier.arrive(clean.index(stage))", "pass"),
    "takes the first head's": ("column = kv_head * stride_head", "column = 0"),
    "takes values at the keys' heads": ("v_block_rows, stride_v_head", "v_block_rows, stride_k_head"),
    "takes values at the keys' blocks": ("v_block_rows, stride_v_head", "k_block_rows, stride_v_head"),
    "takes every row's blocks from the first": ("row.to(gl.int64) * stride_table", "row.to(gl.int64) * 0"),
    "deals copies another way": (NEXT_ITEM, NEXT_ITEM.replace("number,", "turn * step - 1 - number - step // 2,")),
    # who waits for whom
    "awaits the wrong phase": ("(tile // STAGES) & 1)", "(tile // STAGES + 1) & 1)"),
    "awaits no first keys": ("_wait_full(k_full, 0, STAGES)", "pass"),
    "awaits no keys": (KEYS_THEN_TURN, "_take_turn"),
    "awaits no first keys of the next item": (FIRST_KEYS, "        pass"),
    "awaits keys after the last item": (FIRST_KEYS, "        _wait_full(k_full, count, STAGES)"),
    "awaits no values": ("_wait_full(v_full, count - 1, STAGES)", "pass"),
    "awaits no zeroes": ("_wait_full(v_clean, count - 1, STAGES)", "pass"),
    "awaits values, not zeroes": ("_wait_full(v_clean, count - 1, STAGES)", "_wait_full(v_full, count - 1, STAGES)"),
    "never frees the first keys": ("mbarrier.arrive(k_empty.index(0))", "pass"),
    "never frees keys": (FREE_KEYS, "pass"),
    "never frees first keys": (FREE_FIRST_KEYS, "pass"),
    "never frees values": (FREE_VALUES + WITHIN, "pass" + WITHIN),
    "never frees last values": (FREE_VALUES + LAST, "pass" + LAST),
    "frees other values": (FREE_VALUES + WITHIN, "mbarrier.arrive(v_empty.index(stage))" + WITHIN),
    "frees keys in use": (SCORES_WITHIN, f"{FREE_KEYS}; {AWAIT_SCORES}"),
    "frees first keys in use": (FIRST_SCORES, f"{FREE_FIRST_KEYS}; {AWAIT_SCORES}"),
    "frees values in use": (OUTPUT_WITHIN, f"{FREE_VALUES}; {AWAIT_OUTPUT}"),
    "frees last values in use": (LAST_OUTPUT, f"{FREE_VALUES}; {AWAIT_OUTPUT}"),
    "frees keys for both": ("mbarrier.init(k_empty.index(i), count=2)", "mbarrier.init(k_empty.index(i), count=1)"),
    "frees values for both": ("mbarrier.init(v_empty.index(i), count=2)", "mbarrier.init(v_empty.index(i), count=1)"),
    "nobody's turn is first": ("(turn + 1 - WHO) & 1", "turn & 1"),
    "keeps its turn": ("mbarrier.arrive(turns.index(1 - WHO))", "pass"),
    "weighs scores in flight": (SCORES_WITHIN, SCORES_WITHIN.replace("=1", "=2")),
    "weighs first scores in flight": (FIRST_SCORES, FIRST_SCORES.replace("=1", "=2")),
    "rescales an output in flight": (OUTPUT_WITHIN, OUTPUT_WITHIN.replace("=0", "=1")),
    "stores an output in flight": (LAST_OUTPUT, LAST_OUTPUT.replace("=0", "=1")),
    "multiplies unfenced queries": (FENCED_QUERIES, "    _meet()\n\n\n"),
    "multiplies queries too early": (FENCED_QUERIES, "    fence_async_shared()\n\n\n"),
    "awaits no queries": ("async_copy.wait_group(0)", "pass"),
    "awaits queries of no group": ("async_copy.commit_group()", "pass"),
    "asks for queries too early": ("_meet()\n        _ask_queries(next_q", "_ask_queries(next_q"),
    "asks for queries where others are": ("next_q = q_smem.index(turn & 1)", "next_q = q_smem.index((turn - 1) & 1)"),
    "stores over the next queries": ("this_q.store((acc", "next_q.store((acc"),
    "loads rows too early": ("to(dtype))\n        _meet()\n", "to(dtype))\n"),
    # what is computed
    "multiplies this item's queries": ("next_q, k_tiles", "this_q, k_tiles"),
    "multiplies other values": ("STAGES)\n            acc_next = warpgroup_mma(p, v_tiles.index(stage_before)",
                                "STAGES)\n            acc_next = warpgroup_mma(p, v_tiles.index(stage)"),
    "multiplies other last values": ("STAGES)\n        acc_next = warpgroup_mma(p, v_tiles.index(stage_before)",
                                     "STAGES)\n        acc_next = warpgroup_mma(p, v_tiles.index(stage)"),
    "does not rescale the output": ("acc = acc * gl.expand_dims", "acc = acc + 0 * gl.expand_dims"),
    "does not rescale the sum": ("row_sum * rescale + gl.sum", "row_sum + gl.sum"),
    "divides by the next sum": ("(acc * factor)", "(acc / gl.expand_dims(row_sum, 1))"),
    "keeps the output": ("acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=mma_o)\n        p = ", "p = "),
    "keeps the maximum": (NEXT_WEIGHTS, NEXT_WEIGHTS.replace("no_max", "row_max")),
    "keeps the sum": (NEXT_WEIGHTS, NEXT_WEIGHTS.replace("no_sum", "row_sum")),
    "keeps the head": (THIS_WAS, THIS_WAS.replace("next_head", "kv_head")),
    "keeps the first token": (THIS_WAS, THIS_WAS.replace("next_token,", "token,")),
    "keeps the number of tokens": (THIS_WAS, THIS_WAS.replace("next_tokens", "num_tokens")),
    "keeps the position": ("position, num_tiles = next_position", "position, num_tiles = position"),
    "keeps the number of tiles": ("next_position, next_tiles", "next_position, num_tiles"),
    "counts no last tiles": ("next_tiles\n        count += 1", "next_tiles"),
    "hides a query's own key": ("<= gl.expand_dims(positions, 1)", "< gl.expand_dims(positions, 1)"),
    "shows the next key": ("<= gl.expand_dims(positions, 1)", "<= gl.expand_dims(positions, 1) + 1"),
    "masks too late": ("WHO * 64 // GROUP + 1) // BLOCK_N", "WHO * 64 // GROUP + 2) // BLOCK_N"),
    "masks first scores as this item's": (NEXT_POSITIONS, f"({THIS_POSITIONS}[0], {NEXT_POSITIONS}[1])"),
    "masks first scores where this item's": (NEXT_POSITIONS, f"({NEXT_POSITIONS}[0], {THIS_POSITIONS}[1])"),
    "walks a tile too few": ("(end + BLOCK_N - 1) // BLOCK_N", "(end + BLOCK_N - 2) // BLOCK_N"),
    "attends to the first half twice": (f"{ROWS}tokens", f"{ROWS}tokens".replace("WHO * 64 + ", "")),
    "has as many queries in each half": (f"{ROWS}return", f"{ROWS}return".replace("WHO * 64 + ", "")),
    "masks the second half as the first": ("position + (WHO * 64 + ", "position + ("),
    "writes past the chunk": ("gl.minimum(chunk_len - tile * TOKENS, TOKENS)", "TOKENS"),
    # the items
    "skips items": ("first += items", "first += items + 1"),
    "ends rows an item late": ("number >= first + items", "number > first + items"),
    "rounds the first row's tiles down": (f"    {ITEMS}while", f"    {ITEMS}while".replace(" + TOKENS - 1", "")),
    "rounds other rows' tiles down": (f"    {ITEMS}return", f"    {ITEMS}return".replace(" + TOKENS - 1", "")),
    "begins with another tile": ("// TOKENS - 1 - level", "// TOKENS - level"),
    "deals back from another number": ("turn * step - 1 - number", "turn * step - number"),
    "deals to half of the programs": ("2 * programs,", "programs,"),
    "attends to nothing": ("if row >= batch:", "if row > batch:"),
    # the host
    "no last block": ("(num_blocks - 1) * (block // slot) + block_size", "(num_blocks - 1) * (block // slot)"),
    "no last head": ("head * (num_kv_heads - 1) + head_dim]", "head * (num_kv_heads - 1)]"),
}  # fmt: skip


@cache
def demanding_case(seed: int) -> tuple[PrefillCase, Tensor]:
    """And its answer. Items of one tile of keys to six, edges of tiles, rows without queries, caches unlike each other,
    every block in use."""
    case = case_in_fp64(
        [5, 65, 0, 1, 1, 1, 40, 0],
        [700, 530, 9, 127, 128, 129, 40, 0],
        num_q_heads=8,
        head_dim=128,
        seed=seed,
    )
    used = case.block_table[case.block_table < len(case.k_cache)]
    table = case.block_table.clone()
    table[table < len(case.k_cache)] = torch.arange(len(used), dtype=torch.int32)
    pool = torch.stack([case.k_cache[used], case.v_cache[used]], dim=1)
    v_cache = slots_apart(case.v_cache[used])
    case = dataclasses.replace(case, k_cache=pool[:, 0], v_cache=v_cache, block_table=table)
    return case, case.expected(-0.2)


def demanding_error(seed: int, programs: int, *changes: tuple[str, str]) -> float:
    case, expected = demanding_case(seed)
    return largest_error(case, expected=expected, scale=-0.2, seed=seed, programs=programs, changes=changes)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("programs", PROGRAMS)
def test_a_demanding_case(seed: int, programs: int) -> None:
    assert demanding_error(seed, programs) < TOLERANCE


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_error_shows(name: str) -> None:
    """As a deadlock, a race, an address, NaN or another number, by one of a few schedules."""
    for seed, programs in enumerate((3, 1, 2, 132) * 2):
        try:
            error = demanding_error(seed % 3, programs, MUTATIONS[name])
        except KernelError:
            return
        if not error < TOLERANCE:
            return
    pytest.fail("nothing showed")


def test_a_mutation_of_what_is_not_there_is_refused() -> None:
    for old in ("no such text", "mbarrier.init("):
        with pytest.raises(AssertionError, match=old.replace("(", r"\(")):
            in_fp64(changes=[(old, "pass")])
