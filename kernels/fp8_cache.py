"""Paged KV caches in fp8 (e4m3), one scale a KV head: how they are made, and the checks of their scales."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # torch.finfo(FP8).max

# The least compute capability whose GPUs convert e4m3, as Triton asks for it.
FP8_CAPABILITY = (8, 9)


def quantise_cache(cache: Tensor) -> tuple[Tensor, Tensor]:
    """(fp8 cache, scale): scale = amax / 448 over a KV head's finite elements, cache = round(value / scale).

    cache: [num_blocks, block_size, num_kv_heads, head_dim], any float dtype and strides; the result is contiguous.
    scale: [num_kv_heads] float32, 1 where a head holds nothing but zeros. What is not finite (memory that no token
    was written to) counts for no scale and becomes NaN. A value is off by 2^-4 of itself at most, or near zero by
    2^-10 of the scale: half of e4m3's steps, of which it has eight an octave down to 2^-6 and even ones below.
    """
    if cache.dim() != 4 or not cache.is_floating_point():
        raise ValueError(
            "cache must be [num_blocks, block_size, num_kv_heads, head_dim] floating point, "
            f"got shape {tuple(cache.shape)} {cache.dtype}"
        )
    wide = cache.float()
    finite = wide.isfinite()
    magnitudes = torch.where(finite, wide.abs(), 0.0)
    amax = magnitudes.amax(dim=(0, 1, 3)) if cache.numel() else magnitudes.new_zeros(cache.shape[2])
    scale = torch.where(amax > 0, amax / FP8_MAX, 1.0)
    # Clamped, for the quotient may exceed 448 by a rounding.
    scaled = (wide / scale[:, None]).clamp(-FP8_MAX, FP8_MAX)
    return torch.where(finite, scaled, float("nan")).to(FP8).contiguous(), scale


def dequantise_cache(cache: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values that an fp8 cache and its scales stand for, [num_blocks, block_size, num_kv_heads, head_dim]."""
    return (cache.float() * scale[:, None]).to(dtype)


def check_scales(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Raise ValueError, naming the argument, unless both scales fit a cache in fp8, or the cache needs none."""
    num_kv_heads = k_cache.shape[2]
    for name, scale, other, other_name in (
        ("k_scale", k_scale, v_scale, "v_scale"),
        ("v_scale", v_scale, k_scale, "k_scale"),
    ):
        if scale is None:
            if other is not None:
                raise ValueError(f"{other_name} is given without {name}")
            if k_cache.dtype == FP8:
                raise ValueError(f"{name} is None, a cache in {FP8} needs [{num_kv_heads}] torch.float32")
            continue
        if k_cache.dtype != FP8:
            raise ValueError(f"{name} is given, k_cache is {k_cache.dtype}: scales are for {FP8}")
        if scale.shape != (num_kv_heads,) or scale.dtype != torch.float32 or not scale.is_contiguous():
            raise ValueError(
                f"{name} must be [{num_kv_heads}] torch.float32 contiguous, a scale a KV head, "
                f"got shape {tuple(scale.shape)} {scale.dtype}"
            )
        if scale.device != k_cache.device:
            raise ValueError(f"{name} is on {scale.device}, k_cache is on {k_cache.device}")


def fp8_unsupported(device: torch.device) -> str | None:
    """Why kernels cannot read an fp8 cache on `device`, or None if they can."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None  # Triton's interpreter, and plans made ahead of time
    found = torch.cuda.get_device_capability(device)
    if found >= FP8_CAPABILITY:
        return None
    return f"a cache in {FP8} needs compute capability 8.9 or later, {device} has {found[0]}.{found[1]}"
