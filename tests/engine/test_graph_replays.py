"""Every replay against the eager step, on the CPU: padding, buckets that contexts cross, graphs that were dropped."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.execution import cuda_graphs
from engine.execution.graph_sizes import GraphSizes
from kernels import decode
from kernels.decode.contract import DecodeKernel, DecodeProblem
from tests.engine.checkpoints import QWEN3
from tests.engine.cuda_on_cpu import RunAgain, replace_cuda

MODEL = QWEN3 | {"max_position_embeddings": 640}
OPTIONS = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
LENGTH = 600  # of a sequence: no power of two, no multiple of a block


class WithinItsPlan(DecodeKernel):
    """The torch kernel, whose plans hold for no context beyond the one they were made for, and no other batch."""

    name = "within_its_plan"

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def plan(self, problem: DecodeProblem) -> dict[str, Any]:
        return {"rows": problem.batch_size, "most": problem.max_context_len, "mean": problem.mean_context_len}

    def __call__(
        self, q, k_cache, v_cache, block_table, context_lens, *args, rows=0, most=0, mean=0, **options
    ):
        assert len(q) == rows
        assert 0 <= int(context_lens.min()) <= int(context_lens.max()) <= most <= LENGTH
        options.pop("workspace")
        return decode.get("torch")(q, k_cache, v_cache, block_table, context_lens, *args, **options)


@pytest.fixture(autouse=True)
def checked_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(decode._registry._kernels, WithinItsPlan.name, WithinItsPlan())


def requests(seed: int) -> list[tuple[int, list[int], SamplingParams]]:
    """(step of arrival, prompt, parameters): prompts that end near a bucket's edge, or a sequence's."""
    rng, found = random.Random(seed), []
    for i in range(28):
        length = rng.choice([1, 3, 15, 16, 17, 250, 254, 257, 505, 511, 594, 599])
        params = {"max_tokens": rng.choice([1, 2, 9, 24]), "seed": i, "ignore_eos": i % 3 > 0}
        params |= rng.choice([{"temperature": 0.0}, {"top_k": 5}, {"temperature": 0.0, "logprobs": 2}])
        found.append((i, [rng.randrange(300) for _ in range(length)], SamplingParams(**params)))
    return found


def run(llm: LLM, arrivals: list[tuple[int, list[int], SamplingParams]]) -> list[Any]:
    waiting, outputs, step = list(enumerate(arrivals)), {}, 0
    while waiting or llm.engine.has_unfinished_requests():
        while waiting and (waiting[0][1][0] <= step or not llm.engine.has_unfinished_requests()):
            index, (_, prompt, params) = waiting.pop(0)
            llm.engine.add_request(prompt, params, str(index))
        outputs |= {output.request_id: output for output in llm.engine.step() if output.finished}
        step += 1
        assert step < 2000
    return [outputs[str(i)] for i in range(len(arrivals))]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("max_num_seqs", "num_kv_blocks", "most_chunk_tokens"),
    [(1, 40, 256), (6, 90, 0), (6, 90, 256), (11, 400, 256)],
)
def test_replays_give_the_tokens_of_eager_steps(
    monkeypatch: pytest.MonkeyPatch,
    overlap: bool,
    max_num_seqs: int,
    num_kv_blocks: int,
    most_chunk_tokens: int,
) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_PLANS", 2)
    monkeypatch.setattr(cuda_graphs, "MOST_CHUNK_GRAPHS", 5)
    monkeypatch.setattr(cuda_graphs, "CAPTURE_PAUSE", 0)
    arrivals = requests(max_num_seqs)
    with LLM(MODEL, num_kv_blocks=400, max_model_len=LENGTH, overlap_scheduling=False, **OPTIONS) as llm:
        expected = run(llm, arrivals)
    replace_cuda(monkeypatch)
    sizes = {"num_kv_blocks": num_kv_blocks, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 256}
    with LLM(
        MODEL,
        max_model_len=LENGTH,
        overlap_scheduling=overlap,
        decode_attention=WithinItsPlan.name,
        **sizes,
        **OPTIONS,
    ) as llm:
        runner = llm.runner
        sizes = GraphSizes(max_num_seqs, most_chunk_tokens, launch_rows=400)
        graphs = RunAgain(
            runner._run, runner.planner, sizes, runner.state.padding_slot, LENGTH, runner.device
        )
        graphs.capture_cost = 1.2
        runner.graphs = graphs
        # Unwritten memory, and blocks of no request, must not matter.
        runner.kv_cache.fill_(float("nan"))
        for output, other in zip(run(llm, arrivals), expected, strict=True):
            assert list(output.token_ids) == list(other.token_ids)
            if other.logprobs:
                for got, wanted in zip(output.logprobs, other.logprobs, strict=True):
                    assert got == pytest.approx(wanted, abs=1e-4)
        assert runner.state.num_computed[runner.state.padding_slot] == -1
        assert graphs.num_captures > 3
        assert (len(graphs._chunk_graphs) > 3) is (most_chunk_tokens > 0)
        llm.engine.block_manager.check_invariants()


def test_the_triton_prefill_kernel_replays_other_chunks_than_it_was_captured_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One coarse graph holds them all: fewer chunks than it has places for, shorter ones, and cached prefixes."""
    prompts = [[5, 6, 7], [9] * 19, [9] * 16 + [3], [1, 2] * 9]
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    arrivals = [(2 * i, prompt, params) for i, prompt in enumerate(prompts)]
    sizes = {"num_kv_blocks": 20, "max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 32}
    options = OPTIONS | sizes | {"overlap_scheduling": False}
    with LLM(MODEL, **options) as llm:
        expected = run(llm, arrivals)
    replace_cuda(monkeypatch)
    with LLM(MODEL, prefill_attention="triton", **options) as llm:
        runner = llm.runner
        runner.graphs = graphs = RunAgain(
            runner._run,
            runner.planner,
            GraphSizes(2, 32, 1000),
            runner.state.padding_slot,
            64,
            runner.device,
        )
        monkeypatch.setattr(graphs.sizes, "_fine_tokens", [32])
        monkeypatch.setattr(graphs.sizes, "_fine_decodes", [2])
        graphs.capture_cost = 0.0
        runner.kv_cache.fill_(float("nan"))
        found = run(llm, arrivals)
        assert len(graphs._chunk_graphs) == 1
    assert [list(output.token_ids) for output in found] == [list(output.token_ids) for output in expected]
