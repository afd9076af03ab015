"""Writing KV: each token's slot gets its values, and nothing else in the pool changes by one bit."""

from __future__ import annotations

import pytest
import torch

from kernels.kv_write import write_kv


def written(k, v, num_blocks, block_size, slots, *, use_triton, layout="views of one buffer"):
    """The caches after the write: [num_blocks * block_size, heads, dim] each, over a pool of NaN."""
    shape = (num_blocks, block_size, *k.shape[1:])
    if layout == "views of one buffer":
        pool = torch.full((2, *shape), float("nan"), dtype=k.dtype, device=k.device)
        k_cache, v_cache = pool[0], pool[1]
    elif layout == "interleaved":
        pool = torch.full((num_blocks, 2, *shape[1:]), float("nan"), dtype=k.dtype, device=k.device)
        k_cache, v_cache = pool[:, 0], pool[:, 1]
    else:  # heads outermost
        pool = torch.full((2, k.shape[1], num_blocks, block_size, k.shape[2]), float("nan"), device=k.device)
        k_cache, v_cache = pool.to(k.dtype).permute(0, 2, 3, 1, 4)
    write_kv(k, v, k_cache, v_cache, slots, use_triton=use_triton)
    return k_cache.flatten(0, 1), v_cache.flatten(0, 1)


def tokens(count, heads, head_dim, dtype, device):
    """k and v as views inside one qkv projection."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(count, 3 * heads, head_dim, generator=generator).to(dtype).to(device)
    return qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]


@pytest.mark.parametrize("use_triton", [False, True])
@pytest.mark.parametrize("layout", ["views of one buffer", "interleaved", "heads outermost"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_writes_slots_and_nothing_else(use_triton, layout, dtype, block_size, device):
    k, v = tokens(9, 2, 64, dtype, device)
    num_blocks = 64 // block_size + 1
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(0))[:9]
    slots[[2, 5, 8]] = torch.tensor([-1, -1, -7])
    caches = written(k, v, num_blocks, block_size, slots.to(device), use_triton=use_triton, layout=layout)
    real = slots >= 0
    for cache, new in zip(caches, (k, v)):
        assert torch.equal(cache[slots[real].to(device)], new[real.to(device)])
        untouched = torch.ones(len(cache), dtype=torch.bool)
        untouched[slots[real]] = False
        assert cache[untouched.to(device)].isnan().all()


@pytest.mark.parametrize("use_triton", [False, True])
def test_wide_tokens(use_triton, device):
    """More values a token than one program writes, and no power of two."""
    k, v = tokens(3, 20, 80, torch.float32, device)
    slots = torch.tensor([5, 0, 7], device=device)
    k_cache, v_cache = written(k, v, 2, 4, slots, use_triton=use_triton)
    assert torch.equal(k_cache[slots], k)
    assert torch.equal(v_cache[slots], v)
    assert k_cache[[1, 2, 3, 4, 6]].isnan().all()


@pytest.mark.parametrize("use_triton", [False, True])
def test_strided_slots(use_triton, device):
    k, v = tokens(3, 2, 64, torch.float32, device)
    slots = torch.tensor([[5, 1], [-1, 2], [7, 3]], device=device)[:, 0]
    k_cache, v_cache = written(k, v, 2, 4, slots, use_triton=use_triton)
    assert torch.equal(k_cache[[5, 7]], k[[0, 2]])
    assert torch.equal(v_cache[[5, 7]], v[[0, 2]])
    assert k_cache[[0, 1, 2, 3, 4, 6]].isnan().all()


@pytest.mark.parametrize("use_triton", [False, True])
def test_padding_alone_and_no_tokens(use_triton, device):
    k, v = tokens(3, 2, 64, torch.float32, device)
    for count in (3, 0):
        slots = torch.full((count,), -1, device=device)
        for cache in written(k[:count], v[:count], 2, 4, slots, use_triton=use_triton):
            assert cache.isnan().all()


@pytest.mark.parametrize("slots", [[5, -1, 7], [-1, -1, -1], [0, 3, 2]])
def test_the_torch_path_can_be_traced_as_one_graph(slots):
    """Padding is written by no branch on the values of slots: the caches become what they do without a compiler."""
    k, v = tokens(3, 2, 8, torch.float32, torch.device("cpu"))
    mapping = torch.tensor(slots)
    plain, traced = ([torch.full((2, 4, 2, 8), -1.0) for _ in range(2)] for _ in range(2))
    write_kv(k, v, *plain, mapping, use_triton=False)
    torch.compile(write_kv, backend="eager", fullgraph=True)(k, v, *traced, mapping, use_triton=False)
    assert torch.equal(torch.stack(traced), torch.stack(plain))


@pytest.mark.parametrize("use_triton", [False, True])
def test_slots_past_2_31_elements(use_triton, device):
    """The pool is virtual memory: few of its pages are ever touched."""
    heads, head_dim, block_size = 2, 64, 16
    num_blocks = 2**31 // (block_size * heads * head_dim) + 2
    k, v = tokens(2, heads, head_dim, torch.float16, device)
    pool = torch.empty(num_blocks, 2, block_size, heads, head_dim, dtype=torch.float16, device=device)
    last = num_blocks * block_size - 1
    pool[num_blocks - 1] = 0
    write_kv(k, v, pool[:, 0], pool[:, 1], torch.tensor([last, 0], device=device), use_triton=use_triton)
    assert torch.equal(pool[-1, 0, -1], k[0])
    assert torch.equal(pool[-1, 1, -1], v[0])
    assert torch.equal(pool[0, 0, 0], k[1])
    assert (pool[-1, :, :-1] == 0).all()


BAD = {
    "k .* does not fit k_cache": {"k": torch.ones(3, 1, 8)},
    "v .* does not fit v_cache": {"v_cache": torch.ones(4, 4, 2, 4)},
    "v has shape": {"v": torch.ones(2, 2, 8)},
    "k is torch.float16": {"k": torch.ones(3, 2, 8, dtype=torch.float16)},
    "slot_mapping must be": {"slot_mapping": torch.zeros(3, dtype=torch.int32)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    good = {
        "k": torch.ones(3, 2, 8),
        "v": torch.ones(3, 2, 8),
        "k_cache": torch.ones(4, 4, 2, 8),
        "v_cache": torch.ones(4, 4, 2, 8),
        "slot_mapping": torch.arange(3),
    }
    with pytest.raises(ValueError, match=message):
        write_kv(**{**good, **BAD[message]}, use_triton=False)
