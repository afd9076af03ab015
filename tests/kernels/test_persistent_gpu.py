"""All layers in one launch on a GPU: real shapes against the separate kernels, and many replays of one capture."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.persistent import LayerShape, PersistentLayers
from tests.kernels.persistent_case import Step, random_layers, run_separately

pytestmark = pytest.mark.gpu

SMALL = LayerShape(
    1024, 3072, 16, 8, 128, 1e-6, qk_norm=True, attention_bias=False, mlp_bias=False
)  # Qwen3-0.6B
MIDDLE = dataclasses.replace(SMALL, hidden_size=4096, intermediate_size=12288, num_q_heads=32)  # 8B
LARGE = dataclasses.replace(SMALL, hidden_size=5120, intermediate_size=25600, num_q_heads=64)  # 32B
LLAMA = LayerShape(2048, 8192, 32, 8, 64, 1e-5, qk_norm=False, attention_bias=True, mlp_bias=True)


@pytest.mark.parametrize("contexts", [[1], [1040], [5000, 300], [0, 2049], [64, 65]], ids=str)
@pytest.mark.parametrize("shape", [SMALL, MIDDLE, LARGE, LLAMA], ids=["0.6b", "8b", "32b", "llama"])
def test_equals_the_separate_kernels(device, shape, contexts):
    """In bf16 against fp32 of the same weights: no farther from it than twice the separate kernels in bf16 are."""
    weights = random_layers(shape, 3, dtype=torch.bfloat16, device=device)
    step = Step.random(shape, 3, contexts, dtype=torch.bfloat16, device=device)
    separate, exact = step.clone(), step.clone()
    exact.stream, exact.kv_cache = exact.stream.float(), exact.kv_cache.float()
    run_separately(shape, weights, separate)
    run_separately(shape, [{name: w.float() for name, w in layer.items()} for layer in weights], exact)
    layers = PersistentLayers(shape, weights)
    step.run(layers)
    rows = [row for row, context in enumerate(contexts) if context]
    for name in ("stream", "kv_cache"):
        mine, theirs, truth = (
            getattr(s, name)[rows].float() if name == "stream" else getattr(s, name).float()
            for s in (step, separate, exact)
        )
        assert torch.equal(mine.isnan(), truth.isnan()), name
        error = (mine - truth).nan_to_num().norm()
        assert error <= 2 * (theirs - truth).nan_to_num().norm(), name
    assert layers._counter.item() == 0


@pytest.mark.parametrize("shape", [SMALL, MIDDLE], ids=["0.6b", "8b"])
def test_replays_give_the_bits_of_eager_calls(device, shape):
    """A thousand replays: a barrier that lets one program through early shows in some of them."""
    weights = random_layers(shape, 8, dtype=torch.bfloat16, device=device)
    step = Step.random(shape, 8, [700, 1040], dtype=torch.bfloat16, device=device)
    layers = PersistentLayers(shape, weights)
    eager = step.clone()
    eager.run(layers)
    torch.cuda.synchronize()
    stream = step.stream.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(layers)
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000):
        step.stream.copy_(stream)
        graph.replay()
        differing += (step.stream != eager.stream).any()
    assert differing.item() == 0
    assert torch.equal(step.kv_cache.nan_to_num(), eager.kv_cache.nan_to_num())
    assert layers._counter.item() == 0
