"""The demo: kernel and step rows of a real engine, checked first, with measured lengths and the step's roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import experiments
from experiments import session
from experiments.backends import engine as backend
from experiments.backends import greedy
from experiments.settings import Settings, Variant, resolve

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "+suite=long_decode",
    "device=cpu",
    "bench.batch_sizes=[2]",
    "bench.context_lens=[64]",
    "bench.tensor_parallel=[1,2]",
    "bench.engine_tensor_parallel=[1]",
    "bench.engine_batch_sizes=[3]",
    "bench.engine_context_lens=[64]",
    "bench.engine_steps=2",
    "run.timeout_s=600",
)


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        found: Any = OmegaConf.to_container(compose("config", overrides=list(overrides)), resolve=True)
    return found


def settings(*overrides: str) -> Settings:
    return Settings.parse(resolve(composed("+suite=long_decode", "device=cpu", *overrides), ROOT))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("long_decode")
    code = session.run(composed(*SMALL, f"run.root={root}"), ROOT, list(SMALL))
    assert code == 0
    (found,) = (root / "long_decode").iterdir()
    return found


def test_the_folder_holds_rows_report_table_and_plots(folder: Path) -> None:
    plots = {path.name for path in (folder / "plots").glob("*.png")}
    levels, kinds = ("kernel", "step"), ("latency", "speedup", "roofline")
    assert plots == {f"{level}_{kind}.png" for level in levels for kind in kinds}
    report = (folder / "report.md").read_text()
    assert "Triton's interpreter" in report
    assert "python -m experiments.run +suite=long_decode" in report
    assert (folder / "table.csv").read_text().count("\n") > 10


def test_kernel_rows_use_one_ranks_heads(folder: Path) -> None:
    df = experiments.load(folder)
    kernel = df[df["level"] == "kernel"]
    heads = kernel.groupby("tp")[["num_q_heads", "num_kv_heads"]].agg(["min", "max"])
    assert heads.loc[1].tolist() == [8, 8, 2, 2]
    assert heads.loc[2].tolist() == [4, 4, 1, 1]
    assert set(kernel["variant"]) == {"torch", "single_pass", "split_kv"}
    assert set(kernel.loc[kernel["variant"] == "torch", "status"]) == {"ok"}
    assert set(kernel.loc[kernel["variant"] == "split_kv", "status"]) == {"not_timed"}
    assert kernel.loc[kernel["variant"] == "split_kv", "max_rel_err"].notna().all()


def test_step_rows_are_checked_and_carry_measured_lengths(folder: Path) -> None:
    df = experiments.load(folder)
    step = df[(df["level"] == "step") & (df["tp"] == 1)]
    timed = step[step["status"] == "ok"]
    assert set(timed["variant"]) == {"torch"}
    assert (timed["tokens_checked"] == 24).all()
    assert (timed["tokens_excused"] == 0).all()
    # The mean over a round moves through what was asked for, as the contexts grow by a token a step.
    means = timed.groupby("batch_size")["mean_context_len"]
    assert means.mean().between(63.4, 64.6).all()
    assert (means.max() - means.min() == (6 - 1) * 2).all()
    assert (timed["output_tokens"] == timed["batch_size"] * 2).all()
    assert (timed["roofline_fraction"] > 0).all()
    assert timed["step_ms"].tolist() == pytest.approx((timed["time_us"] / 1000).tolist())
    interpreted = step[step["variant"] == "split_kv"]
    assert set(interpreted["status"]) == {"not_timed"}
    assert (interpreted["tokens_checked"] == 6).all()


def test_a_rank_too_many_is_unsupported_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    model = backend.EngineSetup(settings(), Variant("torch", "torch")).model_config
    assert "needs 2 CUDA devices from cuda:0 on, but 1 are visible" in str(
        backend.ranks_refusal("cuda:0", model, 2)
    )
    assert backend.ranks_refusal("cuda:0", model, 1) is None
    assert backend.ranks_refusal("cpu", model, 2) is None


@pytest.fixture(scope="module")
def setup() -> backend.EngineSetup:
    return backend.EngineSetup(settings(), Variant("torch", "torch"))


@pytest.fixture(scope="module")
def reference(setup: backend.EngineSetup) -> greedy.GreedyReference:
    return greedy.greedy_reference(setup, (5, 20), 6, seed=1)


def test_greedy_check_accepts_the_engine_and_sees_another_model(
    setup: backend.EngineSetup, reference: greedy.GreedyReference
) -> None:
    options = greedy.check_options(setup, (5, 20), 6)
    with setup.open(**options) as llm:
        steps, launch = [], llm.engine.executor.launch
        llm.engine.executor.launch = lambda step: steps.append(step) or launch(step)
        assert greedy.check_greedy(llm, reference, "float32") == greedy.GreedyCheck(12, 0, None)
        kinds = {(bool(step.decode_slots), bool(step.chunks)) for step in steps}
        assert kinds == {(False, True), (True, True), (True, False)}  # those that a workload has
        with torch.no_grad():
            llm.model.layers[-1].mlp.down_proj.weight.mul_(-1)
        check = greedy.check_greedy(llm, reference, "float32")
    assert check.error is not None
    assert "standard deviations" in check.error


def test_near_ties_are_excused_and_counted(
    setup: backend.EngineSetup, reference: greedy.GreedyReference
) -> None:
    """A reference that prefers another token by less than the margin: the difference is excused, once a prompt."""
    logits = [rows.clone() for rows in reference.logits]
    tokens = [list(ids) for ids in reference.token_ids]
    rival = (tokens[0][2] + 1) % logits[0].shape[1]
    logits[0][2, rival] = logits[0][2, tokens[0][2]] * (1 + 1e-6)
    tokens[0][2] = rival
    changed = greedy.GreedyReference(reference.prompts, tokens, logits)
    with setup.open(**greedy.check_options(setup, (5, 20), 6)) as llm:
        assert greedy.check_greedy(llm, changed, "float32") == greedy.GreedyCheck(9, 1, None)


def test_decode_steps_hold_the_whole_batch_and_its_actual_lengths(setup: backend.EngineSetup) -> None:
    prompts = setup.prompts([10, 17], seed=3)
    with setup.open(max_model_len=64, max_num_seqs=2, num_kv_blocks=16) as llm:
        run = backend.time_decode_steps(llm, prompts, num_steps=3, warm_up=2)
        assert greedy.check_last_token(llm, run, "float32") is None
        assert not llm.engine.has_unfinished_requests()
        assert llm.engine.block_manager.num_free_blocks == llm.engine.block_manager.num_blocks
        run.token_ids[1][-1] ^= 1
        assert "row 1" in str(greedy.check_last_token(llm, run, "float32"))
    # The first token comes from the prefill, two from warm-up: the first timed step writes and reads token 3's KV.
    assert [step.context_lens for step in run.steps] == [(13, 20), (14, 21), (15, 22)]
    assert run.prefill_s > 0
    assert [len(ids) for ids in run.token_ids] == [7, 7]


def test_a_batch_that_cannot_fit_is_said_so_before_it_runs(setup: backend.EngineSetup) -> None:
    with (
        setup.open(max_model_len=64, max_num_seqs=2, num_kv_blocks=4) as llm,
        pytest.raises(backend.UnsupportedError, match="4 blocks"),
    ):
        backend.time_decode_steps(llm, setup.prompts([30, 30], seed=3), num_steps=3, warm_up=2)


def test_decode_throughput_counts_intervals_not_tokens(setup: backend.EngineSetup) -> None:
    """A clock that only the device's work moves on: 0.1 s a step, prefill included."""
    now = 0.0

    def launch(step: Any) -> Any:
        nonlocal now
        now += 0.1
        return original(step)

    with setup.open(max_model_len=64, max_num_seqs=2, num_kv_blocks=16) as llm:
        original = llm.engine.executor.launch
        llm.engine.executor.launch = launch
        llm.engine.clock = lambda: now
        run = backend.time_decode_steps(llm, setup.prompts([10, 10], seed=3), num_steps=4, warm_up=1)
    assert [step.duration_s for step in run.steps] == pytest.approx([0.1] * 4)
    assert run.prefill_s == pytest.approx(0.1)
