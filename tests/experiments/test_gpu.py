"""What only a GPU can show: graph timing, isolation, out of memory as a row, throttling and identity in provenance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import experiments
from experiments import session
from experiments.arguments import CONF

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


def run(root: Path, suite: str, *overrides: str) -> tuple[int, pd.DataFrame, dict[str, Any]]:
    typed = [f"+suite={suite}", f"run.root={root}", "device=cuda", *overrides]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config: Any = OmegaConf.to_container(compose("config", overrides=typed), resolve=True)
    code = session.run(config, ROOT, typed)
    (folder,) = (root / suite).iterdir()
    return code, experiments.load(folder), json.loads((folder / "provenance.json").read_text())


def test_kernels_are_timed_by_graph_replay_cold_and_hot(tmp_path: Path) -> None:
    code, df, record = run(
        tmp_path,
        "decode_kernel",
        "bench.heads=[64,8]",
        "bench.batch_sizes=[1]",
        "bench.context_lens=[4096]",
        "attention=[single_pass,split_kv,torch]",
    )
    assert code == 0
    assert set(df["status"]) == {"ok"}
    assert (df.loc[df["variant"] != "torch", "timing_method"] == "cuda_graph").all()
    medians = df.groupby(["variant", "cache_state"])["time_us"].median()
    assert medians["single_pass", "cold"] > 10 * medians["split_kv", "cold"]
    cold = df[df["cache_state"] == "cold"]
    assert (cold["roofline_fraction"] < 1.05).all()
    assert df["throttled"].notna().all()
    gpu = record["gpu_before"]
    assert gpu["uuid"].startswith("GPU-")
    for name in ("driver_version", "clocks.sm", "power.limit", "clocks_throttle_reasons.active"):
        assert gpu[name]


def test_all_paths_of_elementwise_operations_are_right_and_timed(tmp_path: Path) -> None:
    options = ("model=qwen3_0_6b", "bench.num_tokens=[4]", "size.rounds=1", "size.samples=2")
    code, df, _ = run(tmp_path, "elementwise_kernel", *options)
    # An operation that this torch's Inductor cannot compile: `sample` with 2.11.
    unable = (df["variant"] == "compile") & (df["status"] == "unsupported")
    assert set(df.loc[unable, "operation"]) <= {"sample"}
    failed = df.loc[(df["status"] != "ok") & ~unable, ["operation", "variant", "status", "error"]]
    assert failed.empty, failed.to_dict("records")
    assert code == 0
    assert set(df["variant"]) == {"torch", "triton", "compile"}
    assert (df.loc[(df["variant"] != "torch") & ~unable, "timing_method"] == "cuda_graph").all()


def test_steps_run_isolated_and_are_checked(tmp_path: Path) -> None:
    code, df, _ = run(
        tmp_path,
        "long_decode",
        "bench.levels=step",
        "bench.engine_tensor_parallel=[1,8]",
        "bench.engine_batch_sizes=[2]",
        "bench.engine_context_lens=[1024]",
        "attention=[single_pass,split_kv]",
        "size.rounds=6",
    )
    assert code == 0
    one = df[df["tp"] == 1]
    assert set(one["status"]) == {"ok"}
    assert (one["tokens_checked"] > 0).all()
    assert (one["peak_memory_bytes"] > 1e9).all()
    many = df[df["tp"] == 8]
    assert set(many["status"]) == {"unsupported"}


def test_transformers_eager_and_graph_agree_in_one_run(tmp_path: Path) -> None:
    code, df, _ = run(
        tmp_path,
        "correctness",
        "model=tiny_qwen3",
        "model.dtype=float32",
        "bench.num_prompts=3",
        "bench.output_len=16",
        "attention=[split_kv,torch]",
    )
    assert code == 0
    split_kv = df[df["variant"] == "split_kv"]
    assert split_kv["execution"].tolist() == ["eager"] * 3 + ["graph"] * 3
    assert set(split_kv["status"]) == {"ok"}
    assert split_kv["identical"].all()
    assert split_kv["identical_to_eager"].tolist()[3:] == [True] * 3
    (folder,) = (tmp_path / "correctness").iterdir()
    agreement = pd.read_csv(folder / "agreement.csv")
    pairs = ["eager_and_transformers", "graph_and_transformers", "graph_and_eager"]
    assert (agreement.loc[agreement["variant"] == "split_kv", pairs] == "identical").all(axis=None)


def test_out_of_memory_is_a_row_and_the_next_point_runs(tmp_path: Path) -> None:
    code, df, _ = run(
        tmp_path,
        "decode_kernel",
        "bench.heads=[8,8]",
        "bench.batch_sizes=[4096,1]",
        "bench.context_lens=[131072]",
        "attention=[split_kv]",
        "size.rounds=2",
        "run.isolate=false",
    )
    assert code == 1
    assert df.loc[df["batch_size"] == 4096, "status"].tolist() == ["oom"]
    assert set(df.loc[df["batch_size"] == 1, "status"]) == {"ok"}


def test_peak_memory_does_not_leak_from_one_point_to_the_next(tmp_path: Path) -> None:
    peaks = {}
    for name, batches in (("up", "[1,64]"), ("down", "[64,1]")):
        _, df, _ = run(
            tmp_path / name,
            "high_concurrency",
            f"bench.num_seqs={batches}",
            "bench.input_len=128",
            "bench.output_len=16",
            "bench.rounds=1",
            "run.isolate=false",
        )
        peaks[name] = df.groupby("batch_size")["peak_memory_bytes"].max()
    assert (peaks["up"] / peaks["down"]).between(0.98, 1.02).all()


def test_a_device_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="visible"):
        run(tmp_path, "decode_kernel", "device=63")
