"""The tensor-core product compiles for GPUs that are not here: tensor cores, loads in flight, no spills."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from kernels.dot_linear import MAX_ROWS, DotTile  # noqa: E402
from kernels.product_choice import read_table  # noqa: E402
from kernels.tuned_tables import DEFAULT_GPU, tuned_table  # noqa: E402
from tests.kernels.aot import EXTENT, Launch, compile_usual  # noqa: E402

# Bytes a thread: of wide products ptxas makes 64 registers and two spilled words, as in those measured on an H200.
MAX_SPILLED_WIDE = 8


def shipped_tiles() -> list[DotTile]:
    """Those that the table names."""
    choices = [
        c for of_rows in read_table(tuned_table("kernels", DEFAULT_GPU)).values() for c in of_rows.values()
    ]
    return [DotTile(*tile) for tile in sorted({choice.tile for choice in choices if choice.kind == "dot"})]


def dot(tile: DotTile, dtype: str = "bf16", *, bias: bool = False) -> Launch:
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), f"*{dtype}")
    constexprs = {
        "ROWS": MAX_ROWS,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.num_stages,
        "DOT_DTYPE": {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[dtype],
    }
    return Launch(
        kernel="kernels.dot_linear:_dot_kernel",
        types=pointers | ({"bias_ptr": f"*{dtype}"} if bias else {}),
        constexprs=constexprs | ({} if bias else {"bias_ptr": None}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        label=f"{dtype} {tile} bias {bias}",
    )


@pytest.mark.parametrize("everything", EXTENT)
def test_compile_for_every_gpu(everything):
    tiles = shipped_tiles()
    halves = [dot(tile) for tile in tiles] + [dot(tile, "fp16", bias=True) for tile in tiles]
    launches = [*halves, dot(DotTile(16, 64, 2, 2), "fp32")]
    for report in compile_usual(launches, len(tiles), everything):
        print(report)
        report.check(MAX_SPILLED_WIDE if report.launch.constexprs["BLOCK_N"] > 16 else 0)
        if report.launch in halves:
            assert "mma.sync" in report.ptx, str(report)
            assert "cp.async.cg" in report.ptx, f"{report} is not pipelined"
