"""RoPE in place: the torch path bit for bit against Transformers in fp32, the Triton path against it."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kernels.rope import apply_rope

ULP = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def table(max_position, head_dim, theta=1e4):
    frequencies = theta ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(max_position).double()[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], dim=1).float()


def packed(tokens, num_q_heads, num_kv_heads, head_dim, dtype=torch.float32):
    """q and k as views inside one qkv projection."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, num_q_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    return qkv, qkv[:, :num_q_heads], qkv[:, num_q_heads : num_q_heads + num_kv_heads]


def positions_for(tokens, max_position):
    return torch.randint(0, max_position, (tokens,), generator=torch.Generator().manual_seed(1))


def test_torch_path_equals_transformers():
    tokens, head_dim = 7, 64
    _, q, k = packed(tokens, 6, 2, head_dim)
    cos_sin, positions = table(500, head_dim), positions_for(tokens, 500)
    cos, sin = (torch.cat([half, half], -1) for half in cos_sin[positions].unbind(1))
    expected = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    apply_rope(q, k, positions, cos_sin, use_triton=False)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])


@pytest.mark.parametrize("use_triton", [False, True])
@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (6, 2), (14, 2), (40, 8)])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rotates_pairs_and_nothing_else(use_triton, dtype, num_q_heads, num_kv_heads, head_dim, device):
    """Dimension i and i + head_dim / 2 as a complex number, in fp64, rounded once; v is not touched."""
    cos_sin, positions = table(100, head_dim), positions_for(3, 100)
    qkv = packed(3, num_q_heads, num_kv_heads, head_dim, dtype)[0].to(device)
    before = qkv.clone()
    turn = torch.complex(*cos_sin[positions].double().unbind(1))[:, None]
    first, second = before.cpu().double().chunk(2, -1)
    turned = torch.complex(first, second) * turn
    expected = torch.cat([turned.real, turned.imag], -1)
    rotated = num_q_heads + num_kv_heads
    q, k = qkv[:, :num_q_heads], qkv[:, num_q_heads:rotated]
    apply_rope(q, k, positions.to(device), cos_sin.to(device), use_triton=use_triton)
    torch.testing.assert_close(
        qkv[:, :rotated].cpu().double(), expected[:, :rotated], atol=ULP[dtype], rtol=ULP[dtype]
    )
    assert torch.equal(qkv[:, rotated:], before[:, rotated:])


@pytest.mark.parametrize("use_triton", [False, True])
def test_strides_and_no_tokens(use_triton, device):
    cos_sin, positions = table(50, 32).to(device), positions_for(4, 50).to(device)
    _, q, k = (t.to(device) for t in packed(4, 4, 2, 32))
    q_strided = torch.empty(4, 4, 64, device=device)[:, :, ::2].copy_(q)
    k_strided = torch.empty(4, 2, 64, device=device)[:, :, ::2].copy_(k)
    apply_rope(q, k, positions, cos_sin, use_triton=False)
    apply_rope(
        q_strided,
        k_strided,
        torch.stack([positions, positions.flip(0)], 1)[:, 0],
        cos_sin,
        use_triton=use_triton,
    )
    torch.testing.assert_close(q_strided, q, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(k_strided, k, atol=1e-6, rtol=1e-6)
    apply_rope(q[:0], k[:0], positions[:0], cos_sin, use_triton=use_triton)


BAD = {
    "q must be": {"q": torch.ones(3, 8)},
    "q's head_dim must be even": {"q": torch.ones(3, 2, 7)},
    "k must be": {"k": torch.ones(2, 1, 8)},
    "positions must be": {"positions": torch.zeros(3, dtype=torch.int32)},
    "cos_sin must be ": {"cos_sin": torch.ones(9, 2, 8)},
    "cos_sin must be contiguous": {"cos_sin": torch.ones(9, 4, 2).transpose(1, 2)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    good = {
        "q": torch.ones(3, 2, 8),
        "k": torch.ones(3, 1, 8),
        "positions": torch.zeros(3, dtype=torch.int64),
        "cos_sin": torch.ones(9, 2, 4),
    }
    with pytest.raises(ValueError, match=message):
        apply_rope(**{**good, **BAD[message]}, use_triton=False)
