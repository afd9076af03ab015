"""Fitting the planner's constants: from times that known constants make, and from the samples of an H200."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from experiments import tune
from experiments.tune import GRID, Sample
from kernels import decode
from kernels.decode.cost_model import CostModel, SharesModel
from kernels.decode.merge import partial_numel
from kernels.decode.planner import plan_splits
from kernels.decode.split_kv import shape_of
from kernels.tuned_tables import table_name

SM_COUNT = 132
TRUE = CostModel(2.5, 0.04, 20.0, 3.0, 30_000.0, 4.0, 0.02)


def samples(model: CostModel = TRUE) -> list[Sample]:
    """split_kv at several shapes and splits, taking as long as the model says."""
    found = []
    for heads, lens in GRID[:12]:
        for splits in (1, 2, 4, 8, 16, 32, 64):
            sample = Sample("split_kv", 32, 32, splits, heads, 16, lens, 1.0)
            time_us = model.time_us(sample.work(), splits, sample.gpu(SM_COUNT))
            found.append(replace(sample, time_us=time_us))
    return found


def test_a_fit_finds_what_made_the_times() -> None:
    made = samples()
    found = tune.fit(made, SM_COUNT, steps=3000)
    for sample in made:
        modelled = found.time_us(sample.work(), sample.num_splits, sample.gpu(SM_COUNT))
        assert modelled == pytest.approx(sample.time_us, rel=0.15)
    assert found.sm_bytes_per_us == pytest.approx(TRUE.sm_bytes_per_us, rel=0.1)


def test_a_fit_of_equal_shares_finds_what_made_the_times() -> None:
    true = SharesModel(9.0, 33_000.0)
    made = []
    for heads, lens in GRID:
        sample = Sample("stream_k_tma", 16, 16, 1, heads, 16, lens, 1.0)
        made.append(replace(sample, time_us=true.time_us(sample.work(), 1, sample.gpu(SM_COUNT))))
    found = tune.fit(made, SM_COUNT, steps=2000)
    assert isinstance(found, SharesModel)
    assert found.start_us == pytest.approx(9.0, rel=0.03)
    assert found.sm_bytes_per_us == pytest.approx(33_000.0, rel=0.03)


def test_equal_shares_are_chosen_for_ragged_rows_alone() -> None:
    """As PlannedDecode does, whatever the models say of rows that are alike."""
    models = {"split_kv": {"32": TRUE}, "stream_k_tma": {"16": SharesModel(1e-3, 1e9)}}
    for lens, expected in (((4096,) * 64, "split_kv x1"), (tune.RAGGED, "stream_k_tma")):
        made = [
            Sample("split_kv", 32, 32, 1, 64, 16, lens, 2.0),
            Sample("stream_k_tma", 16, 16, 1, 64, 16, lens, 1.0),
        ]
        (row,) = tune.regrets(made, models, SM_COUNT)
        assert row["chosen"] == expected
        assert row["best"] == "stream_k_tma"


def test_regret_is_what_the_choice_costs_over_the_best() -> None:
    made = samples()
    right = tune.regrets(made, {"split_kv": {"32": TRUE}}, SM_COUNT)
    assert [row["regret"] for row in right] == [0.0] * 12
    # A model that takes a split for free chooses too many of them, and is told so.
    wrong = replace(TRUE, merge_us=1e-9, merge_split_us=1e-9, start_us=1e-9, extra_keys=1e-9)
    assert max(row["regret"] for row in tune.regrets(made, {"split_kv": {"32": wrong}}, SM_COUNT)) > 0.005


def test_raw_rows_become_a_table_that_the_planner_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in samples()))
    arguments = ["tune", "--from", str(raw), "--gpu", "Some GPU", "--sm-count", "132", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--steps", "300"])
    assert tune.main() == 0
    table = json.loads((tmp_path / table_name("Some GPU")).read_text())
    assert table["regret"]["shapes"] == 12
    CostModel(**table["models"]["split_kv"]["32"])
    assert "regret" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tune"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main() == 1
    assert "CUDA device" in capsys.readouterr().err


def test_the_table_of_the_h200_chooses_well_among_its_samples() -> None:
    """The committed raw rows: the committed constants choose within 2% of the best on average, 10% at worst."""
    folder = Path(__file__).parents[2]
    table = json.loads((folder / "kernels" / "decode" / "tuned" / table_name("NVIDIA H200")).read_text())
    models = {
        k: {t: (SharesModel if k in tune.OF_SHARES else CostModel)(**m) for t, m in tiles.items()}
        for k, tiles in table["models"].items()
    }
    made = tune.read_samples(folder / "results" / "decode_splits-h200" / "samples.jsonl")
    found = [row["regret"] for row in tune.regrets(made, models, SM_COUNT)]
    assert max(found) == pytest.approx(table["regret"]["worst"])
    assert sum(found) / len(found) < 0.02
    assert max(found) < 0.1


def test_the_planner_follows_the_table() -> None:
    """What the planner picks is what the fitted constants say is fastest."""
    sample = Sample("split_kv", 32, 32, 1, 64, 16, (4096,) * 8, 1.0)
    problem = sample.problem()
    assert plan_splits(problem, shape_of(problem), sm_count=SM_COUNT) > 1


@pytest.mark.parametrize(
    "contender",
    [each for each in tune.CONTENDERS if each.kernel not in tune.OF_SHARES],
    ids=lambda each: f"{each.kernel}{'-lighter' if each.lighter else ''}",
)
@pytest.mark.parametrize(("heads", "lens"), [(64, (4096,)), (64, tune.RAGGED), (16, (1024,) * 256)])
def test_the_numbers_measured_fit_the_workspace(
    contender: tune.Contender, heads: int, lens: tuple[int, ...]
) -> None:
    """On the H200 a ragged batch was asked for more splits than its kernel's workspace holds."""
    problem = Sample(contender.kernel, 32, 32, 1, heads, 16, lens, 1.0).problem()
    found = contender.splits(problem)
    workspace = decode.get(contender.kernel).workspace(problem, torch.device("meta"))
    assert found[0] == 1
    assert workspace is not None
    assert workspace.numel() >= partial_numel(len(lens), heads, max(found), 128)
