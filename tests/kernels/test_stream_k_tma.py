"""What is particular to stream_k_tma: shares of a line a KV head, the last tile of a context, what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels import decode
from kernels.decode.contract import DecodeProblem
from kernels.triton_support import INTERPRETING
from tests.kernels.decode_cases import expected, make_case, worst_error

kernel = decode.get("stream_k_tma")
DEVICE = torch.device("cpu" if INTERPRETING else "cuda")


@pytest.fixture(autouse=True)
def _runs_here() -> None:
    reason = kernel.unavailable(DEVICE)
    if reason is not None:
        pytest.skip(reason)


@settings(max_examples=8, deadline=None)
@given(
    context_lens=st.lists(st.integers(0, 100), min_size=1, max_size=6),
    num_programs=st.integers(1, 40),
    heads=st.sampled_from([(2, 2), (3, 1), (4, 2)]),
    blocks=st.sampled_from([(16, 16), (32, 16), (32, 32), (48, 16)]),
)
@example(context_lens=[0, 0, 0], num_programs=5, heads=(2, 2), blocks=(16, 16))
@example(context_lens=[16], num_programs=40, heads=(3, 1), blocks=(16, 16))  # one tile, 40 shares
@example(context_lens=[0, 1, 0, 100, 0], num_programs=7, heads=(4, 2), blocks=(32, 32))
@example(context_lens=[100] * 3, num_programs=42, heads=(4, 2), blocks=(16, 16))  # a share for every tile
@example(context_lens=[96, 33, 17], num_programs=6, heads=(4, 2), blocks=(48, 16))
def test_any_schedule(
    context_lens: list[int], num_programs: int, heads: tuple[int, int], blocks: tuple[int, int]
) -> None:
    block_size, tile = blocks
    case = make_case(context_lens, heads=heads, head_dim=16, block_size=block_size, device=DEVICE)
    workspace = torch.full((2 * 84 * 3 * 17,), float("nan"), device=DEVICE)
    kernel(*case.inputs, out=case.out, workspace=workspace, num_programs=num_programs, tile=tile)
    assert worst_error(case.out, expected(case)) < 1e-5


@pytest.mark.parametrize("num_programs", [1, 6, 14])
@pytest.mark.parametrize(("block_size", "tile"), [(16, 16), (64, 16), (64, 32), (64, 64)])
def test_every_last_key(block_size: int, tile: int, num_programs: int) -> None:
    """Contexts that end on, before and behind a tile's and a block's edge; what follows them in the block is NaN."""
    lens = [1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128]
    case = make_case(lens, heads=(2, 1), head_dim=16, block_size=block_size, strided=True, device=DEVICE)
    kernel(*case.inputs, out=case.out, num_programs=num_programs, tile=tile)
    assert worst_error(case.out, expected(case)) < 1e-5


def test_empty_rows_are_zeros_whatever_their_queries() -> None:
    """Padded rows of a captured graph hold what they held."""
    case = make_case([0, 40, 0, 0, 9], device=DEVICE)
    case.q[[0, 3]] = float("nan")
    case.q[2] = float("inf")
    kernel(*case.inputs, out=case.out, num_programs=6)
    assert not case.out[[0, 2, 3]].any()
    used = [1, 4]
    assert worst_error(case.out[used], expected(case)[used]) < 1e-5


def test_negative_scores_of_any_size() -> None:
    """No key that is masked outweighs one that is not."""
    case = make_case([5, 33], heads=(2, 2), head_dim=16, device=DEVICE)
    case.q.fill_(1e15)
    finite = case.k_cache.isfinite()
    case.k_cache[finite] = -case.k_cache[finite].abs() * 1e15
    kernel(*case.inputs, out=case.out, num_programs=4)
    assert worst_error(case.out, expected(case)) < 1e-5


def test_query_heads_in_several_tiles() -> None:
    case = make_case([90, 3, 0], heads=(70, 1), head_dim=16, device=DEVICE)
    kernel(*case.inputs, out=case.out, num_programs=9, tile=16)
    assert worst_error(case.out, expected(case)) < 1e-5


def test_agrees_with_stream_k() -> None:
    case = make_case([320, 65, 0, 7], device=DEVICE)
    other = decode.get("stream_k")(*case.inputs)
    torch.testing.assert_close(kernel(*case.inputs, num_programs=26), other, rtol=1e-5, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    contexts=st.tuples(st.integers(0, 140_000), st.integers(0, 140_000)),
    heads=st.sampled_from([(64, 8), (16, 8), (14, 2), (70, 1), (64, 64)]),
    head_dim=st.sampled_from([64, 128]),
    block_size=st.sampled_from([16, 64]),
)
def test_a_plan_fits_the_workspace_of_a_larger_problem(
    rows: tuple[int, int],
    contexts: tuple[int, int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
) -> None:
    larger = DecodeProblem(
        max(rows), *heads, head_dim, block_size, max(contexts), torch.bfloat16, torch.device("cpu")
    )
    smaller = replace(larger, batch_size=min(rows), max_context_len=min(contexts))
    scratch, needed = (kernel.workspace(problem, torch.device("meta")) for problem in (larger, smaller))
    assert scratch is not None
    assert needed is not None
    assert needed.numel() <= scratch.numel()
    num_programs = kernel.plan(smaller)["num_programs"]
    lines = heads[1] * -(-heads[0] // heads[1] // 64)
    assert num_programs % lines == 0
    # A program has 64 keys at least where contexts are full, and all fit on the GPU if a line's first ones do.
    assert num_programs <= lines * max(
        1, -(-smaller.batch_size * -(-smaller.max_context_len // 32) * 32 // 64)
    )


def test_refusals() -> None:
    for head_dim, block_size, message in [(80, 16, "head_dim is 80"), (64, 24, "block_size is 24")]:
        problem = DecodeProblem(1, 4, 2, head_dim, block_size, 100, torch.bfloat16, DEVICE)
        assert message in str(kernel.supports(problem))
        with pytest.raises(ValueError, match=message):
            kernel(*make_case([20], head_dim=head_dim, block_size=block_size, device=DEVICE).inputs)


def test_bad_options() -> None:
    inputs = make_case([20], device=DEVICE).inputs
    with pytest.raises(ValueError, match="num_programs is 0"):
        kernel(*inputs, num_programs=0)
    for tile in (64, 0, -16):
        with pytest.raises(ValueError, match=f"tile is {tile}, expected a divisor of block_size 16"):
            kernel(*inputs, tile=tile)
    with pytest.raises(ValueError, match="tile is 48, expected a power of two"):
        kernel(*make_case([20], block_size=48, device=DEVICE).inputs, tile=48)
    # Five programs are two for each of two KV heads.
    with pytest.raises(ValueError, match=r"this call needs \[1040\]"):
        kernel(*inputs, num_programs=5, workspace=torch.empty(1039, device=DEVICE))
