"""The Triton prefill kernel compiles for GPUs that are not here, within their shared memory and registers."""

from __future__ import annotations

import re

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from kernels.prefill.triton_flash import choose_tile  # noqa: E402
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
