"""Prefill attention: every registered kernel on shuffled paged KV; torch's own flash and cuDNN beside them.

Labels ending in `_contiguous` know no paging and are lent KV in order.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from experiments.prefill_bench import PrefillBench, variant_of
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

PEERS = prefill.CONTIGUOUS_ONLY
PAGED = [name for name in prefill.names() if name not in ("reference", *PEERS)]
LABELS = [variant_of(name) for name in (*PAGED, *PEERS)]


def compare(shape: str, device: torch.device) -> Comparison:
    """One problem for all that read shuffled blocks, one for contiguous KV."""
    paged = PrefillBench(*SHAPES[shape], *HEADS, HEAD_DIM, BLOCK_SIZE, DTYPE, device, PAGED)
    contenders = {
        candidate.name: Contender(bench, candidate, peer=bench.contiguous)
        for bench in (paged, replace(paged, kernels=PEERS, contiguous=True))
        for candidate in bench.candidates()
    }
    title = f"prefill {shape}, {HEADS[0]}/{HEADS[1]} heads of {HEAD_DIM}, blocks of {BLOCK_SIZE}, {DTYPE}"
    return Comparison(title, contenders, device)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("cache_state", ["cold", "hot"])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_attention(bench: Bench, shape: str, cache_state: CacheState, label: str) -> None:
    bench(shape, label, cache_state)
