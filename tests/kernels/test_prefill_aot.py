"""The Triton prefill kernel compiles for GPUs that are not here, within their shared memory and registers."""

from __future__ import annotations

import math
import re

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from kernels.prefill import warp_specialized  # noqa: E402
from kernels.prefill.triton_flash import choose_tile  # noqa: E402
from kernels.triton_support import gl  # noqa: E402
from tests.kernels.aot import EXTENT, SHARED_LIMIT, Launch, compile_launches  # noqa: E402

NAMES = {
    torch.bfloat16: ("bf16", tl.bfloat16),
    torch.float16: ("fp16", tl.float16),
    torch.float32: ("fp32", tl.float32),
}
# head_dim, dtype, group, block_size, max_query_len
CASES = [
    (128, torch.bfloat16, 2, 16, 4096),
    (128, torch.bfloat16, 4, 24, 1),
    (256, torch.bfloat16, 8, 16, 4096),
    (128, torch.float32, 2, 16, 4096),
    (128, torch.bfloat16, 2, 256, 4096),
    (128, torch.bfloat16, 8, 16, 4),
    (64, torch.float16, 7, 16, 4096),
    (96, torch.bfloat16, 4, 64, 4096),
]
# Bytes a thread that may spill where head_dim or group is no power of two: their masks and divisions cost
# registers. The plain shapes spill nothing.
MAX_SPILLED_ODD = 160
# At 256 the accumulator alone takes half of a thread's registers.
MAX_SPILLED_WIDE = 64


@pytest.mark.parametrize("everything", EXTENT)
def test_compiles_without_spills(everything):
    cases = CASES if everything else CASES[:4]
    for capability in SHARED_LIMIT if everything else (90,):
        launches = [_launch(capability, *case) for case in cases]
        for report, case in zip(compile_launches(launches, [capability]), cases):
            is_odd = case[0] & (case[0] - 1) or case[2] & (case[2] - 1)
            report.check(max_spilled=MAX_SPILLED_ODD if is_odd else MAX_SPILLED_WIDE if case[0] > 128 else 0)
            if case[1] != torch.float32:
                assert "mma" in report.ptx, f"{report} does not use tensor cores"
                # The .cg form copies 16 bytes a time: keys and values are read in whole vectors, asynchronously.
                assert "cp.async.cg.shared.global" in report.ptx, f"{report} does not load in vectors"


@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (64, 4), (128, 8), (128, 5)])
def test_hopper_reads_queries_and_keys_from_shared_memory(head_dim, group):
    """A product whose left operand lies in registers waits for each step of it: only the weights of values may."""
    (report,) = compile_launches([_launch(90, head_dim, torch.bfloat16, group, 16, 4096)], [90])
    products = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\S)", report.ptx)
    assert len(products) > 0
    assert products.count("{") * head_dim == products.count("%") * 128, (
        products
    )  # block_n 128 against head_dim, in steps of 16


def _launch(capability, head_dim, dtype, group, block_size, max_query_len) -> Launch:
    tile = choose_tile(head_dim, dtype, group, max_query_len, divmod(capability, 10))
    name, dot_dtype = NAMES[dtype]
    return Launch(
        kernel="kernels.prefill.triton_flash:_prefill_kernel",
        types={
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{name}"),
            **dict.fromkeys(("block_table_ptr", "context_lens_ptr", "query_start_loc_ptr"), "*i32"),
            "scale_log2": "fp32",
        },
        constexprs={
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_SIZE": block_size,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "DOT_DTYPE": dot_dtype,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        label=f"D{head_dim} {name} group {group} block {block_size} {tile}",
    )


# Bytes a thread: some registers that live from item to item, stored and loaded once an item, not while keys are walked,
# and more of them with offsets of 64 bits.
MAX_SPILLED_ITEM, MAX_SPILLED_ITEM_WIDE = 16, 40


@pytest.mark.parametrize("everything", EXTENT)
def test_specialised_warps_compile_for_hopper(everything):
    """In 168 registers of 12 warps, and the shared memory of one program a processor, at most."""
    cases = [
        {"head_dim": 128, "group": 4},
        {"head_dim": 64, "group": 7, "block_size": 24, "dtype": "fp16"},
        {"head_dim": 128, "group": 8, "block_size": 256},
        {"head_dim": 128, "group": 1, "kv_heads": 1},
        {"head_dim": 128, "group": 5, "early": False},
        {"head_dim": 128, "group": 5, "wide": True},
        {"head_dim": 64, "group": 2, "early": False, "wide": True},
        {"head_dim": 128, "group": 5, "block_size": 8, "dtype": "fp16"},
    ]
    cases = cases if everything else cases[:2]
    for report, case in zip(compile_launches([_specialised(**case) for case in cases], [90]), cases):
        narrow = 0 if case["head_dim"] == 64 else MAX_SPILLED_ITEM
        report.check(max_spilled=MAX_SPILLED_ITEM_WIDE if case.get("wide") else narrow)
        # Queries of 16 bytes a time, asynchronously.
        assert ("cp.async.cg.shared.global" in report.ptx) == case.get("early", True)
        assert report.ptx.count("setmaxnreg.inc") >= 2, (
            f"{report} does not move registers to where they are needed"
        )
        assert "cp.async.bulk.tensor" in report.ptx


def _specialised(head_dim, group, block_size=16, dtype="bf16", kv_heads=8, early=True, wide=False) -> Launch:
    box = math.gcd(block_size, warp_specialized.BLOCK_N)
    descriptor = f"tensordesc<{dtype}[{box}, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
    return Launch(
        kernel="kernels.prefill.warp_specialized:_prefill_kernel",
        types={
            **dict.fromkeys(("q_ptr", "out_ptr"), f"*{dtype}"),
            **dict.fromkeys(("k_desc", "v_desc"), descriptor),
            **dict.fromkeys(("block_table_ptr", "context_lens_ptr", "query_start_loc_ptr"), "*i32"),
            "scale_log2": "fp32",
        },
        constexprs={
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_M": warp_specialized.BLOCK_M,
            "BLOCK_N": warp_specialized.BLOCK_N,
            "BOX": box,
            "STAGES": warp_specialized.NUM_STAGES,
            "EARLY": early,
            "WIDE": wide,
            "CONSUMER_REGISTERS": warp_specialized.CONSUMER_REGISTERS,
            "PRODUCER_REGISTERS": warp_specialized.PRODUCER_REGISTERS,
        },
        num_warps=4,
        label=f"D{head_dim} {dtype} group {group} block {block_size} KV heads {kv_heads} early {early} wide {wide}",
    )
