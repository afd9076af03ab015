"""The prefill suite on contiguous KV: kernels that know no paging beside those that do, and told apart from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import experiments
from experiments import session, suites
from experiments.prefill_bench import PrefillBench, variant_of
from experiments.settings import Settings, resolve
from experiments.suites.protocol import Point
from kernels import prefill
from tests.experiments.test_conf import composed

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def points(*typed: str) -> list[Point]:
    settings = Settings.parse(resolve(composed("+suite=prefill_kernel", "device=cpu", *typed), ROOT))
    return suites.get("prefill_kernel").points(settings)


def test_rows_of_the_peers_say_that_they_are_contiguous_and_why_they_did_not_run(tmp_path: Path) -> None:
    typed = [
        "+suite=prefill_kernel",
        "device=cpu",
        "bench.contiguous=true",
        "bench.shapes=[[2,20,20],[1,8,40]]",
        "size.rounds=2",
        "size.samples=2",
        f"run.root={tmp_path}",
    ]
    assert session.run(composed(*typed), ROOT, typed) == 0
    df = experiments.load(tmp_path)
    assert df["contiguous"].all()
    assert set(df[df["variant"] == "torch"]["status"]) == {"ok"}
    for name in prefill.CONTIGUOUS_ONLY:
        rows = df[df["prefill_attention"] == name]
        assert set(rows["variant"]) == {f"{name}_contiguous"}
        assert set(rows["status"]) == {"unsupported"}
        assert set(rows["error"]) == {f"{name} needs a CUDA device"}
        assert len(rows) == 2
        assert name not in set(df["variant"])


def test_shuffled_blocks_are_for_those_that_read_tables_unless_others_are_named() -> None:
    everywhere = {tuple(point.params["kernels"]) for point in points()}
    assert everywhere == {tuple(name for name in prefill.available("cpu") if name != "reference")}
    (kernels,) = {tuple(point.params["kernels"]) for point in points("bench.contiguous=true")}
    assert kernels == (*next(iter(everywhere)), *prefill.CONTIGUOUS_ONLY)
    (point, *_) = points("bench.kernels=[cudnn_sdpa,torch]")
    assert suites.get("prefill_kernel").blank_rows(point) == [
        {"variant": "cudnn_sdpa_contiguous", "prefill_attention": "cudnn_sdpa"},
        {"variant": "torch", "prefill_attention": "torch"},
    ]
    assert {point.id for point in points()}.isdisjoint(point.id for point in points("bench.contiguous=true"))
    with pytest.raises(ValueError, match=r"bench.contiguous must be true or false, got 'yes'"):
        points("bench.contiguous=yes")


@pytest.mark.parametrize("context_len", [40, 48])
def test_contiguous_inputs_lie_as_the_problem_says(context_len: int) -> None:
    bench = PrefillBench(3, 20, context_len, 4, 2, 32, 16, "float32", CPU, ["torch"], contiguous=True)
    assert (bench.problem.contiguous, bench.problem.equal_lengths) == (True, True)
    inputs = bench.make_inputs(torch.Generator().manual_seed(0))
    assert inputs.paged.block_table.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    rows = inputs.paged.k_cache[:9].reshape(3, 48, 2, 32)
    assert bool(rows[:, :context_len].isfinite().all())
    assert bool(rows[:, context_len:].isnan().all())


def test_a_kernel_that_knows_no_paging_makes_its_own_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's operations do; one lent to them would cost a copy that is no part of attention."""
    lent: list[object] = []
    bench = PrefillBench(2, 8, 8, 4, 2, 32, 16, "float32", CPU, ["flash_varlen", "torch"], contiguous=True)
    inputs = bench.make_inputs(torch.Generator().manual_seed(0))
    for name in bench.kernels:
        kernel = prefill.get(name)

        def call(self: object, q: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
            lent.append(options["out"])
            return q

        monkeypatch.setattr(type(kernel), "__call__", call)
    for candidate in bench.candidates():
        candidate.bind(inputs).call()
    assert lent[0] is None
    assert lent[1] is not None
    assert [variant_of(name) for name in bench.kernels] == ["flash_varlen_contiguous", "torch"]
