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
    prefill_attention="triton", skip_tokenizer_init=True, num_kv_blocks=BLOCKS, max_num_seqs=MOST_ROWS,
    max_model_len=LONGEST, max_num_batched_tokens=2048, block_size=16,
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
    runner.allocate_kv_cache(BLOCKS)

assert lazily(rehearse) == [] and len(compiled) > 20, compiled
assert runner.state.num_computed[runner.state.padding_slot] == -1 and runner.group.size == RANKS
"""

FIRST_STEPS = """
print(lazily(lambda: runner.launch(runner._largest_step()).result()))
print(lazily(generate, 1, 200), lazily(generate, 1, 9), lazily(generate, 1, 100, temperature=0.0))
print(lazily(generate, 16, 70, top_p=0.9, logprobs=2), lazily(generate, 16, 70, temperature=0.0))
print(lazily(generate, 3, 70, top_k=5), lazily(generate, 1, 30, top_k=5), lazily(generate, 1, 6))
"""

ANY_STEPS = """
import random
rng = random.Random(SEED)
def serve(num_requests, longest, pause):
    for i in range(num_requests):
        prompt = [7] * rng.randrange(1, longest)
        params = SamplingParams(temperature=0.6, max_tokens=rng.randrange(1, 80), ignore_eos=True)
        llm.engine.add_request(prompt, params)
        for _ in range(rng.randrange(pause)):
            llm.engine.step()
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
print(lazily(serve, 12, 60, 12), lazily(serve, 12, LONGEST - 80, 12), lazily(serve, 30, 60, 12))
print(lazily(serve, 80, LONGEST - 80, 3))
"""

EVERY_PLAN = """
from engine.execution.graph_sizes import decode_sizes
def attend():
    shape = runner.shape
    k_cache, v_cache = runner.new_kv_cache(1)[0].unbind(0)
    for num_rows in {*decode_sizes(MOST_ROWS), 3, 5, 17, 33, 100}:
        qkv = torch.zeros(num_rows, shape.num_q_heads + 2 * shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
        inputs = qkv[:, : shape.num_q_heads], k_cache, v_cache, torch.zeros(num_rows, LONGEST // 16, dtype=torch.int32)
        lens = torch.zeros(num_rows, dtype=torch.int32)
        for plan in runner.planner.every_plan(num_rows, LONGEST):
            runner.kernels.decode(*inputs, lens, workspace=plan.workspace(), **plan.options)
print(lazily(attend))
"""


SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "small": (1, {"num_hidden_layers": 3}),
    "grouped": (1, {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}),
    "groups of 8": (1, {"num_attention_heads": 8, "num_key_value_heads": 1, "num_hidden_layers": 2}),
    "ranks": (2, {}),
}

REAL_SHAPES = {
    "0.6B": {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    | {"hidden_size": 1024, "intermediate_size": 3072},
    "8B": {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    | {"hidden_size": 4096, "intermediate_size": 12288},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_steps_compile_nothing(shape: str) -> None:
    ranks, changes = SHAPES[shape]
    sizes = f"RANKS, CHANGES = {ranks}, {changes}; BLOCKS, MOST_ROWS, LONGEST = 300, 16, 256"
    assert run_program(f"{sizes}\n{PROGRAM}{FIRST_STEPS}").split() == ["[]"] * 9


@pytest.mark.parametrize("shape", ["0.6B", "8B"])
def test_no_later_step_compiles_anything(shape: str) -> None:
    """A step that does lasts a second: for few rows and many, alike and ragged, short contexts and long ones."""
    changes = {"num_hidden_layers": 1, "max_position_embeddings": 2048} | REAL_SHAPES[shape]
    sizes = f"RANKS, CHANGES = 1, {changes}; BLOCKS, MOST_ROWS, LONGEST, SEED = 10240, 80, 2048, 0"
    assert run_program(f"{sizes}\n{PROGRAM}{ANY_STEPS}").split() == ["[]"] * 4


@pytest.mark.parametrize("num_heads", [16, 40])
def test_attention_of_any_number_of_rows_compiles_nothing(num_heads: int) -> None:
    """Of 40 heads 96 rows have a kernel of their own, between those of 64 and of 128."""
    changes = {"num_hidden_layers": 1, "max_position_embeddings": 40960, "head_dim": 128}
    changes |= {"num_attention_heads": num_heads, "num_key_value_heads": 8}
    sizes = f"RANKS, CHANGES = 1, {changes}; BLOCKS, MOST_ROWS, LONGEST = 300, 512, 40960"
    assert run_program(f"{sizes}\n{PROGRAM}{EVERY_PLAN}") == "[]\n"


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
