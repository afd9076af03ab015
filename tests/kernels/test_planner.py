"""The planner: pure arithmetic on the host, no device, the same answer every time."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import decode
from kernels.decode import split_kv, split_kv_tma
from kernels.decode.contract import DecodeProblem
from kernels.decode.cost_model import CostModel, Gpu, Work, cost_model
from kernels.decode.merge import partial_numel
from kernels.decode.planner import (
    TileShape,
    head_rows,
    head_tiles,
    max_partials,
    plan_splits,
    planned_us,
    work_of,
)
from kernels.tuned_tables import DEFAULT_GPU

CPU = torch.device("cpu")


def problem(
    batch_size: int, context: int, heads: tuple[int, int] = (64, 8), head_dim: int = 128
) -> DecodeProblem:
    return DecodeProblem(batch_size, *heads, head_dim, 16, context, torch.bfloat16, CPU)


problems = st.builds(
    problem,
    st.integers(1, 300),
    st.integers(0, 200_000),
    st.sampled_from([(64, 8), (32, 8), (14, 2), (9, 3), (64, 1), (100, 1)]),
    st.sampled_from([64, 80, 128, 256]),
)


def splits(p: DecodeProblem, sm_count: int = 132) -> int:
    return plan_splits(p, split_kv.shape_of(p), sm_count=sm_count)


def test_small_batches_fill_the_gpu_and_large_ones_are_not_split() -> None:
    for context in (4096, 32768, 131072):
        assert splits(problem(1, context)) * 8 >= 132
    assert splits(problem(256, 1024)) == 1
    assert splits(problem(1, 1)) == 1
    assert splits(problem(1, 0)) == 1


def test_ragged_batches_are_split_finer() -> None:
    """64 rows up to 32,768 tokens, about 7,300 on average: one split took 1,110 us on an H200, sixteen took 495."""
    ragged = dataclasses.replace(problem(64, 30_000), mean_context_len=7300)
    assert splits(problem(64, 30_000)) <= 2
    assert splits(ragged) >= 8


def test_a_last_turn_of_few_programs_is_avoided() -> None:
    """Eight rows more than the GPU holds at once would leave it all but idle for the length of a whole context."""
    shape = split_kv.shape_of(problem(1, 8192))
    slots = 132 * shape.programs_per_sm(problem(1, 8192))
    rows = slots // 8 + 1
    p = problem(rows, 8192)
    gpu, work = Gpu(132, slots), work_of(p, shape.tile)
    model = cost_model("split_kv", shape.tile, DEFAULT_GPU)
    assert model.time_us(work, 1, gpu) > 1.1 * model.time_us(work_of(problem(rows - 1, 8192), 32), 1, gpu)
    assert splits(p) > 1


def test_the_modelled_time_makes_no_step() -> None:
    """From one batch size or context to the next the plan may jump, the time that the model gives it hardly."""

    def modelled(batch_size: int, context: int) -> float:
        p = problem(batch_size, context)
        return planned_us(p, split_kv.shape_of(p), "split_kv")

    for context in (1024, 4096, 40_000):
        times = [modelled(batch_size, context) for batch_size in range(1, 260)]
        # A row more costs its share, and at most a tenth on top.
        for rows, (before, after) in enumerate(itertools.pairwise(times), start=1):
            assert after <= 1.125 * before * (rows + 1) / rows
    for batch_size in (1, 3, 16, 64):
        lengths = range(64, 40_000, 64)
        times = [modelled(batch_size, context) for context in lengths]
        for context, (before, after) in zip(lengths, itertools.pairwise(times)):
            assert after <= 1.125 * before * (context + 64) / context + 1


def test_whole_rows_in_a_stage_less_where_one_turn_then_holds_them_all() -> None:
    """1,024 programs: more than an SM holds with three tiles in flight, fewer than with two."""
    shapes = ((128, 8192, True), (256, 1024, True), (64, 4096, False), (16, 4352, False))
    for (rows, context, lighter), block_size in itertools.product(shapes, (16, 64)):
        p = dataclasses.replace(problem(rows, context), block_size=block_size)
        shape, num_splits = split_kv_tma.choose_splits(p)
        own = split_kv_tma.shape_of(p)
        assert (shape.num_stages == own.num_stages - 1) == lighter, p
        assert num_splits == 1 or not lighter
        plan = decode.get("split_kv_tma").plan(p)
        assert plan == {"num_splits": num_splits, "num_stages": shape.num_stages}


def test_ragged_rows_get_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts log-uniform from 128 to 32,768 took 365 us in shares on an H200, 406 in splits."""
    planned = decode.get("planned")
    for kernel in planned._variants.values():
        monkeypatch.setattr(kernel, "supports", lambda problem: None)
    ragged = dataclasses.replace(problem(64, 31_378), mean_context_len=5843)
    assert planned.plan(ragged)["variant"] == "stream_k_tma"
    assert planned.plan(problem(64, 5843))["variant"] == "split_kv_tma"


def test_more_multiprocessors_get_more_splits() -> None:
    assert splits(problem(1, 32768), 66) < splits(problem(1, 32768), 132)


@settings(max_examples=200)
@given(problems, st.sampled_from([20, 108, 132, 170]), st.integers(0, 200_000))
def test_plan_is_valid_and_bounded(p: DecodeProblem, sm_count: int, mean: int) -> None:
    p = dataclasses.replace(p, mean_context_len=min(mean, p.max_context_len))
    shape = split_kv.shape_of(p)
    found = splits(p, sm_count)
    assert found == splits(p, sm_count)
    assert 1 <= found <= max(1, -(-p.max_context_len // shape.tile))
    assert p.batch_size * found <= max_partials(p, shape, sm_count)


@settings(max_examples=100)
@given(problems, st.integers(1, 300), st.integers(0, 200_000), st.sampled_from(["split_kv", "planned"]))
def test_workspace_serves_every_smaller_problem(
    p: DecodeProblem, batch_size: int, context: int, name: str
) -> None:
    kernel = decode.get(name)
    workspace = kernel.workspace(p, torch.device("meta"))
    smaller = dataclasses.replace(
        p, batch_size=min(batch_size, p.batch_size), max_context_len=min(context, p.max_context_len)
    )
    num_splits = kernel.plan(smaller)["num_splits"]
    assert workspace is not None
    assert workspace.numel() >= partial_numel(smaller.batch_size, p.num_q_heads, num_splits, p.head_dim)


works = st.builds(
    Work,
    programs=st.integers(1, 3000),
    unit=st.sampled_from([16, 32, 64]),
    max_keys=st.integers(1, 200_000),
    mean_keys=st.integers(0, 1000),
    key_bytes=st.just(512),
    result_bytes=st.just(4128),
)


@given(works, st.integers(1, 200), st.sampled_from(["split_kv", "split_kv_tma"]))
@settings(max_examples=200)
def test_no_number_that_was_thought_of_would_have_ended_sooner(work: Work, most: int, kernel: str) -> None:
    model, gpu = cost_model(kernel, 32, DEFAULT_GPU), Gpu(132, 900)
    chosen = model.best_num_splits(work, most, gpu)
    time_us = model.time_us(work, chosen, gpu)
    assert 1 <= chosen <= most
    for other in (*range(1, min(most, 16) + 1), most):
        assert time_us <= model.time_us(work, other, gpu)
        assert other >= chosen or time_us < model.time_us(work, other, gpu)


def test_a_gpu_that_was_never_measured_gets_the_default_constants() -> None:
    assert cost_model("split_kv", 32, "NVIDIA B200") == cost_model("split_kv", 32, DEFAULT_GPU)
    # The nearest tile that was measured stands in for one that was not.
    assert cost_model("split_kv", 64, DEFAULT_GPU) == cost_model("split_kv", 32, DEFAULT_GPU)


def test_constants_are_positive() -> None:
    with pytest.raises(ValueError, match="key_us is -1"):
        CostModel(1, -1, 1, 1, 1, 1, 1)


def test_planned_names_the_variants_it_knows() -> None:
    q = torch.zeros(1, 4, 64)
    cache = torch.zeros(2, 16, 2, 64)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(
        ValueError, match="variant is 'fast', expected one of split_kv, split_kv_tma, stream_k_tma"
    ):
        decode.get("planned")(q, cache, cache, table, lens, variant="fast")


def test_query_tiles_cover_every_head() -> None:
    for group in (1, 3, 5, 7, 8, 16, 17, 64, 65, 100):
        p = problem(1, 100, (group, 1))
        assert head_rows(p) >= 16
        assert head_rows(p) & (head_rows(p) - 1) == 0
        assert head_rows(p) * head_tiles(p) >= group
        assert head_rows(p) * (head_tiles(p) - 1) < group


def test_plan_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="num_warps is 0"):
        TileShape(16, 0, 2)
    with pytest.raises(ValueError, match="num_stages is -1"):
        TileShape(16, 4, -1)


@pytest.mark.parametrize("tile", [8, 48])
def test_tile_is_a_power_of_two(tile: int) -> None:
    with pytest.raises(ValueError, match=f"tile is {tile}"):
        TileShape(tile, 4, 2)
