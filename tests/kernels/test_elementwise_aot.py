"""The elementwise Triton kernels compile for GPUs that are not here, without spills and with vector loads."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

from tests.kernels.aot import EXTENT, Launch, Report, compile_launches, compile_usual  # noqa: E402


def norm(
    hidden: int, rows: int, add: bool, heads: int = 1, flat: bool = True, dtype: str = "bf16", warps: int = 0
) -> Launch:
    block = triton.next_power_of_2(hidden)
    num_warps = warps or (4 if rows * block <= 4096 else 8)
    return Launch(
        kernel="kernels.norm:_rms_norm_kernel",
        types={
            **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "normed_ptr", "total_ptr"), f"*{dtype}"),
            "eps": "fp32",
        },
        constexprs={
            "HEADS": heads,
            "HIDDEN": hidden,
            "BLOCK": block,
            "ROWS": rows,
            "ADD": add,
            "FLAT": flat,
        },
        num_warps=num_warps,
        label=f"{rows} x {hidden} add {add} flat {flat} {dtype} {num_warps} warps",
    )


def silu_mul(dtype: str) -> Launch:
    return Launch(
        kernel="kernels.activation:_silu_mul_kernel",
        types=dict.fromkeys(("gate_up_ptr", "out_ptr"), f"*{dtype}"),
        constexprs={"INTERMEDIATE": 3072, "BLOCK": 1024},
        label=dtype,
    )


def rope(num_q_heads: int, num_heads: int, head_dim: int) -> Launch:
    half = head_dim // 2
    block_half = triton.next_power_of_2(half)
    return Launch(
        kernel="kernels.rope:_rope_kernel",
        types={"q_ptr": "*bf16", "k_ptr": "*bf16", "positions_ptr": "*i64", "cos_sin_ptr": "*fp32"},
        constexprs={
            "stride_q_dim": 1,
            "stride_k_dim": 1,
            "NUM_Q_HEADS": num_q_heads,
            "NUM_HEADS": num_heads,
            "HALF": half,
            "BLOCK_HEADS": min(triton.next_power_of_2(num_heads), 2048 // block_half),
            "BLOCK_HALF": block_half,
        },
        label=f"{num_heads} x {head_dim}",
    )


def write_kv(block_size: int, width: int, head_dim: int) -> Launch:
    pointers = ("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr")
    block = min(triton.next_power_of_2(width), 1024)
    return Launch(
        kernel="kernels.kv_write:_write_kv_kernel",
        types={**dict.fromkeys(pointers, "*bf16"), "slot_mapping_ptr": "*i64"},
        constexprs={
            **dict.fromkeys(("stride_k_dim", "stride_v_dim", "stride_kc_dim", "stride_vc_dim"), 1),
            "BLOCK_SIZE": block_size,
            "HEAD_DIM": head_dim,
            "WIDTH": width,
            "BLOCK": block,
        },
        num_warps=max(1, block // 256),
        label=f"block {block_size} width {width}",
    )


def qk_norm_rope_write(num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> Launch:
    half = head_dim // 2
    block_half = triton.next_power_of_2(half)
    block_heads = min(triton.next_power_of_2(num_q_heads), 1024 // block_half)
    pointers = ("q_ptr", "k_ptr", "v_ptr", "q_weight_ptr", "k_weight_ptr", "k_cache_ptr", "v_cache_ptr")
    return Launch(
        kernel="kernels.qk_norm_rope_write:_qk_norm_rope_write_kernel",
        types={
            **dict.fromkeys(pointers, "*bf16"),
            "positions_ptr": "*i64",
            "slot_mapping_ptr": "*i64",
            "cos_sin_ptr": "*fp32",
            "eps": "fp32",
        },
        constexprs={
            **dict.fromkeys(("stride_kc_dim", "stride_vc_dim"), 1),
            "Q_TILES": triton.cdiv(num_q_heads, block_heads),
            "NUM_Q_HEADS": num_q_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "BLOCK_SIZE": block_size,
            "HALF": half,
            "BLOCK_HEADS": block_heads,
            "BLOCK_HALF": block_half,
            "NORM": True,
        },
        label=f"{num_q_heads}/{num_kv_heads} x {head_dim}",
    )


NORMS = [
    norm(1024, 1, add=False),
    norm(1024, 1, add=True, flat=False),
    norm(5120, 1, add=True),
    norm(128, 8, add=False, heads=16, flat=False),
    norm(576, 1, add=True, dtype="fp32"),
]
# Of results/adhoc-h200/norm_variants.py.
CANDIDATES = [
    *(norm(1024, rows, add=True, warps=warps) for rows, warps in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 4))),
    *(norm(hidden, 1, add=True, warps=warps) for hidden in (4096, 5120) for warps in (4, 8, 16, 32)),
]
LAUNCHES = [
    *NORMS,
    silu_mul("bf16"),
    silu_mul("fp32"),
    rope(16, 24, 128),
    rope(9, 12, 64),
    write_kv(16, 1024, 128),
    write_kv(24, 192, 64),
    qk_norm_rope_write(16, 8, 128, 16),
    qk_norm_rope_write(9, 3, 64, 24),
]


@pytest.mark.parametrize("everything", EXTENT)
def test_compile_without_spills_and_with_vector_loads(everything):
    check_vectors(compile_usual(LAUNCHES, len(LAUNCHES), everything))


@pytest.mark.slow
def test_candidates_compile_for_every_gpu():
    check_vectors(compile_launches(CANDIDATES))
    check_order(compile_launches(CANDIDATES, (90,)))


def check_vectors(reports: list[Report]) -> None:
    for report in reports:
        report.check()
        assert "ld.global.v4" in report.ptx or "ld.global.v2" in report.ptx, f"{report} has no vector loads"
        assert "st.global.v4" in report.ptx or "st.global.v2" in report.ptx, f"{report} has no vector stores"


def test_the_weight_is_asked_for_before_any_warp_waits():
    """Loaded where it is used, behind the reduction, its latency would be added to the row's."""
    check_order(compile_launches(NORMS, (90,)))


def check_order(reports: list[Report]) -> None:
    for report in reports:
        before_barrier = report.ptx.split("bar.sync")[0]
        assert before_barrier.count("ld.global") == report.ptx.count("ld.global"), f"{report}"
