"""The sampling kernels compile for GPUs that are not here, at the size of Qwen3's vocabulary, without spills."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

from kernels.sampling_triton import CHUNK, NUM_PIVOTS  # noqa: E402
from tests.kernels.aot import EXTENT, Launch, compile_usual  # noqa: E402

VOCAB_SIZE = 151_936
NUM_CHUNKS = triton.cdiv(VOCAB_SIZE, CHUNK)
POINTERS = {
    "chunk_max_ptr": "*fp32",
    **dict.fromkeys(
        ("chunk_id_ptr", "mass_above_ptr", "num_ties_ptr", "cut_ptr", "ids_ptr", "top_k_ptr"), "*i64"
    ),
    **dict.fromkeys(("bounds_ptr", "measures_ptr", "new_bounds_ptr", "new_measures_ptr"), "*i64"),
    **dict.fromkeys(("newest_ptr", "slots_ptr"), "*i64"),
    **dict.fromkeys(("temperature_ptr", "top_p_ptr", "uniform_ptr"), "*fp64"),
}
ARGUMENTS = {
    "_chunk_max_kernel": ("chunk_max_ptr", "chunk_id_ptr", "cut_ptr"),
    "_search_kernel": (
        "chunk_max_ptr",
        "mass_above_ptr",
        "cut_ptr",
        "temperature_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "bounds_ptr",
        "measures_ptr",
        "new_bounds_ptr",
        "new_measures_ptr",
    ),
    "_weigh_kernel": ("chunk_max_ptr", "mass_above_ptr", "num_ties_ptr", "cut_ptr", "temperature_ptr"),
    "_draw_kernel": (
        "chunk_max_ptr",
        "chunk_id_ptr",
        "mass_above_ptr",
        "num_ties_ptr",
        "cut_ptr",
        "temperature_ptr",
        "uniform_ptr",
        "ids_ptr",
        "newest_ptr",
        "slots_ptr",
    ),
}


def launch(kernel: str, dtype: str = "bf16", **constants) -> Launch:
    unused_bits = {"bf16": 16, "fp16": 13, "fp32": 0}[dtype]
    return Launch(
        kernel=f"kernels.sampling_triton:{kernel}",
        types={"logits_ptr": f"*{dtype}", **{name: POINTERS[name] for name in ARGUMENTS[kernel]}},
        constexprs={
            "VOCAB_SIZE": VOCAB_SIZE,
            "CHUNK": CHUNK,
            "NUM_CHUNKS": NUM_CHUNKS,
            "CHUNKS": triton.next_power_of_2(NUM_CHUNKS),
            "UNUSED_BITS": unused_bits,
            "UNIT": float(1 << (62 - VOCAB_SIZE.bit_length())),
            **constants,
        },
        num_warps=8,
        label=f"{dtype} {constants}",
    )


def search(dtype: str = "bf16", *, by_count: bool, first: bool = False, last: bool = False) -> Launch:
    return launch("_search_kernel", dtype, FIRST=first, LAST=last, BY_COUNT=by_count, NUM_PIVOTS=NUM_PIVOTS)


@pytest.mark.parametrize("everything", EXTENT)
def test_compile_without_spills(everything):
    launches = [
        launch("_chunk_max_kernel"),
        search(by_count=True, first=True),
        search("fp32", by_count=False),
        launch("_weigh_kernel", CUT=True),
        launch("_draw_kernel", GREEDY=False, CUT=True, KEEP=True),
        launch("_draw_kernel", GREEDY=True, CUT=False, KEEP=True),
        launch("_chunk_max_kernel", "fp32"),
        search(by_count=True),
        search(by_count=False),
        search(by_count=False, last=True),
        launch("_weigh_kernel", CUT=False),
        launch("_draw_kernel", GREEDY=False, CUT=False, KEEP=True),
        launch("_draw_kernel", GREEDY=True, CUT=False, KEEP=False),
    ]
    for report in compile_usual(launches, 6, everything):
        report.check()
        if report.launch.kernel.endswith("_chunk_max_kernel"):
            assert "ld.global.v4" in report.ptx, f"{report} has no vector loads"
