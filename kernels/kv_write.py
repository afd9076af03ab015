"""Writing new keys and values into their slots of the paged cache."""

import torch
from torch import Tensor

from kernels.triton_support import cdiv, next_power_of_2, on_device, tl, triton

MAX_BLOCK = 1024


def write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, use_triton: bool
) -> None:
    """cache[slot // block_size, slot % block_size] = token's k (v), for each token with a slot.

    k, v [tokens, num_kv_heads, head_dim], strided views allowed; caches [num_blocks, block_size,
    num_kv_heads, head_dim], any strides; slot_mapping [tokens] int64, distinct where not negative.
    A negative slot is a padding token: nothing is written for it.
    """
    check_kv_write(k, v, k_cache, v_cache, slot_mapping)
    if use_triton:
        _launch(k, v, k_cache, v_cache, slot_mapping)
        return
    if not len(slot_mapping):
        return
    if slot_mapping.is_cuda or torch.compiler.is_compiling():
        # Without a boolean selection, which waits for the device and which no compiler can follow: padding repeats
        # the first real token's write. A batch of padding alone rewrites slot 0 with what it holds.
        is_real = slot_mapping >= 0
        source = torch.where(
            is_real, torch.arange(len(slot_mapping), device=k.device), is_real.int().argmax()
        )
        slots = slot_mapping[source].clamp(min=0)
        index = (slots // k_cache.shape[1], slots % k_cache.shape[1])
        any_real = is_real.any()
        k = torch.where(any_real, k[source], k_cache[index])
        v = torch.where(any_real, v[source], v_cache[index])
    else:
        slots = slot_mapping
        if slots.min() < 0:
            source = (slots >= 0).nonzero().squeeze(1)
            k, v, slots = k[source], v[source], slots[source]
        index = (slots // k_cache.shape[1], slots % k_cache.shape[1])
    k_cache.index_put_(index, k)
    v_cache.index_put_(index, v)


def check_kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Raise ValueError, naming the argument, unless the tensors fit together. Reads no values."""
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if new.dim() != 3 or cache.dim() != 4 or new.shape[1:] != cache.shape[2:]:
            raise ValueError(
                f"{name} {tuple(new.shape)} does not fit {name}_cache {tuple(cache.shape)}: expected "
                "[tokens, num_kv_heads, head_dim] and [num_blocks, block_size, num_kv_heads, head_dim]"
            )
        if new.dtype != cache.dtype:
            raise ValueError(f"{name} is {new.dtype}, {name}_cache is {cache.dtype}")
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}, k has {tuple(k.shape)}")
    if slot_mapping.shape != k.shape[:1] or slot_mapping.dtype != torch.int64:
        raise ValueError(
            f"slot_mapping must be [{k.shape[0]}] int64, "
            f"got shape {tuple(slot_mapping.shape)} {slot_mapping.dtype}"
        )


def _launch(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    tokens, num_kv_heads, head_dim = k.shape
    if not tokens:
        return
    width = num_kv_heads * head_dim
    block = min(next_power_of_2(width), MAX_BLOCK)
    with on_device(k):
        _write_kv_kernel[(tokens, cdiv(width, block))](
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping.contiguous(),
            *k.stride(),
            *v.stride(),
            *k_cache.stride(),
            *v_cache.stride(),
            BLOCK_SIZE=k_cache.shape[1],
            HEAD_DIM=head_dim,
            WIDTH=width,
            BLOCK=block,
            num_warps=max(1, block // 256),  # 16 bytes a thread in bf16
        )


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])
def _write_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    stride_k_token,
    stride_k_head,
    stride_k_dim,
    stride_v_token,
    stride_v_head,
    stride_v_dim,
    stride_kc_block,
    stride_kc_slot,
    stride_kc_head,
    stride_kc_dim,
    stride_vc_block,
    stride_vc_slot,
    stride_vc_head,
    stride_vc_dim,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = (columns // HEAD_DIM).to(tl.int64)
    dim = (columns % HEAD_DIM).to(tl.int64)
    mask = columns < WIDTH
    k = tl.load(k_ptr + token * stride_k_token + head * stride_k_head + dim * stride_k_dim, mask=mask)
    v = tl.load(v_ptr + token * stride_v_token + head * stride_v_head + dim * stride_v_dim, mask=mask)
    k_slot = k_cache_ptr + block * stride_kc_block + offset * stride_kc_slot
    v_slot = v_cache_ptr + block * stride_vc_block + offset * stride_vc_slot
    tl.store(k_slot + head * stride_kc_head + dim * stride_kc_dim, k, mask=mask)
    tl.store(v_slot + head * stride_vc_head + dim * stride_vc_dim, v, mask=mask)
