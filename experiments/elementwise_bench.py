"""The elementwise operations of a decoder layer for kernel_bench: Triton and torch behind each, on a model's shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.kernel_bench import BoundCall, Candidate
from kernels import costs
from kernels.activation import silu_mul
from kernels.costs import Cost
from kernels.kv_write import write_kv
from kernels.linear import MAX_ROWS, few_rows_linear, linear
from kernels.norm import add_rms_norm, rms_norm
from kernels.qk_norm_rope_write import qk_norm_rope_write
from kernels.rope import apply_rope
from kernels.sampling import greedy
from kernels.triton_support import triton_unavailable

if TYPE_CHECKING:
    from engine.models.config import ModelConfig

EPS = 1e-6
BLOCK_SIZE = 16
PATHS = ("torch", "triton")
MAX_POSITION = 4096

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Draw:
    """Makes random tensors of one kind on one device."""

    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def integers(self, high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=self.generator, device=self.device)

    def distinct(self, high: int, count: int) -> Tensor:
        return torch.randperm(high, generator=self.generator, device=self.device)[:count]


@dataclass(frozen=True)
class Operation:
    """make: random inputs for so many tokens. run: (inputs, use_triton) -> outputs. cost: what it cannot do without.

    max_triton_tokens: beyond which the Triton path hands over to torch, so that there is nothing to compare.
    """

    make: Callable[[ModelConfig, int, Draw], dict[str, Tensor]]
    run: Callable[[Inputs, bool], tuple[Tensor, ...]]
    cost: Callable[[ModelConfig, int, torch.dtype], Cost]
    max_triton_tokens: int | None = None


def _heads(config: ModelConfig, tokens: int, draw: Draw) -> dict[str, Tensor]:
    """Views of one packed qkv projection, positions, and the table of cosines and sines."""
    sizes = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
    packed = draw.normal(tokens, sum(sizes), config.head_dim)
    angles = (
        torch.rand(MAX_POSITION, config.head_dim // 2, generator=draw.generator, device=draw.device) * 6.28
    )
    q, k, v = packed.split(sizes, dim=1)
    cos_sin = torch.stack([angles.cos(), angles.sin()], dim=1)
    return {"q": q, "k": k, "v": v, "positions": draw.integers(MAX_POSITION, tokens), "cos_sin": cos_sin}


def _cache(config: ModelConfig, tokens: int, draw: Draw) -> dict[str, Tensor]:
    num_blocks = 2 * -(-tokens // BLOCK_SIZE) + 1
    shape = (num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    return {
        "k_cache": draw.normal(*shape),
        "v_cache": draw.normal(*shape),
        "slot_mapping": draw.distinct(num_blocks * BLOCK_SIZE, tokens),
    }


def _norm(config: ModelConfig, tokens: int, draw: Draw) -> dict[str, Tensor]:
    return {"x": draw.normal(tokens, config.hidden_size), "weight": draw.normal(config.hidden_size)}


def _run_rope(t: Inputs, use_triton: bool) -> tuple[Tensor, ...]:
    apply_rope(t["q"], t["k"], t["positions"], t["cos_sin"], use_triton=use_triton)
    return t["q"], t["k"]


def _run_write(t: Inputs, use_triton: bool) -> tuple[Tensor, ...]:
    write_kv(t["k"], t["v"], t["k_cache"], t["v_cache"], t["slot_mapping"], use_triton=use_triton)
    return t["k_cache"], t["v_cache"]


def _run_fused(t: Inputs, use_triton: bool) -> tuple[Tensor, ...]:
    heads = (t["q"], t["k"], t["v"], t["q_weight"], t["k_weight"], EPS, t["positions"], t["cos_sin"])
    qk_norm_rope_write(*heads, t["k_cache"], t["v_cache"], t["slot_mapping"], use_triton=use_triton)
    return t["q"], t["k_cache"], t["v_cache"]


def _run_linear(t: Inputs, use_triton: bool) -> tuple[Tensor, ...]:
    """The Triton kernel itself: kernels.linear.linear leaves fp32 to torch."""
    if use_triton:
        return (few_rows_linear(t["x"], t["weight"], None),)
    return (linear(t["x"], t["weight"], use_triton=False),)


def _run_greedy(t: Inputs, use_triton: bool) -> tuple[Tensor, ...]:
    """The logits of the chosen ids: they can be compared where the ids of near ties cannot."""
    return (t["logits"].gather(1, greedy(t["logits"], use_triton=use_triton)[:, None]),)


def _fused_cost(config: ModelConfig, tokens: int, dtype: torch.dtype) -> Cost:
    """q in place, k and v from the projection to the cache; a norm and a rotation of each head."""
    heads, dim = config.num_q_heads + config.num_kv_heads, config.head_dim
    flops = costs.rms_norm(tokens * heads, dim, dtype).flops + 3 * tokens * heads * dim
    q = costs.rope(tokens, config.num_q_heads, 0, dim, dtype).bytes
    return Cost(q + costs.kv_write(tokens, config.num_kv_heads, dim, dtype).bytes, flops)


OPERATIONS: dict[str, Operation] = {
    "rms_norm": Operation(
        _norm,
        lambda t, use_triton: (rms_norm(t["x"], t["weight"], EPS, use_triton=use_triton),),
        lambda c, n, dtype: costs.rms_norm(n, c.hidden_size, dtype),
    ),
    "add_rms_norm": Operation(
        lambda c, n, draw: _norm(c, n, draw) | {"residual": draw.normal(n, c.hidden_size)},
        lambda t, use_triton: add_rms_norm(t["x"], t["residual"], t["weight"], EPS, use_triton=use_triton),
        lambda c, n, dtype: costs.add_rms_norm(n, c.hidden_size, dtype),
    ),
    "silu_mul": Operation(
        lambda c, n, draw: {"gate_up": draw.normal(n, 2 * c.intermediate_size)},
        lambda t, use_triton: (silu_mul(t["gate_up"], use_triton=use_triton),),
        lambda c, n, dtype: costs.silu_mul(n, c.intermediate_size, dtype),
    ),
    "rope": Operation(
        _heads,
        _run_rope,
        lambda c, n, dtype: costs.rope(n, c.num_q_heads, c.num_kv_heads, c.head_dim, dtype),
    ),
    "kv_write": Operation(
        lambda c, n, draw: _heads(c, n, draw) | _cache(c, n, draw),
        _run_write,
        lambda c, n, dtype: costs.kv_write(n, c.num_kv_heads, c.head_dim, dtype),
    ),
    "qk_norm_rope_write": Operation(
        lambda c, n, draw: (
            _heads(c, n, draw)
            | _cache(c, n, draw)
            | {name: draw.normal(c.head_dim) for name in ("q_weight", "k_weight")}
        ),
        _run_fused,
        _fused_cost,
    ),
    "down_proj": Operation(
        lambda c, n, draw: {
            "x": draw.normal(n, c.intermediate_size),
            "weight": draw.normal(c.hidden_size, c.intermediate_size),
        },
        _run_linear,
        lambda c, n, dtype: costs.linear(n, c.intermediate_size, c.hidden_size, dtype),
        max_triton_tokens=MAX_ROWS,
    ),
    "greedy": Operation(
        lambda c, n, draw: {"logits": draw.normal(n, c.vocab_size)},
        _run_greedy,
        lambda c, n, dtype: costs.greedy(n, c.vocab_size, dtype),
    ),
}


@dataclass(frozen=True)
class ElementwiseBench:
    """One operation over num_tokens tokens of a model."""

    operation: str
    config: ModelConfig
    num_tokens: int
    dtype: str
    device: torch.device

    @property
    def _operation(self) -> Operation:
        return OPERATIONS[self.operation]

    @property
    def cost(self) -> Cost:
        return self._operation.cost(self.config, self.num_tokens, getattr(torch, self.dtype))

    @property
    def input_bytes(self) -> int:
        return self.cost.bytes

    @property
    def interpreted_size(self) -> int:
        return self.num_tokens

    def make_inputs(self, generator: torch.Generator) -> dict[str, Tensor]:
        draw = Draw(generator, self.device, getattr(torch, self.dtype))
        return self._operation.make(self.config, self.num_tokens, draw)

    def reference(self, inputs: Inputs) -> Sequence[Tensor]:
        """The torch path on inputs widened to fp32."""
        wide = {
            name: tensor.float().clone() if tensor.is_floating_point() else tensor
            for name, tensor in inputs.items()
        }
        return self._operation.run(wide, False)

    def candidates(self) -> Sequence[Candidate]:
        return [self._candidate(path) for path in PATHS]

    def _candidate(self, path: str) -> Candidate:
        run, use_triton = self._operation.run, path == "triton"

        def bind(inputs: Inputs) -> BoundCall:
            own = _copies(inputs)  # some operations work in place
            return BoundCall(lambda: run(own, use_triton))

        def probe() -> Any:
            tiny = ElementwiseBench(self.operation, self.config, 1, self.dtype, self.device)
            inputs = tiny.make_inputs(torch.Generator(device=self.device).manual_seed(0))
            return run(inputs, use_triton)

        unsupported = triton_unavailable(self.device) if use_triton else None
        limit = self._operation.max_triton_tokens
        if use_triton and limit is not None and self.num_tokens > limit:
            unsupported = f"the Triton path takes {limit} tokens at most and leaves more to torch"
        return Candidate(path, bind, probe, {"operation": self.operation}, unsupported)


def _copies(inputs: Inputs) -> dict[str, Tensor]:
    """Copies with the same strides, so that views of a packed projection stay as far apart as they were."""
    copies = {}
    for name, tensor in inputs.items():
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        copies[name] = copy.copy_(tensor)
    return copies
