"""Random layers and a decode step of them, and what the separate torch kernels make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels import decode
from kernels.activation import silu_mul
from kernels.norm import rms_norm
from kernels.persistent import LayerShape, PersistentLayers
from kernels.qk_norm_rope_write import qk_norm_rope_write

UNUSED = 10**6
"""What entries of the block table past a context hold: read, it would lie far outside the cache."""


def random_layers(
    shape: LayerShape,
    num_layers: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device,
    seed: int = 0,
) -> list[dict[str, Tensor]]:
    """Weights such that a layer's output is about as large as its input; norms about 1, biases about 0.1."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(name: str, size: tuple[int, ...]) -> Tensor:
        values = torch.randn(size, generator=generator, device=device)
        if len(size) == 2:
            return (values * size[1] ** -0.5).to(dtype)
        return (values * 0.1 + (1.0 if name.endswith("norm") else 0.0)).to(dtype)

    return [
        {name: random(name, size) for name, size in shape.weight_shapes().items()} for _ in range(num_layers)
    ]


@dataclass
class Step:
    """A decode step's inputs: what has no meaning to it is NaN, or an index out of bounds."""

    stream: Tensor
    positions: Tensor
    cos_sin: Tensor
    kv_cache: Tensor
    block_table: Tensor
    context_lens: Tensor
    slot_mapping: Tensor

    @classmethod
    def random(
        cls,
        shape: LayerShape,
        num_layers: int,
        contexts: Sequence[int],
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device,
        seed: int = 1,
    ) -> Step:
        """contexts: tokens of each row, the new one included; 0 for a padding row."""
        generator = torch.Generator(device).manual_seed(seed)
        max_blocks = -(-max(contexts) // block_size) + 1
        num_blocks = len(contexts) * max_blocks + 1
        size = (num_layers, 2, num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        kv_cache = torch.full(size, float("nan"), dtype=dtype, device=device)
        block_table = torch.full((len(contexts), max_blocks), UNUSED, dtype=torch.int32, device=device)
        order = torch.randperm(num_blocks, generator=generator, device=device)
        slots = []
        for row, context in enumerate(contexts):
            blocks = order[row * max_blocks :][: -(-context // block_size)]
            block_table[row, : len(blocks)] = blocks.int()
            tokens = torch.arange(context, device=device)
            where = blocks[tokens // block_size] * block_size + tokens % block_size
            slots.append(int(where[-1]) if context else -1)
            earlier = where[:-1]
            values = torch.randn((num_layers, 2, len(earlier), *size[4:]), generator=generator, device=device)
            kv_cache.flatten(2, 3)[:, :, earlier] = values.to(dtype)
        positions = torch.tensor([max(context - 1, 0) for context in contexts], device=device)
        half = shape.head_dim // 2
        angles = torch.arange(max(contexts), device=device)[:, None] * 10000.0 ** -(
            torch.arange(half, device=device) / half
        )
        return cls(
            torch.randn((len(contexts), shape.hidden_size), generator=generator, device=device).to(dtype),
            positions,
            torch.stack([angles.cos(), angles.sin()], 1),
            kv_cache,
            block_table,
            torch.tensor(contexts, dtype=torch.int32, device=device),
            torch.tensor(slots, device=device),
        )

    def clone(self) -> Step:
        """With a stream and a cache of its own."""
        return Step(**(vars(self) | {"stream": self.stream.clone(), "kv_cache": self.kv_cache.clone()}))

    def run(self, layers: PersistentLayers) -> None:
        layers(*vars(self).values())


def run_separately(shape: LayerShape, layers: Sequence[Mapping[str, Tensor]], step: Step) -> None:
    """The step by the kernels that an engine runs one after another, in torch; stream and cache in place."""
    rows, stream = len(step.stream), step.stream
    sizes = [n * shape.head_dim for n in (shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads)]
    for layer, (k_cache, v_cache) in zip(layers, step.kv_cache):
        normed = rms_norm(stream, layer["input_norm"], shape.eps, use_triton=False)
        qkv = functional.linear(normed, layer["qkv"], layer.get("qkv_bias"))
        q, k, v = (part.unflatten(1, (-1, shape.head_dim)) for part in qkv.split(sizes, dim=1))
        qk_norm_rope_write(
            q,
            k,
            v,
            layer.get("q_norm"),
            layer.get("k_norm"),
            shape.eps,
            step.positions,
            step.cos_sin,
            k_cache,
            v_cache,
            step.slot_mapping,
            use_triton=False,
        )
        heads = decode.get("reference")(q, k_cache, v_cache, step.block_table, step.context_lens)
        stream += functional.linear(heads.view(rows, -1), layer["o"], layer.get("o_bias"))
        normed = rms_norm(stream, layer["post_norm"], shape.eps, use_triton=False)
        gate_up = functional.linear(normed, layer["gate_up"], layer.get("gate_up_bias"))
        stream += functional.linear(
            silu_mul(gate_up, use_triton=False), layer["down"], layer.get("down_bias")
        )
