"""Stream-K: every tile in exactly one share, whatever the number of programs, lengths and items."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels import decode
from kernels.triton_support import INTERPRETING
from tests.kernels.decode_cases import expected, make_case, worst_error

stream_k = decode.get("stream_k")
DEVICE = torch.device("cpu" if INTERPRETING else "cuda")


@settings(max_examples=8, deadline=None)
@given(
    context_lens=st.lists(st.integers(0, 100), min_size=1, max_size=6),
    num_programs=st.integers(1, 40),
    heads=st.sampled_from([(2, 2), (3, 1), (4, 2)]),
)
@example(context_lens=[0, 0, 0], num_programs=5, heads=(2, 2))
@example(context_lens=[16], num_programs=40, heads=(3, 1))  # one tile, 40 programs
@example(context_lens=[0, 1, 0, 100, 0], num_programs=7, heads=(4, 2))
@example(context_lens=[100] * 3, num_programs=42, heads=(4, 2))  # a program for every tile
@example(context_lens=[100] * 3, num_programs=50, heads=(4, 2))
def test_any_schedule(context_lens: list[int], num_programs: int, heads: tuple[int, int]) -> None:
    case = make_case(context_lens, heads=heads, head_dim=16, device=DEVICE)
    workspace = torch.full((2 * 100 * 3 * 17,), float("nan"), device=DEVICE)
    stream_k(*case.inputs, out=case.out, workspace=workspace, num_programs=num_programs, tile=16)
    assert worst_error(case.out, expected(case)) < 1e-5


def test_query_heads_in_several_tiles(device: torch.device) -> None:
    case = make_case([90, 3, 0], heads=(70, 1), head_dim=16, device=device)
    stream_k(*case.inputs, out=case.out, num_programs=9, tile=16)
    assert worst_error(case.out, expected(case)) < 1e-5


def test_bad_options(device: torch.device) -> None:
    case = make_case([20], device=device)
    with pytest.raises(ValueError, match="num_programs is 0"):
        stream_k(*case.inputs, num_programs=0)
    with pytest.raises(ValueError, match=r"this call needs \[1040\]"):
        stream_k(*case.inputs, num_programs=4, workspace=torch.empty(1039, device=device))
