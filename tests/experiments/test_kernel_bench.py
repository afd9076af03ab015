"""Correct before timed: wrong, crashing, unsupported, interpreted kernels get a row, the good one a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import suites
from experiments.decode_bench import DecodeBench
from experiments.execution import _alarm
from experiments.failures import PointTimeout, describe
from experiments.kernel_bench import measure, relative_error
from experiments.roofline import Ceilings
from experiments.settings import Settings, Variant, resolve
from experiments.suites import Point, PointContext
from kernels import decode
from kernels.decode import DecodeKernel
from tests.experiments import test_conf as conf
from tests.experiments.fake_run import composed


class Faulty(DecodeKernel):
    """The torch kernel with a fault."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0

    def supports(self, problem: decode.DecodeProblem) -> str | None:
        return "heads are too many" if self.name == "unable" else None

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        if self.name == "tiring" and self.calls > 2:
            raise RuntimeError("illegal something")
        if self.name == "hanging" and self.calls > 1:
            time.sleep(600)
        if self.name == "crashing":
            raise RuntimeError("illegal something")
        if self.name == "greedy_for_memory":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if "out" not in kwargs:  # a probe
            return args[0]
        out: torch.Tensor = kwargs["out"]
        if self.name == "lazy":
            return out
        decode.get("torch")(*args, **kwargs)
        if self.name == "wrong":
            out[0, -1] *= 1.01
        if self.name == "careless":
            args[0].zero_()
            args[2].zero_()
        return out


FAULTS = ("unable", "tiring", "hanging", "crashing", "greedy_for_memory", "lazy", "wrong", "careless")


@pytest.fixture(autouse=True)
def faulty_kernels() -> Iterator[None]:
    registry = decode.register.__self__  # type: ignore[attr-defined]
    for name in FAULTS:
        decode.register(name)(Faulty(name))
    yield
    for name in FAULTS:
        del registry._kernels[name]


def measured(
    variants: list[Variant],
    tmp_path: Any,
    limit: int = 512,
    dtype: str = "float32",
    kv_dtype: str | None = None,
) -> list[dict[str, Any]]:
    settings = Settings.parse(resolve(composed([], root=tmp_path), tmp_path))
    point = Point("s", {"level": "kernel", "dtype": dtype, "batch_size": 2, "context_len": 40})
    context = PointContext(settings, torch.device("cpu"), Ceilings(1e9, {dtype: 1e9}), "r", "cpu")
    bench = DecodeBench((40, 17), 4, 2, 32, 16, dtype, torch.device("cpu"), variants, kv_dtype=kv_dtype)
    return measure(bench, point, context, cache_states=("cold", "hot"), max_interpreted_size=limit)


def test_every_fault_is_a_row_without_a_time_and_the_others_are_timed(tmp_path: Any) -> None:
    names = [*(name for name in FAULTS if name not in ("tiring", "hanging")), "torch", "single_pass"]
    rows = measured([Variant(name, name) for name in names], tmp_path)
    status = {row["variant"]: row["status"] for row in rows}
    on_cpu = {"single_pass": "not_timed"} if not torch.cuda.is_available() else {}
    assert status == {
        "unable": "unsupported",
        "crashing": "error",
        "greedy_for_memory": "oom",
        "lazy": "incorrect",
        "wrong": "incorrect",
        "careless": "incorrect",
        "torch": "ok",
        **on_cpu,
    }
    assert [row["variant"] for row in rows] == sorted((row["variant"] for row in rows), key=names.index)
    for row in rows:
        assert (row["time_us"] is not None) == (row["status"] == "ok")
        assert (row["error"] is not None) == (row["status"] != "ok")
    timed = [row for row in rows if row["variant"] == "torch"]
    assert [(row["cache_state"], row["round"]) for row in timed] == [
        (state, i) for state in ("cold", "hot") for i in range(3)
    ]
    for row in timed:
        assert len(row["samples_us"]) == 3
        assert sorted(row["samples_us"])[1] == row["time_us"]
        assert row["max_rel_err"] < row["tolerance"]
        assert row["timing_method"] == "perf_counter"
        assert row["floor_us"] == pytest.approx(max(row["bytes"], row["flops"]) / 1e9 * 1e6)
        assert row["roofline_fraction"] == pytest.approx(row["floor_us"] / row["time_us"])


def test_what_fails_or_hangs_beside_others_is_named(tmp_path: Any) -> None:
    """The point's other kernels lose their times with it, but not their names."""
    rows = measured([Variant("tiring", "tiring"), Variant("torch", "torch")], tmp_path)
    assert {(row["status"], row["cache_state"]) for row in rows} == {("error", "cold"), ("error", "hot")}
    assert all("illegal something" in row["error"] and "(in tiring)" in row["error"] for row in rows)
    with pytest.raises(PointTimeout) as raised, _alarm(0.5):
        measured([Variant("torch", "torch"), Variant("hanging", "hanging")], tmp_path)
    assert describe(raised.value) == "took longer than 0.5 s (in hanging)"


def test_a_kernel_that_writes_to_its_inputs_is_incorrect_and_the_next_one_reads_them_whole(
    tmp_path: Any,
) -> None:
    rows = measured([Variant("careless", "careless"), Variant("torch", "torch")], tmp_path)
    (careless,) = (row for row in rows if row["variant"] == "careless")
    assert (careless["status"], careless["time_us"]) == ("incorrect", None)
    assert careless["error"] == "it wrote to its inputs: q, v_cache"
    assert {row["status"] for row in rows if row["variant"] == "torch"} == {"ok"}


def test_a_wrong_kernel_is_told_by_how_much(tmp_path: Any) -> None:
    (row,) = measured([Variant("wrong", "wrong")], tmp_path)
    assert row["max_rel_err"] == pytest.approx(0.01, rel=0.05)
    assert "tolerance" in row["error"]
    (row,) = measured([Variant("lazy", "lazy")], tmp_path)
    assert row["max_rel_err"] is None
    assert "not finite" in row["error"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton does not interpret on a GPU")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_interpreted_kernels_are_checked_at_small_shapes_only(tmp_path: Any, dtype: str) -> None:
    (row,) = measured([Variant("split_kv", "split_kv")], tmp_path, dtype=dtype)
    assert (row["status"], row["time_us"]) == ("not_timed", None)
    assert row["max_rel_err"] is not None
    assert "interpreter" in row["error"]
    (row,) = measured([Variant("split_kv", "split_kv")], tmp_path, limit=50, dtype=dtype)
    assert (row["status"], row["max_rel_err"]) == ("not_timed", None)
    assert "57 tokens" in row["error"]


def test_options_of_a_variant_reach_the_kernel(tmp_path: Any) -> None:
    (row,) = measured([Variant("odd", "torch", options={"no_such_option": 1})], tmp_path)
    assert row["status"] == "error"
    assert "no_such_option" in row["error"]


def test_fp8_caches_go_to_the_kernels_that_read_them_with_their_scales(tmp_path: Any) -> None:
    variants = [Variant(name, name) for name in ("torch", "split_kv", "reference")]
    rows = measured(variants, tmp_path, kv_dtype="float8_e4m3fn")
    first = {row["variant"]: row for row in reversed(rows)}
    assert first["torch"]["status"] == "unsupported"
    assert "kv_dtype is torch.float8_e4m3fn" in first["torch"]["error"]
    assert first["reference"]["status"] == "ok"
    assert first["split_kv"]["max_rel_err"] < 1e-4
    # 57 tokens of 2 KV heads, K and V: three bytes less for each element, two scales a head more.
    (wide, *_) = measured([Variant("torch", "torch")], tmp_path)
    assert wide["bytes"] - first["reference"]["bytes"] == 57 * 2 * 2 * 32 * 3 - 2 * 2 * 4


def test_the_suite_asks_for_fp8_by_name() -> None:
    def points(*overrides: str) -> list[Point]:
        config = conf.composed("+suite=decode_kernel", "device=cpu", "size=smoke", *overrides)
        return suites.get("decode_kernel").points(Settings.parse(resolve(config, Path.cwd())))

    assert {point.params.get("kv_dtype") for point in points()} == {None}
    fp8 = points("bench.kv_dtype=float8_e4m3fn")
    assert {point.params["kv_dtype"] for point in fp8} == {"float8_e4m3fn"}
    with pytest.raises(ValueError, match=r"kv_dtype must be among auto, float8_e4m3fn, got 'int4'"):
        points("bench.kv_dtype=int4")


def test_inputs_are_shuffled_over_a_larger_pool_and_nan_where_no_token_is() -> None:
    bench = DecodeBench((40, 17), 4, 2, 32, 16, "float32", torch.device("cpu"), [])
    inputs = bench.make_inputs(torch.Generator().manual_seed(3))
    used = [*inputs.block_table[0, :3].tolist(), *inputs.block_table[1, :2].tolist()]
    assert len(set(used)) == 5
    assert used != sorted(used)
    assert inputs.k_cache.shape[0] > 5
    real = (~inputs.k_cache.isnan()).all(-1).all(-1).sum().item()
    assert real == 40 + 17
    assert (inputs.k_cache.isnan() == inputs.v_cache.isnan()).all()
    other = bench.make_inputs(torch.Generator().manual_seed(4))
    assert not torch.equal(inputs.q, other.q)


def test_relative_error_is_per_row_and_sees_what_is_not_finite() -> None:
    expected = torch.tensor([[100.0, 1.0], [1e-3, 1e-3]])
    assert relative_error([expected + torch.tensor([[0.0, 1.0], [0.0, 0.0]])], [expected]) == pytest.approx(
        0.01
    )
    assert relative_error([expected + torch.tensor([[0.0, 0.0], [0.0, 1e-3]])], [expected]) == pytest.approx(
        1.0
    )
    assert relative_error([torch.full((2, 2), float("nan"))], [expected]) == float("inf")
    zeros = torch.zeros(1, 2)
    assert relative_error([zeros], [zeros]) == 0.0
    assert relative_error([zeros + 1e-6], [zeros]) > 1.0
