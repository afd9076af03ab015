"""The elementwise suite: three paths of each operation do the same work, each compiled once, and who is fastest."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from engine.models.config import ModelConfig
from experiments import elementwise_bench, suites
from experiments.arguments import CONF
from experiments.columns import make_row
from experiments.elementwise_bench import OPERATIONS, PATHS, ElementwiseBench
from experiments.execution import run_here
from experiments.kernel_bench import measure, relative_error
from experiments.records import to_frame
from experiments.roofline import Ceilings
from experiments.settings import Settings, resolve
from experiments.suites import Point, PointContext
from experiments.suites.elementwise_kernel import compare_paths
from kernels.triton_support import triton_unavailable
from tests.experiments.fake_run import composed
from tests.experiments.test_conf import composed as composed_conf

CPU = torch.device("cpu")


def model_config(name: str = "tiny_qwen3") -> ModelConfig:
    fields: Any = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{name}.yaml"))
    return ModelConfig.from_hf(fields["config"])


def measured(tmp_path: Path, operation: str, num_tokens: int = 3, dtype: str = "float32") -> dict[str, Any]:
    """The first row of each path."""
    settings = Settings.parse(resolve(composed([], root=tmp_path), tmp_path))
    point = Point("s", {"level": "kernel", "dtype": dtype, "batch_size": num_tokens, "operation": operation})
    context = PointContext(settings, CPU, Ceilings(1e9, {dtype: 1e9}), "r", "cpu")
    bench = ElementwiseBench(operation, model_config(), num_tokens, dtype, CPU)
    rows = measure(bench, point, context, cache_states=("cold", "hot"), max_interpreted_size=16)
    return {row["variant"]: row for row in reversed(rows)}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the compiled path compiles, on this CPU by a compiler that changes nothing."""
    found: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    compiled = elementwise_bench.compiled
    monkeypatch.setattr(elementwise_bench, "compiled", lambda run: compiled(run, backend))
    monkeypatch.setattr(elementwise_bench, "compile_unavailable", lambda device: None)
    return found


# --- the compiled path ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_is_one_graph_for_all_input_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, graphs: list[Any]
) -> None:
    monkeypatch.setattr(elementwise_bench, "PATHS", ("torch", "compile"))
    row = measured(tmp_path, operation)["compile"]
    assert (row["status"], row["error"]) == ("ok", None)
    assert row["max_rel_err"] < row["tolerance"]
    assert row["time_us"] > 0
    assert len(graphs) == 1


def test_a_sweep_over_numbers_of_tokens_never_meets_the_limit_of_recompilations(graphs: list[Any]) -> None:
    """Beyond the limit of one function, fullgraph=True makes an error of what would run uncompiled."""
    num_shapes = torch._dynamo.config.recompile_limit + 3
    generator = torch.Generator().manual_seed(0)
    for num_tokens, operation in itertools.product(range(1, num_shapes + 1), ("rms_norm", "silu_mul")):
        bench = ElementwiseBench(operation, model_config(), num_tokens, "float32", CPU)
        (compiled,) = (candidate for candidate in bench.candidates() if candidate.name == "compile")
        for _ in range(2):
            inputs = bench.make_inputs(generator)
            (out,) = compiled.bind(inputs).outputs()
            torch.testing.assert_close(out, bench.reference(inputs)[0])
    assert len(graphs) == 2 * num_shapes


def test_on_a_cpu_it_is_a_row_that_says_why_not(tmp_path: Path) -> None:
    row = measured(tmp_path, "silu_mul")["compile"]
    assert (row["status"], row["time_us"]) == ("unsupported", None)
    assert "on cpu Inductor needs a C++ compiler" in row["error"]


def test_a_failing_compiler_fails_its_own_row_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no code for you")

    compiled = elementwise_bench.compiled
    monkeypatch.setattr(elementwise_bench, "compiled", lambda run: compiled(run, broken))
    monkeypatch.setattr(elementwise_bench, "compile_unavailable", lambda device: None)
    rows = measured(tmp_path, "rms_norm")
    assert rows["compile"]["status"] == "unsupported"
    assert f"torch {torch.__version__} cannot compile it" in rows["compile"]["error"]
    assert "no code for you" in rows["compile"]["error"]
    assert rows["torch"]["status"] == "ok"
    assert list(rows) == list(reversed(PATHS))


# --- inputs and outputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("num_tokens", [1, 16])
def test_an_input_set_holds_little_that_is_not_touched(operation: str, num_tokens: int) -> None:
    """There are up to MAX_INPUT_SETS of them for each path: a table of all positions in each would be gigabytes."""
    bench = ElementwiseBench(operation, model_config("qwen3_0_6b"), num_tokens, "bfloat16", CPU)
    inputs = bench.make_inputs(torch.Generator().manual_seed(0))
    assert sum(tensor.numel() * tensor.element_size() for tensor in inputs.values()) < 32 * bench.input_bytes
    if "positions" in inputs:
        assert inputs["positions"].max() < len(inputs["cos_sin"])


@pytest.mark.skipif(triton_unavailable(CPU) is not None, reason="needs Triton's interpreter")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("operation", ["greedy", "sample"])
def test_paths_choose_the_same_tokens(operation: str, dtype: str) -> None:
    bench = ElementwiseBench(operation, model_config(), 3, dtype, CPU)
    inputs = bench.make_inputs(torch.Generator().manual_seed(1))
    by_path = [OPERATIONS[operation].run(inputs, use_triton)[0] for use_triton in (False, True)]
    assert torch.equal(*by_path)
    assert len(set(by_path[0].tolist())) == 3
    for ids in by_path:
        assert relative_error(OPERATIONS[operation].read(inputs, (ids,)), bench.reference(inputs)) == 0


def test_a_token_is_right_if_the_uniform_number_lies_in_its_share() -> None:
    sample = OPERATIONS["sample"]
    bench = ElementwiseBench("sample", model_config(), 80, "float32", CPU)
    inputs = bench.make_inputs(torch.Generator().manual_seed(0))
    assert (inputs["temperature"] == 0.6).all()
    assert (inputs["top_k"] == 50).all()
    assert (inputs["top_p"] == 0.9).all()
    (ids,) = sample.run(inputs, False)
    assert bench.reference(inputs)[0].tolist() == [[1.0]] * 80
    (kept,) = sample.run(inputs | {"uniform": (inputs["uniform"] + 0.5) % 1}, False)
    dropped = inputs["logits"].argmin(1)
    for other in (kept, dropped, torch.full_like(ids, -1), torch.full_like(ids, 10**6)):
        wrong = torch.where(torch.arange(80) % 2 == 0, other, ids)
        (right,) = sample.read(inputs, (wrong,))
        assert right[1::2].eq(1).all()
        assert right[0::2].eq(0)[other[::2, None] != ids[::2, None]].all()
    # At the edge between two tokens, and only there, either will do.
    shares = elementwise_bench.filtered_probs(
        *(inputs[n] for n in ("logits", "temperature", "top_k", "top_p"))
    )
    ends = shares.double().cumsum(1)
    first, second = shares.nonzero()[shares.nonzero()[:, 0] == 0][:2, 1].tolist()
    for distance, answers in ((-1e-6, [1, 1]), (1e-6, [1, 1]), (-1e-4, [1, 0]), (1e-4, [0, 1])):
        row = {name: tensor[:1] for name, tensor in inputs.items()}
        row["uniform"] = ends[:1, first] + distance
        found = [sample.read(row, (torch.tensor([token]),))[0].item() for token in (first, second)]
        assert found == answers


def test_more_rows_than_are_sampled_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    config = composed_conf("+suite=elementwise_kernel", "device=cpu", "bench.num_tokens=[1024,1025]")
    settings = Settings.parse(resolve(config, tmp_path))
    suite = suites.get("elementwise_kernel")
    points = suite.points(settings)
    assert len(points) == 2 * len(OPERATIONS)
    (refused,) = (point for point in points if point.unsupported is not None)
    assert (refused.params["operation"], refused.params["batch_size"]) == ("sample", 1025)
    context = PointContext(settings, CPU, Ceilings(1e9, {}), "r", "cpu", suite.columns)
    rows = run_here(suite, refused, context).rows
    assert [(row["variant"], row["status"]) for row in rows] == [(path, "unsupported") for path in PATHS]
    assert "compared for 1024 tokens at most" in rows[0]["error"]


# --- who is fastest ---------------------------------------------------------------------------------------------


def timed_rows(cache_state: str, rounds: int = 6, **times: float) -> list[dict[str, Any]]:
    common = {
        "suite": "elementwise_kernel",
        "status": "ok",
        "operation": "rope",
        "batch_size": 16,
        "bytes": 8,
    }
    return [
        make_row(
            **common,
            variant=path,
            cache_state=cache_state,
            round=number,
            time_us=time_us * (1 + 1e-4 * ((7 * number + len(path)) % 5)),
        )
        for number in range(rounds)
        for path, time_us in times.items()
    ]


def test_the_fastest_path_may_be_the_compiled_one() -> None:
    cold = timed_rows("cold", torch=9.0, triton=3.0, compile=2.0)
    hot = timed_rows("hot", torch=9.0, triton=1.0, compile=1.001)
    alone = timed_rows("hot", torch=5.0)
    for row in alone:
        row["batch_size"] = 1
    frame = to_frame([*cold, *hot, *alone])
    table = (
        suites.get("elementwise_kernel").summary(frame).set_index(["batch_size", "cache_state", "variant"])
    )
    assert table.loc[16, "cold"]["fastest"].to_dict() == {"torch": False, "triton": False, "compile": True}
    assert not table.loc[16, "hot"]["fastest"].any()
    paths = compare_paths(frame).set_index(["batch_size", "cache_state"])
    paths = paths.astype({"fastest": object, "triton_is": object}).where(paths.notna(), None)
    assert paths["fastest"].to_dict() == {(16, "cold"): "compile", (16, "hot"): None, (1, "hot"): None}
    assert paths["triton_is"].to_dict() == {(16, "cold"): "slower", (16, "hot"): "equal", (1, "hot"): None}
    assert paths.loc[(16, "cold"), "compile_over_triton"] == pytest.approx(2 / 3, rel=1e-3)
    assert paths.loc[(16, "cold"), ["torch_us", "triton_us", "compile_us"]].tolist() == pytest.approx(
        [9.0, 3.0, 2.0], rel=1e-3
    )
    assert pd.isna(paths.loc[(1, "hot"), "triton_us"])


def test_too_few_rounds_show_nothing() -> None:
    (line,) = compare_paths(to_frame(timed_rows("cold", 5, torch=9.0, triton=1.0, compile=3.0))).to_dict(
        "records"
    )
    assert pd.isna(line["fastest"])
    assert pd.isna(line["triton_is"])
    assert line["compile_over_triton"] == pytest.approx(3, rel=1e-3)
    (line,) = compare_paths(to_frame(timed_rows("cold", 6, torch=9.0, triton=1.0, compile=3.0))).to_dict(
        "records"
    )
    assert (line["fastest"], line["triton_is"]) == ("triton", "faster")


def test_no_timed_rows_make_an_empty_table() -> None:
    frame = to_frame([make_row(suite="elementwise_kernel", status="unsupported", variant="torch")])
    assert compare_paths(frame).empty
