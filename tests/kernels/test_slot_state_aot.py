"""The kernels of slot state compile for GPUs that are not here, and count after a barrier."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels.aot import EXTENT, Launch, compile_usual

SETTINGS = {
    **dict.fromkeys(("temperature_ptr", "top_p_ptr", "row_temperature_ptr", "row_top_p_ptr"), "*fp64"),
    **dict.fromkeys(("top_k_ptr", "seed_ptr", "row_top_k_ptr"), "*i64"),
    "row_uniform_ptr": "*fp64",
}


def start(drawn: bool, block_size: int, tile: int) -> Launch:
    int64 = ("slots", "num_computed", "newest", "input_ids", "positions", "slot_mapping")
    int32 = ("table", "context_lens", "row_table")
    return Launch(
        kernel="kernels.slot_state:_start_decodes_kernel",
        types={
            **{f"{name}_ptr": "*i64" for name in int64},
            **{f"{name}_ptr": "*i32" for name in int32},
            **SETTINGS,
        },
        constexprs={"BLOCK_SIZE": block_size, "TILE": tile, "DRAWN": drawn},
        label=f"drawn {drawn}, blocks of {block_size}, tile {tile}",
    )


@pytest.mark.parametrize("everything", EXTENT)
def test_compile_without_spills(everything):
    launches = [
        start(drawn=False, block_size=16, tile=1024),
        start(drawn=True, block_size=16, tile=1024),
        start(drawn=True, block_size=24, tile=4),
        Launch(
            kernel="kernels.slot_state:_draw_settings_kernel",
            types={"slots_ptr": "*i64", "num_computed_ptr": "*i64", **SETTINGS},
            num_warps=1,
        ),
        Launch(
            kernel="kernels.slot_state:_keep_newest_kernel",
            types=dict.fromkeys(("slots_ptr", "token_ids_ptr", "newest_ptr"), "*i64"),
            num_warps=1,
        ),
    ]
    for report in compile_usual(launches, len(launches), everything):
        report.check()
        assert report.shared == 0, f"{report} sends values through shared memory"
        if "start_decodes" in report.launch.kernel:
            # Else one thread may count before another has read the count.
            stores = report.ptx[report.ptx.rindex("bar.sync") :]
            assert stores.count("st.global") == 1, f"{report} does not end with the count"
