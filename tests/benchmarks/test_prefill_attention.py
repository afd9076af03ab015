"""Prefill attention: the registered kernels on paged KV; torch's own flash and cuDNN beside them on contiguous KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.kernel_bench import BoundCall, Candidate
from experiments.prefill_bench import PrefillBench, PrefillInputs
from kernels import prefill
from kernels.timing import CacheState
from tests.benchmarks.comparison import Comparison, Contender
from tests.benchmarks.conftest import DEVICE, Bench

ON_GPU = DEVICE.type == "cuda"
# (batch, query length, context length)
GPU_SHAPES = [(1, 4096, 4096), (16, 1024, 1024), (1, 2048, 16384), (8, 256, 16384)]
CPU_SHAPES = [(1, 48, 48), (2, 16, 80)]
SHAPES = {f"{b}x{q}-of-{c}": (b, q, c) for b, q, c in (GPU_SHAPES if ON_GPU else CPU_SHAPES)}
HEADS, HEAD_DIM, DTYPE = ((32, 8), 128, "bfloat16") if ON_GPU else ((4, 2), 32, "float32")
BLOCK_SIZE = 16


def contiguous(inputs: PrefillInputs) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, context, num_kv_heads, head_dim], gathered out of the pool beforehand."""
    paged = inputs.paged
    length = int(paged.context_lens[0])
    return tuple(
        cache[paged.block_table.long()].flatten(1, 2)[:, :length].contiguous()
        for cache in (paged.k_cache, paged.v_cache)
    )  # type: ignore[return-value]


def varlen_flash(inputs: PrefillInputs, query_len: int) -> Callable[[], tuple[Tensor, ...]]:
    """The op below torch.nn.attention.varlen, whose own signature changes between versions."""
    keys, values = contiguous(inputs)
    context_len = keys.shape[1]
    starts = inputs.query_start_loc // query_len * context_len
    arguments = (inputs.q, keys.flatten(0, 1), values.flatten(0, 1), inputs.query_start_loc, starts)
    flash = torch.ops.aten._flash_attention_forward
    return lambda: (flash(*arguments, query_len, context_len, 0.0, True, False)[0],)


def cudnn(inputs: PrefillInputs, query_len: int) -> Callable[[], tuple[Tensor, ...]]:
    keys, values = (tensor.transpose(1, 2) for tensor in contiguous(inputs))
    queries = inputs.q.unflatten(0, (-1, query_len)).transpose(1, 2)

    def call() -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return (out.transpose(1, 2).flatten(0, 1),)

    return call


PEERS = {"varlen_flash_contiguous": varlen_flash, "cudnn_contiguous": cudnn}
LABELS = [*(name for name in prefill.names() if name != "reference"), *PEERS]


def peer(name: str, problem: PrefillBench) -> Candidate:
    def bind(inputs: PrefillInputs) -> BoundCall:
        return BoundCall(PEERS[name](inputs, problem.query_len))

    reason = None if ON_GPU else "needs a CUDA device"
    if name == "cudnn_contiguous" and problem.query_len != problem.context_len:
        reason = (
            "the causal mask of scaled_dot_product_attention is for whole prompts: query_len = context_len"
        )
    return Candidate(name, bind, probe=lambda: None, unsupported=reason)


def compare(shape: str, device: torch.device) -> Comparison:
    registered: Sequence[str] = [name for name in LABELS if name not in PEERS]
    problem = PrefillBench(*SHAPES[shape], *HEADS, HEAD_DIM, BLOCK_SIZE, DTYPE, device, registered)
    contenders = {candidate.name: Contender(problem, candidate) for candidate in problem.candidates()}
    contenders |= {name: Contender(problem, peer(name, problem), peer=True) for name in PEERS}
    title = f"prefill {shape}, {HEADS[0]}/{HEADS[1]} heads of {HEAD_DIM}, blocks of {BLOCK_SIZE}, {DTYPE}"
    return Comparison(title, contenders, device)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("cache_state", ["cold", "hot"])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_attention(bench: Bench, shape: str, cache_state: CacheState, label: str) -> None:
    bench(shape, label, cache_state)
