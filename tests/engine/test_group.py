"""Collectives, alone and over gloo; and the decoder of two ranks against that of one (F4 of the case list)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from engine.execution.loader import load_model
from engine.models.checkpoint import resolve_model
from engine.models.decoder import Decoder
from engine.parallel.group import ParallelGroup
from tests.engine.checkpoints import LLAMA, QWEN3, write_random_checkpoint
from tests.engine.paged_batch import PagedBatch, choose


def test_a_group_of_one_does_nothing() -> None:
    group, tensor = ParallelGroup.single(), torch.arange(3.0)
    assert group.all_reduce(tensor) is tensor
    assert group.all_gather(tensor, dim=0) is tensor
    assert (group.rank, group.size) == (0, 1)


@pytest.mark.parametrize(("rank", "size"), [(0, 0), (-1, 2), (2, 2)])
def test_a_rank_outside_its_group_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"rank must be in \[0, size\)"):
        ParallelGroup(rank, size)


def test_ranks_without_a_process_group_cannot_communicate() -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 2 has no process group"):
        ParallelGroup(1, 2).all_reduce(torch.zeros(1))


def run_ranks(size: int, work: Callable[..., Any], directory: Path, *args: Any) -> list[Any]:
    """work(group, *args) on `size` processes that meet through a file; their results in rank order."""
    mp.spawn(_rank, (size, work, str(directory), args), nprocs=size)
    return [torch.load(directory / f"result-{rank}") for rank in range(size)]


def _rank(rank: int, size: int, work: Callable[..., Any], directory: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=size)
    try:
        result = work(ParallelGroup(rank, size), *args)
        torch.save(result, f"{directory}/result-{rank}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def threads_of_gloo() -> list[str]:
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended since
            names.append(path.read_text())
    return [name for name in names if "gloo" in name]


def collectives_then_threads(group: ParallelGroup) -> dict[str, Any]:
    return {"collectives": collectives(group), "threads": threads_before_and_after_leaving()}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks found, which start once for several tests."""
    return run_ranks(2, collectives_then_threads, tmp_path_factory.mktemp("ranks"))


def threads_before_and_after_leaving() -> tuple[list[str], list[str]]:
    before = threads_of_gloo()
    dist.destroy_process_group()
    deadline = time.monotonic() + 30  # a joined thread is listed for a moment more
    while (after := threads_of_gloo()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, after


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads the names of threads from /proc")
def test_no_thread_of_gloo_outlives_the_process_group_though_a_parallel_group_does(
    two_ranks: list[dict[str, Any]],
) -> None:
    """One that does may touch a tensor while the interpreter ends: "terminate called without an active exception"."""
    for rank in two_ranks:
        before, after = rank["threads"]
        assert before
        assert after == []


def collectives(group: ParallelGroup) -> dict[str, torch.Tensor]:
    mine = torch.arange(6.0).view(2, 3) + 10 * group.rank
    texts = group.gather_texts(f"é {group.rank}", mine.device)
    half = torch.tensor([1.0, 2**-9], dtype=torch.bfloat16) * (group.rank + 1)
    return {
        "sum": group.all_reduce(mine.clone()),
        "bf16 sum": group.all_reduce(half),
        "rows": group.all_gather(mine, dim=0),
        "columns": group.all_gather(mine, dim=-1),
        "of a transpose": group.all_gather(mine.T, dim=0),
        "texts": torch.tensor([text == f"é {rank}" for rank, text in enumerate(texts)]),
        "agree": torch.tensor([group.agrees("one", mine.device), group.agrees(f"{group.rank}", mine.device)]),
    }


def test_collectives_over_gloo(two_ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["collectives"] for rank in two_ranks)
    a = torch.arange(6.0).view(2, 3)
    b = a + 10
    assert torch.equal(first["sum"], a + b)
    assert torch.equal(first["rows"], torch.cat([a, b]))
    assert first["agree"].tolist() == [True, False]
    assert first["texts"].tolist() == [True, True]
    assert torch.equal(first["columns"], torch.cat([a, b], dim=1))
    assert torch.equal(first["of a transpose"], torch.cat([a.T, b.T]))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def load(directory: Path, group: ParallelGroup) -> Decoder:
    return load_model(
        resolve_model(directory, "auto"),
        load_format="auto",
        device=torch.device("cpu"),
        dtype=torch.float32,
        group=group,
        kernels=choose(),
        seed=0,
    )


def logits(group: ParallelGroup, directories: list[Path]) -> list[torch.Tensor]:
    """Of every checkpoint: prefill of two uneven prompts, then a decode step of both."""
    results = []
    for directory in directories:
        model = load(directory, group)
        heads = model.config.heads_per_rank(group.size)
        generator = torch.Generator().manual_seed(0)
        sequences = [
            torch.randint(model.config.vocab_size, (n,), generator=generator).tolist() for n in (9, 30)
        ]
        batch = PagedBatch(model, sequences, block_size=4, num_kv_heads=heads.num_kv_heads)
        prefilled, decoded = batch.step({0: 8, 1: 29}), batch.step({}, decodes=[0, 1])
        results.append(torch.cat([*prefilled.values(), *decoded.values()]))
    return results


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints: tied and untied, with and without biases."""
    configs = [
        QWEN3,
        QWEN3 | {"tie_word_embeddings": False},
        LLAMA | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    ]
    return [
        write_random_checkpoint(tmp_path_factory.mktemp("model"), config, max_shard_size="40KB")
        for config in configs
    ]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_logits_of_several_ranks_equal_those_of_one(
    tmp_path: Path, directories: list[Path], size: int
) -> None:
    """At size 4 the two KV heads are replicated, and 307 ids are padded."""
    expected = logits(ParallelGroup.single(), directories)
    for actual in run_ranks(size, logits, tmp_path, directories):
        for a, b in zip(actual, expected, strict=True):
            assert a.shape[-1] == 307
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_padding_ids_never_win(tmp_path: Path) -> None:
    """With every real logit negative, the zero rows of the padding would."""
    model = load(write_random_checkpoint(tmp_path, QWEN3 | {"vocab_size": 5}), ParallelGroup(1, 2))
    head = model.lm_head
    assert (head.ids.start, head.ids.num_ids, head.ids.num_rows) == (3, 2, 3)
    hidden = -head.weight[:1]
    local = head.local_logits(hidden)
    assert local[0, 0] < 0
    assert local.argmax() < head.ids.num_ids
    assert local[0, 2] == -torch.inf
