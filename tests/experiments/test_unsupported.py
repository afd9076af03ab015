"""Ranks that cannot share a model, or that this machine has not: rows that say so beside the points that run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import pyplot as plt
from omegaconf import OmegaConf

import experiments
from experiments import session, suites
from experiments.backends.engine import engine_options
from experiments.execution import run_here
from experiments.records import to_frame
from experiments.roofline import Ceilings
from experiments.settings import Settings, resolve
from experiments.suites.protocol import Point, PointContext, Suite
from tests.experiments.test_conf import composed

ROOT = Path(__file__).resolve().parents[2]
# tiny_qwen3 has 8 query and 2 KV heads and an intermediate size of 256.
WITH_RANKS = [
    name
    for name in suites.names()
    if "tensor_parallel" in OmegaConf.load(ROOT / "conf" / "suite" / f"{name}.yaml").bench
]


def made(*overrides: str) -> tuple[Suite, Settings, list[Point]]:
    settings = Settings.parse(resolve(composed("device=cpu", *overrides), ROOT))
    suite = suites.get(settings.suite)
    return suite, settings, suite.points(settings)


@pytest.mark.parametrize("name", WITH_RANKS)
def test_ranks_that_do_not_divide_the_model_are_rows_of_every_suite(name: str) -> None:
    typed = [f"+suite={name}", "attention=[torch,reference]", "bench.tensor_parallel=[3]"]
    if name == "long_decode":
        typed.append("bench.engine_tensor_parallel=[3]")
    suite, settings, points = made(*typed)
    device = torch.device("cpu")
    context = PointContext(settings, device, Ceilings(1e9, {}), "run", "cpu", suite.columns)
    rows = [row for point in points for row in run_here(suite, point, context).rows]
    assert {row["status"] for row in rows} == {"unsupported"}
    assert {row["error"] for row in rows} == {
        "num_q_heads is 8, which tensor_parallel_size 3 does not divide"
    }
    assert {row["tp"] for row in rows} == {3}
    assert all(row["num_q_heads"] is None for row in rows)
    if name != "prefill_kernel":
        assert {row["variant"] for row in rows} == {"torch", "reference"}
    frame = to_frame(rows)
    assert len(suite.summary(frame))
    suite.tables(frame)
    for figure in suite.figures(frame).values():
        assert [text for axes in figure.axes for text in axes.texts]  # that say that there is nothing
        plt.close(figure)


def test_the_other_points_of_the_sweep_run(tmp_path: Path) -> None:
    typed = [
        "+suite=long_decode",
        "device=cpu",
        "attention=[torch]",
        "bench.batch_sizes=[1]",
        "bench.context_lens=[32]",
        "bench.engine_batch_sizes=[1]",
        "bench.engine_context_lens=[32]",
        "bench.tensor_parallel=[3,1]",
        "bench.engine_tensor_parallel=[16,3,1]",
        "bench.engine_steps=1",
        f"run.root={tmp_path}",
        "run.isolate=true",
        "run.timeout_s=300",
    ]
    assert session.run(composed(*typed), ROOT, typed) == 0
    df = experiments.load(tmp_path)
    statuses = df.groupby(["level", "tp"])["status"].agg(lambda found: ", ".join(sorted(set(found))))
    assert statuses.to_dict() == {
        ("kernel", 1): "ok",
        ("kernel", 3): "unsupported",
        ("step", 1): "ok",
        ("step", 3): "unsupported",
        ("step", 16): "unsupported",
    }
    (report,) = tmp_path.rglob("report.md")
    assert "num_q_heads is 8, which tensor_parallel_size 3 does not divide" in report.read_text()


def test_more_ranks_than_an_engine_takes_are_rows() -> None:
    """Heads and layers that 16 ranks could share, were there an engine of so many."""
    fields = "model.config.num_attention_heads=16", "model.config.num_key_value_heads=16"
    _, _, points = made("+suite=tp_scaling", "model=tiny_qwen3", *fields, "bench.tensor_parallel=[1,16]")
    reasons = {point.params["tp"]: point.unsupported for point in points}
    assert reasons == {1: None, 16: "tensor_parallel_size must be at most 8, got 16"}


def test_more_ranks_than_gpus_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    _, settings, _ = made("+suite=tp_scaling")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    on_gpu = dataclasses.replace(settings, device="cuda:1")
    points = suites.get("tp_scaling").points(on_gpu)
    reasons = {point.params["tp"]: point.unsupported for point in points}
    assert reasons[1] is None
    assert "needs 2 CUDA devices from cuda:1 on, but 2 are visible" in str(reasons[2])


def test_a_kernel_that_cannot_serve_the_model_is_known_before_anything_starts() -> None:
    _, _, points = made("+suite=throughput", "attention=torch", "+attention.sdpa={decode: sdpa}")
    reasons: dict[Any, Any] = {point.params["variant"]: point.unsupported for point in points}
    assert reasons["torch"] is None
    assert "contiguous" in reasons["sdpa"]


def test_an_engine_option_that_no_engine_takes_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="block_size must be an integer >= 1, got -1"):
        made("+suite=throughput", "engine.block_size=-1")
    with pytest.raises(ValueError, match=r"unknown option engine\.typo"):
        made("+suite=throughput", "+engine.typo=1")
    _, settings, _ = made("+suite=throughput")
    assert engine_options(settings) == dict(settings.engine)
