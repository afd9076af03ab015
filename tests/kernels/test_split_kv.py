"""What is particular to splitting: unequal and empty splits, the merge's base, fixed split sizes, scratch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import decode
from kernels.decode.merge import merge_splits, partial_numel, partial_views
from tests.kernels.decode_cases import Case, expected, make_case, worst_error

split_kv = decode.get("split_kv")


def partial_results(case: Case, pieces: list[tuple[int, int]], base: float) -> tuple[Tensor, Tensor]:
    """Row 0's attention over each range of keys, and its log-sum-exp in `base`: the first stage, written out."""
    length = int(case.context_lens[0])
    blocks = case.block_table[0, : -(-length // case.k_cache.shape[1])].long()
    keys, values = (cache[blocks].flatten(0, 1)[:, 0].double() for cache in (case.k_cache, case.v_cache))
    outs, lses = [], []
    for start, end in pieces:
        scores = case.q[0].double() @ keys[start:end].T / math.sqrt(case.q.shape[-1])
        outs.append(torch.softmax(scores, -1) @ values[start:end])
        lses.append(torch.logsumexp(scores, -1) / math.log(base))
    return torch.stack(outs, 1)[None].float().contiguous(), torch.stack(lses, 1)[None].float().contiguous()


def test_merge_of_unequal_splits_is_in_base_2(device: torch.device) -> None:
    """320 keys as 300 and 20: the base must be that of the weights, and a mixed base is far off."""
    case = make_case([320], heads=(4, 1), device=device)
    pieces = [(0, 300), (300, 320)]
    merge_splits(*partial_results(case, pieces, base=2.0), case.out)
    assert worst_error(case.out, expected(case)) < 1e-5
    merge_splits(*partial_results(case, pieces, base=math.e), case.out)
    assert worst_error(case.out, expected(case)) > 1e-2


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 20])
def test_any_number_of_splits(num_splits: int, prefetch: bool, device: torch.device) -> None:
    """320 keys in tiles of 64: 2 splits are 192 and 128 keys; from 6 on some are empty."""
    case = make_case([320, 0, 65, 1], heads=(2, 1), device=device)
    split_kv(*case.inputs, out=case.out, num_splits=num_splits, tile=64, prefetch=prefetch)
    assert worst_error(case.out, expected(case)) < 1e-5


@pytest.mark.parametrize("block_size", [16, 64])
def test_split_sizes(block_size: int, device: torch.device) -> None:
    """300 keys in splits of 256: 256 and 44."""
    case = make_case([300, 256, 257, 0], block_size=block_size, device=device)
    split_kv(*case.inputs, out=case.out, split_size=256, tile=32)
    assert worst_error(case.out, expected(case)) < 1e-5


@pytest.mark.parametrize(("name", "options"), [("split_kv", {"split_size": 256}), ("fixed_split", {})])
def test_fixed_split_size_gives_the_same_bits_in_any_batch(
    name: str, options: dict[str, int], device: torch.device
) -> None:
    """A row of 600 alone, beside 1,300, and among 16: with different tables, widths and numbers of splits."""
    alone = make_case([600], heads=(2, 1), dtype=torch.float16, device=device)
    results = []
    for others in ([], [1300], [40, 7, 0, 130, 60, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]):
        company = make_case([*others, 600], heads=(2, 1), dtype=torch.float16, device=device, seed=1)
        blocks = company.block_table[-1, : -(-600 // 16)].long()
        mine = alone.block_table[0, : -(-600 // 16)].long()
        company.k_cache[blocks], company.v_cache[blocks] = alone.k_cache[mine], alone.v_cache[mine]
        company.q[-1] = alone.q[0]
        kernel = decode.get(name)
        plan = kernel.plan(company.problem) if name == "fixed_split" else {}
        results.append(kernel(*company.inputs, out=company.out, **plan, **options)[-1])
    assert worst_error(results[0][None], expected(alone)) < 1e-3
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_all_splits_empty_merge_to_zeros(device: torch.device) -> None:
    partial, lse = torch.zeros(2, 3, 20, 64, device=device), torch.full((2, 3, 20), -math.inf, device=device)
    out = torch.full((2, 3, 64), math.nan, device=device)
    merge_splits(partial, lse, out)
    assert not out.any()


def test_trailing_empty_splits_do_not_change_a_bit(device: torch.device) -> None:
    partial, lse = torch.randn(1, 2, 5, 80, device=device), torch.randn(1, 2, 5, device=device)
    out, longer = (torch.empty(1, 2, 80, device=device) for _ in range(2))
    merge_splits(partial, lse, out)
    padded = torch.cat([partial, torch.zeros(1, 2, 60, 80, device=device)], 2)
    padded_lse = torch.cat([lse, torch.full((1, 2, 60), -math.inf, device=device)], 2)
    merge_splits(padded, padded_lse, longer)
    assert torch.equal(out, longer)
    weights = torch.softmax(lse.double() * math.log(2), -1)
    assert worst_error(out, (weights[..., None] * partial.double()).sum(2)) < 1e-5


def test_workspace_that_does_not_fit(device: torch.device) -> None:
    case = make_case([100], device=device)
    needed = partial_numel(1, 4, 2, 64)
    for workspace, message in [
        (torch.empty(needed - 1, device=device), f"workspace has {needed - 1} elements.*needs {needed}"),
        (
            torch.empty(needed, dtype=torch.float16, device=device),
            "workspace must be flat contiguous float32",
        ),
        (torch.empty(2, needed, device=device), "workspace must be flat contiguous float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            split_kv(*case.inputs, workspace=workspace, num_splits=2)
    split_kv(*case.inputs, out=case.out, workspace=torch.empty(needed, device=device), num_splits=2)
    assert worst_error(case.out, expected(case)) < 1e-5


def test_partial_views_do_not_overlap() -> None:
    workspace = torch.zeros(partial_numel(2, 3, 4, 5) + 7)
    partial, lse = partial_views(workspace, 2, 3, 4, 5, like=workspace)
    partial.fill_(1)
    assert not lse.any()
    lse.fill_(1)
    assert int(workspace.sum()) == partial.numel() + lse.numel() == partial_numel(2, 3, 4, 5)


def test_split_size_is_whole_tiles(device: torch.device) -> None:
    with pytest.raises(ValueError, match="split_size is 100, not a multiple of tile 64"):
        split_kv(*make_case([5], device=device).inputs, split_size=100, tile=64)


def test_fixed_split_needs_a_size(device: torch.device) -> None:
    with pytest.raises(ValueError, match="split_size is 0, the least is 1"):
        decode.get("fixed_split")(*make_case([5], device=device).inputs, split_size=0)


def test_a_plan_made_for_less_loses_no_keys(device: torch.device) -> None:
    """num_splits * split_size short of the context: the last split takes the rest."""
    case = make_case([500], device=device)
    split_kv(*case.inputs, out=case.out, split_size=64, num_splits=2, tile=64)
    assert worst_error(case.out, expected(case)) < 1e-5
