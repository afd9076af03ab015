"""Peers of the prefill kernels: torch's variable-length flash and cuDNN on contiguous KV.

Neither runs on a CPU. There the operations have stand-ins, and what is tested is what they are handed: the pool seen as
sequences, where rows begin, how much of them is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from kernels import prefill
from kernels.paged_cache import rows_in_order
from kernels.prefill import PrefillProblem, cudnn_sdpa, flash_varlen
from tests.kernels.prefill_case import GARBAGE_BLOCK, PADDING_TOKENS, PrefillCase, make_case

PEERS = ("flash_varlen", "cudnn_sdpa")
flash, cudnn = (prefill.get(name) for name in PEERS)
FITTING = PrefillProblem(
    batch_size=2,
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=128,
    block_size=16,
    max_query_len=100,
    max_context_len=100,
    dtype=torch.bfloat16,
    device=torch.device("cuda"),
    contiguous=True,
    equal_lengths=True,
)


def contiguous_case(
    query_lens: list[int], context_lens: list[int], *, padded: bool = True, **options: Any
) -> PrefillCase:
    """As make_case, with each row's blocks in order, row after row, each with room for the longest context."""
    case = make_case(query_lens, context_lens, **options)
    block_size = case.k_cache.shape[1]
    row_blocks = -(-max(context_lens) // block_size)
    shape = (len(context_lens) * row_blocks + 1, *case.k_cache.shape[1:])
    caches = {}
    table = torch.full_like(case.block_table, GARBAGE_BLOCK)
    for name in ("k_cache", "v_cache"):
        caches[name] = torch.full(shape, float("nan"), dtype=case.q.dtype, device=case.q.device)
        for row, length in enumerate(context_lens):
            used, first = -(-length // block_size), row * row_blocks
            caches[name][first : first + used] = getattr(case, name)[case.block_table[row, :used].long()]
            table[row, :used] = torch.arange(first, first + used)
    q = case.q if padded else case.q[: sum(query_lens)]
    return dataclasses.replace(case, q=q, block_table=table, **caches)


def problem_of(case: PrefillCase) -> PrefillProblem:
    return dataclasses.replace(
        FITTING,
        batch_size=len(case.context_lens),
        num_q_heads=case.q.shape[1],
        num_kv_heads=case.k_cache.shape[2],
        head_dim=case.q.shape[2],
        block_size=case.k_cache.shape[1],
        max_query_len=case.max_query_len,
        max_context_len=int(case.context_lens.max()),
        dtype=case.q.dtype,
        device=case.q.device,
    )


@pytest.fixture
def runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine had a GPU for them."""
    for kernel in (flash, cudnn):
        monkeypatch.setattr(type(kernel), "unavailable", lambda self, device: None)


# --- what they say they can do --------------------------------------------------------------------------------


def test_they_are_registered_after_the_paged_kernels() -> None:
    assert prefill.names()[4:6] == list(PEERS) == list(prefill.CONTIGUOUS_ONLY)
    assert not set(PEERS) & set(prefill.available("cpu"))
    assert all(prefill.get(name).paged for name in ("reference", "torch", "triton", "warp_specialized"))


@pytest.mark.parametrize("name", PEERS)
def test_no_cpu_runs_them(name: str) -> None:
    kernel = prefill.get(name)
    problem = dataclasses.replace(FITTING, device=torch.device("cpu"))
    assert kernel.supports(problem) == f"{name} needs a CUDA device"
    case = contiguous_case([5], [5], padded=False, device="cpu")
    with pytest.raises(ValueError, match=f"^{name} needs a CUDA device, q is on cpu$"):
        kernel(*case.args, contiguous_len=5)


@pytest.mark.parametrize("name", PEERS)
def test_why_a_gpu_may_not_run_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, device = prefill.get(name), torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernel.unavailable(device) == f"{name} needs a CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(type(kernel), "is_built", lambda self: False)
    assert kernel.unavailable(device) == f"{name} is not in this build of torch"
    monkeypatch.setattr(type(kernel), "is_built", lambda self: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert kernel.unavailable(device) == f"{name} needs compute capability 8.0, cuda:0 has 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kernel.unavailable(device) is None


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"contiguous": False}, r"needs contiguous KV \(problem.contiguous\)"),
        ({"dtype": torch.float32}, r"dtype is torch.float32, supported: torch.float16, torch.bfloat16"),
        ({"head_dim": 68}, r"head_dim is 68, supported: multiples of 8 up to"),
        ({"head_dim": 264}, r"head_dim is 264, supported: multiples of 8 up to"),
    ],
)
def test_what_both_refuse(name: str, change: dict[str, Any], reason: str, runs_here: None) -> None:
    kernel = prefill.get(name)
    assert kernel.supports(FITTING) is None
    assert re.search(reason, str(kernel.supports(dataclasses.replace(FITTING, **change))))


def test_only_cudnn_needs_whole_prompts_of_one_length(runs_here: None) -> None:
    chunk = dataclasses.replace(FITTING, max_query_len=40)
    ragged = dataclasses.replace(FITTING, equal_lengths=False)
    short = dataclasses.replace(FITTING, max_query_len=1, max_context_len=1)
    assert flash.supports(chunk) is flash.supports(ragged) is flash.supports(short) is None
    assert "whole prompts, got max_query_len 40 of max_context_len 100" in str(cudnn.supports(chunk))
    assert "rows of equal lengths (problem.equal_lengths)" in str(cudnn.supports(ragged))
    assert cudnn.supports(short) == "max_context_len is 1, the least that cuDNN takes is 2"


def test_nothing_is_planned_for_paged_kv() -> None:
    paged = dataclasses.replace(FITTING, contiguous=False)
    assert flash.plan(paged) == cudnn.plan(paged) == {}


# --- what the operations are handed ---------------------------------------------------------------------------


class Flash:
    """Stands in for the flash operation: checks what that asks of its arguments, and computes what it would."""

    def __init__(self) -> None:
        self.max_q: list[int] = []

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts_q: Tensor,
        starts_k: Tensor,
        max_q: int,
        max_k: int,
        dropout: float,
        is_causal: bool,
        debug_mask: bool,
        *,
        scale: float | None,
        seqused_k: Tensor,
    ) -> tuple[Tensor, ...]:
        meta = [tensor.to("meta") for tensor in (q, k, v, starts_q, starts_k)]
        lengths = (max_q, max_k, dropout, is_causal, debug_mask)
        shown = torch.ops.aten._flash_attention_forward(
            *meta, *lengths, scale=scale, seqused_k=seqused_k.to("meta")
        )
        assert shown[0].shape == q.shape  # so this torch takes these arguments
        assert (dropout, is_causal, debug_mask) == (0.0, True, False)
        for ints in (starts_q, starts_k, seqused_k):
            assert ints.dtype == torch.int32
            assert ints.is_contiguous()
        assert k.shape == v.shape
        assert all(tensor.stride(-1) == 1 for tensor in (q, k, v))
        assert len(starts_q) == len(starts_k) == len(seqused_k) + 1
        assert int(starts_k[-1]) <= len(k)
        self.max_q.append(max_q)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        assert scale > 0  # the largest score is scaled after the search for it
        out = torch.full_like(q, float("nan"))
        group = q.shape[1] // k.shape[1]
        for row, used in enumerate(seqused_k.tolist()):
            first, last = starts_q[row : row + 2].tolist()
            assert last - first <= max_q
            assert used <= max_k
            assert used <= int(starts_k[row + 1] - starts_k[row])
            keys, values = (
                t[int(starts_k[row]) :][:used].repeat_interleave(group, dim=1).double() for t in (k, v)
            )
            scores = torch.einsum("qhd,khd->hqk", q[first:last].double(), keys) * scale
            hidden = torch.ones(last - first, used, dtype=torch.bool).triu(used - (last - first) + 1)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[first:last] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        return (out, *shown[1:])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, runs_here: None) -> Flash:
    operation = Flash()
    monkeypatch.setattr(flash_varlen, "_flash", operation)
    return operation


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(2, 2), (8, 2)])
def test_flash_sees_every_row_at_its_length(
    planned: bool, block_size: int, num_q_heads: int, num_kv_heads: int, stand_in: Flash
) -> None:
    # whole prompt; one token after a prefix; chunk after a prefix; nothing to do; not even a context
    case = contiguous_case(
        [19, 1, 33, 0, 0],
        [19, 50, 70, 20, 0],
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        device="cpu",
    )
    plan = flash.plan(problem_of(case)) if planned else {"contiguous_len": 70}
    out = case.untouched_out()
    assert flash(*case.args, out=out, **plan) is out  # padding stays as it was
    torch.testing.assert_close(out.double(), case.expected(), atol=3e-6, rtol=3e-6)
    for scale in (0.3, 0.0, -0.2):
        own = flash(*case.args, scale=scale, **plan)
        used = len(own) - PADDING_TOKENS
        torch.testing.assert_close(own[:used].double(), case.expected(scale)[:used], atol=3e-6, rtol=3e-6)
    assert torch.equal(
        flash.plan(problem_of(case))["row_starts"], torch.arange(6).int() * -(-70 // block_size) * block_size
    )


def test_flash_is_never_told_of_one_query_a_row(stand_in: Flash) -> None:
    case = contiguous_case([1, 0, 1], [30, 4, 1], num_q_heads=8, device="cpu")
    out = case.untouched_out()
    flash(*case.args, out=out, contiguous_len=30)
    torch.testing.assert_close(out.double(), case.expected(), atol=3e-6, rtol=3e-6)
    assert stand_in.max_q == [2]


def test_flash_of_views_that_are_not_contiguous(stand_in: Flash) -> None:
    """Lengths and starts as columns of a table."""
    case = contiguous_case([19, 3], [19, 40], device="cpu")
    ints = {
        name: torch.stack([getattr(case, name)] * 2, -1)[:, 0] for name in ("context_lens", "query_start_loc")
    }
    assert not any(tensor.is_contiguous() for tensor in ints.values())
    out = case.untouched_out()
    flash(*dataclasses.replace(case, **ints).args, out=out, contiguous_len=40)
    torch.testing.assert_close(out.double(), case.expected(), atol=3e-6, rtol=3e-6)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, runs_here: None) -> list[SDPBackend]:
    """The backends that were asked for; torch is left to take one that a CPU has."""
    backends: list[SDPBackend] = []

    @contextlib.contextmanager
    def chosen(backend: SDPBackend) -> Iterator[None]:
        backends.append(backend)
        yield

    monkeypatch.setattr(cudnn_sdpa, "sdpa_kernel", chosen)
    return backends


@pytest.mark.parametrize("length", [2, 48, 50])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2)])
def test_cudnn_sees_whole_prompts(length: int, heads: tuple[int, int], asked: list[SDPBackend]) -> None:
    case = contiguous_case(
        [length] * 3, [length] * 3, num_q_heads=heads[0], num_kv_heads=heads[1], padded=False, device="cpu"
    )
    problem = problem_of(case)
    out = case.untouched_out()
    assert cudnn(*case.args, out=out, **cudnn.plan(problem)) is out
    torch.testing.assert_close(out.double(), case.expected(), atol=3e-6, rtol=3e-6)
    own = cudnn(*case.args, scale=0.3, **cudnn.plan(problem))
    torch.testing.assert_close(own.double(), case.expected(0.3), atol=3e-6, rtol=3e-6)
    for scale in (0.0, -0.2):
        own = cudnn(*case.args, scale=scale, **cudnn.plan(problem))
        torch.testing.assert_close(own.double(), case.expected(scale), atol=3e-6, rtol=3e-6)
    assert asked == [SDPBackend.CUDNN_ATTENTION] * 4


@pytest.mark.parametrize("name", PEERS)
def test_nothing_to_do(name: str, runs_here: None) -> None:
    case = contiguous_case([0, 0], [0, 0], padded=False, device="cpu")
    kernel, out = prefill.get(name), case.untouched_out()
    assert kernel(*case.args, out=out, contiguous_len=0) is out
    assert kernel(*case.args, contiguous_len=0).shape == case.q.shape
    none = dataclasses.replace(
        case,
        block_table=case.block_table[:0],
        context_lens=case.context_lens[:0],
        query_start_loc=case.query_start_loc[:1],
    )
    assert kernel(*none.args, contiguous_len=0).shape == case.q.shape


def test_a_pool_in_order_is_viewed_not_copied() -> None:
    pool = torch.arange(7 * 4 * 2 * 8.0).view(7, 4, 2, 8)
    rows = rows_in_order("k_cache", pool, 3, 2)
    assert rows.shape == (3, 8, 2, 8)
    assert rows.data_ptr() == pool.data_ptr()
    assert torch.equal(rows[2, 5], pool[5, 1])


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PEERS)
def test_errors_name_the_argument(name: str, runs_here: None) -> None:
    kernel = prefill.get(name)
    case = contiguous_case([20, 20], [20, 20], padded=False, device="cpu")
    with pytest.raises(TypeError, match=rf"{name} takes no option \['num_splits'\]"):
        kernel(*case.args, contiguous_len=20, num_splits=2)
    with pytest.raises(ValueError, match=f"^{name} reads contiguous KV only: contiguous_len must promise"):
        kernel(*case.args)
    with pytest.raises(ValueError, match=r"^contiguous_len is -1, the least is 0$"):
        kernel(*case.args, contiguous_len=-1)
    with pytest.raises(ValueError, match="out must be like q"):
        kernel(*case.args, out=torch.empty(1), contiguous_len=20)
    changes = {
        "q": case.q[:, :3],
        "block_table": case.block_table.long(),
        "context_lens": case.context_lens[:1],
        "query_start_loc": case.query_start_loc[:-1],
        "max_query_len": len(case.q) + 1,
    }
    for argument, value in changes.items():
        with pytest.raises(ValueError, match=argument):
            kernel(*dataclasses.replace(case, **{argument: value}).args, contiguous_len=20)


@pytest.mark.parametrize("name", PEERS)
def test_a_pool_that_cannot_be_in_order_is_refused(name: str, runs_here: None) -> None:
    kernel = prefill.get(name)
    case = contiguous_case([20, 20], [20, 20], padded=False, device="cpu")
    few = dataclasses.replace(case, k_cache=case.k_cache[:3], v_cache=case.v_cache[:3])
    with pytest.raises(ValueError, match="k_cache has 3 blocks, fewer than 2 rows of 2 blocks in order"):
        kernel(*few.args, contiguous_len=20)
    both = torch.stack(
        [case.k_cache, case.v_cache], 1
    )  # as an engine's pool: keys and values of a block side by side
    apart = dataclasses.replace(case, k_cache=both[:, 0], v_cache=both[:, 1])
    with pytest.raises(ValueError, match="k_cache's blocks are 4096 elements apart, expected 2048"):
        kernel(*apart.args, contiguous_len=20)


def test_cudnn_counts_the_tokens(runs_here: None) -> None:
    padded = contiguous_case([20, 20], [20, 20], device="cpu")
    with pytest.raises(ValueError, match="q has 43 tokens, expected 2 rows of contiguous_len 20, no padding"):
        cudnn(*padded.args, contiguous_len=20)
    ragged = contiguous_case([20, 10], [20, 10], padded=False, device="cpu")
    with pytest.raises(ValueError, match="q has 30 tokens, expected 2 rows of contiguous_len 20, no padding"):
        cudnn(*ragged.args, contiguous_len=20)


# --- on a GPU -------------------------------------------------------------------------------------------------

GPU_DTYPES = [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def check_on_gpu(name: str, case: PrefillCase) -> None:
    """Norm of the error over the norm of the answer, for each token and head: with an output given and without."""
    kernel, problem = prefill.get(name), problem_of(case)
    reason = kernel.supports(problem)
    if reason is not None:
        pytest.skip(reason)
    plan = kernel.plan(problem)
    out = case.untouched_out()
    assert kernel(*case.args, out=out, **plan) is out
    precise = [t.float() for t in (case.q, case.k_cache, case.v_cache)]
    expected = prefill.get("reference")(*precise, *case.args[3:])
    used = int(case.query_start_loc[-1])
    assert torch.equal(out[used:], case.untouched_out()[used:])
    for found in (out, kernel(*case.args, **plan)):
        error = (found[:used].float() - expected[:used]).norm(dim=-1) / expected[:used].norm(dim=-1)
        assert error.max() < TOLERANCE[case.q.dtype], f"relative error {error.max():.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("block_size", [16, 64])
def test_flash_on_a_gpu(dtype: torch.dtype, head_dim: int, group: int, block_size: int) -> None:
    shape: dict[str, Any] = {
        "num_q_heads": 4 * group,
        "num_kv_heads": 4,
        "head_dim": head_dim,
        "block_size": block_size,
        "dtype": dtype,
        "device": "cuda",
    }
    check_on_gpu("flash_varlen", contiguous_case([300, 1, 0, 77, 512], [300, 2049, 33, 1000, 1500], **shape))
    check_on_gpu("flash_varlen", contiguous_case([1, 0, 1], [500, 7, 1], **shape))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("length", [2, 500, 512])
def test_cudnn_on_a_gpu(dtype: torch.dtype, head_dim: int, group: int, length: int) -> None:
    shape: dict[str, Any] = {
        "num_q_heads": 4 * group,
        "num_kv_heads": 4,
        "head_dim": head_dim,
        "dtype": dtype,
    }
    case = contiguous_case([length] * 3, [length] * 3, padded=False, device="cuda", **shape)
    check_on_gpu("cudnn_sdpa", case)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PEERS)
def test_they_can_be_captured(name: str) -> None:
    """As kernels/timing.py times them."""
    shape: dict[str, Any] = {"num_q_heads": 16, "num_kv_heads": 4, "head_dim": 128, "dtype": torch.bfloat16}
    case = contiguous_case([256] * 2, [256] * 2, padded=False, device="cuda", **shape)
    check_on_gpu(name, case)
    kernel, plan = prefill.get(name), prefill.get(name).plan(problem_of(case))
    expected = kernel(*case.args, **plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(*case.args, **plan)
    graph.replay()
    assert torch.equal(out, expected)
