"""The one-shot all-reduce compiles for GPUs that are not here: wide loads, system-wide signals, never multicast."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

from kernels.all_reduce import MAX_TILE, MIN_TILE, SIGNAL_BYTES, SIGNALS  # noqa: E402
from tests.kernels.aot import EXTENT, Launch, compile_usual  # noqa: E402


def one_shot(size: int, tile: int, dtype: str) -> Launch:
    return Launch(
        kernel="kernels.all_reduce:_one_shot_kernel",
        types={"x_ptr": f"*{dtype}", "addresses_ptr": "*i64", "calls_ptr": "*i32"},
        constexprs={
            "SIZE": size,
            "LANES": triton.next_power_of_2(size),
            "TILE": tile,
            "SIGNALS": SIGNALS,
            "SIGNAL_BYTES": SIGNAL_BYTES,
        },
        num_warps=tile // 256,
        label=f"{size} ranks, tile {tile}, {dtype}",
    )


@pytest.mark.parametrize("everything", EXTENT)
def test_compile_for_every_gpu(everything):
    launches = [one_shot(3, MIN_TILE, "bf16"), *(one_shot(8, MAX_TILE, dtype) for dtype in ("bf16", "fp32"))]
    launches += [one_shot(size, MIN_TILE, "bf16") for size in (2, 8)]
    for report in compile_usual(launches, 3, everything):
        report.check()
        size, wide = report.launch.constexprs["SIZE"], report.launch.types["x_ptr"] == "*fp32"
        assert report.ptx.count("ld.global.v4.b32") == (size + 1) * (2 if wide else 1), str(report)
        assert "atom.global.sys.release.exch" in report.ptx, str(report)
        assert "atom.global.sys.acquire.add" in report.ptx, str(report)
        assert "multimem" not in report.ptx, str(report)
        # Nothing is loaded from the peers before the barrier that follows the last acquire.
        before, after = report.ptx.rsplit("sys.acquire", 1)
        assert after.index("bar.sync") < after.index("ld.global.v4"), str(report)
        order = [before.index(part) for part in ("st.global.v4", "bar.sync", "sys.release")]
        assert order == sorted(order), str(report)
