"""Decode attention: every registered kernel and peer, on shuffled paged KV; sdpa beside them on contiguous KV.

Labels ending in `_fp8` read caches in fp8, whose cost counts their own, fewer bytes. Labels with `contiguous` know no
paging and are lent KV in order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch

from experiments.decode_bench import DecodeBench
from experiments.settings import Variant
from kernels import decode
from kernels.fp8_cache import FP8
from kernels.timing import CacheState
from tests.benchmarks.comparison import Comparison, Contender
from tests.benchmarks.conftest import DEVICE, Bench

ON_GPU = DEVICE.type == "cuda"


@dataclass(frozen=True)
class Shape:
    """heads: of queries and of KV. contexts: of each row. shared: tokens that all rows begin with."""

    heads: tuple[int, int]
    contexts: tuple[int, ...]
    shared: int = 0

    @property
    def is_uniform(self) -> bool:
        return len(set(self.contexts)) == 1 and not self.shared


def ragged(rows: int, least: int, most: int) -> tuple[int, ...]:
    """Log-uniform context lengths."""
    rng = random.Random(0)
    return tuple(round(least * (most / least) ** rng.random()) for _ in range(rows))


GPU_SHAPES = {
    "64h-1x4096": Shape((64, 8), (4096,)),
    "64h-1x32768": Shape((64, 8), (32768,)),
    "64h-8x4096": Shape((64, 8), (4096,) * 8),
    "64h-16x4352": Shape((64, 8), (4352,) * 16),
    "64h-64x4096": Shape((64, 8), (4096,) * 64),
    "64h-256x1024": Shape((64, 8), (1024,) * 256),
    "64h-64xragged": Shape((64, 8), ragged(64, 128, 32768)),
    "32h-64x4096-half-shared": Shape((32, 8), (4096,) * 64, shared=2048),
    "16h-16x1050": Shape((16, 8), (1050,) * 16),
}
CPU_SHAPES = {"8h-1x128": Shape((8, 2), (128,)), "8h-4xragged": Shape((8, 2), (70, 1, 128, 33))}
SHAPES = GPU_SHAPES if ON_GPU else CPU_SHAPES
HEAD_DIM, DTYPE = (128, "bfloat16") if ON_GPU else (32, "float32")
BLOCK_SIZE = 16

PEERS = ("flashinfer", "sdpa")
PAGED = [name for name in decode.names() if name not in ("reference", "sdpa")]
READ_FP8 = [name for name in PAGED if FP8 in decode.get(name).kv_dtypes]
SDPA_BACKENDS = (
    {"sdpa_contiguous": {}, "sdpa_contiguous_cudnn": {"backend": "cudnn"}}
    if ON_GPU
    else {"sdpa_contiguous": {}}
)
LABELS = [*PAGED, *(f"{name}_fp8" for name in READ_FP8), *SDPA_BACKENDS]


def compare(shape: str, device: torch.device) -> Comparison:
    """One problem for all that read shuffled blocks, one for fp8, one for contiguous KV."""
    asked = SHAPES[shape]
    contiguous = [Variant(label, "sdpa", options=options) for label, options in SDPA_BACKENDS.items()]
    paged = DecodeBench(
        asked.contexts,
        *asked.heads,
        HEAD_DIM,
        BLOCK_SIZE,
        DTYPE,
        device,
        [Variant(name, name) for name in PAGED],
        shared_prefix_len=asked.shared,
    )
    benches = [
        paged,
        replace(
            paged, kv_dtype="float8_e4m3fn", variants=[Variant(f"{name}_fp8", name) for name in READ_FP8]
        ),
        replace(paged, contiguous=asked.is_uniform, shared_prefix_len=0, variants=contiguous),
    ]
    contenders = {
        candidate.name: Contender(bench, candidate, peer=candidate.columns["decode_attention"] in PEERS)
        for bench in benches
        for candidate in bench.candidates()
    }
    (q_heads, kv_heads), head = asked.heads, shape.split("-", 1)[1]
    title = f"decode {head}, {q_heads}/{kv_heads} heads of {HEAD_DIM}, blocks of {BLOCK_SIZE}, {DTYPE}"
    return Comparison(title, contenders, device)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("cache_state", ["cold", "hot"])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_attention(bench: Bench, shape: str, cache_state: CacheState, label: str) -> None:
    bench(shape, label, cache_state)
