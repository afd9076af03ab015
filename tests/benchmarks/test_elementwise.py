"""Elementwise operations of a decoder layer: Triton, torch, and torch.compile of the latter, on Qwen3-8B's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from engine.models.config import ModelConfig
from experiments.arguments import CONF
from experiments.elementwise_bench import OPERATIONS, PATHS, ElementwiseBench
from experiments.kernel_bench import BoundCall, Candidate
from kernels.timing import CacheState
from tests.benchmarks.comparison import Comparison, Contender
from tests.benchmarks.conftest import DEVICE, Bench

ON_GPU = DEVICE.type == "cuda"
MODEL, DTYPE, TOKENS = ("qwen3_8b", "bfloat16", (16, 4096)) if ON_GPU else ("tiny_qwen3", "float32", (4,))
LABELS = [*PATHS, "compiled"]


def shapes() -> dict[str, tuple[str, int]]:
    """(operation, tokens) by name; what Triton does for few tokens only is compared on one."""
    return {
        f"{name}-{tokens}": (name, tokens)
        for name, operation in OPERATIONS.items()
        for tokens in (TOKENS if operation.max_triton_tokens is None else (1,))
    }


def model_config() -> ModelConfig:
    fields: Any = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{MODEL}.yaml"))
    return ModelConfig.from_hf(fields["config"])


def compiled(candidate: Candidate) -> Candidate:
    """The torch path, compiled for the very shapes of its inputs."""

    def bind(inputs: Mapping[str, Tensor]) -> BoundCall:
        return BoundCall(torch.compile(candidate.bind(inputs).call, dynamic=False))

    reason = None if ON_GPU else "torch.compile is a peer on a GPU only"
    return replace(candidate, name="compiled", bind=bind, unsupported=reason)


def compare(shape: str, device: torch.device) -> Comparison:
    if ON_GPU:
        torch.compiler.reset()  # what was compiled for another shape counts towards a limit
    operation, tokens = shapes()[shape]
    problem = ElementwiseBench(operation, model_config(), tokens, DTYPE, device)
    candidates = {candidate.name: candidate for candidate in problem.candidates()}
    contenders = {name: Contender(problem, candidate) for name, candidate in candidates.items()}
    contenders["compiled"] = Contender(problem, compiled(candidates["torch"]), peer=True)
    return Comparison(f"{operation}, {tokens} tokens, {MODEL}, {DTYPE}", contenders, device)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("cache_state", ["cold", "hot"])
@pytest.mark.parametrize("shape", shapes())
def test_elementwise(bench: Bench, shape: str, cache_state: CacheState, label: str) -> None:
    bench(shape, label, cache_state)
