"""All layers of a decode step of few rows in one launch: a grid of programs that stay, and meet between phases.

A layer of one row is ten kernels whose edges cost more than their bytes (results/NOTES.md). Here it is six phases:

    0  qkv      = norm(stream) W_qkv
    1  partials = attention of each KV head over a split of its context; the newest key and value are written
    2  heads    = the splits' partials, merged by their log-sum-exps
    3  stream  += heads W_o
    4  gated    = silu(gate) * up, where gate and up = norm(stream) W_gate_up
    5  stream  += gated W_down

Memory does not rest while the programs meet: each has the first weights (or keys) of the phase to come on their way
into registers before it waits. Persistent kernels for a whole decode step are known from Hazy Research's Llama-1B
megakernel (Spector et al. 2025) and from MPK (Cheng et al. 2025); this one keeps to plain barriers. Its attention takes
the place of the registry's decode kernel, so kernels are compared without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.decode.online_softmax import LOG2_E
from kernels.decode.planner import device_sm_count
from kernels.persistent.kernel import FIELDS, NUM_PHASES, layers_kernel
from kernels.triton_support import INTERPRETING, dot_dtype, next_power_of_2, on_device

MAX_ROWS = 2
"""Rows at most: products are made on the plain cores, a row at a time."""

MAX_GROUP = 16
"""Query heads of a KV head, at most: M of the tensor cores' product."""

NUM_SPLITS_AT_ONCE = 16


def unsupported_block_size(block_size: int) -> str | None:
    """Why the keys of such blocks cannot be read, or None."""
    return f"block_size is {block_size}, supported: multiples of 16" if block_size % 16 else None


@dataclass(frozen=True)
class LayerShape:
    """What all layers of a network have in common. eps: of every RMSNorm, those of query and key heads too."""

    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool

    def unsupported(self) -> str | None:
        """Why such layers cannot run in one launch, or None."""
        if self.head_dim & (self.head_dim - 1) or not 16 <= self.head_dim <= 256:
            return f"head_dim is {self.head_dim}, supported: powers of two from 16 to 256"
        if self.num_q_heads % self.num_kv_heads:
            return (
                f"num_q_heads is {self.num_q_heads}, expected a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.num_q_heads // self.num_kv_heads > MAX_GROUP:
            return f"num_q_heads is {self.num_q_heads}, the limit is {MAX_GROUP} for each KV head"
        for name in ("hidden_size", "intermediate_size"):
            if getattr(self, name) % 8:  # rows of weights that begin at multiples of 16 bytes
                return f"{name} is {getattr(self, name)}, expected a multiple of 8"
        return None

    @property
    def attention_size(self) -> int:
        """Features of all query heads."""
        return self.num_q_heads * self.head_dim

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of FIELDS, without those that such layers lack."""
        hidden, heads = self.hidden_size, self.attention_size
        qkv = heads + 2 * self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_norm": (hidden,),
            "qkv": (qkv, hidden),
            "o": (hidden, heads),
            "post_norm": (hidden,),
            "gate_up": (2 * self.intermediate_size, hidden),
            "down": (hidden, self.intermediate_size),
        }
        if self.qk_norm:
            shapes |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        if self.attention_bias:
            shapes |= {"qkv_bias": (qkv,), "o_bias": (hidden,)}
        if self.mlp_bias:
            shapes |= {"gate_up_bias": (2 * self.intermediate_size,), "down_bias": (hidden,)}
        return shapes


@dataclass(frozen=True)
class LayerTile:
    """numel: weights that a program loads at once, of block_k inputs or as many as there are. keys: of a tile."""

    numel: int = 16384
    block_k: int = 2048
    keys: int = 32
    num_warps: int = 8

    def __post_init__(self) -> None:
        for field in ("numel", "block_k", "keys", "num_warps"):
            value = getattr(self, field)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{field} is {value}, expected a power of two from 1 on")
        for field, least in (("keys", 16), ("block_k", 8), ("numel", 2 * self.block_k)):
            if getattr(self, field) < least:
                raise ValueError(f"{field} is {getattr(self, field)}, the least is {least}")

    @classmethod
    def of(cls, head_dim: int, dtype: torch.dtype) -> LayerTile:
        """What leaves registers for the rest: half the weights in fp32, half the keys where theirs are large."""
        return cls(
            numel=16384 if dtype.itemsize == 2 else 8192, keys=32 if head_dim * dtype.itemsize <= 256 else 16
        )

    def of_product(self, in_features: int) -> tuple[int, int]:
        """(outputs, inputs) of a tile of weights."""
        block_k = min(self.block_k, max(8, next_power_of_2(in_features)))
        return self.numel // block_k, block_k


def layer_constexprs(
    shape: LayerShape, tile: LayerTile, rows: int, block_size: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Those of the kernel, but for PHASE."""
    hidden_n, hidden_k = tile.of_product(shape.hidden_size)
    heads_n, heads_k = tile.of_product(shape.attention_size)
    intermediate_n, intermediate_k = tile.of_product(shape.intermediate_size)
    return {
        "HIDDEN": shape.hidden_size,
        "INTERMEDIATE": shape.intermediate_size,
        "NUM_Q_HEADS": shape.num_q_heads,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": block_size,
        "QK_NORM": shape.qk_norm,
        "ATTENTION_BIAS": shape.attention_bias,
        "MLP_BIAS": shape.mlp_bias,
        "NUM_FIELDS": len(FIELDS),
        "ROWS": next_power_of_2(rows),
        "HEADS": MAX_GROUP,
        "TILE": tile.keys,
        "CHUNK": NUM_SPLITS_AT_ONCE,
        "HIDDEN_N": hidden_n,
        "HIDDEN_K": hidden_k,
        "HIDDEN_PADDED": next_power_of_2(shape.hidden_size),
        "HEADS_N": heads_n,
        "HEADS_K": heads_k,
        "INTERMEDIATE_N": intermediate_n,
        "INTERMEDIATE_K": intermediate_k,
        "DOT_DTYPE": dot_dtype(dtype),
    }


class PersistentLayers:
    """The layers of one network on one device.

    weights: of each layer FIELDS' tensors that shape.weight_shapes() names, [out_features, in_features] contiguous,
    all of one dtype; they must stay where they are. num_programs: of the grid; all must run at once, so a GPU gets one
    for each multiprocessor. tile: None for LayerTile.of. Raises ValueError for a shape that is unsupported and,
    naming layer and field, for weights that do not fit.

    Scratch and barrier are the object's own: its calls must follow one another on one stream, as in an engine.
    """

    def __init__(
        self,
        shape: LayerShape,
        weights: Sequence[Mapping[str, Tensor]],
        *,
        num_programs: int | None = None,
        tile: LayerTile | None = None,
    ) -> None:
        reason = shape.unsupported()
        if reason is not None:
            raise ValueError(f"persistent layers: {reason}")
        if not weights:
            raise ValueError("weights has no layers, the least is 1")
        self.shape = shape
        # Detached, so that the table's addresses are good as long as this lives, whatever becomes of the parameters.
        self._weights = [{name: weight.detach() for name, weight in layer.items()} for layer in weights]
        first = next(iter(self._weights[0].values()), torch.empty(0))
        self.dtype, self.device = first.dtype, first.device
        for i, layer in enumerate(self._weights):
            self._check(i, layer)
        self.tile = tile or LayerTile.of(shape.head_dim, self.dtype)
        self.num_programs = device_sm_count(self.device) if num_programs is None else num_programs
        if self.num_programs < shape.num_kv_heads:
            raise ValueError(
                f"num_programs is {self.num_programs}, the least is num_kv_heads, {shape.num_kv_heads}: each attends "
                "to one KV head"
            )
        table = [
            [layer[name].data_ptr() if name in layer else 0 for name in FIELDS] for layer in self._weights
        ]
        self._addresses = torch.tensor(table, dtype=torch.int64).to(self.device)
        self._qkv = self._scratch(MAX_ROWS, shape.weight_shapes()["qkv"][0])
        self._heads = self._scratch(MAX_ROWS, shape.attention_size)
        self._gated = self._scratch(MAX_ROWS, shape.intermediate_size)
        # Rows share the programs, and with them the splits.
        num_partials = self.num_programs * (shape.num_q_heads // shape.num_kv_heads)
        self._partial = torch.empty((num_partials, shape.head_dim), dtype=torch.float32, device=self.device)
        self._lse = torch.empty((num_partials,), dtype=torch.float32, device=self.device)
        self._counter = torch.zeros(1, dtype=torch.int32, device=self.device)

    @property
    def max_rows(self) -> int:
        """Rows that one call takes: a program attends to one row and KV head."""
        return min(MAX_ROWS, self.num_programs // self.shape.num_kv_heads)

    def __call__(
        self,
        stream: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Run the layers on stream [rows, hidden_size], in place; the rows' keys and values are written.

        positions [rows] int64; cos_sin [max_position, 2, head_dim / 2] fp32; kv_cache [num_layers, 2, num_blocks,
        block_size, num_kv_heads, head_dim]; block_table [rows, max_blocks] int32; context_lens [rows] int32, the new
        token included, 0 for a padding row; slot_mapping [rows] int64, where the new token's KV goes, -1 for nowhere.
        All on the weights' device, stream and kv_cache in their dtype. Raises ValueError for what does not fit.
        """
        self._check_call(stream, positions, cos_sin, kv_cache, block_table, context_lens, slot_mapping)
        rows, num_layers = stream.shape[0], len(self._weights)
        tile = self.tile
        constexprs = layer_constexprs(self.shape, tile, rows, kv_cache.shape[3], self.dtype)
        # The interpreter's programs run one after another: there each phase is a launch.
        in_turn = INTERPRETING and self.num_programs > 1
        ranges = [(i, i + 1, phase) for i in range(num_layers) for phase in range(NUM_PHASES)]
        with on_device(stream):
            for first_layer, last_layer, phase in ranges if in_turn else [(0, num_layers, -1)]:
                layers_kernel[(self.num_programs,)](
                    stream,
                    self._addresses,
                    positions,
                    cos_sin,
                    kv_cache,
                    block_table,
                    context_lens,
                    slot_mapping,
                    self._qkv,
                    self._partial,
                    self._lse,
                    self._heads,
                    self._gated,
                    self._counter,
                    rows,
                    first_layer,
                    last_layer,
                    self.shape.eps,
                    self.shape.head_dim**-0.5 * LOG2_E,
                    block_table.stride(0),
                    *kv_cache.stride()[:3],
                    **constexprs,
                    PHASE=phase,
                    num_warps=tile.num_warps,
                    num_stages=1,
                    launch_cooperative_grid=not INTERPRETING,
                )

    def _scratch(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def _check(self, index: int, layer: Mapping[str, Tensor]) -> None:
        shapes = self.shape.weight_shapes()
        if layer.keys() != shapes.keys():
            raise ValueError(
                f"layer {index} has {', '.join(sorted(layer))}, expected {', '.join(sorted(shapes))}"
            )
        for name, expected in shapes.items():
            weight = layer[name]
            if weight.shape != expected or not weight.is_contiguous():
                raise ValueError(
                    f"layer {index}: {name} must be contiguous {list(expected)}, got shape {tuple(weight.shape)}, "
                    f"strides {weight.stride()}"
                )
            if (weight.dtype, weight.device) != (self.dtype, self.device) or weight.data_ptr() % 16:
                raise ValueError(
                    f"layer {index}: {name} must be {self.dtype} on {self.device} at a multiple of 16 bytes, got "
                    f"{weight.dtype} on {weight.device} at {weight.data_ptr():#x}"
                )

    def _check_call(
        self,
        stream: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        shape, rows = self.shape, stream.shape[0]
        if not 0 < rows <= self.max_rows:
            raise ValueError(f"stream has {rows} rows, the limit is {self.max_rows}")
        if stream.shape != (rows, shape.hidden_size) or not stream.is_contiguous():
            raise ValueError(
                f"stream must be contiguous [rows, {shape.hidden_size}], got shape {tuple(stream.shape)}, "
                f"strides {stream.stride()}"
            )
        expected = (len(self._weights), 2, *kv_cache.shape[2:4], shape.num_kv_heads, shape.head_dim)
        if kv_cache.shape != expected or not kv_cache[0, 0].is_contiguous():
            raise ValueError(
                f"kv_cache must be [{len(self._weights)}, 2, num_blocks, block_size, {shape.num_kv_heads}, "
                f"{shape.head_dim}] with contiguous blocks, got shape {tuple(kv_cache.shape)}"
            )
        reason = unsupported_block_size(kv_cache.shape[3])
        if reason is not None:
            raise ValueError(f"kv_cache: {reason}")
        if cos_sin.shape[1:] != (2, shape.head_dim // 2) or not cos_sin.is_contiguous():
            raise ValueError(
                f"cos_sin must be contiguous [max_position, 2, {shape.head_dim // 2}], got shape "
                f"{tuple(cos_sin.shape)}, strides {cos_sin.stride()}"
            )
        if block_table.dim() != 2 or block_table.shape[0] != rows or block_table.stride(1) != 1:
            raise ValueError(
                f"block_table must be [{rows}, max_blocks], got shape {tuple(block_table.shape)}"
            )
        for name, tensor in (
            ("positions", positions),
            ("context_lens", context_lens),
            ("slot_mapping", slot_mapping),
        ):
            if tensor.shape != (rows,) or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous [{rows}], got shape {tuple(tensor.shape)}")
        for name, tensor, dtype in (
            ("stream", stream, self.dtype),
            ("kv_cache", kv_cache, self.dtype),
            ("positions", positions, torch.int64),
            ("cos_sin", cos_sin, torch.float32),
            ("block_table", block_table, torch.int32),
            ("context_lens", context_lens, torch.int32),
            ("slot_mapping", slot_mapping, torch.int64),
        ):
            if (tensor.dtype, tensor.device) != (dtype, self.device):
                raise ValueError(
                    f"{name} must be {dtype} on {self.device}, got {tensor.dtype} on {tensor.device}"
                )
