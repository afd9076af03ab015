"""Self-attention over the paged KV cache: decode rows and prefill chunks of one batch, each by its own kernel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.attention_metadata import AttentionMetadata, KernelChoice
from engine.layers.linear import PackedColumnParallelLinear, RowParallelLinear, split_heads
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding
from engine.layers.weight_shard import WeightShard
from engine.parallel.group import ParallelGroup
from kernels.kv_write import write_kv
from kernels.qk_norm_rope_write import qk_norm_rope_write


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; heads are split over the ranks.

    Query head h of the model uses KV head h // (num_q_heads // num_kv_heads), also on a rank: ranks hold whole groups,
    or parts of one group and a copy of its KV head.

    norm_eps: RMSNorm over each query and key head before RoPE with this epsilon (Qwen3's QK-norm), or None.
    """

    def __init__(
        self,
        hidden_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        norm_eps: float | None,
        group: ParallelGroup,
        kernels: KernelChoice,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm_eps = norm_eps
        self.kernels = kernels
        projections = (
            split_heads("q_proj", num_q_heads, head_dim, group),
            split_heads("k_proj", num_kv_heads, head_dim, group),
            split_heads("v_proj", num_kv_heads, head_dim, group),
        )
        self.qkv_proj = PackedColumnParallelLinear(
            hidden_size, projections, bias=bias, use_triton=kernels.use_triton, dtype=dtype, device=device
        )
        self.o_proj = RowParallelLinear(
            num_q_heads * head_dim,
            hidden_size,
            bias=bias,
            group=group,
            use_triton=kernels.use_triton,
            dtype=dtype,
            device=device,
        )
        self.q_norm = self.k_norm = None
        if norm_eps is not None:
            use_triton = kernels.use_triton
            self.q_norm = RMSNorm(head_dim, norm_eps, use_triton=use_triton, dtype=dtype, device=device)
            self.k_norm = RMSNorm(head_dim, norm_eps, use_triton=use_triton, dtype=dtype, device=device)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        rotary: RotaryEmbedding,
        metadata: AttentionMetadata,
        kv_cache: Tensor,
    ) -> Tensor:
        """Write the tokens' KV, then attend to it.

        hidden [tokens, hidden_size]; positions [tokens] int64; kv_cache [2, num_blocks, block_size, num_kv_heads,
        head_dim], this layer's. Returns [tokens, hidden_size]; of padding tokens anything.
        """
        qkv = self.qkv_proj(hidden).split(self.qkv_proj.sizes, dim=1)
        q, k, v = (part.unflatten(1, (-1, self.head_dim)) for part in qkv)
        k_cache, v_cache = kv_cache.unbind(0)
        if self.kernels.use_triton:
            qk_norm_rope_write(
                q,
                k,
                v,
                self.q_norm.weight if self.q_norm is not None else None,
                self.k_norm.weight if self.k_norm is not None else None,
                self.norm_eps or 0.0,
                positions,
                rotary.cos_sin,
                k_cache,
                v_cache,
                metadata.slot_mapping,
                use_triton=True,
            )
        else:  # the same in its parts, each a module that a forward hook can watch
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
            rotary(q, k, positions)
            write_kv(k, v, k_cache, v_cache, metadata.slot_mapping, use_triton=False)
        return self.o_proj(self._attend(q, k_cache, v_cache, metadata).flatten(1))

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """[tokens, num_q_heads, head_dim]: each kernel writes its rows of one buffer."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_decodes = metadata.num_decodes
        end = num_decodes + metadata.num_prefill_tokens
        if num_decodes:
            self.kernels.decode(
                q[:num_decodes],
                k_cache,
                v_cache,
                metadata.decode_block_table,
                metadata.decode_context_lens,
                out=out[:num_decodes],
                workspace=metadata.decode_workspace,
                **metadata.decode_plan,
            )
        if metadata.num_prefill_tokens:
            self.kernels.prefill(
                q[num_decodes:end],
                k_cache,
                v_cache,
                metadata.prefill_block_table,
                metadata.prefill_context_lens,
                metadata.query_start_loc,
                metadata.max_query_len,
                out=out[num_decodes:end],
            )
        out[end:].zero_()
        return out

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield from self.qkv_proj.weight_shards(name)
        yield from self.o_proj.weight_shards(f"{name}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.weight_shards(f"{name}.q_norm")
            yield from self.k_norm.weight_shards(f"{name}.k_norm")
