"""Every suite at size smoke, with few rounds: rows, table, plots and reports, and what each is about."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import experiments
from experiments import session, suites
from experiments.arguments import CONF

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {"ok", "not_timed", "unsupported"}

# Less of the same, where a suite's smoke size takes more than a few seconds.
FEWER = {
    "attribution": ["bench.context_lens=[128]", "bench.engine_passes=1", "bench.rounds=2"],
    "decode_kernel": ["bench.heads=[8,2]", "bench.batch_sizes=[1]"],
    "elementwise_kernel": ["bench.num_tokens=[1]"],
    "long_decode": [
        "bench.batch_sizes=[1]",
        "bench.context_lens=[128]",
        "bench.engine_context_lens=[128]",
        "bench.engine_tensor_parallel=[1]",  # two ranks: tp_scaling
        "attention=torch",
    ],
    "tp_scaling": ["bench.batch_sizes=[4]"],
    "serving": ["bench.request_rates=[80]"],
    "correctness": [
        "bench.num_prompts=2",
        "bench.output_len=4",
        "bench.interpreted_prompts=1",
        "bench.interpreted_output_len=2",
        "attention=[torch,split_kv]",
    ],
}


@cache
def folder_of(suite: str, root: Path) -> Path:
    overrides = [f"+suite={suite}", "device=cpu", "size.rounds=2", "size.samples=2", f"run.root={root}"]
    overrides.append("run.timeout_s=600")  # interpreted kernels on a busy machine
    overrides += FEWER.get(suite, [])
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config: Any = OmegaConf.to_container(compose("config", overrides=overrides), resolve=True)
    assert session.run(config, ROOT, overrides) == 0
    (folder,) = (root / suite).iterdir()
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("suites")


def rows_of(suite: str, root: Path) -> pd.DataFrame:
    return experiments.load(folder_of(suite, root))


@pytest.mark.parametrize("suite", suites.names())
def test_every_suite_at_size_smoke(suite: str, root: Path) -> None:
    folder = folder_of(suite, root)
    df = experiments.load(folder)
    assert set(df["status"]) <= ALLOWED
    assert (df["status"] == "ok").any()
    assert set(df["suite"]) == {suite}
    assert (df["size"] == "smoke").all()
    assert df["device_name"].notna().all()
    timed = df[(df["status"] == "ok") & df["time_us"].notna()]
    assert (timed["time_us"] > 0).all()
    assert (timed["timing_method"] == "perf_counter").all()
    for row in df[df["status"] != "ok"].itertuples():
        assert row.error
        assert pd.isna(row.time_us)
    for name in ("table.csv", "report.md", "report.html", "provenance.json", "config.yaml"):
        assert (folder / name).stat().st_size > 100
    assert all(path.stat().st_size > 2000 for path in (folder / "plots").glob("*.png"))
    assert list((folder / "plots").glob("*.png"))


def test_prefix_cache_hot_computes_only_what_is_not_shared(root: Path) -> None:
    df = rows_of("prefix_cache", root)
    cold, hot = (df[df["cache_state"] == state] for state in ("cold", "hot"))
    assert (cold["hit_rate"] == 0).all()
    assert (hot["hit_rate"] == (256 - 16) / 256).all()
    assert (hot["prompt_tokens"] == 4 * 256).all()
    assert (hot["flops"] < cold["flops"].min() / 2).all()
    ratios = cold["prefill_s"].to_numpy() / hot["prefill_s"].to_numpy()
    table = suites.get("prefix_cache").summary(df)
    speedup = table.loc[table["cache_state"] == "hot", "speedup"].iloc[0]
    assert speedup == pytest.approx(np.exp(np.log(ratios).mean()))


def test_max_output_gives_every_token_and_their_times(root: Path) -> None:
    df = rows_of("max_output", root)
    assert df["output_tokens"].tolist() == [192]
    assert df["prompt_tokens"].tolist() == [64]
    assert len(df["samples_us"].iloc[0]) == 16


def test_elementwise_compares_three_paths_of_every_operation(root: Path) -> None:
    from experiments.elementwise_bench import OPERATIONS

    df = rows_of("elementwise_kernel", root)
    assert set(df["operation"]) == set(OPERATIONS)
    for _, rows in df.groupby("operation"):
        assert list(dict.fromkeys(rows["variant"])) == ["torch", "triton", "compile"]
    assert (df.loc[df["variant"] == "torch", "status"] == "ok").all()
    compiled = df[df["variant"] == "compile"]
    assert (compiled["status"] == "unsupported").all()
    assert compiled["error"].str.contains("on cpu Inductor needs a C\\+\\+ compiler").all()
    paths = pd.read_csv(folder_of("elementwise_kernel", root) / "paths.csv")
    assert len(paths) == 2 * len(OPERATIONS)  # cold and hot
    assert paths["torch_us"].notna().all()
    assert paths["compile_us"].isna().all()


def test_throughput_counts_what_was_really_made(root: Path) -> None:
    df = rows_of("throughput", root)
    assert (df["num_requests"] == 8).all()
    assert (df["temperature"] == 0.6).all()  # what all workloads are sampled at, unless told otherwise
    assert df["prompt_tokens"].between(8 * 8, 8 * 48).all()
    assert df["output_tokens"].between(8 * 4, 8 * 16).all()
    for row in df.itertuples():
        assert row.total_tok_s == pytest.approx((row.prompt_tokens + row.output_tokens) / row.elapsed_s)
        assert row.output_tok_s == pytest.approx(row.output_tokens / row.elapsed_s)
        assert row.prefill_s + row.decode_s <= row.elapsed_s


def test_high_concurrency_reads_the_weights_for_more_tokens_at_a_time(root: Path) -> None:
    """By the bytes of the steps that were taken; time would say so too, but for what else the machine does."""
    df = rows_of("high_concurrency", root)
    assert df["output_tok_s"].tolist() == pytest.approx((df["output_tokens"] / df["elapsed_s"]).tolist())
    read = (df["bytes"] / df["output_tokens"]).groupby(df["batch_size"]).agg(["min", "max"])
    assert read.index.tolist() == [1, 4, 16]
    assert read.loc[4, "max"] < read.loc[1, "min"] / 2
    assert read.loc[16, "max"] < read.loc[4, "min"] / 2


def test_serving_has_both_arrivals_and_percentiles_in_order(root: Path) -> None:
    df = rows_of("serving", root)
    assert sorted(df["arrivals"]) == ["burst", "poisson"]
    for name in ("ttft", "tpot", "itl", "latency"):
        assert (df[f"{name}_ms_p50"] <= df[f"{name}_ms_p99"]).all()
    assert (df["ttft_ms_p50"] < df["latency_ms_p50"]).all()
    assert df["good_fraction"].between(0, 1).all()
    # 24 requests at 80 a second: no run is over before the last has come.
    assert (df["elapsed_s"] > 18 / 80).all()


def test_attribution_names_all_three_depths(root: Path) -> None:
    folder = folder_of("attribution", root)
    df = experiments.load(folder)
    assert set(df["level"]) == {"kernel", "step", "workload"}
    table = pd.read_csv(folder / "attribution.csv")
    assert (
        table.groupby(["batch_size", "context_len"])["level"].apply(list).tolist()
        == [["kernel", "step", "workload"]] * df["context_len"].nunique()
    )
    assert table["speedup"].notna().all()


def test_tensor_parallel_ranks_give_the_same_tokens(root: Path) -> None:
    df = rows_of("tp_scaling", root)
    two = df[df["tp"] == 2]
    assert set(two["status"]) == {"ok"}
    assert (two["tokens_checked"] == 24).all()
    assert (two["num_q_heads"] == 4).all()
    assert (two["collective_us"] > 0).all()
    share = two["collective_us"] / two["collective_step_us"]
    assert two["collective_share"].tolist() == pytest.approx(share.tolist())
    table = pd.read_csv(folder_of("tp_scaling", root) / "table.csv").set_index(["tp", "batch_size"])
    assert table.loc[2, "collective_share"].between(0, 1, inclusive="neither").all()  # of the same steps
    assert (table.loc[2, "speedup_low"] <= table.loc[2, "speedup"]).all()
    assert table.loc[1, "collective_share"].isna().all()
    assert table.loc[2, "efficiency"].notna().all()


def test_plots_may_be_left_out_and_no_figure_stays_open(root: Path) -> None:
    from matplotlib import pyplot as plt

    folder_of("throughput", root)
    assert plt.get_fignums() == []
    assert os.environ.get("MPLBACKEND", "agg").lower() == "agg"
