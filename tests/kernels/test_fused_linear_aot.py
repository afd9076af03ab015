"""The products on the residual stream compile for GPUs that are not here: tensor cores, loads in flight, no spills."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from kernels.fused_linear import MAX_ROWS, choose_dot_tile  # noqa: E402
from tests.kernels.aot import EXTENT, Launch, compile_usual  # noqa: E402

# Outputs, inputs, onto the residual: Qwen3-0.6B's o, 8B's qkv, o and gate_up, 32B's down.
SHAPES = [
    (1024, 2048, True),
    (6144, 4096, False),
    (4096, 4096, True),
    (24576, 4096, False),
    (5120, 25600, True),
]

# Bytes a thread: of wide products ptxas makes 64 registers and two spilled words, as in those measured on an H200.
MAX_SPILLED_WIDE = 8


def dot(n: int, k: int, *, add: bool = True, dtype: str = "bf16") -> Launch:
    tile = choose_dot_tile(n, 4 if dtype == "fp32" else 2)
    return Launch(
        kernel="kernels.fused_linear:_dot_kernel",
        types=dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), f"*{dtype}"),
        constexprs={
            "bias_ptr": None,
            "ROWS": MAX_ROWS,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "STAGES": tile.num_stages,
            "ADD": add,
            "DOT_DTYPE": {"bf16": tl.bfloat16, "fp32": tl.float32}[dtype],
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        label=f"{n} x {k} {dtype} {tile} add {add}",
    )


@pytest.mark.parametrize("everything", EXTENT)
def test_compile_for_every_gpu(everything):
    launches = [*(dot(n, k, add=add) for n, k, add in SHAPES), dot(4096, 4096, dtype="fp32")]
    for report in compile_usual(launches, 3, everything):
        report.check(0 if report.launch.constexprs["ADD"] else MAX_SPILLED_WIDE)
        if "fp32" not in report.launch.label:
            assert "mma.sync" in report.ptx, str(report)
            assert "cp.async.cg" in report.ptx, f"{report} is not pipelined"
