"""Fused layers of few decode rows against Transformers and the unfused engine, in the interpreter; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.execution.kernel_choice import choose_kernels
from engine.execution.loader import load_model
from engine.layers.attention_metadata import KernelChoice
from engine.layers.fusion import NO_FUSION, LayerFusion
from engine.models.checkpoint import resolve_model
from engine.parallel.group import ParallelGroup
from kernels import decode, prefill
from tests.engine.checkpoints import LLAMA, QWEN3, reference_model, write_random_checkpoint
from tests.engine.paged_batch import PagedBatch

MODELS = {
    "qwen3": QWEN3,
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
}
LENGTHS = (9, 12, 5)


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp(request.param), MODELS[request.param])


def kernels(fusion: LayerFusion) -> KernelChoice:
    return KernelChoice(decode.get("torch"), prefill.get("torch"), use_triton=True, fusion=fusion)


def chosen(hidden_size: int = 64, dtype: torch.dtype = torch.float32, **options: Any) -> LayerFusion:
    """What an engine with these arguments fuses."""
    config = EngineConfig(**({"device": "cpu", "use_triton": True} | options))
    return choose_kernels(config, torch.device("cpu"), hidden_size=hidden_size, dtype=dtype).fusion


def decoded(checkpoint: Path, fusion: LayerFusion, device: torch.device) -> tuple[Any, list[list[int]], Any]:
    """(model, sequences, logits of their last three tokens, each decoded in one step of all sequences)."""
    model = load_model(
        resolve_model(checkpoint, "auto"),
        load_format="auto",
        device=device,
        dtype=torch.float32,
        group=ParallelGroup.single(),
        kernels=kernels(fusion),
        seed=0,
    )
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(model.config.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS
    ]
    batch = PagedBatch(model, sequences, block_size=4)
    batch.step({i: length - 3 for i, length in enumerate(LENGTHS)})
    steps = [batch.step({}, decodes=range(len(LENGTHS))) for _ in range(3)]
    return model, sequences, [torch.cat([step[i] for step in steps]) for i in range(len(LENGTHS))]


def test_logits_equal_transformers(checkpoint: Path, device: torch.device) -> None:
    fusion = chosen(layer_fusion="on")
    assert fusion.applies(len(LENGTHS), len(LENGTHS))
    _, sequences, logits = decoded(checkpoint, fusion, device)
    reference = reference_model(checkpoint)
    for i, sequence in enumerate(sequences):
        with torch.no_grad():
            expected = reference(torch.tensor([sequence])).logits[0, -3:]
        torch.testing.assert_close(logits[i].cpu(), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits[i].cpu().argmax(-1), expected.argmax(-1))


def test_only_steps_of_few_decode_rows_are_fused(checkpoint: Path, device: torch.device, monkeypatch) -> None:
    fused: list[int] = []
    original = LayerFusion.add_linear
    monkeypatch.setattr(
        LayerFusion, "add_linear", lambda self, x, *rest: (fused.append(len(x)), original(self, x, *rest))[1]
    )
    model, _, _ = decoded(checkpoint, LayerFusion(max_rows=2), device)
    assert not fused
    decoded(checkpoint, LayerFusion(max_rows=3), device)
    assert fused == [3] * (3 * 2 * model.config.num_layers)


def test_on() -> None:
    on = chosen(layer_fusion="on")
    assert [rows for rows in range(20) if on.applies(rows, rows)] == list(range(1, 17))
    assert not on.applies(3, 4), "a prefill token is no decode row"
    with pytest.raises(ValueError, match="layer_fusion 'on' needs use_triton"):
        chosen(layer_fusion="on", use_triton=False)
    with pytest.raises(ValueError, match="layer_fusion 'on' needs tensor_parallel_size 1, got 2"):
        chosen(layer_fusion="on", tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("hidden_size", "first"), [(1024, None), (2048, None), (4095, None), (4096, 1), (5120, 1), (8192, 1)]
)
def test_auto_takes_what_was_measured_to_be_faster(hidden_size: int, first: int | None) -> None:
    expected = [] if first is None else list(range(first, 17))
    for dtype in (torch.bfloat16, torch.float16):
        fusion = chosen(hidden_size, dtype)
        assert [rows for rows in range(20) if fusion.applies(rows, rows)] == expected


def test_auto_fuses_nothing_where_it_was_not_measured() -> None:
    assert chosen(4096, torch.bfloat16) != NO_FUSION
    assert chosen(4096, torch.float32) == NO_FUSION
    for option in ({"use_triton": False}, {"tensor_parallel_size": 2}, {"layer_fusion": "off"}):
        assert chosen(4096, torch.bfloat16, **option) == NO_FUSION


def test_an_engine_chooses_by_its_models_width(tmp_path: Path, monkeypatch) -> None:
    """The rule gets hidden_size and the resolved dtype: those of the checkpoint and the arguments."""
    seen: list[int] = []
    monkeypatch.setattr(
        "engine.execution.kernel_choice.measured_fusion", lambda size: (seen.append(size), NO_FUSION)[1]
    )
    checkpoint = write_random_checkpoint(tmp_path, QWEN3)
    for dtype in ("float32", "bfloat16"):
        options = {"device": "cpu", "use_triton": True, "skip_tokenizer_init": True, "num_kv_blocks": 8}
        with LLM(str(checkpoint), dtype=dtype, **options):
            pass
    assert seen == [resolve_model(checkpoint, "auto").config.hidden_size]


def test_senseless_values_are_named() -> None:
    with pytest.raises(ValueError, match="layer_fusion must be one of auto, off, on, persistent, got 'all'"):
        chosen(layer_fusion="all")
    with pytest.raises(ValueError, match=r"max_rows must be in \[0, 16\], got 17"):
        LayerFusion(max_rows=17)
    with pytest.raises(ValueError, match="needs use_triton"):
        KernelChoice(decode.get("torch"), prefill.get("torch"), False, LayerFusion(max_rows=2))


@pytest.mark.gpu
def test_on_a_gpu_the_engine_gives_the_same_tokens(checkpoint: Path) -> None:
    """Graphs of one, two and five rows, in fp32: greedy tokens are those of separate kernels."""

    def tokens(layer_fusion: str, count: int) -> list[list[int]]:
        options = {"device": "cuda", "dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 200}
        with LLM(str(checkpoint), layer_fusion=layer_fusion, **options) as llm:
            assert llm.runner.uses_cuda_graphs
            prompts = [[1 + i, 7, 3 + 2 * i] for i in range(count)]
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)
            return [list(output.token_ids) for output in outputs]

    for count in (1, 2, 5):
        assert tokens("on", count) == tokens("off", count)
