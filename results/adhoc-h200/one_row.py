"""long_runs.py with other products for the rows of a small step: which of them a step of one row is fastest with.

python results/adhoc-h200/one_row.py VARIANT breakdown --model qwen3_32b --out step.json --batch 1 --context 1024
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import long_runs

from engine.execution import kernel_choice
from engine.layers import linear as layers
from engine.layers.fusion import LayerFusion
from kernels.fused_linear import MAX_ROWS, dot_linear
from kernels.linear import few_rows_linear, functional


def by(choose):
    """All products of layers (the head keeps cuBLAS) by choose(out_features, rows): "few", "dot" or "cublas"."""

    def linear(x, weight, bias=None, *, use_triton):
        chosen = choose(weight.shape[0], x.shape[0])
        if chosen == "few":
            return few_rows_linear(x, weight, bias)
        return dot_linear(x, weight, bias) if chosen == "dot" else functional.linear(x, weight, bias)

    def patch():
        layers.linear = linear
        kernel_choice.measured_fusion = lambda hidden_size: LayerFusion()

    return patch


def fused_from_one_row():
    kernel_choice.measured_fusion = lambda hidden_size: LayerFusion(max_rows=MAX_ROWS)  # when run: min_rows=1, which is the default since


VARIANTS = {
    "now": lambda: None,
    "cublas": by(lambda n, rows: "cublas"),
    "few": by(lambda n, rows: "few" if rows == 1 else "cublas"),
    "few_narrow_dot_wide": by(
        lambda n, rows: "cublas" if rows > 16 else "few" if rows == 1 and n <= 8192 else "dot"
    ),
    "dot": by(lambda n, rows: "dot" if rows <= 16 else "cublas"),
    "residual_dot": fused_from_one_row,
}

if __name__ == "__main__":
    VARIANTS[sys.argv.pop(1)]()
    sys.exit(long_runs.main())
