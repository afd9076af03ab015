"""The cascade: a prefix read once for all rows gives what each row's own reading gives."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import decode
from kernels.decode.contract import DecodeProblem
from kernels.decode.merge import partial_numel
from tests.kernels.decode_cases import Case, expected, make_case, worst_error

shared_prefix = decode.get("shared_prefix")


def shared_case(
    context_lens: list[int], prefix_len: int, heads: tuple[int, int] = (4, 2), **options: object
) -> Case:
    """A case whose rows have the blocks of the longest row up to prefix_len (or to their own end)."""
    case = make_case(context_lens, heads=heads, **options)
    longest = max(range(len(context_lens)), key=context_lens.__getitem__)
    block_size = case.k_cache.shape[1]
    for row, length in enumerate(context_lens):
        blocks = -(-min(prefix_len, length) // block_size)
        case.block_table[row, :blocks] = case.block_table[longest, :blocks].clone()
    return case


def run(case: Case, prefix_len: int, **options: object) -> None:
    problem = dataclasses.replace(case.problem, shared_prefix_len=prefix_len)
    workspace = shared_prefix.workspace(problem, case.q.device)
    assert workspace is not None
    workspace.fill_(float("nan"))
    plan = shared_prefix.plan(problem) | options
    shared_prefix(*case.inputs, out=case.out, workspace=workspace, **plan)
    assert worst_error(case.out, expected(case)) < 1e-5


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (20, 1)])
def test_shared_prefix(heads: tuple[int, int], block_size: int, device: torch.device) -> None:
    """Rows longer than the prefix, as long, shorter, and empty; the longest is not the first."""
    case = shared_case([128, 0, 200, 129, 40, 16], 128, heads, block_size=block_size, device=device)
    run(case, 128)


def test_prefix_that_is_not_whole_tiles(device: torch.device) -> None:
    """100 shared tokens are read together up to a whole tile, the rest with each row's own."""
    case = shared_case([150, 101, 100], 100, device=device)
    problem = dataclasses.replace(case.problem, shared_prefix_len=100)
    assert shared_prefix.plan(problem)["prefix_len"] == 96
    run(case, 100)


@pytest.mark.parametrize(("prefix_splits", "num_splits"), [(1, 1), (3, 1), (1, 4), (9, 2)])
def test_any_splits(prefix_splits: int, num_splits: int, device: torch.device) -> None:
    case = shared_case([64, 100, 0, 90], 64, device=device)
    run(case, 64, prefix_splits=prefix_splits, num_splits=num_splits)


def test_the_prefix_is_all_there_is(device: torch.device) -> None:
    run(shared_case([64, 64], 64, device=device), 64)


def test_more_queries_than_one_tile(device: torch.device) -> None:
    case = shared_case([33] * 9, 32, heads=(10, 1), head_dim=16, device=device)
    run(case, 32)


def test_only_the_longest_rows_blocks_are_read_for_the_prefix(device: torch.device) -> None:
    """Other rows' table entries for the prefix may be anything: proof that it is not read row by row."""
    case = shared_case([80, 100], 64, device=device)
    reference = expected(case)
    case.block_table[0, :4] = 10**9
    shared_prefix(*case.inputs, out=case.out, prefix_len=64, prefix_splits=2, num_splits=2)
    assert worst_error(case.out, reference) < 1e-5


def test_bad_prefix(device: torch.device) -> None:
    with pytest.raises(ValueError, match="prefix_len is 40, not a multiple of tile 64"):
        shared_prefix(*make_case([50], device=device).inputs, prefix_len=40, tile=64)
    with pytest.raises(ValueError, match="shared_prefix_len is 51, expected 0 to max_context_len 50"):
        dataclasses.replace(make_case([50]).problem, shared_prefix_len=51)


@settings(max_examples=150)
@given(
    st.integers(1, 300),
    st.integers(0, 100_000),
    st.floats(0, 1),
    st.sampled_from([(64, 8), (32, 8), (14, 2), (9, 3), (64, 1), (100, 1)]),
    st.integers(1, 300),
)
def test_workspace_serves_every_smaller_problem(
    batch_size: int, context: int, share: float, heads: tuple[int, int], smaller: int
) -> None:
    problem = DecodeProblem(batch_size, *heads, 128, 16, context, torch.bfloat16, torch.device("cpu"))
    workspace = shared_prefix.workspace(problem, torch.device("meta"))
    small = dataclasses.replace(
        problem,
        batch_size=min(batch_size, smaller),
        shared_prefix_len=int(share * context),
        mean_context_len=context // 2,
    )
    plan = shared_prefix.plan(small)
    splits = plan["num_splits"] + (plan["prefix_splits"] if plan["prefix_len"] else 0)
    assert workspace is not None
    assert workspace.numel() >= partial_numel(small.batch_size, heads[0], splits, 128)
