"""Several ranks against one, on CPUs over gloo: the same tokens and logits (cases F4, F5, T1, T2, T3)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.execution import workers as workers_module
from engine.execution.workers import PendingAnswer, Workers
from engine.models.checkpoint import resolve_model
from engine.parallel.rendezvous import ExternalRank
from tests.engine.checkpoints import LLAMA, QWEN3, REPOSITORY, write_random_checkpoint
from tests.engine.faulty_ranks import UnequalRunner
from tests.engine.greedy_reference import uneven_prompts

MODELS = {
    "qwen3 tied": QWEN3,
    "qwen3 untied": QWEN3 | {"tie_word_embeddings": False},
    "llama": LLAMA | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
}
CASES = [
    ("qwen3 tied", 2, False),
    ("llama", 2, True),
    # Two KV heads on four ranks; 307 ids are padded.
    pytest.param("qwen3 untied", 4, False, marks=pytest.mark.slow),
    pytest.param("qwen3 untied", 2, True, marks=pytest.mark.slow),
    pytest.param("qwen3 tied", 4, True, marks=pytest.mark.slow),
    pytest.param("llama", 4, False, marks=pytest.mark.slow),
]
"""test_group.py compares the logits of all of them; these are whole engines."""
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "max_num_batched_tokens": 32,
    "num_kv_blocks": 45,  # far less than the prompts need: they preempt each other
}
PROMPTS = uneven_prompts(307, 8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = [
    SamplingParams(temperature=0.8, top_k=5, seed=1, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.9, seed=2, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.8, seed=5, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=300, seed=6, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.0, logprobs=3, max_tokens=8, ignore_eos=True),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def answers(llm: LLM) -> dict[str, Any]:
    """Everything that must not depend on the number of ranks. The greedy rows run alone, and so do those with top-k:
    only then do the ranks decide from candidates."""
    results: dict[str, Any] = {}
    batches = {"greedy": [GREEDY] * len(PROMPTS), "top-k": SAMPLED[:3], "mixed": SAMPLED}
    for name, params in batches.items():
        outputs = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
        results[name] = [output.token_ids for output in outputs]
        llm.engine.block_manager.check_invariants()
    results["logprobs"] = [list(step.items()) for step in outputs[-1].logprobs]
    results["logits"] = llm.forced_logits(PROMPTS[2], results["greedy"][2][:8])
    stats = llm.stats()
    assert stats["num_preemptions"] > 0
    assert stats["num_cached_tokens"] > 0
    assert stats["num_free_kv_blocks"] == stats["num_kv_blocks"]
    return results


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Checkpoints and their answers on one rank, by name."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}
    for name, config in MODELS.items():
        directory = write_random_checkpoint(
            tmp_path_factory.mktemp("checkpoint"), config, max_shard_size="40KB"
        )
        with LLM(directory, **OPTIONS) as llm:
            made[name] = (directory, answers(llm))
    return made


@pytest.mark.parametrize(("name", "size", "overlap"), CASES)
def test_several_ranks_answer_as_one(one_rank, monkeypatch, name, size, overlap):
    directory, expected = one_rank[name]
    monkeypatch.chdir(directory.parent)  # a relative path is made absolute before the ranks start
    with LLM(directory.name, tensor_parallel_size=size, overlap_scheduling=overlap, **OPTIONS) as llm:
        assert isinstance(llm.runner, Workers)
        assert llm.runner.kernels.decode.name == "torch"
        with pytest.raises(
            RuntimeError, match=f"tensor_parallel_size {size} the model's parts are in processes"
        ):
            _ = llm.model
        start = time.perf_counter()
        llm.runner.start_collective_timer()
        actual = answers(llm)
        seconds, elapsed_s = llm.runner.stop_collective_timer()
        assert 0 < seconds < elapsed_s < time.perf_counter() - start
        reports = llm.runner.report()
    for batch in ("greedy", "top-k", "mixed"):
        assert actual[batch] == expected[batch], batch
    torch.testing.assert_close(actual["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(actual["logprobs"], expected["logprobs"], strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], abs=1e-4)
    assert [report["num_kv_blocks"] for report in reports] == [45] * size


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (QWEN3, 3, "num_q_heads is 4, which tensor_parallel_size 3 does not divide"),
        (QWEN3, 8, "num_q_heads is 4, which tensor_parallel_size 8 does not divide"),
        (QWEN3 | {"intermediate_size": 97}, 2, "intermediate_size is 97"),
        (QWEN3 | {"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "num_kv_heads is 3"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_a_process_starts(monkeypatch, config, size, message):
    monkeypatch.setattr(workers_module, "RankProcess", None)
    with pytest.raises(ValueError, match=message):
        LLM(config, load_format="dummy", tensor_parallel_size=size, **OPTIONS)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:90", "device is 'cuda:90', but"),
        ("cpu,cpu,cpu", r"device names 3 devices for 2 ranks \(tensor_parallel_size\)"),
        ("cpu,gpu", "device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
    ],
)
def test_devices_that_are_not_there_are_refused_before_a_process_starts(monkeypatch, device, message):
    monkeypatch.setattr(workers_module, "RankProcess", None)
    with pytest.raises(ValueError, match=message):
        LLM(QWEN3, load_format="dummy", tensor_parallel_size=2, **(OPTIONS | {"device": device}))


def test_ranks_take_consecutive_gpus_from_the_one_that_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    def names(device: str, count: int) -> list[str]:
        return [str(each) for each in EngineConfig(device=device).resolve_devices(count)]

    assert names("auto", 2) == names("cuda", 2) == ["cuda:0", "cuda:1"]
    assert names("cuda:2", 2) == ["cuda:2", "cuda:3"]
    assert names("cuda:1, cuda:1", 2) == ["cuda:1", "cuda:1"]
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size needs 3 CUDA devices from cuda:2 on, but 4 are"
    ):
        names("cuda:2", 3)
    with pytest.raises(ValueError, match="all CUDA or all CPU"):
        names("cpu,cuda:1", 2)


def test_t1_t2_the_smallest_capacity_counts_and_every_command_arrives_in_order():
    config = EngineConfig(tensor_parallel_size=2, **{k: v for k, v in OPTIONS.items() if k[0] != "s"})
    source = resolve_model(QWEN3, "dummy")
    config = EngineConfig(**(vars(config) | {"load_format": "dummy", "num_kv_blocks": None}))
    runner = Workers(config, source, runner_class=UnequalRunner)
    try:
        assert runner.num_kv_blocks == 37
        assert [report["num_kv_blocks"] for report in runner.report()] == [37, 37]
        sizes = [10, 1_000_000, 1000, 250_000, 70_000] * 10
        pending = []
        for number, size in enumerate(sizes):
            pending.append(PendingAnswer(runner, runner._new_command("tell", number, bytes(size))))
            runner._start(pending[-1])
        assert [each.wait()[0] for each in reversed(pending)] == sizes[::-1]
        assert runner.call("all_told", all_answer=True) == [list(range(50))] * 2
    finally:
        runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 6, 8])
def test_other_numbers_of_ranks_start_and_answer(size):
    heads = {
        "num_attention_heads": 24,
        "num_key_value_heads": 24 if size == 3 else 2,
        "intermediate_size": 96,
    }
    outputs = []
    for ranks in (1, size):
        with LLM(QWEN3 | heads, load_format="dummy", tensor_parallel_size=ranks, **OPTIONS) as llm:
            outputs.append([o.token_ids for o in llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)])
    assert outputs[0] == outputs[1]


# --- an external launcher ---------------------------------------------------------------------------------------

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


def test_the_launchers_variables_say_which_rank_this_is():
    assert ExternalRank.from_environment(TORCHRUN) == ExternalRank(1, 2, 1, 2)
    two_hosts = TORCHRUN | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert ExternalRank.from_environment(two_hosts) == ExternalRank(3, 4, 1, 2)
    assert ExternalRank.from_environment({}) is None
    assert ExternalRank.from_environment({"RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "2"}, "contradict each other"),
        ({"LOCAL_WORLD_SIZE": "1"}, "contradict each other"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number, got 'two'"),
    ],
)
def test_launcher_variables_that_make_no_sense_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        ExternalRank.from_environment(TORCHRUN | changed)
    with pytest.raises(ValueError, match="MASTER_PORT is not"):
        ExternalRank.from_environment({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"})


def test_a_launcher_with_another_number_of_processes_is_refused(monkeypatch):
    for name, value in (TORCHRUN | {"WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size is 2, but the launcher has started 4 processes"
    ):
        LLM(QWEN3, load_format="dummy", tensor_parallel_size=2, **OPTIONS)


SCRIPT = """
import os
from pathlib import Path
import torch
from engine import LLM, SamplingParams
from tests.engine.checkpoints import QWEN3

torch.set_num_threads(1)
for seed in (0, 1):  # the second engine joins the same group
    with LLM(QWEN3, load_format="dummy", seed=seed, tensor_parallel_size=2, device="cpu", num_kv_blocks=20) as llm:
        assert llm.runner.group.size == 2
        params = [SamplingParams(temperature=t, seed=3, max_tokens=8, ignore_eos=True) for t in (0.0, 1.0)]
        outputs = llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
    ids = [list(output.token_ids) for output in outputs]
    Path(f"rank-{os.environ['RANK']}-seed-{seed}").write_text(str(ids))
"""


def test_two_processes_of_torchrun_are_the_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(script)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for seed in (0, 1):
        with LLM(QWEN3, load_format="dummy", seed=seed, device="cpu", num_kv_blocks=20) as llm:
            params = [
                SamplingParams(temperature=t, seed=3, max_tokens=8, ignore_eos=True) for t in (0.0, 1.0)
            ]
            outputs = llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
        ids = [list(output.token_ids) for output in outputs]
        for rank in range(2):
            assert (tmp_path / f"rank-{rank}-seed-{seed}").read_text() == str(ids)
