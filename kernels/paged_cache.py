"""What decode and prefill attention share: checks of queries, a paged KV cache and its table, and a pool in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_paged_inputs(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    kv_dtypes: Sequence[torch.dtype] = (),
) -> None:
    """Raise ValueError, naming the argument, unless the tensors fit together.

    q [rows, num_q_heads, head_dim]; caches [num_blocks, block_size, num_kv_heads, head_dim];
    block_table [batch, max_blocks] int32; context_lens [batch] int32. kv_dtypes: what both caches may be
    instead of q's dtype. Reads shapes and strides only, never values: nothing here waits for a device.
    """
    if q.dim() != 3:
        raise ValueError(f"q must be [rows, num_q_heads, head_dim], got shape {tuple(q.shape)}")
    if k_cache.dim() != 4:
        raise ValueError(
            "k_cache must be [num_blocks, block_size, num_kv_heads, head_dim], "
            f"got shape {tuple(k_cache.shape)}"
        )
    if v_cache.shape != k_cache.shape:
        raise ValueError(
            f"v_cache has shape {tuple(v_cache.shape)}, expected k_cache's {tuple(k_cache.shape)}"
        )
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    if k_cache.shape[3] != head_dim:
        raise ValueError(f"k_cache has head_dim {k_cache.shape[3]}, q has {head_dim}")
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(f"q has {num_q_heads} heads, not a multiple of k_cache's {num_kv_heads}")
    if block_table.dim() != 2 or block_table.dtype != torch.int32:
        raise ValueError(
            "block_table must be [batch, max_blocks] int32, "
            f"got shape {tuple(block_table.shape)} {block_table.dtype}"
        )
    if context_lens.shape != block_table.shape[:1] or context_lens.dtype != torch.int32:
        raise ValueError(
            f"context_lens must be [{block_table.shape[0]}] int32 (block_table's rows), "
            f"got shape {tuple(context_lens.shape)} {context_lens.dtype}"
        )
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.stride(-1) != 1 and tensor.numel():
            raise ValueError(
                f"{name}'s last dimension must be contiguous, got strides {tuple(tensor.stride())}"
            )
    if not q.is_floating_point():
        raise ValueError(f"q must be floating point, got {q.dtype}")
    if k_cache.dtype != q.dtype and k_cache.dtype not in kv_dtypes:
        raise ValueError(f"k_cache is {k_cache.dtype}, q is {q.dtype}")
    if v_cache.dtype != k_cache.dtype:
        raise ValueError(f"v_cache is {v_cache.dtype}, k_cache is {k_cache.dtype}")
    for name, tensor in (
        ("k_cache", k_cache),
        ("v_cache", v_cache),
        ("block_table", block_table),
        ("context_lens", context_lens),
    ):
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q is on {q.device}")


def rows_and_lengths(block_table: Tensor, context_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Both as kernels read them that know a table's row stride alone: a copy only where other strides ask for it."""
    return block_table if block_table.stride(1) == 1 else block_table.contiguous(), context_lens.contiguous()


def rows_in_order(name: str, cache: Tensor, num_rows: int, row_blocks: int) -> Tensor:
    """A pool whose blocks lie as tokens do, for kernels that know no paging: a view, nothing is gathered.

    cache: [num_blocks, block_size, num_kv_heads, head_dim], called `name` in errors; row b has the row_blocks blocks
        from b * row_blocks on.

    Returns [num_rows, row_blocks * block_size, num_kv_heads, head_dim]. Raises ValueError where the pool has fewer
    blocks, or something lies between one and the next.
    """
    num_blocks, block_size = cache.shape[:2]
    if num_blocks < num_rows * row_blocks:
        raise ValueError(
            f"{name} has {num_blocks} blocks, fewer than {num_rows} rows of {row_blocks} blocks in order"
        )
    if cache.stride(0) != block_size * cache.stride(1):
        raise ValueError(
            f"{name}'s blocks are {cache.stride(0)} elements apart, expected {block_size * cache.stride(1)}: "
            "in order, each ends where the next begins"
        )
    return cache[: num_rows * row_blocks].flatten(0, 1).unflatten(0, (num_rows, row_blocks * block_size))
