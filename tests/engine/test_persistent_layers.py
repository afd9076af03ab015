"""An engine whose smallest decode steps are one launch, against Transformers and the separate kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine import LLM, SamplingParams
from engine.execution.loader import load_model
from engine.layers.attention_metadata import KernelChoice
from engine.models.checkpoint import resolve_model
from engine.parallel.group import ParallelGroup
from kernels import decode, prefill
from kernels.persistent import PersistentLayers
from tests.engine.checkpoints import LLAMA, QWEN3, reference_model, write_random_checkpoint
from tests.engine.paged_batch import PagedBatch

MODELS = {
    "qwen3": QWEN3 | {"head_dim": 16, "num_hidden_layers": 2},
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp(request.param), MODELS[request.param])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every call, on eight programs: a GPU has one a multiprocessor, the interpreter runs them in turn."""
    rows: list[int] = []
    original = PersistentLayers.__call__

    def counted(self: PersistentLayers, stream: torch.Tensor, *rest: Any) -> None:
        rows.append(len(stream))
        original(self, stream, *rest)

    monkeypatch.setattr(PersistentLayers, "__call__", counted)
    if not torch.cuda.is_available():
        monkeypatch.setattr("kernels.persistent.layers.device_sm_count", lambda device: 8)
    return rows


def test_logits_equal_transformers(checkpoint: Path, device: torch.device, calls: list[int]) -> None:
    """Two sequences, one across a block's edge; a step with a prompt in it runs layer by layer."""
    model = load_model(
        resolve_model(checkpoint, "auto"),
        load_format="auto",
        device=device,
        dtype=torch.float32,
        group=ParallelGroup.single(),
        kernels=KernelChoice(decode.get("torch"), prefill.get("torch"), use_triton=True),
        seed=0,
    )
    model.prepare_persistent_layers()
    generator = torch.Generator().manual_seed(0)
    lengths = (18, 7)
    sequences = [
        torch.randint(model.config.vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]
    batch = PagedBatch(model, sequences, block_size=16)
    mixed = [batch.step({0: 15}), batch.step({1: 4}, decodes=[0])]
    assert calls == []
    steps = [*mixed[1:], batch.step({}, decodes=[0, 1]), batch.step({}, decodes=[1, 0])]
    assert calls == [2, 2]
    reference = reference_model(checkpoint)
    for i, sequence in enumerate(sequences):
        with torch.no_grad():
            expected = reference(torch.tensor([sequence[: batch.done[i]]])).logits[0]
        logits = torch.cat([step[i] for step in steps]).cpu()
        torch.testing.assert_close(logits, expected[-len(logits) :], rtol=1e-4, atol=1e-4)


def engine(checkpoint: Path, **options: Any) -> LLM:
    defaults = {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "dtype": "float32",
        "use_triton": True,
        "skip_tokenizer_init": True,
        "num_kv_blocks": 40,
    }
    return LLM(str(checkpoint), **(defaults | options))


def tokens(checkpoint: Path, prompts: list[list[int]], max_tokens: int, **options: Any) -> list[list[int]]:
    with engine(checkpoint, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return [list(output.token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def test_an_engine_gives_the_same_tokens(checkpoint: Path, calls: list[int]) -> None:
    prompts = [[1, 7, 3], [5]]
    expected = tokens(checkpoint, prompts, 3)
    assert calls == []
    assert tokens(checkpoint, prompts, 3, layer_fusion="persistent") == expected
    assert set(calls) == {2}


def test_what_is_refused(tmp_path: Path) -> None:
    checkpoint = write_random_checkpoint(tmp_path, MODELS["qwen3"])
    for options, match in (
        ({"use_triton": False}, "layer_fusion 'persistent' needs use_triton"),
        ({"tensor_parallel_size": 2}, "layer_fusion 'persistent' needs tensor_parallel_size 1, got 2"),
        ({"block_size": 8}, "layer_fusion 'persistent' cannot run this model: block_size is 8"),
    ):
        with pytest.raises(ValueError, match=match):
            engine(checkpoint, layer_fusion="persistent", **options).close()


def test_a_model_that_is_refused(tmp_path: Path) -> None:
    directory = write_random_checkpoint(tmp_path, QWEN3)
    with pytest.raises(ValueError, match="layer_fusion 'persistent' cannot run this model: head_dim is 24"):
        engine(directory, layer_fusion="persistent").close()


def test_a_choice_of_kernels_without_triton_is_refused() -> None:
    with pytest.raises(ValueError, match="persistent_layers needs use_triton"):
        KernelChoice(decode.get("torch"), prefill.get("torch"), use_triton=False, persistent_layers=True)


@pytest.mark.gpu
def test_on_a_gpu_graphs_and_eager_steps_give_the_tokens_of_separate_kernels(
    checkpoint: Path, calls: list[int]
) -> None:
    """One to four requests at once: the third makes steps of more rows than one launch takes."""
    prompts = [[1 + i, 7, 3 + 2 * i] for i in range(4)]
    for count in (1, 2, 3, 4):
        expected = tokens(checkpoint, prompts[:count], 40, layer_fusion="off")
        for enforce_eager in (False, True):
            options = {"layer_fusion": "persistent", "enforce_eager": enforce_eager}
            assert tokens(checkpoint, prompts[:count], 40, **options) == expected
    assert set(calls) == {1, 2}
