"""The fused products compile for GPUs that are not here: without spills, and with the loads they are built around."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from kernels.fused_linear import (  # noqa: E402
    THREAD_K,
    DotTile,
    PlainTile,
    choose_dot_tile,
    choose_plain_tile,
    prefetch_bytes,
)
from tests.kernels.aot import Launch, compile_launches  # noqa: E402

# Qwen3's widths: hidden, query, intermediate.
SHAPES = {"0.6B": (1024, 2048, 3072), "8B": (4096, 4096, 12288), "32B": (5120, 8192, 25600)}


def plain(rows: int, n: int, k: int, what: str, *, pdl: bool, tile: PlainTile | None = None) -> Launch:
    tile = tile or choose_plain_tile(n, k, rows)
    norm = what == "norm"
    constexprs = {
        "bias_ptr": None,
        "ROWS": rows,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "THREAD_K": THREAD_K,
        "ONE_STEP": k <= tile.block_k,
        "NORM": norm,
        "GATED": what == "gated",
        "ADD": not norm,
        "CHUNKS": 32 * tile.num_warps // tile.block_n,
        "CHUNK_BYTES": prefetch_bytes(k - tile.block_k, 2, 32 * tile.num_warps // tile.block_n) if pdl else 0,
        "PDL": pdl,
    }
    if not norm:
        constexprs["norm_weight_ptr"] = None
    pointers = ("x_ptr", "weight_ptr", "norm_weight_ptr", "out_ptr")
    return Launch(
        kernel="kernels.fused_linear:_plain_kernel",
        types={name: "*bf16" for name in pointers if name not in constexprs} | {"eps": "fp32"},
        constexprs=constexprs,
        num_warps=tile.num_warps,
        label=f"{what} {rows} x {n} x {k} {tile} pdl {pdl}",
    )


def dot(n: int, k: int, *, pdl: bool, dtype: str = "bf16", tile: DotTile | None = None) -> Launch:
    tile = tile or choose_dot_tile(n, k, 4 if dtype == "fp32" else 2)
    chunks = 32 * tile.num_warps // tile.block_n
    return Launch(
        kernel="kernels.fused_linear:_dot_kernel",
        types=dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), f"*{dtype}"),
        constexprs={
            "bias_ptr": None,
            "ROWS": 16,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "STAGES": tile.num_stages,
            "ADD": True,
            "DOT_DTYPE": {"bf16": tl.bfloat16, "fp32": tl.float32}[dtype],
            "CHUNKS": chunks,
            "CHUNK_BYTES": prefetch_bytes(k, 2, chunks) if pdl else 0,
            "PDL": pdl,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        label=f"{n} x {k} {dtype} {tile} pdl {pdl}",
    )


def launches(pdl: bool) -> list[Launch]:
    found = []
    for hidden, query, intermediate in SHAPES.values():
        found += [
            plain(1, 2 * intermediate, hidden, "norm", pdl=pdl),
            plain(1, hidden, query, "add", pdl=pdl),
        ]
        found += [plain(rows, hidden, intermediate, "gated", pdl=pdl) for rows in (1, 2)]
        found += [dot(2 * intermediate, hidden, pdl=pdl), dot(hidden, query, pdl=pdl)]
    return [*found, plain(2, 6144, 1024, "norm", pdl=pdl)]


def test_compile_without_spills_for_every_gpu():
    for report in compile_launches([*launches(pdl=False), dot(4096, 4096, pdl=False, dtype="fp32")]):
        report.check()
        assert "griddepcontrol" not in report.ptx, f"{report} waits without PDL"
        if "fp32" in report.launch.label:
            continue
        if "dot" in report.launch.kernel:
            assert "mma.sync" in report.ptx, str(report)
            assert "cp.async.cg" in report.ptx, f"{report} is not pipelined"
        else:
            assert "ld.global.L1::evict_first.L2::cache_hint.v4" in report.ptx, (
                f"{report} reads no 16 bytes at once"
            )


def test_with_pdl_the_weights_are_asked_for_before_the_wait_and_all_else_after():
    for report in compile_launches(launches(pdl=True), capabilities=(90, 120)):
        report.check()
        before, after = report.ptx.split("griddepcontrol.wait")
        assert "griddepcontrol.launch_dependents" in before
        assert "st.global" not in before, f"{report} stores before it waits"
        assert "st.global" in after
        if "dot" in report.launch.kernel:
            assert "cp.async.bulk.prefetch.L2" in before
            for load in ("ld.global", "cp.async.cg"):
                assert load not in before, f"{report} reads before it waits"
        else:
            # The first weights, and of the norm's own: nothing else.
            assert "ld.global" in before
            assert "ld.global" in after
