"""Which sums go over peer memory, and what is said where none can; a decoder whose ranks sum that way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.execution import all_reduce_choice, collective_timer
from engine.execution.all_reduce_choice import MAX_PEER_BYTES, OneShotAllReduce, choose_all_reduce
from engine.parallel.group import ParallelGroup
from engine.parallel.peer_memory import PeerMemory
from kernels import all_reduce
from kernels.all_reduce import PeerBuffers, buffer_bytes
from kernels.triton_support import INTERPRETING
from tests.engine.checkpoints import QWEN3, write_random_checkpoint
from tests.engine.test_group import logits, run_ranks

CPU = torch.device("cpu")
GLOO = "it needs a GPU for each rank, and these ranks talk over gloo"


def choose(
    monkeypatch: pytest.MonkeyPatch,
    all_reduce: Any,
    *,
    shared: PeerMemory | str = GLOO,
    size: int = 2,
    use_triton: bool = True,
    largest: int = 4096,
) -> tuple[ParallelGroup, ParallelGroup, list[int]]:
    """The group that was given, the group that came back, and the bytes that were asked for."""
    asked: list[int] = []

    def share(group: ParallelGroup, device: torch.device, num_bytes: int) -> PeerMemory | str:
        asked.append(num_bytes)
        return shared

    monkeypatch.setattr(all_reduce_choice, "share_memory", share)
    config = EngineConfig(device="cpu", tensor_parallel_size=size, all_reduce=all_reduce)
    group = ParallelGroup(0, size)
    chosen = choose_all_reduce(config, group, CPU, use_triton=use_triton, largest=largest)
    return group, chosen, asked


def test_by_torch_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineConfig().all_reduce == "auto"  # three times as fast as NCCL on two H200s
    group, chosen, asked = choose(monkeypatch, "torch")
    assert chosen is group
    assert not asked


@pytest.mark.parametrize("name", ["auto", "one_shot"])
def test_one_rank_sums_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    group, chosen, asked = choose(monkeypatch, name, size=1, use_triton=False)
    assert chosen is group
    assert not asked


def test_where_it_cannot_be_had_it_is_refused_by_name_and_auto_goes_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=f"all_reduce 'one_shot' cannot be had: {GLOO}"):
        choose(monkeypatch, "one_shot")
    with pytest.raises(ValueError, match="all_reduce 'one_shot' cannot be had: it needs use_triton"):
        choose(monkeypatch, "one_shot", use_triton=False)
    for options in ({}, {"use_triton": False}):
        group, chosen, asked = choose(monkeypatch, "auto", **options)
        assert chosen is group
        assert bool(asked) == (not options)


def test_a_name_that_is_none() -> None:
    with pytest.raises(ValueError, match="all_reduce must be one of auto, torch, one_shot, got 'ring'"):
        EngineConfig(all_reduce="ring")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["auto", "one_shot"])
@pytest.mark.parametrize(("size", "largest"), [(2, 4096), (2, 64 << 20), (3, 64 << 20), (8, 64 << 20)])
def test_memory_is_shared_for_the_largest_decode_step_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, name: str, size: int, largest: int
) -> None:
    memory = PeerMemory(torch.zeros(1), tuple(16 * (1 + rank) for rank in range(size)), None)
    group, chosen, asked = choose(monkeypatch, name, shared=memory, size=size, largest=largest)
    max_bytes = min(largest, MAX_PEER_BYTES // (size - 1))
    assert asked == [buffer_bytes(max_bytes)]
    assert chosen == group
    assert chosen.host_time is group.host_time
    small = chosen.small_all_reduce
    assert isinstance(small, OneShotAllReduce)
    assert (small.buffers.rank, small.buffers.size, small.buffers.max_bytes) == (0, size, max_bytes)
    assert small.buffers.addresses.tolist() == list(memory.addresses)
    assert small.buffers.owner is memory


def test_only_what_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    small = OneShotAllReduce(PeerBuffers.at((0, 0), 0, 64, CPU, None))
    for tensor, taken in (
        (torch.zeros(16), True),
        (torch.zeros(2, 16, dtype=torch.bfloat16), True),
        (torch.zeros(17), False),
        (torch.zeros(0), False),
        (torch.zeros(4, 4).T[:2], False),
    ):
        assert small.takes(tensor) == taken
    summed: list[tuple[str, int]] = []
    group = ParallelGroup(0, 2, small_all_reduce=small)
    monkeypatch.setattr(
        all_reduce_choice, "one_shot_all_reduce", lambda x, buffers: summed.append(("one_shot", x.numel()))
    )
    monkeypatch.setattr(
        ParallelGroup, "_call", lambda self, function, x: summed.append((function.__name__, x.numel()))
    )
    for numel in (16, 17):
        tensor = torch.zeros(numel)
        assert group.all_reduce(tensor) is tensor
    assert summed == [("one_shot", 16), ("all_reduce", 17)]


def test_the_timer_knows_the_kernel() -> None:
    assert all_reduce._one_shot_kernel.__name__.startswith(collective_timer._KERNELS)


def test_ranks_on_cpus_refuse_it_at_the_start_and_auto_does_without() -> None:
    options: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "num_kv_blocks": 8}
    options |= {"tensor_parallel_size": 2, "skip_tokenizer_init": True}
    with pytest.raises(ValueError, match="all_reduce 'one_shot' cannot be had: it needs use_triton"):
        LLM(QWEN3, all_reduce="one_shot", **options)
    with LLM(QWEN3, all_reduce="auto", **options) as llm:
        assert [report["all_reduce"] for report in llm.runner.report()] == ["torch", "torch"]
        llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)


# --- a decoder --------------------------------------------------------------------------------------------------


def logits_over_shared_memory(group: ParallelGroup, directories: list[Path], folder: Path) -> Any:
    """test_group's logits, all sums but the largest by the kernel, through files that both ranks map."""
    all_reduce.NUM_PROGRAMS = 2  # the interpreter runs them one after another
    max_bytes = 4096
    num_bytes = buffer_bytes(max_bytes)
    mapped = [
        torch.from_file(str(folder / str(rank)), shared=True, size=num_bytes, dtype=torch.uint8)
        for rank in range(group.size)
    ]
    addresses = tuple(t.data_ptr() for t in mapped)
    buffers = PeerBuffers.at(addresses, group.rank, max_bytes, CPU, mapped)
    own = ParallelGroup(group.rank, group.size, small_all_reduce=OneShotAllReduce(buffers))
    return logits(own, directories), int(buffers.calls[0])


@pytest.mark.skipif(not INTERPRETING, reason="the ranks share memory of the host")
def test_logits_of_ranks_that_sum_over_shared_memory(tmp_path: Path) -> None:
    directories = [write_random_checkpoint(tmp_path / "model", QWEN3 | {"num_hidden_layers": 1})]
    for rank in range(2):
        (tmp_path / str(rank)).write_bytes(bytes(buffer_bytes(4096)))
    expected = logits(ParallelGroup.single(), directories)
    results = run_ranks(2, logits_over_shared_memory, tmp_path, directories, tmp_path)
    assert results[0][1] == results[1][1] > 0
    for actual, _ in results:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0]))
