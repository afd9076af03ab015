"""Decode steps whose products run each kernel that a table may name, against Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from engine.execution.loader import load_model
from engine.models.checkpoint import resolve_model
from engine.parallel.group import ParallelGroup
from kernels import linear, product_choice
from kernels.product_choice import ProductChoice
from tests.engine.checkpoints import LLAMA, QWEN3, reference_model, write_random_checkpoint
from tests.engine.paged_batch import PagedBatch, choose

MODELS = {
    "qwen3": QWEN3 | {"num_hidden_layers": 2},
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
}
LENGTHS = (9, 12, 5)
DTYPE = torch.float16  # fp32 products are always torch's
LIMIT = 4e-3
"""Relative, of logits: twice what fp16's roundings come to in the interpreter."""
DECODED = 2


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp(request.param), MODELS[request.param], dtype=DTYPE)


@pytest.mark.parametrize(
    "chosen",
    [ProductChoice("few_rows", (16, 64, 4)), ProductChoice("dot", (16, 32, 2, 3))],
    ids=lambda chosen: chosen.kind,
)
def test_logits_equal_transformers(
    checkpoint: Path, device: torch.device, chosen: ProductChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(
        resolve_model(checkpoint, "auto"),
        load_format="auto",
        device=device,
        dtype=DTYPE,
        group=ParallelGroup.single(),
        kernels=choose(use_triton=True),
        seed=0,
    )
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(model.config.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS
    ]
    batch = PagedBatch(model, sequences, block_size=4)
    batch.step({i: length - DECODED for i, length in enumerate(LENGTHS)})

    ran: list[str] = []
    for kind in ("few_rows", "dot"):
        original = getattr(linear, f"{kind}_linear")

        def counted(x: torch.Tensor, *rest, kind: str = kind, original=original, **options) -> torch.Tensor:
            ran.append(kind)
            assert len(x) == len(LENGTHS)
            return original(x, *rest, **options)

        monkeypatch.setattr(linear, f"{kind}_linear", counted)
    monkeypatch.setattr(product_choice, "choose_product", lambda *arguments: chosen)
    steps = [batch.step({}, decodes=range(len(LENGTHS))) for _ in range(DECODED)]
    assert ran == [chosen.kind] * (DECODED * 4 * model.config.num_layers)

    reference = reference_model(checkpoint)  # in fp32: the weights are what fp16 holds
    for i, sequence in enumerate(sequences):
        with torch.no_grad():
            expected = reference(torch.tensor([sequence])).logits[0, -DECODED:]
        logits = torch.cat([step[i] for step in steps]).float().cpu()
        error = ((logits - expected).norm() / expected.norm()).item()
        assert error < LIMIT
