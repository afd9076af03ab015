"""KV caches in fp8: quantised per KV head, read by the kernels that say so, refused by name elsewhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels import decode, fp8_cache
from kernels.decode import DecodeProblem
from kernels.fp8_cache import FP8, FP8_MAX, dequantise_cache, quantise_cache
from tests.kernels.decode_cases import expected, make_case, quantised, worst_error

KERNELS = [name for name in decode.names() if FP8 in decode.get(name).kv_dtypes and name != "reference"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def test_each_heads_largest_value_becomes_448() -> None:
    cache = (
        torch.randn(5, 4, 3, 8, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-3, 1.0, 1e4])[:, None]
    )
    quantised_cache, scale = quantise_cache(cache.bfloat16())
    torch.testing.assert_close(scale, cache.bfloat16().float().abs().amax((0, 1, 3)) / 448)
    assert quantised_cache.dtype == FP8
    assert quantised_cache.float().abs().amax((0, 1, 3)).tolist() == [FP8_MAX] * 3


def test_rounding_stays_within_half_a_step() -> None:
    cache = torch.randn(40, 16, 2, 64, generator=torch.Generator().manual_seed(0))
    error = (dequantise_cache(*quantise_cache(cache)) - cache).abs()
    _, scale = quantise_cache(cache)
    assert (error <= (cache.abs() * 2**-4).maximum(scale[:, None] * 2**-10) * (1 + 1e-5)).all()
    assert (error / cache.abs()).square().mean().sqrt() < 0.03


def test_unwritten_memory_sets_no_scale_and_stays_nan() -> None:
    cache = torch.full((3, 4, 2, 8), float("nan"))
    cache[1, :, 0], cache[2, 0, 1, 0] = 2.0, float("inf")
    quantised_cache, scale = quantise_cache(cache)
    assert scale.tolist() == [pytest.approx(2 / 448), 1.0]
    assert torch.equal(quantised_cache.float().isnan(), ~cache.isfinite())
    empty, scale = quantise_cache(torch.zeros(0, 4, 2, 8))
    assert empty.shape == (0, 4, 2, 8)
    assert scale.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bad", [torch.zeros(3, 4, 5), torch.zeros(1, 2, 3, 4, dtype=torch.int32)])
def test_what_is_no_cache_is_refused(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="cache must be"):
        quantise_cache(bad)


def test_the_oracle_multiplies_by_the_scales() -> None:
    """Against the plain oracle on caches that were widened beforehand; each head has its own scale."""
    case = make_case([60, 0, 7])
    case.k_cache[:, :, 1] *= 3
    case.v_cache[:, :, 0] *= 50
    small, scales = quantised(case)
    wide = dataclasses.replace(
        case,
        k_cache=dequantise_cache(small.k_cache, scales["k_scale"]),
        v_cache=dequantise_cache(small.v_cache, scales["v_scale"]),
    )
    assert worst_error(expected(small, **scales), expected(wide)) < 1e-6


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "heads", "head_dim"), [(16, (4, 2), 64), (64, (5, 1), 80)])
def test_against_the_dequantised_oracle(
    name: str,
    dtype: torch.dtype,
    block_size: int,
    heads: tuple[int, int],
    head_dim: int,
    device: torch.device,
) -> None:
    """Ragged, NaN around, K and V of different sizes in each head."""
    case = make_case([1, 0, 200, 64], heads=heads, head_dim=head_dim, block_size=block_size, device=device)
    case.k_cache[:, :, 0] *= 2
    case.v_cache[:, :, -1] *= 30
    case, scales = quantised(case)
    case = dataclasses.replace(case, q=case.q.to(dtype), out=case.out.to(dtype))
    kernel = decode.get(name)
    reason = kernel.supports(case.problem)
    if reason is not None:
        pytest.skip(reason)
    kernel(*case.inputs, out=case.out, **kernel.plan(case.problem), **scales)
    assert worst_error(case.out, expected(case, **scales)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "options", [{"num_splits": 1}, {"num_splits": 3, "prefetch": True}, {"split_size": 64}]
)
def test_every_way_of_splitting(options: dict[str, int], device: torch.device) -> None:
    case, scales = quantised(make_case([150, 64, 0], device=device))
    reason = decode.get("split_kv").supports(case.problem)
    if reason is not None:
        pytest.skip(reason)
    decode.get("split_kv")(*case.inputs, out=case.out, tile=64, **options, **scales)
    assert worst_error(case.out, expected(case, **scales)) < 1e-5


@pytest.mark.parametrize("context_len", [16, 500, 4000])
def test_error_against_the_cache_before_it_was_quantised(context_len: int) -> None:
    """What split_kv's docstring states, by the oracle: of standard normal inputs, norm over norm, a head and row."""
    case = make_case([context_len] * 4, heads=(16, 4), head_dim=128)
    small, scales = quantised(case)
    exact = expected(case)
    error = (expected(small, **scales) - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 0.03 < error.mean() < 0.045
    assert error.max() < 0.08


@pytest.mark.parametrize("name", [*KERNELS, "reference"])
def test_scales_that_do_not_fit_are_named(name: str, device: torch.device) -> None:
    plain = make_case([20], device=device)
    case, scales = quantised(plain)
    reason = decode.get(name).supports(case.problem)
    if reason is not None:
        pytest.skip(reason)
    call = decode.get(name)
    k_scale, v_scale = scales["k_scale"], scales["v_scale"]
    for options, message in [
        ({}, "k_scale is None, a cache in torch.float8_e4m3fn needs"),
        ({"k_scale": k_scale}, "k_scale is given without v_scale"),
        ({"v_scale": v_scale}, "v_scale is given without k_scale"),
        ({"k_scale": k_scale.half(), "v_scale": v_scale}, r"k_scale must be \[2\] torch.float32"),
        ({"k_scale": k_scale, "v_scale": v_scale[:1]}, r"v_scale must be \[2\] torch.float32"),
        ({"k_scale": k_scale, "v_scale": v_scale.repeat(2)[::2]}, "v_scale must be .* contiguous"),
        ({"k_scale": k_scale.to("meta"), "v_scale": v_scale}, "k_scale is on meta, k_cache is on"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(*case.inputs, **options)
    # A kernel that hands such a cache to one without these options may leave the refusal to it.
    wanted = (
        r"k_scale is given, k_cache is torch\.float32: scales are for|unexpected keyword argument 'k_scale'"
    )
    with pytest.raises(ValueError, match=wanted):
        call(*plain.inputs, **scales)
    mixed = dataclasses.replace(case, v_cache=plain.v_cache)
    with pytest.raises(ValueError, match=r"v_cache is torch.float32, k_cache is torch.float8_e4m3fn"):
        call(*mixed.inputs, **scales)


@pytest.mark.parametrize("name", [name for name in decode.names() if name not in (*KERNELS, "reference")])
def test_other_kernels_refuse_fp8_by_name(name: str, device: torch.device) -> None:
    case, _ = quantised(make_case([20], device=device))
    kernel = decode.get(name)
    if kernel.unavailable(device) is None:
        assert f"kv_dtype is torch.float8_e4m3fn, {name} takes" in str(kernel.supports(case.problem))
    with pytest.raises(ValueError, match=r"k_cache is torch\.float8_e4m3fn, q is torch\.float32"):
        kernel(*case.inputs)


def test_older_gpus_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a compiler says it in its own words (test_decode_aot.py::test_an_a100_cannot_read_fp8)."""
    problem = DecodeProblem(
        1, 4, 2, 64, 16, 100, torch.bfloat16, torch.device("cuda"), kv_dtype=torch.float8_e4m3fn
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, supported in [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        reason = decode.get("split_kv").supports(problem)
        assert (reason is None) == supported
        assert supported or "needs compute capability 8.9 or later, cuda has 8." in str(reason)
    assert fp8_cache.fp8_unsupported(torch.device("cpu")) is None


def test_a_problem_has_one_form() -> None:
    """kv_dtype is None where it is dtype, however it was given: equal problems compare equal."""
    plain = DecodeProblem(1, 4, 2, 64, 16, 100, torch.float16, torch.device("cpu"))
    assert dataclasses.replace(plain, kv_dtype=torch.float16) == plain
    assert dataclasses.replace(plain, kv_dtype=FP8).kv_dtype == FP8
