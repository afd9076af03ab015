"""The network: one pre-norm decoder that serves every architecture in engine.models.config.

Modules carry Transformers' names (embed_tokens, layers.i.self_attn, norm, lm_head, ...) so that forward hooks can
compare the two layer by layer. Residual additions are fused into the norm that follows. After
prepare_persistent_layers the steps of fewest rows are one launch (there no layer is called).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.attention import Attention
from engine.layers.attention_metadata import AttentionMetadata, KernelChoice
from engine.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding
from engine.layers.weight_shard import WeightShard
from engine.models.config import ModelConfig, check_parallel
from engine.parallel.group import ParallelGroup
from kernels.persistent import LayerShape, PersistentLayers


class DecoderLayer(nn.Module):
    """Attention and feed-forward block, each behind a norm that first adds the previous block's output."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        group: ParallelGroup,
        kernels: KernelChoice,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.self_attn = Attention(
            config.hidden_size,
            config.num_q_heads,
            config.num_kv_heads,
            config.head_dim,
            bias=config.attention_bias,
            norm_eps=config.rms_norm_eps if config.qk_norm else None,
            group=group,
            kernels=kernels,
            dtype=dtype,
            device=device,
        )
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            bias=config.mlp_bias,
            group=group,
            use_triton=kernels.use_triton,
            dtype=dtype,
            device=device,
        )
        self.input_layernorm = new_norm(config, kernels, dtype, device)
        self.post_attention_layernorm = new_norm(config, kernels, dtype, device)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        rotary: RotaryEmbedding,
        metadata: AttentionMetadata,
        kv_cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns (output of the feed-forward block, residual), whose sum is the layer's output.

        hidden, residual: the pair that the layer before returned; the first layer gets (embeddings, None).
        """
        if residual is None:
            normed, residual = self.input_layernorm(hidden), hidden
        else:
            normed, residual = self.input_layernorm(hidden, residual)
        attended = self.self_attn(normed, positions, rotary, metadata, kv_cache)
        normed, residual = self.post_attention_layernorm(attended, residual)
        return self.mlp(normed), residual

    def persistent_weights(self) -> dict[str, Tensor]:
        """The layer's parameters by the names of kernels/persistent."""
        attention, mlp = self.self_attn, self.mlp
        weights = {
            "input_norm": self.input_layernorm.weight,
            "qkv": attention.qkv_proj.weight,
            "qkv_bias": attention.qkv_proj.bias,
            "q_norm": attention.q_norm.weight if attention.q_norm is not None else None,
            "k_norm": attention.k_norm.weight if attention.k_norm is not None else None,
            "o": attention.o_proj.weight,
            "o_bias": attention.o_proj.bias,
            "post_norm": self.post_attention_layernorm.weight,
            "gate_up": mlp.gate_up_proj.weight,
            "gate_up_bias": mlp.gate_up_proj.bias,
            "down": mlp.down_proj.weight,
            "down_bias": mlp.down_proj.bias,
        }
        return {name: weight for name, weight in weights.items() if weight is not None}

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield from self.self_attn.weight_shards(f"{name}.self_attn")
        yield from self.mlp.weight_shards(f"{name}.mlp")
        yield from self.input_layernorm.weight_shards(f"{name}.input_layernorm")
        yield from self.post_attention_layernorm.weight_shards(f"{name}.post_attention_layernorm")


class Decoder(nn.Module):
    """A causal language model. Its parameters are uninitialised until the loader fills them.

    group: the ranks the weights are split over. kernels: what attention and the elementwise operations run on.
    dtype, device: of parameters and activations. Raises ValueError if the network cannot be split over the group.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        group: ParallelGroup,
        kernels: KernelChoice,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        check_parallel(config, group.size)
        self.config = config
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(vocab, hidden, group=group, dtype=dtype, device=device)
        self.rotary_emb = RotaryEmbedding(
            config.rope.inverse_frequencies(config.head_dim),
            config.max_position_embeddings,
            scale=config.rope.cos_sin_scale,
            use_triton=kernels.use_triton,
            device=device,
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, group=group, kernels=kernels, dtype=dtype, device=device)
            for _ in range(config.num_layers)
        )
        self.norm = new_norm(config, kernels, dtype, device)
        shared = self.embed_tokens.weight if config.tie_word_embeddings else None
        self.lm_head = VocabParallelHead(
            vocab, hidden, group=group, dtype=dtype, device=device, weight=shared
        )
        self._persistent: PersistentLayers | None = None

    def prepare_persistent_layers(self) -> None:
        """Run decode steps of few rows by kernels/persistent from now on. The parameters must stay where they are."""
        weights = [layer.persistent_weights() for layer in self.layers if isinstance(layer, DecoderLayer)]
        self._persistent = PersistentLayers(layer_shape(self.config), weights)

    def forward(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_cache: Tensor
    ) -> Tensor:
        """Hidden states [num_tokens, hidden_size] after the last norm; the tokens' KV is written on the way.

        input_ids, positions: [num_tokens] int64, in the order AttentionMetadata describes. kv_cache: [num_layers, 2,
        num_blocks, block_size, num_kv_heads, head_dim] in the model's dtype, with this rank's KV heads; if it has
        fewer layers, no more are run, which is a rehearsal only.
        """
        hidden, residual = self.embed_tokens(input_ids), None
        persistent, rows = self._persistent, len(input_ids)
        if persistent is not None and metadata.num_decodes == rows and 0 < rows <= persistent.max_rows:
            persistent(
                hidden,
                positions,
                self.rotary_emb.cos_sin,
                kv_cache,
                metadata.decode_block_table,
                metadata.decode_context_lens,
                metadata.slot_mapping,
            )
            return self.norm(hidden)
        for layer, layer_cache in zip(self.layers, kv_cache.unbind(0), strict=False):
            hidden, residual = layer(hidden, residual, positions, self.rotary_emb, metadata, layer_cache)
        return self.norm(hidden, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] to [rows, vocab_size] in the model's dtype; give it only the rows that are needed."""
        return self.lm_head(hidden)

    def weight_shards(self) -> Iterator[WeightShard]:
        """Every checkpoint tensor the model takes, and where; together they fill every parameter exactly once."""
        yield from self.embed_tokens.weight_shards("model.embed_tokens")
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.weight_shards(f"model.layers.{i}")
        yield from self.norm.weight_shards("model.norm")
        if not self.config.tie_word_embeddings:
            yield from self.lm_head.weight_shards("lm_head")


def layer_shape(config: ModelConfig) -> LayerShape:
    """What kernels/persistent must know of the layers: on one rank."""
    return LayerShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        qk_norm=config.qk_norm,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


def new_norm(config: ModelConfig, kernels: KernelChoice, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    return RMSNorm(
        config.hidden_size, config.rms_norm_eps, use_triton=kernels.use_triton, dtype=dtype, device=device
    )
