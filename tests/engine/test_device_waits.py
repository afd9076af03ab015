"""A step waits for the device only where its result is asked for: every other wait is an idle device.

Without a GPU the steps run on the device "meta": what would wait on a real one shows as a copy that blocks, or as a
value or a shape that only the device knows.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.execution import sampler
from engine.execution.batch_state import BatchState
from engine.execution.decode_plan import DecodePlanner
from engine.execution.input_batch import AttentionShape
from engine.execution.model_runner import ModelRunner
from engine.layers.attention_metadata import KernelChoice
from engine.parallel.group import ParallelGroup
from engine.scheduling.step import Chunk, NewBlocks, SlotSetting, StepInput
from kernels import decode, prefill
from tests.engine.checkpoints import QWEN3

META = torch.device("meta")
VOCAB = 50
SETTINGS = tuple(SlotSetting(slot, 0.0, 0, 1.0, 0, None) for slot in range(4))
BLOCKS = tuple(NewBlocks(slot, 0, (2 * slot, 2 * slot + 1)) for slot in range(4))
STEPS = {
    "first chunks": StepInput(
        SETTINGS, BLOCKS, (), 0, 0, (Chunk(0, 0, (1, 2, 3), True), Chunk(1, 0, (4,), False))
    ),
    "mixed": StepInput((), (), (0, 3), 7, 5, (Chunk(1, 1, (1, 2), True), Chunk(2, 0, (4, 5), False))),
    "decode": StepInput((), (), (0, 1, 3), 7, 5, ()),
}


class HostWaits(TorchDispatchMode):
    """Notes every operation for which the host would wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        make = torch.tensor

        def tensor(values, **options):
            if torch.device(options.get("device") or "cpu") == META:
                self.found.append("torch.tensor")  # which copies from memory that is not pinned
            return make(values, **options)

        monkeypatch.setattr(torch, "tensor", tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, options = str(func), kwargs or {}
        source = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
        target = torch.device(options.get("device") or source or "cpu")
        if name.startswith("aten._to_copy") and target != source and not options.get("non_blocking"):
            self.found.append(name)
        if name.startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select")):
            self.found.append(name)
        if name.startswith("aten.index") and any(_is_mask(index) for index in args[1]):
            self.found.append(f"{name} by a mask")
        return func(*args, **options)


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


@pytest.fixture
def runner():
    """A runner without weights, whose network gives zeros."""
    runner = object.__new__(ModelRunner)
    runner.config, runner.device, runner.group = EngineConfig(), META, ParallelGroup.single()
    runner.max_model_len, runner.graphs = 64, None
    runner.kernels = KernelChoice(decode.get("single_pass"), prefill.get("torch"), use_triton=False)
    runner.shape = AttentionShape(4, 2, 16, 16, torch.float32, META)
    runner.planner = DecodePlanner(runner.kernels.decode, runner.shape.decode_problem)
    runner.state = BatchState(8, 4, VOCAB, META)
    runner.model = SimpleNamespace(
        lm_head=None, compute_logits=lambda hidden: torch.zeros((len(hidden), VOCAB), device=META)
    )
    runner.forward = lambda decodes, chunks, plan: torch.zeros(
        (sum(len(rows.input_ids) for rows in (decodes, chunks) if rows is not None), 8), device=META
    )
    return runner


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_launched_without_waiting(runner, name, monkeypatch):
    step = STEPS[name]
    sampled = step.sampled_slots
    with HostWaits(monkeypatch) as waits:
        runner.state.apply(step)
        token_ids, logits = runner.run_eagerly(step, runner.state.sampling_kind(sampled))
        sampler._gather_logprobs(logits, token_ids, [(0, 3)])
    assert waits.found == []
    assert token_ids.shape == (len(sampled),)
    assert token_ids.device == META


def test_what_waits_is_found(monkeypatch):
    values = torch.zeros(2, device=META)
    with HostWaits(monkeypatch) as waits:
        torch.tensor([1, 2], device=META)
        torch.arange(2).to(META)
        for wait in (lambda: values[[True, False]], lambda: values[values > 0], lambda: values.sum().item()):
            with pytest.raises((RuntimeError, NotImplementedError)):
                wait()
    assert len(waits.found) >= 5


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_steps_on_a_gpu_wait_only_for_their_results(enforce_eager):
    params = [
        SamplingParams(temperature=t, top_k=k, logprobs=n, max_tokens=6 + i, ignore_eos=True)
        for i, (t, k, n) in enumerate([(0.0, -1, None), (1.0, 20, 2), (0.7, -1, None), (1.0, -1, 0)])
    ]
    options = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": 32,
        "num_kv_blocks": 64,
    }
    with LLM(QWEN3 | {"head_dim": 64}, device="cuda", enforce_eager=enforce_eager, **options) as llm:
        prompts = [[i + 1] * (20 * i + 3) for i in range(4)]
        llm.runner.capture_at_once(True)
        for _ in range(2):  # compiles and captures
            llm.generate(prompts, params, use_tqdm=False)
            llm.reset_prefix_cache()
        torch.cuda.set_sync_debug_mode("error")  # events are waited for all the same
        try:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [len(output.token_ids) for output in outputs] == [6, 7, 8, 9]
