"""Serving under a clock that only work and waiting move: whose time is whose, and what counts as a token."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import experiments
from engine import LLM
from engine.execution.model_runner import ModelRunner
from experiments import arrivals, checked_engine, session, suites, workload
from experiments.arguments import CONF
from experiments.backends.greedy import check_greedy
from experiments.settings import Settings, resolve
from experiments.suites import Point, options
from experiments.suites.serving import num_good
from experiments.suites.throughput import SUITE as THROUGHPUT
from experiments.workload import Request, Served, WorkloadRun, columns, serve
from experiments.workload_suite import WARM_TOKENS, Phase, warm_up
from tests.experiments.test_conf import composed

CONFIG: Any = OmegaConf.to_container(
    OmegaConf.load(Path(__file__).resolve().parents[2] / "conf/model/tiny_qwen3.yaml")
)
STEP_S = 0.1


class Clock:
    """Seconds; moved on by the engine's work and by sleep alone."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def engine(clock: Clock, step_s: Any = None, **options: Any) -> LLM:
    """A tiny engine whose every step takes STEP_S, or step_s(step)."""
    arguments = {"max_model_len": 128, "num_kv_blocks": 64, "record_token_times": True} | options
    llm = LLM(CONFIG["config"], load_format="dummy", skip_tokenizer_init=True, device="cpu", **arguments)
    launch = llm.engine.executor.launch

    def timed(step: Any) -> Any:
        clock.sleep(STEP_S if step_s is None else step_s(step))
        return launch(step)

    llm.engine.executor.launch = timed  # type: ignore[method-assign]
    llm.engine.clock = clock
    return llm


def prompts(*lengths: int) -> Iterator[list[int]]:
    rng = random.Random(5)
    for length in lengths:
        yield [rng.randrange(2048) for _ in range(length)]


def test_prefill_and_decode_rates_by_the_definitions(clock: Clock) -> None:
    """Prefill of 4 x 100 tokens in 2 s is 200 tok/s; 10 tokens at 0.1 s a step have 9 decode intervals."""
    first = True

    def step_s(_step: Any) -> float:
        nonlocal first
        took, first = (2.0 if first else 0.1), False
        return took

    with engine(clock, step_s) as llm:
        run = serve(llm, [Request(prompt, 10) for prompt in prompts(100, 100, 100, 100)], clock.sleep)
    found = columns(run)
    assert found["prefill_s"] == pytest.approx(2.0)
    assert found["prefill_tok_s"] == pytest.approx(200.0)
    assert found["decode_s"] == pytest.approx(0.9)
    assert found["decode_tok_s"] == pytest.approx(4 * 9 / 0.9)
    assert found["output_tokens"] == 40
    assert found["elapsed_s"] == pytest.approx(2.9)
    assert found["tpot_ms_p50"] == pytest.approx(100.0)
    assert found["ttft_ms_p50"] == pytest.approx(2000.0)


def test_each_request_has_its_own_clock(clock: Clock) -> None:
    """A pool for two sequences: the third waits for one to end, and only its own first token is late."""
    options = {"num_kv_blocks": 5, "max_num_seqs": 2, "block_size": 16, "enable_prefix_caching": False}
    with engine(clock, **options) as llm:
        requests = [Request(prompt, 8) for prompt in prompts(20, 20, 20)]
        run = serve(llm, requests, clock.sleep)
    first = [served.first_token_s for served in run.served]
    assert first[0] == first[1] == pytest.approx(STEP_S)
    assert first[2] == pytest.approx(9 * STEP_S)
    ttft = sorted(1e3 * STEP_S * steps for steps in (1, 1, 9))
    assert columns(run)["ttft_ms_p50"] == pytest.approx(ttft[1])
    assert columns(run)["ttft_ms_p99"] == pytest.approx(np.percentile(ttft, 99))


def test_time_to_first_token_counts_from_when_the_request_should_have_come(clock: Clock) -> None:
    with engine(clock) as llm:
        # The second comes in the middle of the first step, and is seen at its end.
        run = serve(
            llm, [Request(p, 4, at) for p, at in zip(prompts(20, 20, 20), (0.0, 0.04, 5.0))], clock.sleep
        )
    assert [served.ttft_s for served in run.served] == pytest.approx([0.1, 0.16, 0.1])
    assert run.served[2].first_token_s == pytest.approx(5.1)
    assert run.elapsed_s == pytest.approx(5.4)
    assert run.prefill_s + run.decode_s < run.elapsed_s  # nobody computes while it waits


def test_chunks_of_a_prompt_are_no_first_token(clock: Clock) -> None:
    with engine(clock, max_num_batched_tokens=8) as llm:
        run = serve(llm, [Request(next(prompts(24)), 2)], clock.sleep)
    assert run.served[0].ttft_s == pytest.approx(3 * STEP_S)
    assert run.prefill_s == pytest.approx(3 * STEP_S)


def test_recomputed_tokens_are_no_output(clock: Clock) -> None:
    options = {"num_kv_blocks": 5, "block_size": 8, "max_num_seqs": 2, "enable_prefix_caching": False}
    with engine(clock, **options) as llm:
        run = serve(llm, [Request(prompt, 16) for prompt in prompts(8, 8)], clock.sleep)
    found = columns(run)
    assert found["num_preemptions"] >= 1
    assert found["output_tokens"] == 32
    assert found["prompt_tokens"] == 16
    assert all(len(served.token_s) == 16 for served in run.served)


def test_requests_that_cannot_run_are_told_and_the_others_served(clock: Clock) -> None:
    with engine(clock) as llm:
        run = serve(llm, [Request(p, 4) for p in prompts(200, 20)], clock.sleep)
    assert "max_model_len" in str(run.served[0].error)
    assert run.served[1].error is None
    found = columns(run)
    assert (found["num_requests"], found["num_failed"], found["output_tokens"]) == (2, 1, 4)


def test_overlapped_steps_are_counted_once(clock: Clock) -> None:
    with engine(clock, overlap_scheduling=True) as llm:
        run = serve(llm, [Request(prompt, 6) for prompt in prompts(20, 20)], clock.sleep)
    assert run.num_steps == 6
    assert run.num_decode_tokens == 10
    assert run.prefill_s + run.decode_s == pytest.approx(run.elapsed_s)


def served(ttft: float, tpot: float, error: str | None = None) -> Served:
    return Served(10, 11, 0, 0, 1.0, 1.0 + ttft, 1.0 + ttft + 10 * tpot, (), error)


def test_goodput_asks_for_both_targets() -> None:
    all_served = (served(0.1, 0.01), served(0.3, 0.01), served(0.1, 0.03), served(0.1, 0.01, "lost"))
    assert (
        num_good(WorkloadRun(all_served, 2.0, 1.0, 1.0, 40, 10), ttft_target_ms=200, tpot_target_ms=20) == 1
    )


def test_arrivals_have_the_rate_that_was_asked_for() -> None:
    times = arrivals.poisson_times(4000, 8.0, random.Random(1))
    assert times == sorted(times)
    assert times[-1] / 3999 == pytest.approx(1 / 8, rel=0.05)
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.08)  # exponential gaps
    assert arrivals.burst_times(7, 6.0, 3) == [0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 1.0]


def test_traces_are_read_from_a_file_and_told_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    entries = [
        {"arrival_s": 12.0, "input_len": 5, "output_len": 2},
        {"arrival_s": 10.0, "input_len": 7, "output_len": 1},
    ]
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n")
    assert arrivals.read_trace(path, speed=2.0) == [arrivals.Arrival(0.0, 7, 1), arrivals.Arrival(1.0, 5, 2)]
    path.write_text('{"arrival_s": 0, "input_len": 5, "output_len": 2}\n{"arrival_s": 1, "input_len": 0}\n')
    with pytest.raises(ValueError, match="line 2"):
        arrivals.read_trace(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="no requests"):
        arrivals.read_trace(path)
    for wrong in ("true", '"1.5"', "null", "NaN", "-1"):
        path.write_text(f'{{"arrival_s": {wrong}, "input_len": 5, "output_len": 2}}\n')
        with pytest.raises(ValueError, match="line 1: ValueError arrival_s must be a number"):
            arrivals.read_trace(path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 1"):
        arrivals.read_trace(path)


def test_a_trace_of_other_requests_is_another_point(tmp_path: Path) -> None:
    """Or a continued run would hold rows of two traces as one point's."""
    trace = tmp_path / "trace.jsonl"
    overrides = ["+suite=serving", "bench.arrivals=[trace]", "bench.request_rates=[1]", "device=cpu"]

    def point(arrival_s: float) -> Point:
        entries = [{"arrival_s": at, "input_len": 5, "output_len": 2} for at in (0.0, arrival_s)]
        trace.write_text("\n".join(map(json.dumps, entries)))
        settings = Settings.parse(resolve(composed(*overrides, f"bench.trace={trace}"), Path.cwd()))
        return suites.get("serving").points(settings)[0]

    assert point(1.0).id == point(1.0).id != point(2.0).id


def test_workload_cost_counts_steps_contexts_and_products() -> None:
    import torch

    from engine.models.config import ModelConfig
    from experiments.roofline import decode_step_cost
    from experiments.workload_suite import workload_cost

    config = ModelConfig.from_hf(CONFIG["config"])
    one = decode_step_cost(config, [1], tp=1, dtype=torch.float32, block_size=1)
    run = WorkloadRun((Served(10, 3, 4, 0, 0.0, 0.1, 0.2, (), None),), 1.0, 0.5, 0.5, 2, 3)
    cost = workload_cost(config, run, 1, torch.float32)
    kv = config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4
    assert cost.bytes == 3 * one.bytes + kv * (11 + 12)
    pairs = (11 + 12) + sum(range(5, 11))  # decoded tokens, and prompt tokens 5 to 10 after 4 from the cache
    pair = 4 * config.num_layers * config.num_q_heads * config.head_dim
    head = (
        2 * config.hidden_size + 1
    ) * config.vocab_size  # of 3 tokens that came out, not of 6 of the prompt
    assert cost.flops == (one.flops - head - pair) * (6 + 2) + head * 3 + pair * pairs


def test_percentiles_of_nothing_are_null() -> None:
    assert set(workload.percentiles("ttft", [None]).values()) == {None}


def test_a_gpu_is_warmed_up_by_whole_requests_since_graphs_are_captured_on_the_way() -> None:
    """On an H200 the first of two rounds took 7.5 s and the second 5.6: captures were timed."""
    requests = [Request([1, 2], 3, arrival_s=5.0), Request([3], 700), Request([4], 32_768)]
    phases = [Phase(requests), Phase(requests[:1], prime=requests[1:2])]
    on_gpu, prime, second = warm_up(phases, "cuda")
    (on_cpu,) = warm_up(phases, "cpu")
    assert [request.output_len for request in on_gpu] == [3, 700, WARM_TOKENS]
    assert [request.output_len for request in on_cpu] == [3, 4, 4]
    for warm in (on_gpu, on_cpu):
        assert [request.prompt for request in warm] == [request.prompt for request in requests]
    assert [request.arrival_s for request in on_gpu] == [5.0, 0.0, 0.0]  # batches as they will be timed
    assert {request.arrival_s for request in on_cpu} == {0.0}
    assert [*prime, *second] == [requests[1], requests[0]]


def test_graphs_are_captured_at_once_while_an_engine_is_checked_and_warmed_up(monkeypatch, tmp_path) -> None:
    """Or the first timed rounds would hold captures, and graphs that nothing has checked."""
    seen: list[Any] = []
    at_once, served = ModelRunner.capture_at_once, workload.serve
    monkeypatch.setattr(
        ModelRunner, "capture_at_once", lambda self, value: seen.append(value) or at_once(self, value)
    )
    monkeypatch.setattr(
        checked_engine, "check_greedy", lambda *args: seen.append("check") or check_greedy(*args)
    )
    monkeypatch.setattr(
        workload, "serve", lambda *args, **named: seen.append("serve") or served(*args, **named)
    )
    overrides = ["+suite=throughput", "device=cpu", "run.isolate=false", f"run.folder={tmp_path}/run"]
    overrides += ["bench.rounds=1", "attention=torch"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config: Any = OmegaConf.to_container(compose("config", overrides=overrides), resolve=True)
    assert session.run(config, CONF.parent, overrides) == 0
    assert seen == [True, "check", False, True, "serve", False, "serve"]
    table = experiments.load(tmp_path / "run")
    assert list(table["graph_captures"]) == list(table["kernels_compiled"]) == [0]


def test_every_request_is_sampled_as_the_suite_was_told(clock: Clock) -> None:
    requests = [Request(prompt, 4) for prompt in prompts(20, 20)]
    outputs = []
    for sampling in (workload.GREEDY, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 1}):
        with engine(clock, enable_prefix_caching=False) as llm:
            seen = []
            add = llm.engine.add_request
            llm.engine.add_request = lambda *given, add=add, seen=seen: seen.append(given[1]) or add(*given)
            serve(llm, requests, clock.sleep, sampling=sampling)
        outputs.append(seen)
    greedy, sampled, first_only = outputs
    assert [params.temperature for params in greedy] == [0.0, 0.0]
    assert [(params.temperature, params.top_k) for params in sampled] == [(1.0, -1)] * 2
    assert [(params.temperature, params.top_k) for params in first_only] == [(1.0, 1)] * 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.6, "bench.sampling must be a mapping of temperature, top_k, top_p, got 0.6"),
        ({"temp": 1.0}, "unknown option bench.sampling.temp; known: temperature, top_k, top_p"),
        ({"temperature": -1.0}, "bench.sampling.temperature must be >= 0 and finite, got -1.0"),
        ({"top_p": 0.0}, r"bench.sampling.top_p must be in \(0, 1\], got 0.0"),
        ({"top_k": "many"}, "bench.sampling.top_k"),
    ],
)
def test_a_bad_sampling_option_is_named(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options.sampling("sampling", value)


def test_runs_from_before_there_was_a_choice_were_greedy() -> None:
    assert options.sampling("sampling", {}) == {"temperature": 0.0, "top_k": -1, "top_p": 1.0}


def test_throughput_draws_what_nano_vllm_draws() -> None:
    """Its bench.py prints these totals for seed 0 and 256 requests of 100 to 1024 tokens in and out."""
    case = {
        "batch_size": 256,
        "min_input_len": 100,
        "context_len": 1024,
        "min_output_len": 100,
        "output_len": 1024,
    }
    (phase,) = THROUGHPUT.phases(case, 151_936, random.Random(0))
    assert sum(len(request.prompt) for request in phase.requests) == 142_827
    assert sum(request.output_len for request in phase.requests) == 133_966
    (small,) = THROUGHPUT.phases(case, 500, random.Random(0))
    assert max(max(request.prompt) for request in small.requests) == 499
