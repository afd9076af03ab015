"""A decoder layer without attention, and sampling: Triton, torch and torch.compile of torch, on Qwen3-8B's shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from engine.models.config import ModelConfig
from experiments.arguments import CONF
from experiments.elementwise_bench import OPERATIONS, PATHS, ElementwiseBench
from kernels.timing import CacheState
from tests.benchmarks.comparison import Comparison, Contender
from tests.benchmarks.conftest import DEVICE, Bench

ON_GPU = DEVICE.type == "cuda"
MODEL, DTYPE, TOKENS = ("qwen3_8b", "bfloat16", (16, 4096)) if ON_GPU else ("tiny_qwen3", "float32", (4,))


def shapes() -> dict[str, tuple[str, int]]:
    """(operation, tokens) by name; what Triton does for few tokens only is compared on one."""
    return {
        f"{name}-{tokens}": (name, tokens)
        for name, operation in OPERATIONS.items()
        for tokens in (TOKENS if operation.max_triton_tokens is None else (1,))
        if operation.refusal(tokens) is None
    }


def model_config() -> ModelConfig:
    fields: Any = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{MODEL}.yaml"))
    return ModelConfig.from_hf(fields["config"])


def compare(shape: str, device: torch.device) -> Comparison:
    operation, tokens = shapes()[shape]
    problem = ElementwiseBench(operation, model_config(), tokens, DTYPE, device)
    contenders = {
        candidate.name: Contender(problem, candidate, peer=candidate.name == "compile")
        for candidate in problem.candidates()
    }
    return Comparison(f"{operation}, {tokens} tokens, {MODEL}, {DTYPE}", contenders, device)


@pytest.mark.parametrize("label", PATHS)
@pytest.mark.parametrize("cache_state", ["cold", "hot"])
@pytest.mark.parametrize("shape", shapes())
def test_elementwise(bench: Bench, shape: str, cache_state: CacheState, label: str) -> None:
    bench(shape, label, cache_state)
