"""What this device could do at best, measured once a run, and what that means for an operation or a decode step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from engine.models.config import ModelConfig
    from kernels.costs import Cost


@dataclass(frozen=True)
class Ceilings:
    """read_bytes_per_s: of a read-only pass over memory; matmul_flops_per_s: of a large matmul, by dtype name."""

    read_bytes_per_s: float
    matmul_flops_per_s: Mapping[str, float]

    def floor_us(self, cost: Cost, dtype: str) -> float:
        """The least time in microseconds that an operation of that cost can take."""
        return cost.floor_us(self.read_bytes_per_s, self.matmul_flops_per_s[dtype])

    def columns(self, cost: Cost, dtype: str, time_us: float | None) -> dict[str, Any]:
        """bytes, flops, floor_us and, where there is a time, roofline_fraction."""
        floor_us = self.floor_us(cost, dtype)
        return {
            "bytes": cost.bytes,
            "flops": cost.flops,
            "floor_us": floor_us,
            "roofline_fraction": None if time_us is None else floor_us / time_us,
        }


def measure_ceilings(device: torch.device, dtypes: Iterable[str]) -> Ceilings:
    """Both ceilings on this device; its memory is given back afterwards."""
    import torch

    from kernels import ceilings

    found = Ceilings(
        ceilings.read_bandwidth(device),
        {name: ceilings.matmul_rate(device, getattr(torch, name)) for name in dict.fromkeys(dtypes)},
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def decode_step_cost(
    config: ModelConfig, context_lens: Sequence[int], *, tp: int, dtype: torch.dtype, block_size: int
) -> Cost:
    """One rank's share of a decode step: weights read once, every row's context, the new token's activations.

    context_lens: tokens each row attends to, its new one included.
    """
    from kernels import costs

    rows = len(context_lens)
    heads = config.heads_per_rank(tp)
    q_size, kv_size = heads.num_q_heads * config.head_dim, heads.num_kv_heads * config.head_dim
    intermediate = config.intermediate_size // tp
    layer = (
        costs.linear(rows, config.hidden_size, q_size + 2 * kv_size, dtype, config.attention_bias)
        + costs.rope(rows, heads.num_q_heads, heads.num_kv_heads, config.head_dim, dtype)
        + costs.kv_write(rows, heads.num_kv_heads, config.head_dim, dtype)
        + costs.decode_attention(
            context_lens, heads.num_q_heads, heads.num_kv_heads, config.head_dim, dtype, block_size
        )
        + costs.linear(rows, q_size, config.hidden_size, dtype, config.attention_bias)
        + costs.linear(rows, config.hidden_size, 2 * intermediate, dtype, config.mlp_bias)
        + costs.silu_mul(rows, intermediate, dtype)
        + costs.linear(rows, intermediate, config.hidden_size, dtype, config.mlp_bias)
        + costs.add_rms_norm(rows, config.hidden_size, dtype) * 2
    )
    if config.qk_norm:
        layer += costs.rms_norm(rows * heads.num_q_heads, config.head_dim, dtype)
        layer += costs.rms_norm(rows * heads.num_kv_heads, config.head_dim, dtype)
    return (
        costs.embedding(rows, config.hidden_size, dtype)
        + layer * config.num_layers
        + head_cost(config, rows, tp=tp, dtype=dtype)
    )


def head_cost(config: ModelConfig, rows: int, *, tp: int, dtype: torch.dtype) -> Cost:
    """One rank's share of what only rows that give a token need: their logits, and the largest of them."""
    from kernels import costs

    return costs.linear(rows, config.hidden_size, -(-config.vocab_size // tp), dtype) + costs.greedy(
        rows, config.vocab_size, dtype
    )
