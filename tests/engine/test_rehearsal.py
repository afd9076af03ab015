"""What an engine compiles ahead is what its first steps launch, by Triton's keys: types, alignments, constants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import LLM
from engine.execution import model_runner
from engine.execution.model_runner import ModelRunner
from tests.engine.checkpoints import QWEN3
from tests.kernels.no_gpu import run_program

PROGRAM = """
import threading
from types import SimpleNamespace
import torch, triton

empty, new_empty = torch.empty, torch.Tensor.new_empty
torch.empty = lambda *shape, **options: empty(*shape, **options).zero_()  # no launch writes anything
torch.Tensor.new_empty = lambda *arguments, **options: new_empty(*arguments, **options).zero_()
compiled = []
def compile(source, **options):
    compiled.append((source.name, threading.current_thread() is threading.main_thread()))
    return SimpleNamespace(
        run=lambda *arguments: None, launch_metadata=lambda *arguments: None, function=None, packed_metadata=None
    )
triton.compiler.compile = compile

from engine import LLM, SamplingParams
from engine.parallel.group import ParallelGroup
from kernels.compile_ahead import compile_ahead
from tests.engine.checkpoints import QWEN3

class Twins(ParallelGroup):  # the other rank is at the same place, with the same tensors
    all_reduce = broadcast = lambda self, tensor: tensor
    all_gather = lambda self, tensor, dim: torch.cat([tensor, tensor], dim)
    smallest = lambda self, value, device: value
    is_capturable = False

if RANKS == 2:
    ParallelGroup.single = lambda: Twins(0, 2)
llm = LLM(
    QWEN3 | CHANGES, load_format="dummy", dtype="bfloat16", device="cpu", use_triton=True, decode_attention="planned",
    prefill_attention="triton", skip_tokenizer_init=True, num_kv_blocks=300, max_num_seqs=16, max_model_len=256,
    max_num_batched_tokens=2048, block_size=16,
)
runner = llm.runner
def lazily(function, *arguments, **options):
    before = len(compiled)
    function(*arguments, **options)
    return sorted({name for name, on_main in compiled[before:] if on_main})
def generate(num_prompts, num_tokens, **sampling):
    prompts = [[7 + i] * num_tokens for i in range(num_prompts)]
    llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True, **sampling), use_tqdm=False)
def rehearse():
    with compile_ahead(runner.device):
        runner._rehearse()
    runner.allocate_kv_cache(300)

assert lazily(rehearse) == [] and len(compiled) > 20, compiled
assert runner.state.num_computed[runner.state.padding_slot] == -1 and runner.group.size == RANKS
print(lazily(lambda: runner.launch(runner._largest_step()).result()))
print(lazily(generate, 1, 200), lazily(generate, 1, 9), lazily(generate, 1, 100, temperature=0.0))
print(lazily(generate, 16, 70, top_p=0.9, logprobs=2), lazily(generate, 16, 70, temperature=0.0))
print(lazily(generate, 3, 70, top_k=5), lazily(generate, 1, 30, top_k=5), lazily(generate, 1, 6))
"""


SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "small": (1, {"num_hidden_layers": 3}),
    "grouped": (1, {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}),
    "groups of 8": (1, {"num_attention_heads": 8, "num_key_value_heads": 1, "num_hidden_layers": 2}),
    "ranks": (2, {}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_steps_compile_nothing(shape: str) -> None:
    ranks, changes = SHAPES[shape]
    assert run_program(f"RANKS, CHANGES = {ranks}, {changes}\n{PROGRAM}").split() == ["[]"] * 9


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelRunner]:
    """One that takes its device for a GPU, on which Triton could compile ahead."""
    monkeypatch.setattr(model_runner, "can_compile_ahead", lambda: True)
    with LLM(QWEN3, load_format="dummy", device="cpu", num_kv_blocks=8, max_model_len=64) as llm:
        found = llm.runner
        assert isinstance(found, ModelRunner)
        device, group = found.device, found.group
        found.device = torch.device("cuda")
        found.kernels = replace(found.kernels, use_triton=True)
        yield found
        found.device, found.group = device, group


def test_who_compiles_ahead(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a CPU, nor torch, nor a Triton without the means, nor a kernel of another package."""
    assert runner._compiles_ahead
    own = runner.kernels
    foreign = type("Foreign", (type(own.decode),), {"__module__": "elsewhere"})()
    for other in ({"use_triton": False}, {"decode": foreign}, {"persistent_layers": True}):
        runner.kernels = replace(own, **other)
        assert not runner._compiles_ahead, other
    runner.kernels, runner.device = own, torch.device("cpu")
    assert not runner._compiles_ahead
    runner.device = torch.device("cuda")
    monkeypatch.setattr(model_runner, "can_compile_ahead", lambda: False)
    assert not runner._compiles_ahead


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_compiles_and_the_others_wait(
    rank: int, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rehearse, since they meet in collectives; none measures its memory before rank 0 has compiled."""
    done: list[Any] = []

    @contextlib.contextmanager
    def compile_ahead(device: torch.device, *, compiles: bool) -> Iterator[None]:
        done.append(compiles)
        yield
        done.append("compiled")

    def smallest(value: int, device: torch.device) -> int:
        done.append(value)
        return value

    monkeypatch.setattr(model_runner, "compile_ahead", compile_ahead)
    monkeypatch.setattr(runner, "group", SimpleNamespace(rank=rank, smallest=smallest))
    monkeypatch.setattr(runner, "_rehearse", lambda: done.append("rehearsed"))
    monkeypatch.setattr(runner, "num_blocks_that_fit", lambda: 7)
    monkeypatch.setattr(runner, "allocate_kv_cache", done.append)
    runner.prepare()
    assert done == [rank == 0, "rehearsed", "compiled", 0, 7, 7]
