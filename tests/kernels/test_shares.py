"""The merge of shares, for the kernels that cut a batch into them: by heads and by items, on one line and on many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import decode
from kernels.decode import shares
from kernels.triton_support import INTERPRETING
from tests.kernels.decode_cases import expected, make_case, worst_error

KERNELS = ["stream_k", "stream_k_tma"]
DEVICE = torch.device("cpu" if INTERPRETING else "cuda")


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> decode.DecodeKernel:
    found = decode.get(request.param)
    reason = found.unavailable(DEVICE)
    if reason is not None:
        pytest.skip(reason)
    return found


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=12, deadline=None)
@given(
    context_lens=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    num_programs=st.integers(2, 30),
    heads=st.sampled_from([(2, 2), (5, 1), (6, 2)]),
)
def test_all_heads_of_an_item_at_once(
    name: str, context_lens: list[int], num_programs: int, heads: tuple[int, int]
) -> None:
    """As where there are more rows than programs fit; a slot that nothing wrote is NaN."""
    case = make_case(context_lens, heads=heads, head_dim=16, device=DEVICE)
    workspace = torch.full((2 * 30 * 5 * 17,), float("nan"), device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "MERGE_PROGRAMS", 0)
        assert shares.merged_heads(case.problem, 2)[0] == {2: 1, 5: 8, 6: 4}[heads[0]]
        decode.get(name)(*case.inputs, out=case.out, workspace=workspace, num_programs=num_programs, tile=16)
    assert worst_error(case.out, expected(case)) < 1e-5


def test_parts_in_several_chunks(kernel: decode.DecodeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long row among short ones has more parts than a chunk, one head at a time and all at once."""
    case = make_case([400, 1, 1, 1], heads=(3, 1), head_dim=16, device=DEVICE)
    for merge_programs in (shares.MERGE_PROGRAMS, 0):
        monkeypatch.setattr(shares, "MERGE_PROGRAMS", merge_programs)
        kernel(*case.inputs, out=case.out.fill_(float("nan")), num_programs=28, tile=16)
        assert worst_error(case.out, expected(case)) < 1e-5


def addresses(tensor: torch.Tensor) -> np.ndarray:
    """Of every element."""
    offsets = torch.zeros(tensor.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        offsets += (torch.arange(size) * stride).view([-1 if i == dim else 1 for i in range(tensor.dim())])
    return tensor.data_ptr() + tensor.element_size() * offsets.flatten().numpy()


@pytest.mark.skipif(not INTERPRETING, reason="addresses are recorded in Triton's interpreter")
@pytest.mark.parametrize("block_size", [16, 64])
def test_reads_what_the_contexts_hold_and_nothing_else(
    kernel: decode.DecodeKernel, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token or table entry past a context, no query past the batch, no slot that nothing has written."""
    from triton.runtime.interpreter import InterpreterBuilder

    read, written = set[int](), set[int]()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def recorded_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        found = set(np.broadcast_to(ptrs.data, mask.data.shape)[mask.data].tolist())
        read.update(found - written)
        return load(self, ptrs, mask, *rest, **options)

    def recorded_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        written.update(np.broadcast_to(ptrs.data, mask.data.shape)[mask.data].tolist())
        return store(self, ptrs, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", recorded_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", recorded_store)
    case = make_case([37, 0, 16, 100, 1, 0], heads=(3, 1), head_dim=16, block_size=block_size, strided=True)
    # As many programs as rows, so that some shares end with a row; one; some; more than tiles.
    for num_programs in (1, 4, 6, 30):
        kernel(*case.inputs, out=case.out, num_programs=num_programs, tile=16)
    allowed = [addresses(case.q), addresses(case.context_lens)]
    for row, length in enumerate(case.context_lens.tolist()):
        entries = case.block_table[row, : -(-length // block_size)]
        allowed.append(addresses(entries))
        for cache in (case.k_cache, case.v_cache):
            for number, block in enumerate(entries.tolist()):
                allowed.append(addresses(cache[block, : length - number * block_size]))
    assert read == set(np.concatenate(allowed).tolist())


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(64, 8), (32, 8), (16, 8), (14, 2), (8, 8), (64, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_rows(kernel: decode.DecodeKernel, head_dim: int, heads: tuple[int, int]) -> None:
    """300 rows of all lengths: several items a share, and all heads of an item merged at once."""
    lens = [(37 * row * row) % 2500 if row % 7 else 0 for row in range(300)]
    case = make_case(lens, heads=heads, head_dim=head_dim, dtype=torch.bfloat16, device=DEVICE)
    workspace = kernel.workspace(case.problem, DEVICE)
    assert workspace is not None
    workspace.fill_(float("nan"))
    kernel(*case.inputs, out=case.out, workspace=workspace, **kernel.plan(case.problem))
    assert worst_error(case.out, expected(case)) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("block_size", "tile"), [(16, 16), (64, 16), (64, 32), (64, 64), (256, 32)])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 6])
def test_pipelines_of_every_depth(block_size: int, tile: int, num_stages: int) -> None:
    """The copies in flight are the compiler's doing: with each depth, items shorter and longer than it."""
    kernel = decode.get("stream_k_tma")
    lens = [1, 16, 17, 40, 0, 65, 500, 0, 3000, 129, 15, 64]
    case = make_case(
        lens, heads=(16, 2), head_dim=128, block_size=block_size, dtype=torch.bfloat16, device=DEVICE
    )
    reference = expected(case)
    for num_programs in (2, 14, 60, 264):
        for num_warps in (1, 2, 4):
            case.out.fill_(float("nan"))
            options = {"tile": tile, "num_stages": num_stages, "num_warps": num_warps}
            kernel(*case.inputs, out=case.out, num_programs=num_programs, **options)
            assert worst_error(case.out, reference) < 8e-3, (num_programs, num_warps)
