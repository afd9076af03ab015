"""The paged KV cache's memory: how many blocks there are, and the tensor that holds them."""

from __future__ import annotations

import torch

from engine.models.config import ModelConfig

CPU_KV_BYTES = 1 << 30
"""Default size of the pool on a CPU, where free memory is shared with everything else: 1 GiB."""


def block_bytes(config: ModelConfig, num_kv_heads: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, K and V together; num_kv_heads is one rank's."""
    return config.num_layers * 2 * block_size * num_kv_heads * config.head_dim * dtype.itemsize


def allocate(
    config: ModelConfig,
    num_blocks: int,
    *,
    num_kv_heads: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """[num_layers, 2 (K, V), num_blocks, block_size, num_kv_heads, head_dim], uninitialised: no kernel may let a
    value that was not written reach its result. Raises ValueError, with the bytes, if memory cannot hold that much."""
    shape = (config.num_layers, 2, num_blocks, block_size, num_kv_heads, config.head_dim)
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, TypeError) as error:  # torch answers a size beyond 64 bits with the latter
        num_bytes = num_blocks * block_bytes(config, num_kv_heads, block_size, dtype)
        raise ValueError(
            f"out of memory: num_kv_blocks is {num_blocks}, which takes {num_bytes} bytes on {device}"
        ) from error
