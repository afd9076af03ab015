"""One small, checked launch of every Triton kernel, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.kernels.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.kernels.sanitize
    python -m tests.kernels.sanitize --list                       # the names
    python -m tests.kernels.sanitize split_kv prefill             # those with such a part in their name

Prints each name before it runs, so that the tool's report stands below what it is about; the exit code is 1 if a
result is wrong. On a GPU every tensor is an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING): within torch's
pool memcheck would see no overrun. Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read at the first import of triton, below

from kernels import decode, prefill
from kernels.activation import silu_mul
from kernels.all_reduce import one_shot_all_reduce
from kernels.decode.launch import TritonDecodeKernel
from kernels.dot_linear import DotTile, dot_linear
from kernels.fp8_cache import FP8
from kernels.kv_write import write_kv
from kernels.linear import few_rows_linear, linear
from kernels.norm import add_rms_norm, rms_norm
from kernels.prefill import warp_specialized
from kernels.qk_norm_rope_write import qk_norm_rope_write
from kernels.rope import apply_rope
from kernels.sampling import greedy, sample
from kernels.slot_state import draw_settings, keep_newest, start_decodes
from kernels.triton_support import INTERPRETING
from tests.kernels import prefill_case
from tests.kernels.all_reduce_case import PlayedPeers, rank_order_sum
from tests.kernels.decode_cases import expected, make_case, quantised, worst_error
from tests.kernels.slot_case import assert_same_rows, assert_same_settings, assert_same_slots, make_slots

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float16  # computed by the interpreter as by a GPU
CONTEXT_LENS = [33, 0, 17, 130]
EPS = 1e-6

Run = Callable[[], float]
"""Launches, waits, and answers with the error, which should be below TOLERANCE."""

TOLERANCE = 4e-3


def run_decode(name: str, shared_prefix_len: int = 0, fp8: bool = False, **options: Any) -> float:
    """A planned call (several splits) with poisoned scratch; the rows of a shared prefix begin with the same blocks."""
    kernel = decode.get(name)
    lens = [length + shared_prefix_len for length in CONTEXT_LENS]
    case = make_case(lens, heads=(14, 2), head_dim=64, dtype=DTYPE, device=DEVICE, strided=not fp8)
    case.block_table[:, : shared_prefix_len // 16] = case.block_table[-1, : shared_prefix_len // 16].clone()
    scales: dict[str, Tensor] = {}
    if fp8:
        case, scales = quantised(case)
    problem = replace(case.problem, shared_prefix_len=shared_prefix_len)
    workspace = kernel.workspace(problem, DEVICE)
    if workspace is not None:
        workspace.fill_(float("nan"))
    kernel(*case.inputs, out=case.out, workspace=workspace, **(kernel.plan(problem) | options), **scales)
    return worst_error(case.out, expected(case, **scales))


def decode_runs() -> dict[str, Run]:
    names = [name for name in decode.available(DEVICE) if isinstance(decode.get(name), TritonDecodeKernel)]
    runs: dict[str, Run] = {f"decode {name}": lambda name=name: run_decode(name) for name in names}
    # Options that launch other programs.
    runs["decode split_kv, one split"] = lambda: run_decode("split_kv", num_splits=1)
    for prefetch in (False, True):
        runs[f"decode split_kv, prefetch {prefetch}"] = lambda prefetch=prefetch: run_decode(
            "split_kv", prefetch=prefetch
        )
    runs["decode shared_prefix, with one"] = lambda: run_decode("shared_prefix", shared_prefix_len=128)
    if not INTERPRETING:
        runs["decode split_kv_fused, cooperative"] = lambda: run_decode("split_kv_fused", cooperative=True)
    for name in names:
        if FP8 in decode.get(name).kv_dtypes:
            runs[f"decode {name}, fp8 cache"] = lambda name=name: run_decode(name, fp8=True)
    return runs


def run_prefill(name: str, query_lens: Sequence[int], context_lens: Sequence[int], **shape: Any) -> float:
    case = prefill_case.make_case(
        query_lens, context_lens, num_q_heads=6, dtype=DTYPE, device=DEVICE, **shape
    )
    out = prefill.get(name)(*case.args, out=case.untouched_out())
    return worst_error(out, case.expected())


def specialised_runs() -> dict[str, Run]:
    """Of the prefill kernel in Gluon, where it runs: chunks of 90 rows and more, or another kernel would run.

    Two programs, so that each has many items.
    """
    if prefill.get("warp_specialized").unavailable(DEVICE) is not None:
        return {}

    def run(head_dim: int) -> float:
        with mock.patch.object(warp_specialized, "device_sm_count", return_value=2):
            return run_prefill("warp_specialized", [5, 0, 60, 30], [300, 3, 190, 30], head_dim=head_dim)

    return {
        f"prefill warp_specialized, head_dim {head_dim}": partial(run, head_dim) for head_dim in (64, 128)
    }


def against_torch(
    make: Mapping[str, Tensor], run: Callable[[dict[str, Tensor], bool], tuple[Tensor, ...]]
) -> float:
    """The Triton path's outputs against the torch path's, each on its own copy of the inputs."""
    outputs = [run({name: t.clone() for name, t in make.items()}, use_triton) for use_triton in (True, False)]
    return max(worst_error(mine[None], torchs[None].double()) for mine, torchs in zip(*outputs))


def elementwise_runs() -> dict[str, Run]:
    tokens, hidden, heads, kv_heads, dim, vocab = 5, 96, 6, 2, 64, 9000
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, DTYPE)

    angles = torch.rand(50, dim // 2, generator=generator, dtype=torch.float32)
    inputs = {
        "x": normal(tokens, hidden),
        "residual": normal(tokens, hidden),
        "weight": normal(hidden),
        "gate_up": normal(tokens, 2 * hidden),
        "qkv": normal(tokens, heads + 2 * kv_heads, dim),
        "norm": normal(dim),
        "cos_sin": torch.stack([angles.cos(), angles.sin()], 1).to(DEVICE),
        "positions": torch.tensor([0, 49, 7, 7, 3], device=DEVICE),
        "k_cache": normal(3, 4, kv_heads, dim),
        "v_cache": normal(3, 4, kv_heads, dim),
        "slots": torch.tensor([11, 0, -1, 5, 2], device=DEVICE),  # the last slot, and padding
        "matrix": normal(70, hidden),
        "logits": normal(3, vocab),
        "temperature": torch.tensor([0.0, 0.7, 1.0], device=DEVICE),
        "top_k": torch.tensor([-1, 20, 5], device=DEVICE),
        "top_p": torch.tensor([1.0, 1.0, 0.9], device=DEVICE),
        "uniform": torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64, device=DEVICE),
    }

    def heads_of(t: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return t["qkv"].split([heads, kv_heads, kv_heads], dim=1)

    def rope(t: dict[str, Tensor], use_triton: bool) -> tuple[Tensor, ...]:
        q, k, _ = heads_of(t)
        apply_rope(q, k, t["positions"], t["cos_sin"], use_triton=use_triton)
        return q, k

    def kv_write(t: dict[str, Tensor], use_triton: bool) -> tuple[Tensor, ...]:
        _, k, v = heads_of(t)
        write_kv(k, v, t["k_cache"], t["v_cache"], t["slots"], use_triton=use_triton)
        return t["k_cache"], t["v_cache"]

    def fused(t: dict[str, Tensor], use_triton: bool) -> tuple[Tensor, ...]:
        rest = (
            t["norm"],
            t["norm"],
            EPS,
            t["positions"],
            t["cos_sin"],
            t["k_cache"],
            t["v_cache"],
            t["slots"],
        )
        qk_norm_rope_write(*heads_of(t), *rest, use_triton=use_triton)
        return heads_of(t)[0], t["k_cache"], t["v_cache"]

    def row_times_matrix(t: dict[str, Tensor], use_triton: bool) -> tuple[Tensor, ...]:
        x, matrix = t["x"][:3], t["matrix"]
        return (few_rows_linear(x, matrix, None) if use_triton else linear(x, matrix, use_triton=False),)

    def dot_product(t: dict[str, Tensor], use_triton: bool) -> tuple[Tensor, ...]:
        if use_triton:
            return (dot_linear(t["x"], t["matrix"], tile=DotTile(16, 32, 2, 3)),)
        return (linear(t["x"], t["matrix"], use_triton=False),)

    def sampling(t: dict[str, Tensor], use_triton: bool) -> tuple[Tensor, ...]:
        parameters = (t[name] for name in ("temperature", "top_k", "top_p", "uniform"))
        return (sample(t["logits"], *parameters, use_triton=use_triton),)

    operations: dict[str, Callable[[dict[str, Tensor], bool], tuple[Tensor, ...]]] = {
        "rms_norm": lambda t, use: (rms_norm(t["x"], t["weight"], EPS, use_triton=use),),
        "add_rms_norm": lambda t, use: add_rms_norm(t["x"], t["residual"], t["weight"], EPS, use_triton=use),
        "silu_mul": lambda t, use: (silu_mul(t["gate_up"], use_triton=use),),
        "rope": rope,
        "write_kv": kv_write,
        "qk_norm_rope_write": fused,
        "few_rows_linear": row_times_matrix,
        "dot_linear": dot_product,
        "greedy": lambda t, use: (greedy(t["logits"], use_triton=use),),
        "sample": sampling,
    }
    return {
        f"elementwise {name}": lambda run=run: against_torch(inputs, run) for name, run in operations.items()
    }


def run_slot_state() -> float:
    """A decode step's beginning and end, padding among its rows, bit for bit as torch's."""
    slots = make_slots([0, 5, 129], 9, DEVICE)
    index = torch.tensor([2, 3, 0, 3], device=DEVICE)
    outcomes = []
    for use_triton in (True, False):
        state = slots.clone()
        rows, settings = start_decodes(state, index, 16, drawn=True, use_triton=use_triton)
        keep_newest(state, index, torch.tensor([7, 0, -1, 0], device=DEVICE), use_triton=use_triton)
        outcomes.append((rows, settings, draw_settings(state, index, use_triton=use_triton), state))
    (rows, *settings, state), (wanted_rows, *wanted, wanted_state) = outcomes
    assert_same_rows(rows, wanted_rows, 16)
    for each, other in zip(settings, wanted):
        assert_same_settings(each, other)
    assert_same_slots(state, wanted_state)
    return 0.0


def run_all_reduce() -> float:
    """Rank 1 of 3, twice: once in each half."""
    peers = PlayedPeers(1, 3, DEVICE)
    error = 0.0
    for rows in (1, 5):
        tensors = [torch.randn(rows, 96, device=DEVICE).to(DTYPE) for _ in range(3)]
        peers.publish(tensors)
        total = one_shot_all_reduce(tensors[1].clone(), peers.buffers)
        error = max(error, worst_error(total[None], rank_order_sum(tensors)[None].double()))
    return error


def all_runs() -> dict[str, Run]:
    """Every run by name, in the order in which main takes them."""
    return {
        **decode_runs(),
        "prefill triton, chunks of prompts": lambda: run_prefill("triton", [5, 0, 40], [20, 3, 90]),
        "prefill triton, one token": lambda: run_prefill("triton", [1], [70]),
        **specialised_runs(),
        **elementwise_runs(),
        "slot state": run_slot_state,
        "one-shot all-reduce": run_all_reduce,
    }


def main(arguments: Sequence[str]) -> int:
    """0 if every chosen run gave the right result, 1 if one did not, 2 if none was chosen."""
    runs = all_runs()
    if arguments == ["--list"]:
        print("\n".join(runs))
        return 0
    chosen = [name for name in runs if not arguments or any(part in name for part in arguments)]
    if not chosen:
        print(f"nothing is called {' or '.join(arguments)}; there is: {', '.join(runs)}")
        return 2
    wrong = 0
    for name in chosen:
        print(f"{name} ...", flush=True)
        error = runs[name]()
        wrong += not error < TOLERANCE
        print(f"{name}: {'ok' if error < TOLERANCE else 'WRONG'}, error {error:.1e}", flush=True)
    print(f"{len(chosen)} runs on {DEVICE}, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    # Read at the first allocation; in a test process it would slow down, and break, what others do.
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    sys.exit(main(sys.argv[1:]))
