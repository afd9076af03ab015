"""The planner: pure arithmetic on the host, no device, the same answer every time."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import decode
from kernels.decode.contract import DecodeProblem
from kernels.decode.merge import partial_numel
from kernels.decode.planner import (
    SplitPlan,
    TileShape,
    choose_num_splits,
    head_rows,
    head_tiles,
    max_partials,
    plan_splits,
)

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


def test_small_batches_fill_the_gpu_and_large_ones_are_not_split() -> None:
    for context in (4096, 32768, 131072):
        assert plan_splits(problem(1, context), 132).num_splits * 8 >= 132
    assert plan_splits(problem(256, 1024), 132).num_splits == 1
    assert plan_splits(problem(1, 1), 132).num_splits == 1
    assert plan_splits(problem(1, 0), 132).num_splits == 1


def test_the_modelled_time_makes_no_step() -> None:
    """From one batch size or context to the next the plan may jump, the time that the model gives it hardly."""

    def tile_rounds(batch_size: int, context: int) -> float:
        plan = plan_splits(problem(batch_size, context), 132)
        programs = 8 * batch_size
        slots = 132 * plan.shape.programs_per_sm(problem(batch_size, context))
        tiles = -(-context // plan.shape.tile)
        rounds = max(1.0, programs * plan.num_splits / slots)
        return max(tiles * programs / (132 * 3), rounds * (-(-tiles // plan.num_splits) + 2))

    for context in (1024, 4096, 40_000):
        times = [tile_rounds(batch_size, context) for batch_size in range(1, 260)]
        # A row more costs its share, and at most one tile or a tenth on top.
        for rows, (before, after) in enumerate(itertools.pairwise(times), start=1):
            assert after <= 1.1 * before * (rows + 1) / rows + 1
    for batch_size in (1, 3, 16, 64):
        times = [tile_rounds(batch_size, context) for context in range(64, 40_000, 64)]
        assert all(after - before <= 1.5 for before, after in itertools.pairwise(times))


def test_more_multiprocessors_get_more_splits() -> None:
    assert plan_splits(problem(1, 32768), 66).num_splits < plan_splits(problem(1, 32768), 132).num_splits


@settings(max_examples=200)
@given(problems, st.sampled_from([20, 108, 132, 170]))
def test_plan_is_valid_and_bounded(p: DecodeProblem, sm_count: int) -> None:
    plan = plan_splits(p, sm_count)
    assert plan == plan_splits(p, sm_count)
    assert 1 <= plan.num_splits <= max(1, -(-p.max_context_len // plan.shape.tile))
    assert p.batch_size * plan.num_splits <= max_partials(p, sm_count)


@settings(max_examples=100)
@given(problems, st.integers(1, 300), st.integers(0, 200_000))
def test_workspace_serves_every_smaller_problem(p: DecodeProblem, batch_size: int, context: int) -> None:
    kernel = decode.get("split_kv")
    workspace = kernel.workspace(p, torch.device("meta"))
    smaller = dataclasses.replace(
        p, batch_size=min(batch_size, p.batch_size), max_context_len=min(context, p.max_context_len)
    )
    splits = kernel.plan(smaller)["num_splits"]
    assert workspace is not None
    assert workspace.numel() >= partial_numel(smaller.batch_size, p.num_q_heads, splits, p.head_dim)


@given(st.integers(0, 4000), st.integers(1, 2000), st.integers(1, 600), st.integers(1, 600))
@settings(max_examples=200)
def test_no_choice_would_have_ended_sooner(
    num_tiles: int, programs: int, slots: int, saturating: int
) -> None:
    """The chosen number against every other, by the model that choose_num_splits documents."""
    chosen = choose_num_splits(num_tiles, programs, slots, saturating)

    def duration(splits: int) -> float:
        memory = num_tiles * programs / min(saturating, slots)
        rounds = max(1.0, programs * splits / slots)
        return max(memory, rounds * (-(-num_tiles // splits) + 2.0))

    most = max(1, min(num_tiles, -(-slots // programs)))
    assert 1 <= chosen <= most
    assert all(duration(chosen) <= duration(other) for other in range(1, most + 1))
    assert all(duration(chosen) < duration(fewer) for fewer in range(1, chosen))


def test_query_tiles_cover_every_head() -> None:
    for group in (1, 3, 5, 7, 8, 16, 17, 64, 65, 100):
        p = problem(1, 100, (group, 1))
        assert head_rows(p) >= 16
        assert head_rows(p) & (head_rows(p) - 1) == 0
        assert head_rows(p) * head_tiles(p) >= group
        assert head_rows(p) * (head_tiles(p) - 1) < group


def test_plan_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="num_splits is 0"):
        SplitPlan(0, TileShape(16, 4, 2))
    with pytest.raises(ValueError, match="num_warps is 0"):
        TileShape(16, 0, 2)
    with pytest.raises(ValueError, match="num_stages is -1"):
        TileShape(16, 4, -1)


@pytest.mark.parametrize("tile", [8, 48])
def test_tile_is_a_power_of_two(tile: int) -> None:
    with pytest.raises(ValueError, match=f"tile is {tile}"):
        TileShape(tile, 4, 2)
