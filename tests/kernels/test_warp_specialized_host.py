"""The host part of the prefill kernel of specialised warps: what it takes, what goes to `triton`, what is launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import prefill
from kernels.prefill import triton_flash, warp_specialized
from kernels.prefill.contract import positive_scale
from kernels.prefill.triton_flash import LOG2_E, PrefillTile, TritonPrefill, choose_tile
from kernels.triton_support import gluon_unavailable
from tests.kernels.prefill_case import PrefillCase, make_case

HOPPER = torch.device("cuda", 0)
kernel = prefill.get("warp_specialized")


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host part, as if Triton compiled here and every device were an H200."""
    for module in (triton_flash, warp_specialized):
        monkeypatch.setattr(module, "INTERPRETING", False)
    monkeypatch.setattr(triton_flash, "triton_unavailable", lambda device: None)
    monkeypatch.setattr(warp_specialized, "gluon_unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


PROBLEM = prefill.PrefillProblem(
    batch_size=4,
    num_q_heads=16,
    num_kv_heads=4,
    head_dim=128,
    block_size=16,
    max_query_len=1000,
    max_context_len=2000,
    dtype=torch.bfloat16,
    device=HOPPER,
)


def test_the_cpu_has_no_such_kernel() -> None:
    assert "warp_specialized" in prefill.names()
    assert "warp_specialized" not in prefill.available("cpu")
    assert kernel.unavailable(torch.device("cpu")) is not None


@pytest.mark.usefixtures("on_hopper")
def test_unavailable_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel.unavailable(HOPPER) is None
    for module, name, value, reason in (
        (
            triton_flash,
            "triton_unavailable",
            lambda device: "triton is not installed",
            "triton is not installed",
        ),
        (warp_specialized, "gluon_unavailable", lambda: "no Gluon here", "no Gluon here"),
        (warp_specialized, "INTERPRETING", True, "Triton's interpreter does not know Gluon"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(module, name, value)
            assert kernel.unavailable(HOPPER) == reason
            assert kernel.supports(PROBLEM) == reason


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_unavailable_on_other_gpus(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    has = f"{capability[0]}.{capability[1]}"
    assert kernel.unavailable(HOPPER) == f"it needs compute capability 9.0, cuda:0 has {has}"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float16, "head_dim": 64, "block_size": 8}, None),
        ({"num_q_heads": 128, "num_kv_heads": 1, "block_size": 24}, None),
        ({"dtype": torch.float32}, "dtype torch.float32 is not one of float16, bfloat16"),
        ({"head_dim": 96}, "head_dim 96 is not one of 64, 128"),
        ({"head_dim": 256}, "head_dim 256 is not one of 64, 128"),
        ({"block_size": 12}, "block_size 12 is not a multiple of 8"),
        ({"num_q_heads": 160, "num_kv_heads": 1}, "160 query heads per KV head are above 128"),
    ],
    ids=str,
)
def test_supports_names_the_reason(changes: dict[str, Any], reason: str | None) -> None:
    assert kernel.supports(dataclasses.replace(PROBLEM, **changes)) == reason


@pytest.mark.usefixtures("on_hopper")
def test_plans_of_short_chunks_are_tritons() -> None:
    for length in (0, 1, 4, 16):  # 64 rows at most, by four heads a group
        tile = choose_tile(128, torch.bfloat16, 4, length, (9, 0))
        assert kernel.plan(dataclasses.replace(PROBLEM, max_query_len=length)) == {"tile": tile}
    for length in (17, 1000):
        assert kernel.plan(dataclasses.replace(PROBLEM, max_query_len=length)) == {}


def cache_of(strides: tuple[int, ...], offset: int = 0, num_blocks: int = 3) -> Tensor:
    """[num_blocks, 16, 2, 64] in fp16."""
    return torch.zeros(20_000, dtype=torch.float16).as_strided((num_blocks, 16, 2, 64), strides, offset)


TAKEN = {
    "contiguous": cache_of((2048, 128, 64, 1)),
    "of one layer": torch.zeros(2, 2, 3, 16, 2, 64, dtype=torch.float16).unbind(0)[1].unbind(0)[1],
    "keys and values by blocks": cache_of((4096, 128, 64, 1), 2048),
    "keys and values by slots": cache_of((4096, 256, 64, 1), 128),
    "heads apart": cache_of((4096, 256, 128, 1), 64),
}
REFUSED = {
    "dims apart": cache_of((4096, 256, 128, 2)),
    "heads before slots": cache_of((2048, 64, 1024, 1)),
    "slots before blocks": cache_of((128, 384, 64, 1)),
    "slots at 264 bytes": cache_of((2112, 132, 64, 1)),
    "heads at 136 bytes": cache_of((2176, 136, 68, 1)),
    "half a slot between blocks": cache_of((2112, 128, 64, 1)),
    "8 bytes off": cache_of((2048, 128, 64, 1), 4),
}


@pytest.mark.parametrize("name", [*TAKEN, *REFUSED])
def test_which_caches_tma_sees_as_rows(name: str) -> None:
    cache = TAKEN[name] if name in TAKEN else REFUSED[name]
    assert warp_specialized._takes(cache[0], cache) == (name in TAKEN)


@pytest.mark.parametrize("name", TAKEN)
def test_descriptors(name: str) -> None:
    """A token's keys are where the kernel looks for them, and no matrix ends outside its tensor."""
    if (reason := gluon_unavailable()) is not None:
        pytest.skip(reason)
    cache = TAKEN[name]
    block, slot, head, _ = cache.stride()
    descriptor = warp_specialized._descriptor(cache, 16)
    assert descriptor.block_shape == [16, 64]
    matrix = cache.as_strided(descriptor.shape, descriptor.strides)
    for number, token, kv_head in ((0, 0, 1), (1, 7, 0), (2, 15, 1)):
        first = matrix[number * (block // slot) + token, kv_head * head]
        assert first.data_ptr() == cache[number, token, kv_head, 0].data_ptr()
    assert matrix[-1, -1].data_ptr() == cache[-1, -1, -1, -1].data_ptr()


class Launches:
    """In place of the kernel."""

    def __init__(self) -> None:
        self.made: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constexprs: self.made.append((grid, arguments, constexprs))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What goes to `triton`, and what is launched; both leave `out` as it is."""
    found = SimpleNamespace(triton=[], launches=Launches())

    monkeypatch.setattr(TritonPrefill, "_launch", lambda self, *arguments: found.triton.append(arguments))
    monkeypatch.setattr(warp_specialized, "_prefill_kernel", found.launches)
    monkeypatch.setattr(warp_specialized, "_descriptor", lambda cache, box: ("descriptor", cache, box))
    return found


def fp16_case(query_len: int) -> PrefillCase:
    return make_case([query_len], [40], num_q_heads=8, dtype=torch.float16, device="cpu")


def test_long_chunks_are_launched(calls: SimpleNamespace) -> None:
    case, out = fp16_case(33), torch.empty(36, 8, 64, dtype=torch.float16)
    assert kernel(*case.args, scale=0.5, out=out) is out
    ((grid, arguments, constexprs),) = calls.launches.made
    assert not calls.triton
    assert grid == (4,)  # two tiles of 32 tokens, by four heads a group, for two KV heads
    assert arguments[0] is case.q
    assert arguments[1:4] == (("descriptor", case.k_cache, 16), ("descriptor", case.v_cache, 16), out)
    assert arguments[7] == 0.5 * LOG2_E
    assert arguments[-2:] == (1, 8)  # the batch, and the programs twice
    assert (constexprs["KV_HEADS"], constexprs["EARLY"], constexprs["WIDE"]) == (2, True, False)
    assert (constexprs["GROUP"], constexprs["BOX"], constexprs["BLOCK_SIZE"]) == (4, 16, 16)
    assert kernel(*case.args).shape == case.q.shape
    assert calls.launches.made[1][1][7] == 64**-0.5 * LOG2_E


@pytest.mark.parametrize(
    ("query_lens", "max_query_len", "sm_count", "programs"),
    [
        ([33], 33, 132, 4),  # tiles of 32 tokens, for two KV heads
        ([33], 33, 3, 3),
        ([300, 20], 300, 132, 24),  # 323 tokens with padding: ten whole tiles and two others at most
        ([20, 0, 0, 0], 20, 132, 8),  # the other rows might be as long, for all the host knows
        ([20, 20, 20, 20], 20, 7, 7),
    ],
)
def test_no_more_programs_than_items_or_multiprocessors(
    query_lens: list[int],
    max_query_len: int,
    sm_count: int,
    programs: int,
    calls: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warp_specialized, "device_sm_count", lambda device: sm_count)
    case = make_case(query_lens, query_lens, num_q_heads=8, dtype=torch.float16, device="cpu")
    kernel(*dataclasses.replace(case, max_query_len=max_query_len).args)
    ((grid, arguments, _constexprs),) = calls.launches.made
    assert grid == (programs,)
    assert arguments[-2:] == (len(query_lens), 2 * programs)


def spread(x: Tensor, strides: tuple[int, int], offset: int = 0) -> Tensor:
    """As x, without its values, tokens and heads at other strides."""
    size = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=False)) + x.shape[2] + offset
    return torch.empty(size, dtype=x.dtype, device=x.device).as_strided(x.shape, (*strides, 1), offset)


@pytest.mark.parametrize(
    ("strides", "offset", "early"),
    [
        ((512, 64), 0, True),
        ((768, 80), 16, True),
        ((512, 64), 4, False),  # 8 bytes
        ((520, 64), 0, False),  # 16-byte aligned, but Triton asks for a multiple of 16 elements
        ((576, 72), 0, False),
    ],
)
def test_queries_are_copied_early_where_they_are_aligned(
    strides: tuple[int, int], offset: int, early: bool, calls: SimpleNamespace
) -> None:
    case = fp16_case(33)
    kernel(*dataclasses.replace(case, q=spread(case.q, strides, offset)).args)
    assert calls.launches.made[0][2]["EARLY"] is early


@pytest.mark.parametrize("which", ["q", "out"])
@pytest.mark.parametrize(
    ("strides", "wide"),
    [
        ((512, 64), False),
        ((2**31 // 36 - 16, 64), False),
        ((2**31 // 36, 64), True),  # of 36 tokens
        ((64, 2**28), True),  # of 8 heads
    ],
)
def test_far_offsets_have_64_bits(
    strides: tuple[int, int], wide: bool, which: str, calls: SimpleNamespace
) -> None:
    """On tensors without memory, so nothing can be read."""
    case = fp16_case(33)
    on_meta = [x.to("meta") if isinstance(x, Tensor) else x for x in case.args]
    far = spread(on_meta[0], strides)
    if which == "q":
        kernel(far, *on_meta[1:])
    else:
        kernel(*on_meta, out=far)
    assert calls.launches.made[0][2]["WIDE"] is wide


@pytest.mark.parametrize(("block_size", "box"), [(8, 8), (24, 8), (48, 16), (128, 128), (256, 128)])
def test_boxes_lie_in_blocks_and_in_tiles(block_size: int, box: int, calls: SimpleNamespace) -> None:
    case = make_case([40], [300], num_q_heads=8, block_size=block_size, dtype=torch.float16, device="cpu")
    kernel(*case.args)
    ((_grid, arguments, constexprs),) = calls.launches.made
    assert [descriptor[2] for descriptor in arguments[1:3]] == [box, box]
    assert constexprs["BOX"] == box


@pytest.mark.parametrize("query_len", [1, 16, 17])
def test_short_chunks_go_to_triton(query_len: int, calls: SimpleNamespace) -> None:
    case, out = fp16_case(query_len), torch.empty(query_len + 3, 8, 64, dtype=torch.float16)
    assert kernel(*case.args, scale=0.5, out=out, workspace=torch.empty(1)) is out
    if query_len * 4 > 64:
        assert not calls.triton
        assert len(calls.launches.made) == 1
    else:
        assert not calls.launches.made
        ((*tensors, max_query_len, scale, tile),) = calls.triton
        expected = (*case.args[:3], out, *case.args[3:6])
        assert all(one is other for one, other in zip(tensors, expected, strict=True))
        assert (max_query_len, scale, tile) == (query_len, 0.5, None)


def test_tiles_go_to_triton_and_options_nowhere(calls: SimpleNamespace) -> None:
    """The plan of short chunks holds for every batch."""
    case, tile = fp16_case(40), PrefillTile(64, 64, 4, 2)
    kernel(*case.args, tile=tile)
    with pytest.raises(TypeError, match=r"warp_specialized takes no option \['num_splits'\]"):
        kernel(*case.args, num_splits=2)
    assert not calls.launches.made
    assert len(calls.triton) == 1
    assert calls.triton[0][-1] is tile


@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
@pytest.mark.parametrize("name", [name for name in REFUSED if name != "dims apart"])  # no kernel takes those
def test_caches_without_rows_go_to_triton(name: str, which: str, calls: SimpleNamespace) -> None:
    case = dataclasses.replace(fp16_case(33), k_cache=TAKEN["contiguous"], v_cache=TAKEN["heads apart"])
    kernel(*case.args)
    assert not calls.triton
    case = dataclasses.replace(case, k_cache=case.k_cache if which == "v_cache" else REFUSED[name])
    case = dataclasses.replace(case, v_cache=case.v_cache if which == "k_cache" else REFUSED[name])
    kernel(*case.args)
    assert len(calls.launches.made) == 1
    assert calls.triton[0][:3] == case.args[:3]


def test_triton_answers_for_what_it_is_given() -> None:
    """Here by Triton's interpreter or on whatever GPU there is: a short chunk, and heads before slots."""
    short = make_case([9], [40], num_q_heads=8)
    case = make_case([20], [40], num_q_heads=8)
    heads_first = case.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    for one in (short, dataclasses.replace(case, k_cache=heads_first)):
        out = one.untouched_out()
        assert kernel(*one.args, out=out) is out
        torch.testing.assert_close(out.double(), one.expected(), atol=3e-6, rtol=3e-6)
    with pytest.raises(TypeError, match="num_splits"):
        kernel(*case.args, num_splits=2)


def test_empty_batches_launch_nothing(calls: SimpleNamespace) -> None:
    case = make_case([], [], num_q_heads=128, num_kv_heads=1, dtype=torch.float16, device="cpu")
    out = case.untouched_out()
    assert kernel(*dataclasses.replace(case, max_query_len=3).args, out=out) is out
    assert not calls.triton
    assert not calls.launches.made
    assert torch.equal(out, case.untouched_out())


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("block_table", torch.zeros(1, 5, dtype=torch.int64)),
        ("context_lens", torch.zeros(2, dtype=torch.int32)),
        ("query_start_loc", torch.zeros(1, dtype=torch.int32)),
        ("max_query_len", 1000),
    ],
)
def test_bad_arguments_are_named(argument: str, wrong: Any, calls: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=argument):
        kernel(*dataclasses.replace(fp16_case(33), **{argument: wrong}).args)
    with pytest.raises(ValueError, match="out must be like q"):
        kernel(*fp16_case(33).args, out=torch.empty(1))
    assert not calls.launches.made


def test_positive_scale() -> None:
    q = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    same, scale = positive_scale(q, 0.25)
    assert same is q
    assert scale == 0.25
    for given in (-0.25, -3.0, 0.0):
        changed, scale = positive_scale(q, given)
        assert scale > 0
        assert torch.equal(changed * scale, q * given)  # the same scores
