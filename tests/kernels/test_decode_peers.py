"""Peers: torch's own attention on contiguous KV, and FlashInfer where it is installed."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from kernels import decode
from tests.kernels.decode_cases import Case, expected, make_case, worst_error

sdpa = decode.get("sdpa")


def contiguous_case(rows: int, length: int, **options: object) -> Case:
    """As make_case, with each row's blocks in order, row after row."""
    case = make_case([length] * rows, **options)
    blocks = -(-length // case.k_cache.shape[1])
    table = torch.arange(rows * blocks, dtype=torch.int32, device=case.q.device).view(rows, blocks)
    order = case.block_table[:, :blocks].flatten().long()
    caches = {name: getattr(case, name)[order] for name in ("k_cache", "v_cache")}
    return dataclasses.replace(case, block_table=table, **caches)


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (7, 1)])
def test_sdpa_on_contiguous_kv(heads: tuple[int, int], device: torch.device) -> None:
    case = contiguous_case(3, 50, heads=heads, device=device)
    problem = dataclasses.replace(case.problem, contiguous=True)
    assert sdpa.supports(problem) is None
    assert sdpa(*case.inputs, out=case.out, **sdpa.plan(problem)) is case.out
    assert worst_error(case.out, expected(case)) < 1e-5


def test_sdpa_refuses_what_is_not_contiguous(device: torch.device) -> None:
    case = make_case([50, 20], device=device)
    assert "contiguous" in str(sdpa.supports(case.problem))
    with pytest.raises(ValueError, match="sdpa reads contiguous KV only"):
        sdpa(*case.inputs)
    with pytest.raises(ValueError, match="backend is 'fast', expected one of flash, cudnn"):
        sdpa(*contiguous_case(1, 8, device=device).inputs, contiguous_len=8, backend="fast")


def test_a_broken_promise_is_found_on_a_cpu() -> None:
    ragged, shuffled = make_case([50, 20]), make_case([48, 48])
    for case, length in ((ragged, 50), (shuffled, 48)):
        with pytest.raises(ValueError, match=r"are not .* contiguous tokens"):
            sdpa(*case.inputs, contiguous_len=length)


def test_flashinfer_says_why_it_cannot_run() -> None:
    kernel = decode.get("flashinfer")
    assert kernel.unavailable(torch.device("cpu")) == "flashinfer needs a CUDA device"
    if importlib.util.find_spec("flashinfer") is None:
        assert kernel.unavailable(torch.device("cuda")) == "flashinfer is not installed"
    assert "flashinfer" not in decode.available("cpu")


@pytest.mark.gpu
def test_flashinfer_prepared_and_not() -> None:
    kernel = decode.get("flashinfer")
    case = make_case([1000, 17, 64], heads=(16, 8), head_dim=128, dtype=torch.bfloat16, device="cuda")
    reason = kernel.supports(case.problem)
    if reason is not None:
        pytest.skip(reason)
    prepared = kernel.prepare(case.problem, case.block_table, case.context_lens)
    for options in ({}, prepared):
        assert worst_error(kernel(*case.inputs, **options), expected(case)) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "flash", "cudnn"])
def test_sdpa_backends(backend: str | None) -> None:
    case = contiguous_case(2, 1024, heads=(16, 8), head_dim=128, dtype=torch.bfloat16, device="cuda")
    out = sdpa(*case.inputs, contiguous_len=1024, backend=backend)
    assert worst_error(out, expected(case)) < 8e-3
