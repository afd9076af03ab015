"""The fused kernel against the three functions it replaces, one after the other."""

from __future__ import annotations

import pytest
import torch

from kernels.kv_write import write_kv
from kernels.norm import rms_norm
from kernels.qk_norm_rope_write import qk_norm_rope_write
from kernels.rope import apply_rope

EPS = 1e-6
# Three roundings, each of which a sum in another order may tip. (The interpreter cuts bf16 off.)
CLOSE = {torch.float32: 2e-6, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}


def inputs(tokens, num_q_heads, num_kv_heads, head_dim, dtype, device, block_size=16):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    angles = normal(50, head_dim // 2) * 10
    num_blocks = tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:tokens]
    slots[1::3] = -1
    pool = torch.full((num_blocks, 2, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    return {
        "qkv": (normal(tokens, num_q_heads + 2 * num_kv_heads, head_dim) * 3).to(dtype).to(device),
        "weights": [(1 + 0.2 * normal(head_dim)).to(dtype).to(device) for _ in range(2)],
        "positions": torch.randint(0, 50, (tokens,), generator=generator).to(device),
        "cos_sin": torch.stack([angles.cos(), angles.sin()], 1).to(device),
        "pool": pool.to(device),
        "slots": slots.to(device),
        "heads": [num_q_heads, num_kv_heads, num_kv_heads],
    }


def fused(case, *, use_triton, norm=True):
    qkv, pool = case["qkv"].clone(), case["pool"].clone()
    q, k, v = qkv.split(case["heads"], dim=1)
    weights = case["weights"] if norm else (None, None)
    rest = (case["positions"], case["cos_sin"], pool[:, 0], pool[:, 1], case["slots"])
    qk_norm_rope_write(q, k, v, *weights, EPS, *rest, use_triton=use_triton)
    return q, v, pool


def separate(case, *, norm=True):
    pool = case["pool"].clone()
    q, k, v = (t.clone() for t in case["qkv"].split(case["heads"], dim=1))
    if norm:
        q, k = (rms_norm(x, w, EPS, use_triton=False) for x, w in zip((q, k), case["weights"]))
    apply_rope(q, k, case["positions"], case["cos_sin"], use_triton=False)
    write_kv(k, v, pool[:, 0], pool[:, 1], case["slots"], use_triton=False)
    return q, v, pool


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("heads", [(16, 8, 128), (14, 2, 64), (9, 3, 80), (40, 8, 128), (1, 1, 32)])
@pytest.mark.parametrize("norm", [True, False])
def test_equals_norm_then_rope_then_write(dtype, heads, norm, device):
    case = inputs(7, *heads, dtype, device)
    expected = separate(case, norm=norm)
    for actual, wanted in zip(fused(case, use_triton=False, norm=norm), expected):
        torch.testing.assert_close(actual, wanted, atol=0, rtol=0, equal_nan=True)
    for actual, wanted in zip(fused(case, use_triton=True, norm=norm), expected):
        torch.testing.assert_close(actual, wanted, atol=CLOSE[dtype], rtol=CLOSE[dtype], equal_nan=True)


@pytest.mark.parametrize("use_triton", [False, True])
def test_strides(use_triton, device):
    case = inputs(4, 4, 2, 64, torch.float32, device)
    expected = separate(case)
    for name in ("positions", "slots"):
        case[name] = torch.stack([case[name], case[name].flip(0)], 1)[:, 0]
    case["weights"] = [torch.stack([weight, -weight], 1)[:, 0] for weight in case["weights"]]
    for actual, wanted in zip(fused(case, use_triton=use_triton), expected):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("use_triton", [False, True])
def test_padding_writes_nothing_and_no_tokens(use_triton, device):
    case = inputs(4, 4, 2, 64, torch.float32, device, block_size=3)
    case["slots"].fill_(-1)
    assert fused(case, use_triton=use_triton)[2].isnan().all()
    for name in ("qkv", "positions", "slots"):
        case[name] = case[name][:0]
    fused(case, use_triton=use_triton)


@pytest.mark.parametrize("use_triton", [False, True])
def test_bad_arguments_are_named(use_triton, device):
    case = inputs(4, 4, 2, 64, torch.float32, device)
    q, k, v = case["qkv"].split(case["heads"], dim=1)
    pool = case["pool"]
    rest = (EPS, case["positions"], case["cos_sin"], pool[:, 0], pool[:, 1], case["slots"])
    good = case["weights"][0]
    for weights, message in (
        ((good[:8], good), "q_weight must be"),
        ((good, None), "both be given or both be None"),
    ):
        with pytest.raises(ValueError, match=message):
            qk_norm_rope_write(q, k, v, *weights, *rest, use_triton=use_triton)
    with pytest.raises(ValueError, match="v's last dimension must be contiguous"):
        qk_norm_rope_write(q, k, v.mT.contiguous().mT, good, good, *rest, use_triton=use_triton)
    with pytest.raises(ValueError, match="slot_mapping must be"):
        qk_norm_rope_write(q, k, v, good, good, *rest[:-1], case["slots"][:2], use_triton=use_triton)
