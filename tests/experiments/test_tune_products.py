"""The table of products: what is measured, what is kept of it, and that it can be read again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from experiments import tune_products
from experiments.tune_products import Sample, candidates, choose, layer_shapes, write_table
from kernels.product_choice import ProductChoice, read_table
from kernels.tuned_tables import table_name


def sample(kind: str, tile: tuple[int, ...], time_us: float, rows: int = 1) -> Sample:
    return Sample(4096, 1024, rows, kind, tile, time_us, ((time_us,),))


def test_shapes_of_a_rank() -> None:
    """Qwen3-8B: 32 query and 8 KV heads of 128, hidden 4096, intermediate 12288."""
    assert layer_shapes("qwen3_8b", 1) == [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
    assert layer_shapes("qwen3_8b", 2) == [(3072, 4096), (4096, 2048), (12288, 4096), (4096, 6144)]


def test_the_fastest_is_kept_and_torch_unless_another_gains() -> None:
    entries = choose(
        [
            *(
                sample("torch", (), 10.0),
                sample("few_rows", (2, 1024, 4), 9.0),
                sample("dot", (16, 256, 2, 6), 8.0),
            ),
            *(sample("torch", (), 10.0, 2), sample("dot", (16, 256, 2, 6), 9.95, 2)),
        ]
    )
    assert [(e["rows"], e["kind"], e["tile"], e["time_us"]) for e in entries] == [
        (1, "dot", [16, 256, 2, 6], 8.0),
        (2, "torch", [], 10.0),
    ]


def test_a_table_that_was_written_is_read(tmp_path: Path) -> None:
    entries = choose([sample("torch", (), 10.0), sample("few_rows", (2, 1024, 4), 9.0)])
    file = write_table(tmp_path, "Some GPU", entries, {"why": "a test"})
    assert file.name == table_name("Some GPU")
    measured = read_table(json.loads(file.read_text()))
    assert measured == {(4096, 1024): {1: ProductChoice("few_rows", (2, 1024, 4))}}


def test_from_raw_rows_to_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    raw = tmp_path / "raw.jsonl"
    rows = [sample("torch", (), 10.0), sample("dot", (16, 256, 2, 6), 8.0)]
    raw.write_text("".join(json.dumps(vars(row)) + "\n" for row in rows))
    arguments = ["--from", str(raw), "--gpu", "Some GPU", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["tune_products", *arguments])
    assert tune_products.main() == 0
    assert "dot" in capsys.readouterr().out
    assert json.loads((tmp_path / "Some_GPU.json").read_text())["products"][0]["kind"] == "dot"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only without a GPU")
def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["tune_products"])
    assert tune_products.main() == 1
    assert "there is none" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16])
def test_candidates_are_right_and_can_be_timed(rows: int) -> None:
    device = torch.device("cuda", 0)
    found = list(tune_products.measure((1024, 512), [rows], device, rounds=1, samples=1))
    assert len(found) == len(list(candidates(1024, rows)))
    assert all(each.time_us > 0 for each in found)
