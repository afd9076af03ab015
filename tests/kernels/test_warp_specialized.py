"""The prefill kernel of specialised warps: exact on numpy whoever comes first, and what its host part decides.

No interpreter runs the kernel, so it runs on tests/kernels/gluon_on_numpy.py. Errors put into its source must show
there: a stand-in that forgave them would prove nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import prefill
from kernels.prefill import triton_flash, warp_specialized
from kernels.prefill.triton_flash import LOG2_E, PrefillTile, TritonPrefill, choose_tile, positive_scale
from kernels.triton_support import gluon_unavailable
from tests.kernels.gluon_on_numpy import KernelError, execute
from tests.kernels.prefill_case import PrefillCase, make_case

SOURCE = Path(warp_specialized.__file__)
TOLERANCE = 1e-13
SEEDS = range(3)
HOPPER = torch.device("cuda", 0)
kernel = prefill.get("warp_specialized")
case_in_fp64 = partial(make_case, dtype=torch.float64, device="cpu")


def largest_error(
    case: PrefillCase, *, seed: int, scale: float | None = None, changes: tuple[tuple[str, str], ...] = ()
) -> float:
    """Of the kernel on numpy, with what it must not write; NaN if any is."""
    module = execute(SOURCE, seed=seed, changes=changes)
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
    execute(SOURCE).WarpSpecializedPrefill()(*case.args, out=out)
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
    "a scale below 0 without its queries": ("q, scale = positive_scale(", "_, scale = positive_scale("),
    "a grid rounded down": ("triton.cdiv(max_query_len, BLOCK_M // group)", "max_query_len // (BLOCK_M // group)"),
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


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host part, as if Triton compiled here and every device were an H200."""
    for module in (triton_flash, warp_specialized):
        monkeypatch.setattr(module, "INTERPRETING", False)
    monkeypatch.setattr(triton_flash, "triton_unavailable", lambda device: None)
    monkeypatch.setattr(warp_specialized, "gluon_unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


PROBLEM = prefill.PrefillProblem(
    batch_size=4,
    num_q_heads=16,
    num_kv_heads=4,
    head_dim=128,
    block_size=16,
    max_query_len=1000,
    max_context_len=2000,
    dtype=torch.bfloat16,
    device=HOPPER,
)


def test_the_cpu_has_no_such_kernel() -> None:
    assert "warp_specialized" in prefill.names()
    assert "warp_specialized" not in prefill.available("cpu")
    assert kernel.unavailable(torch.device("cpu")) is not None


@pytest.mark.usefixtures("on_hopper")
def test_unavailable_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel.unavailable(HOPPER) is None
    for module, name, value, reason in (
        (
            triton_flash,
            "triton_unavailable",
            lambda device: "triton is not installed",
            "triton is not installed",
        ),
        (warp_specialized, "gluon_unavailable", lambda: "no Gluon here", "no Gluon here"),
        (warp_specialized, "INTERPRETING", True, "Triton's interpreter does not know Gluon"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(module, name, value)
            assert kernel.unavailable(HOPPER) == reason
            assert kernel.supports(PROBLEM) == reason


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_unavailable_on_other_gpus(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    has = f"{capability[0]}.{capability[1]}"
    assert kernel.unavailable(HOPPER) == f"it needs compute capability 9.0, cuda:0 has {has}"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float16, "head_dim": 64, "block_size": 8}, None),
        ({"num_q_heads": 128, "num_kv_heads": 1, "block_size": 24}, None),
        ({"dtype": torch.float32}, "dtype torch.float32 is not one of float16, bfloat16"),
        ({"head_dim": 96}, "head_dim 96 is not one of 64, 128"),
        ({"head_dim": 256}, "head_dim 256 is not one of 64, 128"),
        ({"block_size": 12}, "block_size 12 is not a multiple of 8"),
        ({"num_q_heads": 160, "num_kv_heads": 1}, "160 query heads per KV head are above 128"),
    ],
    ids=str,
)
def test_supports_names_the_reason(changes: dict[str, Any], reason: str | None) -> None:
    assert kernel.supports(dataclasses.replace(PROBLEM, **changes)) == reason


@pytest.mark.usefixtures("on_hopper")
def test_plans_of_short_chunks_are_tritons() -> None:
    for length in (0, 1, 4, 16):  # 64 rows at most, by four heads a group
        tile = choose_tile(128, torch.bfloat16, 4, length, (9, 0))
        assert kernel.plan(dataclasses.replace(PROBLEM, max_query_len=length)) == {"tile": tile}
    for length in (17, 1000):
        assert kernel.plan(dataclasses.replace(PROBLEM, max_query_len=length)) == {}


def cache_of(strides: tuple[int, ...], offset: int = 0, num_blocks: int = 3) -> Tensor:
    """[num_blocks, 16, 2, 64] in fp16."""
    return torch.zeros(20_000, dtype=torch.float16).as_strided((num_blocks, 16, 2, 64), strides, offset)


TAKEN = {
    "contiguous": cache_of((2048, 128, 64, 1)),
    "of one layer": torch.zeros(2, 2, 3, 16, 2, 64, dtype=torch.float16).unbind(0)[1].unbind(0)[1],
    "keys and values by blocks": cache_of((4096, 128, 64, 1), 2048),
    "keys and values by slots": cache_of((4096, 256, 64, 1), 128),
    "heads apart": cache_of((4096, 256, 128, 1), 64),
}
REFUSED = {
    "dims apart": cache_of((4096, 256, 128, 2)),
    "heads before slots": cache_of((2048, 64, 1024, 1)),
    "slots before blocks": cache_of((128, 384, 64, 1)),
    "slots at 264 bytes": cache_of((2112, 132, 64, 1)),
    "heads at 136 bytes": cache_of((2176, 136, 68, 1)),
    "half a slot between blocks": cache_of((2112, 128, 64, 1)),
    "8 bytes off": cache_of((2048, 128, 64, 1), 4),
}


@pytest.mark.parametrize("name", [*TAKEN, *REFUSED])
def test_which_caches_tma_sees_as_rows(name: str) -> None:
    cache = TAKEN[name] if name in TAKEN else REFUSED[name]
    assert warp_specialized._has_rows(cache) == (name in TAKEN)


@pytest.mark.parametrize("name", TAKEN)
def test_descriptors(name: str) -> None:
    """A token's keys are where the kernel looks for them, and no matrix ends outside its tensor."""
    if (reason := gluon_unavailable()) is not None:
        pytest.skip(reason)
    cache = TAKEN[name]
    block, slot, head, _ = cache.stride()
    descriptor = warp_specialized._descriptor(cache, 16)
    assert descriptor.block_shape == [16, 64]
    matrix = cache.as_strided(descriptor.shape, descriptor.strides)
    for number, token, kv_head in ((0, 0, 1), (1, 7, 0), (2, 15, 1)):
        first = matrix[number * (block // slot) + token, kv_head * head]
        assert first.data_ptr() == cache[number, token, kv_head, 0].data_ptr()
    assert matrix[-1, -1].data_ptr() == cache[-1, -1, -1, -1].data_ptr()


class Launches:
    """In place of the kernel."""

    def __init__(self) -> None:
        self.made: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constexprs: self.made.append((grid, arguments, constexprs))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What goes to `triton`, and what is launched; both leave `out` as it is."""
    found = SimpleNamespace(triton=[], launches=Launches())

    def record(self: TritonPrefill, *arguments: Any, **options: Any) -> Tensor:
        found.triton.append((arguments, options))
        return arguments[8]

    monkeypatch.setattr(TritonPrefill, "__call__", record)
    monkeypatch.setattr(warp_specialized, "_prefill_kernel", found.launches)
    monkeypatch.setattr(warp_specialized, "_descriptor", lambda cache, box: ("descriptor", cache, box))
    return found


def fp16_case(query_len: int) -> PrefillCase:
    return make_case([query_len], [40], num_q_heads=8, dtype=torch.float16, device="cpu")


def test_long_chunks_are_launched(calls: SimpleNamespace) -> None:
    case, out = fp16_case(33), torch.empty(36, 8, 64, dtype=torch.float16)
    assert kernel(*case.args, scale=0.5, out=out) is out
    ((grid, arguments, constexprs),) = calls.launches.made
    assert not calls.triton
    assert grid == (2, 2, 1)  # 32 tokens a tile, by four heads a group
    assert arguments[0] is case.q
    assert arguments[1:4] == (("descriptor", case.k_cache, 16), ("descriptor", case.v_cache, 16), out)
    assert arguments[7] == 0.5 * LOG2_E
    assert (constexprs["GROUP"], constexprs["BOX"], constexprs["BLOCK_SIZE"]) == (4, 16, 16)
    assert kernel(*case.args).shape == case.q.shape
    assert calls.launches.made[1][1][7] == 64**-0.5 * LOG2_E


@pytest.mark.parametrize(("block_size", "box"), [(8, 8), (24, 8), (48, 16), (128, 128), (256, 128)])
def test_boxes_lie_in_blocks_and_in_tiles(block_size: int, box: int, calls: SimpleNamespace) -> None:
    case = make_case([40], [300], num_q_heads=8, block_size=block_size, dtype=torch.float16, device="cpu")
    kernel(*case.args)
    ((_grid, arguments, constexprs),) = calls.launches.made
    assert [descriptor[2] for descriptor in arguments[1:3]] == [box, box]
    assert constexprs["BOX"] == box


@pytest.mark.parametrize("query_len", [1, 16, 17])
def test_short_chunks_go_to_triton(query_len: int, calls: SimpleNamespace) -> None:
    case, out = fp16_case(query_len), torch.empty(query_len + 3, 8, 64, dtype=torch.float16)
    workspace = torch.empty(1)
    assert kernel(*case.args, scale=0.5, out=out, workspace=workspace) is out
    if query_len * 4 > 64:
        assert not calls.triton
        assert len(calls.launches.made) == 1
    else:
        assert not calls.launches.made
        (((*tensors, scale, given_out, given_workspace, tile), options),) = calls.triton
        assert all(one is other for one, other in zip(tensors, case.args, strict=True))
        assert (scale, tile, options) == (0.5, None, {})
        assert given_out is out
        assert given_workspace is workspace


def test_tiles_and_options_go_to_triton(calls: SimpleNamespace) -> None:
    """The plan of short chunks holds for every batch, and whatever `triton` does not know it names."""
    case, tile = fp16_case(40), PrefillTile(64, 64, 4, 2)
    kernel(*case.args, tile=tile)
    kernel(*case.args, num_splits=2)
    assert not calls.launches.made
    assert calls.triton[0][0][10] is tile
    assert calls.triton[1][1] == {"num_splits": 2}


@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
@pytest.mark.parametrize("name", REFUSED)
def test_caches_without_rows_go_to_triton(name: str, which: str, calls: SimpleNamespace) -> None:
    case = dataclasses.replace(fp16_case(33), k_cache=TAKEN["contiguous"], v_cache=TAKEN["heads apart"])
    kernel(*case.args)
    assert not calls.triton
    case = dataclasses.replace(case, k_cache=case.k_cache if which == "v_cache" else REFUSED[name])
    case = dataclasses.replace(case, v_cache=case.v_cache if which == "k_cache" else REFUSED[name])
    kernel(*case.args)
    assert len(calls.launches.made) == 1
    assert calls.triton[0][0][:7] == case.args


def test_triton_answers_for_what_it_is_given() -> None:
    """Here by Triton's interpreter or on whatever GPU there is: a short chunk, and heads before slots."""
    short = make_case([9], [40], num_q_heads=8)
    case = make_case([20], [40], num_q_heads=8)
    heads_first = case.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    for one in (short, dataclasses.replace(case, k_cache=heads_first)):
        out = one.untouched_out()
        assert kernel(*one.args, out=out) is out
        torch.testing.assert_close(out.double(), one.expected(), atol=3e-6, rtol=3e-6)
    with pytest.raises(TypeError, match="num_splits"):
        kernel(*case.args, num_splits=2)


def test_empty_batches_launch_nothing(calls: SimpleNamespace) -> None:
    case = make_case([], [], num_q_heads=128, num_kv_heads=1, dtype=torch.float16, device="cpu")
    out = case.untouched_out()
    assert kernel(*dataclasses.replace(case, max_query_len=3).args, out=out) is out
    assert not calls.triton
    assert not calls.launches.made
    assert torch.equal(out, case.untouched_out())


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("block_table", torch.zeros(1, 5, dtype=torch.int64)),
        ("context_lens", torch.zeros(2, dtype=torch.int32)),
        ("query_start_loc", torch.zeros(1, dtype=torch.int32)),
        ("max_query_len", 1000),
    ],
)
def test_bad_arguments_are_named(argument: str, wrong: Any, calls: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=argument):
        kernel(*dataclasses.replace(fp16_case(33), **{argument: wrong}).args)
    with pytest.raises(ValueError, match="out must be like q"):
        kernel(*fp16_case(33).args, out=torch.empty(1))
    assert not calls.launches.made


def test_positive_scale() -> None:
    q = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    same, scale = positive_scale(q, 0.25)
    assert same is q
    assert scale == 0.25
    for given in (-0.25, -3.0, 0.0):
        changed, scale = positive_scale(q, given)
        assert scale > 0
        assert torch.equal(changed * scale, q * given)  # the same scores
