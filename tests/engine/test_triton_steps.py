"""State and sampling of a step by Triton's kernels, in its interpreter or on a GPU, against torch's: equal tokens.

The layers run on torch in both, so that the logits are the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.execution.graph_sizes import GraphSizes
from tests.engine.checkpoints import QWEN3
from tests.engine.cuda_on_cpu import RunAgain, replace_cuda

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
OPTIONS = {
    "load_format": "dummy",
    "dtype": "float32",
    "use_triton": False,
    "skip_tokenizer_init": True,
    "num_kv_blocks": 30,
    "max_num_seqs": 5,
    "max_model_len": 96,
    "max_num_batched_tokens": 20,
}
POISON = 306
PROMPTS = [[5, 6, 7], [9] * 18, [1], [2, 3, 4] * 4, [POISON, 8], [11] * 15]
PARAMS = [
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.0},
    {"temperature": 0.6, "seed": 2**63 + 5},
    {"temperature": 1.2, "seed": 4, "top_k": 5},
    {"temperature": 0.8, "seed": 6},
    {"temperature": 1.1, "seed": 0},
]


def outputs_of(
    *, use_triton: bool, graphs: bool = False, greedy: bool = False, device: str = "cpu", **options: Any
) -> list[tuple[str, tuple[int, ...]]]:
    """(finish reason, tokens) of each request. A token of one prompt has no finite embedding."""
    params = [
        SamplingParams(max_tokens=3 + i % 3, ignore_eos=True, **({"temperature": 0.0} if greedy else kind))
        for i, kind in enumerate(PARAMS)
    ]
    with LLM(QWEN3, device=device, **(OPTIONS | options)) as llm, torch.no_grad():
        runner = llm.runner
        llm.model.embed_tokens.weight[POISON] = torch.nan
        head = llm.model.lm_head
        head.weight = torch.nn.Parameter(head.weight.clone(), requires_grad=False)
        head.weight[POISON] = 0.0
        runner.kernels = replace(runner.kernels, use_triton=use_triton)
        if graphs and device == "cuda":
            runner.allocate_kv_cache(runner.num_kv_blocks)  # and graphs, now that nothing in a step waits
        elif graphs:
            state = runner.state
            sizes = GraphSizes(5, 20, 1000)
            runner.graphs = RunAgain(
                runner._run, runner.planner, sizes, state.padding_slot, runner.max_model_len, runner.device
            )
            runner.capture_at_once(True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert runner.state.num_computed[runner.state.padding_slot] == -1
        assert (runner.graphs is not None and runner.graphs.num_captures > 1) is graphs
        return [(output.finish_reason, tuple(output.token_ids)) for output in outputs]


@pytest.fixture(scope="module", params=[False, True], ids=["drawn", "greedy"])
def greedy(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def expected(greedy: bool) -> list[tuple[str, tuple[int, ...]]]:
    found = outputs_of(use_triton=False, greedy=greedy)
    assert [reason for reason, _ in found] == ["length"] * 4 + ["error", "length"]
    assert not any(POISON in tokens for _, tokens in found)
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_eager_steps_pure_and_mixed(greedy, expected, overlap):
    assert outputs_of(use_triton=True, greedy=greedy, overlap_scheduling=overlap) == expected


def test_replays_with_padding(greedy, expected, monkeypatch):
    replace_cuda(monkeypatch)
    assert outputs_of(use_triton=True, graphs=True, greedy=greedy) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_on_a_gpu(greedy, graphs):
    """Compiled, and captured or not, against the torch path of the same device."""
    options: dict[str, Any] = {"greedy": greedy, "device": "cuda", "decode_attention": "split_kv"}
    by_torch = outputs_of(use_triton=False, **options)
    assert [reason for reason, _ in by_torch] == ["length"] * 4 + ["error", "length"]
    assert outputs_of(use_triton=True, graphs=graphs, **options) == by_torch
