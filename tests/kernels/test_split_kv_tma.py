"""What is particular to split_kv_tma: chunks dealt out in turn, whole tiles and the rest, what it refuses."""

from __future__ import annotations

import pytest
import torch

from kernels import decode
from kernels.decode.contract import DecodeProblem
from tests.kernels.decode_cases import expected, make_case, worst_error

tma = decode.get("split_kv_tma")


@pytest.fixture(autouse=True)
def _runs_here(device: torch.device) -> None:
    reason = tma.unavailable(device)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 9])
@pytest.mark.parametrize(("block_size", "tile"), [(16, 16), (64, 16), (64, 64), (256, 32), (48, 16)])
def test_every_key_is_counted_once(block_size: int, tile: int, num_splits: int, device: torch.device) -> None:
    """Whole rounds of chunks, a begun chunk, whole tiles only, a rest only, a rest that opens a chunk, nothing."""
    case = make_case([400, 150, 64, 7, 129, 0], heads=(2, 1), block_size=block_size, device=device)
    tma(*case.inputs, out=case.out, num_splits=num_splits, tile=tile)
    assert worst_error(case.out, expected(case)) < 1e-5


def test_agrees_with_split_kv(device: torch.device) -> None:
    case = make_case([320, 65, 0, 7], device=device)
    other = decode.get("split_kv")(*case.inputs, num_splits=4, tile=64)
    torch.testing.assert_close(tma(*case.inputs, num_splits=4), other, rtol=1e-5, atol=1e-6)


def test_a_table_narrower_than_the_splits_reach(device: torch.device) -> None:
    """The first entry is read before the context is known: never past the row's end."""
    case = make_case([40], device=device)
    table = torch.full((2, 4), -1, dtype=torch.int32, device=device)
    table[0, :3] = case.block_table[0, :3]
    tma(case.q, case.k_cache, case.v_cache, table[:1, :3], case.context_lens, out=case.out, num_splits=30)
    assert worst_error(case.out, expected(case)) < 1e-5


def test_refusals(device: torch.device) -> None:
    for head_dim, block_size, message in [(80, 16, "head_dim is 80"), (64, 24, "block_size is 24")]:
        problem = DecodeProblem(1, 4, 2, head_dim, block_size, 100, torch.bfloat16, device)
        assert message in str(tma.supports(problem))
        with pytest.raises(ValueError, match=message):
            tma(*make_case([20], head_dim=head_dim, block_size=block_size, device=device).inputs)
    inputs = make_case([20], device=device).inputs
    with pytest.raises(ValueError, match="tile is 64, expected a divisor of block_size 16"):
        tma(*inputs, tile=64)
    with pytest.raises(ValueError, match="num_splits is 0"):
        tma(*inputs, num_splits=0)
