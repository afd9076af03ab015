"""The fused kernel's counters: no initial value needed, none left behind, whatever the workspace held before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import decode
from kernels.decode.contract import DecodeProblem
from kernels.decode.split_kv_fused import NONCE, NONCE_BITS
from kernels.triton_support import INTERPRETING
from tests.kernels.decode_cases import Case, expected, make_case, worst_error

fused = decode.get("split_kv_fused")


def run(case: Case, workspace: Tensor, num_splits: int = 3) -> None:
    case.out.fill_(float("nan"))
    fused(*case.inputs, out=case.out, workspace=workspace, num_splits=num_splits, tile=64)
    assert worst_error(case.out, expected(case)) < 1e-5


def scratch(device: torch.device) -> Tensor:
    workspace = fused.workspace(DecodeProblem(8, 4, 2, 64, 16, 9000, torch.float32, device), device)
    assert workspace is not None
    return workspace


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 0.0, -1.5])
def test_any_initial_contents_and_repeated_use(poison: float, device: torch.device) -> None:
    workspace = scratch(device).fill_(poison)
    for lengths in ([320, 65, 0], [320, 65, 0], [1, 64, 200]):
        run(make_case(lengths, device=device), workspace)


def test_counters_come_back_to_zero(device: torch.device) -> None:
    workspace = scratch(device).fill_(float("nan"))
    run(make_case([320, 65, 0], device=device), workspace)
    counters = workspace[:12].view(torch.int64)  # 3 rows x 2 KV heads
    assert counters[:4].tolist() == [NONCE] * 4
    assert 0 < NONCE < 1 << NONCE_BITS
    # The row without context published nothing and touched no counter.
    assert workspace[8:12].isnan().all()


def test_workspace_passed_from_batch_to_batch(device: torch.device) -> None:
    """What was a partial result for one batch size is a counter for the next."""
    workspace = scratch(device).fill_(float("nan"))
    for lengths in ([300], [90, 300, 200, 10, 170], [300, 300]):
        run(make_case(lengths, device=device), workspace)


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 7, 9, 18])
def test_a_small_tensor_had_the_scratch_in_between(num_bytes: int, device: torch.device) -> None:
    """It begins where the counters do and may end within one: that one must not pass for a count."""
    workspace = scratch(device).fill_(float("nan"))
    case = make_case([320, 65, 300], device=device)
    run(case, workspace)
    counters = workspace[:12].view(torch.int64).clone()
    workspace.view(torch.uint8)[:num_bytes] = 1
    workspace[12:] = float("nan")
    run(case, workspace)
    assert workspace[:12].view(torch.int64).equal(counters)


def test_agrees_with_two_launches(device: torch.device) -> None:
    case = make_case([320, 65, 0, 7], device=device)
    two = decode.get("split_kv")(*case.inputs, num_splits=4, tile=64)
    torch.testing.assert_close(fused(*case.inputs, num_splits=4, tile=64), two, rtol=1e-5, atol=1e-6)


def test_bad_options(device: torch.device) -> None:
    case = make_case([20], device=device)
    with pytest.raises(ValueError, match="num_splits is 40000, expected 1 to 32767"):
        fused(*case.inputs, num_splits=40000)
    with pytest.raises(ValueError, match="this call needs"):
        fused(*case.inputs, workspace=torch.empty(50, device=device), num_splits=2)


@pytest.mark.skipif(not INTERPRETING, reason="about Triton's interpreter")
def test_cooperative_is_refused_where_programs_run_one_by_one(device: torch.device) -> None:
    with pytest.raises(ValueError, match="cooperative needs programs that run at once"):
        fused(*make_case([20], device=device).inputs, cooperative=True)
