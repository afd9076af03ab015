"""Ranks on CUDA devices: two that share one over gloo (slow, for tests), and one each over NCCL with graphs on."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.execution.workers import WorkerError
from tests.engine.checkpoints import LLAMA, QWEN3, write_random_checkpoint
from tests.engine.greedy_reference import uneven_prompts
from tests.engine.leftovers import wait_until_gone

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

MODELS = {
    "qwen3": QWEN3 | {"head_dim": 128, "num_attention_heads": 8},
    "llama": LLAMA | {"head_dim": 64},
}
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_batched_tokens": 64}
PROMPTS = uneven_prompts(307)
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
SAMPLED = [
    SamplingParams(temperature=0.8, top_k=5, seed=1, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.9, seed=2, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.0, logprobs=3, max_tokens=16, ignore_eos=True),
]


def answers(llm: LLM) -> list[Any]:
    batches = ([GREEDY] * len(PROMPTS), SAMPLED[:3], SAMPLED)
    ids: list[Any] = []
    for params in batches:
        outputs = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
        ids.append([output.token_ids for output in outputs])
    return ids


@pytest.fixture(scope="module", params=sorted(MODELS))
def one_rank(request, tmp_path_factory):
    """(directory, ids, logits) in fp32 on one device, with preemption."""
    directory = write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"), MODELS[request.param])
    with LLM(directory, device="cuda", num_kv_blocks=30, **OPTIONS) as llm:
        ids = answers(llm)
        assert llm.stats()["num_preemptions"] > 0
        return directory, ids, llm.forced_logits(PROMPTS[2], ids[0][2][:8]).cpu()


def check(one_rank: Any, device: str, *, graphs: bool, **options: Any) -> None:
    directory, ids, logits = one_rank
    all_reduce = options.get("all_reduce", "torch")
    with LLM(directory, device=device, tensor_parallel_size=2, num_kv_blocks=30, **OPTIONS, **options) as llm:
        assert [report["uses_cuda_graphs"] for report in llm.runner.report()] == [graphs] * 2
        assert [report["all_reduce"] for report in llm.runner.report()] == [all_reduce] * 2
        assert answers(llm) == ids
        torch.testing.assert_close(llm.forced_logits(PROMPTS[2], ids[0][2][:8]), logits, rtol=1e-5, atol=1e-5)
        llm.runner.start_collective_timer()
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        seconds, elapsed_s = llm.runner.stop_collective_timer()
        assert 0 < seconds < elapsed_s


def test_two_ranks_on_one_gpu_give_the_tokens_of_one(one_rank):
    check(one_rank, "cuda:0,cuda:0", graphs=False)


@two_gpus
@pytest.mark.parametrize("all_reduce", ["torch", "one_shot"])
@pytest.mark.parametrize("overlap", [True, False])
def test_two_gpus_over_nccl_with_graphs_give_the_tokens_of_one(one_rank, overlap, all_reduce):
    check(one_rank, "cuda", graphs=True, overlap_scheduling=overlap, all_reduce=all_reduce)


@two_gpus
@pytest.mark.parametrize("all_reduce", ["torch", "one_shot"])
def test_two_gpus_eagerly_give_the_tokens_of_one(one_rank, all_reduce):
    check(one_rank, "cuda", graphs=False, enforce_eager=True, all_reduce=all_reduce)


@two_gpus
@pytest.mark.parametrize("eager", [False, True])
def test_one_shot_sums_have_the_bits_of_nccl_in_bf16(eager):
    """Two ranks: one rounded addition, whoever does it."""
    ids, logits = {}, {}
    for all_reduce in ("torch", "one_shot"):
        with LLM(
            MODELS["qwen3"],
            load_format="dummy",
            dtype="bfloat16",
            device="cuda",
            tensor_parallel_size=2,
            num_kv_blocks=100,
            enforce_eager=eager,
            all_reduce=all_reduce,
            **OPTIONS,
        ) as llm:
            assert [report["all_reduce"] for report in llm.runner.report()] == [all_reduce] * 2
            ids[all_reduce] = answers(llm)
            logits[all_reduce] = llm.forced_logits(PROMPTS[2], ids["torch"][0][2][:8]).cpu()
    assert ids["one_shot"] == ids["torch"]
    assert torch.equal(logits["one_shot"], logits["torch"])


def test_one_shot_sums_of_ranks_that_share_a_gpu_are_refused():
    with pytest.raises(
        ValueError, match=r"all_reduce 'one_shot' cannot be had: .*these ranks talk over gloo"
    ):
        LLM(
            QWEN3,
            load_format="dummy",
            device="cuda:0,cuda:0",
            tensor_parallel_size=2,
            all_reduce="one_shot",
            **OPTIONS,
        )


@two_gpus
@pytest.mark.alone
def test_both_gpus_pools_are_sized_alike():
    model = QWEN3 | {"max_position_embeddings": 40_960, "num_hidden_layers": 16, "head_dim": 128}
    with LLM(
        model, load_format="dummy", dtype="bfloat16", tensor_parallel_size=2, gpu_memory_utilization=0.3
    ) as llm:
        reports = llm.runner.report()
        assert (
            reports[0]["num_kv_blocks"] == reports[1]["num_kv_blocks"] == llm.engine.block_manager.num_blocks
        )
        outputs = llm.generate([[i % 300] * 900 for i in range(64)], GREEDY, use_tqdm=False)
        assert all(len(output.token_ids) == 32 for output in outputs)
        total = torch.cuda.get_device_properties(0).total_memory
        assert all(0 < report["device_peak_bytes"] < 0.31 * total for report in llm.runner.report())


@pytest.mark.parametrize(
    ("device", "all_reduce"),
    [
        ("cuda:0,cuda:0", "torch"),
        pytest.param("cuda", "torch", marks=two_gpus),
        pytest.param("cuda", "one_shot", marks=two_gpus),
    ],
)
@pytest.mark.parametrize(
    ("number", "message", "limit_s"),
    [
        (signal.SIGKILL, "rank 1 was killed by SIGKILL", 10),
        # Stopped, it leaves pings unanswered; rank 0, whose kernel waits for it on the device, answers them.
        (signal.SIGSTOP, r"rank 1 \(pid \d+\) hangs: no sign of life", 60),
    ],
)
def test_a_rank_lost_in_mid_decode_ends_the_engine(device, all_reduce, number, message, limit_s):
    llm = LLM(
        QWEN3,
        load_format="dummy",
        device=device,
        tensor_parallel_size=2,
        num_kv_blocks=200,
        all_reduce=all_reduce,
        worker_timeout_s=20.0,  # the first step compiles and captures
        **OPTIONS,
    )
    pids = [process.pid for process in llm.runner.ranks]
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    name = llm.engine.add_request([1, 2, 3], long)
    llm.engine.step()
    killer = threading.Timer(0.2, os.kill, (pids[1], number))
    killer.start()
    start = time.monotonic()

    def step_on() -> None:
        while llm.engine.has_unfinished_requests() or not llm.runner.failure:
            if not llm.engine.has_unfinished_requests():
                llm.engine.add_request([1, 2, 3], long)
            llm.engine.step()

    with pytest.raises(WorkerError, match=message):
        step_on()
    assert time.monotonic() - start < limit_s
    ended = llm.engine.step()
    assert all(output.finish_reason == "error" for output in ended), name
    llm.close()
    wait_until_gone(pids, timeout_s=2)
