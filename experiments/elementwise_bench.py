"""What a decoder layer does besides attention, and sampling, for kernel_bench: three paths of each on a model's shapes.

"torch" and "triton" are what use_triton chooses between; "compile" is torch.compile of the torch path, on a GPU, for
each operation and number of tokens by itself. All do the same work on copies of the same inputs, in place where the
operation is.

sample: top-k 50, top-p 0.9, temperature 0.6 in every row. `kernels.sampling.sample` first decides on the host which
rows are drawn and filtered, which could be neither captured nor compiled. Here that is known: torch runs
sample_filtered, and Triton the same kernels as in the engine's CUDA graphs. Both compute the same tokens, but for
uniform numbers at the very edge between two tokens' shares, which Triton's fp32 exponentials may move: a token is right
if the number lies in its share of the distribution, or within EDGE of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.failures import UnsupportedError, describe
from experiments.kernel_bench import BoundCall, Candidate
from kernels import costs, sampling_triton
from kernels.activation import silu_mul
from kernels.costs import Cost
from kernels.kv_write import write_kv
from kernels.linear import MAX_ROWS, few_rows_linear, linear
from kernels.norm import add_rms_norm, rms_norm
from kernels.qk_norm_rope_write import qk_norm_rope_write
from kernels.rope import apply_rope
from kernels.sampling import filtered_probs, greedy, sample_filtered
from kernels.triton_support import INTERPRETING, triton_unavailable

if TYPE_CHECKING:
    from engine.models.config import ModelConfig

EPS = 1e-6
BLOCK_SIZE = 16
PATHS = ("torch", "triton", "compile")
MAX_POSITION = 4096
TEMPERATURE, TOP_K, TOP_P = 0.6, 50, 0.9
EDGE = 1e-5  # of a distribution, whose sum is 1
MAX_SAMPLED = 1024

Inputs = Mapping[str, Tensor]
Outputs = tuple[Tensor, ...]
Run = Callable[[Inputs, bool], Outputs]


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

    def uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self.generator, device=self.device, dtype=torch.float64)

    def constant(self, value: float, count: int) -> Tensor:
        """float64, or int64 for an int."""
        dtype = torch.int64 if isinstance(value, int) else torch.float64
        return torch.full((count,), value, device=self.device, dtype=dtype)


@dataclass(frozen=True)
class Operation:
    """make: random inputs for so many tokens. run: (inputs, use_triton) -> outputs. cost: what it cannot do without.

    read: (inputs, outputs) -> what is compared with the reference's. max_tokens: beyond which nothing is compared.
    max_triton_tokens: beyond which the Triton path hands over to torch, so that there is nothing to compare.
    interpreted_as: so many tokens each counts as where Triton's interpreter is concerned.
    """

    make: Callable[[ModelConfig, int, Draw], dict[str, Tensor]]
    run: Run
    cost: Callable[[ModelConfig, int, torch.dtype], Cost]
    read: Callable[[Inputs, Outputs], Outputs] = lambda inputs, outputs: outputs
    max_tokens: int | None = None
    max_triton_tokens: int | None = None
    interpreted_as: int = 1

    def refusal(self, num_tokens: int) -> str | None:
        """Why no path is asked to do so many tokens, or None."""
        if self.max_tokens is None or num_tokens <= self.max_tokens:
            return None
        return f"compared for {self.max_tokens} tokens at most: the torch path's scratch grows with them"


def _heads(config: ModelConfig, tokens: int, draw: Draw) -> dict[str, Tensor]:
    """Views of one packed qkv projection."""
    sizes = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
    packed = draw.normal(tokens, sum(sizes), config.head_dim)
    return dict(zip("qkv", packed.split(sizes, dim=1)))


def _rotations(config: ModelConfig, tokens: int, draw: Draw) -> dict[str, Tensor]:
    """Positions, and a table of cosines and sines that is no larger than it takes: each input set has its own."""
    num_positions = min(MAX_POSITION, 4 * tokens)
    angles = torch.rand(num_positions, config.head_dim // 2, generator=draw.generator, device=draw.device)
    angles *= 6.28
    cos_sin = torch.stack([angles.cos(), angles.sin()], dim=1)
    return {"positions": draw.integers(num_positions, tokens), "cos_sin": cos_sin}


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


def _logits(config: ModelConfig, tokens: int, draw: Draw) -> dict[str, Tensor]:
    return {
        "logits": draw.normal(tokens, config.vocab_size),
        "temperature": draw.constant(TEMPERATURE, tokens),
        "top_k": draw.constant(TOP_K, tokens),
        "top_p": draw.constant(TOP_P, tokens),
        "uniform": draw.uniform(tokens),
    }


def _run_rope(t: Inputs, use_triton: bool) -> Outputs:
    apply_rope(t["q"], t["k"], t["positions"], t["cos_sin"], use_triton=use_triton)
    return t["q"], t["k"]


def _run_write(t: Inputs, use_triton: bool) -> Outputs:
    write_kv(t["k"], t["v"], t["k_cache"], t["v_cache"], t["slot_mapping"], use_triton=use_triton)
    return t["k_cache"], t["v_cache"]


def _run_fused(t: Inputs, use_triton: bool) -> Outputs:
    heads = (t["q"], t["k"], t["v"], t["q_weight"], t["k_weight"], EPS, t["positions"], t["cos_sin"])
    qk_norm_rope_write(*heads, t["k_cache"], t["v_cache"], t["slot_mapping"], use_triton=use_triton)
    return t["q"], t["k_cache"], t["v_cache"]


def _run_linear(t: Inputs, use_triton: bool) -> Outputs:
    """The Triton kernel itself: kernels.linear.linear leaves fp32 to torch."""
    if use_triton:
        return (few_rows_linear(t["x"], t["weight"], None),)
    return (linear(t["x"], t["weight"], use_triton=False),)


def _run_sample(t: Inputs, use_triton: bool) -> Outputs:
    """Filters of both kinds are on in every row, as neither path has to find out."""
    arguments = (t["logits"], t["temperature"], t["top_k"], t["top_p"], t["uniform"])
    if use_triton:
        return (sampling_triton.sample(*arguments, any_top_k=True, any_top_p=True),)
    return (sample_filtered(*arguments),)


def _chosen(values: Tensor, ids: Tensor) -> Tensor:
    """[rows, 1]: each row's value at its id; NaN where that is no id."""
    last = values.shape[1] - 1
    is_id = (ids >= 0) & (ids <= last)
    return values.gather(1, ids.clamp(0, last)[:, None]).masked_fill(~is_id[:, None], float("nan"))


def _chosen_logits(t: Inputs, outputs: Outputs) -> Outputs:
    """They can be compared where the ids of near ties cannot."""
    return (_chosen(t["logits"], outputs[0]),)


def _are_right(t: Inputs, outputs: Outputs) -> Outputs:
    """[rows, 1]: 1 where a token is kept and has the row's uniform number in its share, or next to it, else 0."""
    right = []
    settings = (t["logits"], t["temperature"], t["top_k"], t["top_p"], t["uniform"], outputs[0])
    for *rows, uniform, ids in zip(*(tensor.split(64) for tensor in settings)):
        probs = filtered_probs(*rows).double()
        share, end = _chosen(probs, ids), _chosen(probs.cumsum(-1), ids)
        number = uniform[:, None]
        right.append((share > 0) & (number > end - share - EDGE) & (number < end + EDGE))
    return (torch.cat(right).float(),)


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
        lambda c, n, draw: _heads(c, n, draw) | _rotations(c, n, draw),
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
            | _rotations(c, n, draw)
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
        lambda t, use_triton: (greedy(t["logits"], use_triton=use_triton),),
        lambda c, n, dtype: costs.greedy(n, c.vocab_size, dtype),
        _chosen_logits,
    ),
    "sample": Operation(
        _logits,
        _run_sample,
        lambda c, n, dtype: costs.sample(n, c.vocab_size, dtype),
        _are_right,
        max_tokens=MAX_SAMPLED,
        interpreted_as=16,  # searching a row there takes seconds
    ),
}


def compiled(run: Run, backend: str | Callable[..., Any] = "inductor") -> Callable[[Inputs], Outputs]:
    """run's torch path through torch.compile, in one graph for the shapes of the inputs that it is called with.

    What is compiled again for other shapes counts towards a limit a code object, so that each call here makes its own.
    Raises UnsupportedError where the compiler fails (torch 2.11's Inductor on `sample`): this build lacks the peer.
    """
    from torch._dynamo.exc import BackendCompilerFailed  # imported, the compiler takes seconds

    def call(inputs: Inputs) -> Outputs:
        return run(inputs, False)

    own = FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
    made = torch.compile(own, backend=backend, fullgraph=True, dynamic=False)

    def call_or_say(inputs: Inputs) -> Outputs:
        try:
            return made(inputs)
        except BackendCompilerFailed as error:
            raise UnsupportedError(
                f"torch {torch.__version__} cannot compile it: {describe(error)}"
            ) from error

    return call_or_say


def compile_unavailable(device: torch.device) -> str | None:
    """Why the compiled path is not compared on `device`, or None."""
    if device.type != "cuda":
        return (
            f"torch.compile is compared on a CUDA device: on {device.type} Inductor needs a C++ compiler, and its "
            "loops are not what Triton's kernels compete with"
        )
    if INTERPRETING:
        return "Inductor's kernels cannot be timed in Triton's interpreter (TRITON_INTERPRET is set)"
    return triton_unavailable(device)


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
        return self.num_tokens * self._operation.interpreted_as

    def make_inputs(self, generator: torch.Generator) -> dict[str, Tensor]:
        draw = Draw(generator, self.device, getattr(torch, self.dtype))
        return self._operation.make(self.config, self.num_tokens, draw)

    def reference(self, inputs: Inputs) -> Sequence[Tensor]:
        """The torch path on copies of the inputs widened to fp32."""
        wide = {
            name: tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.clone()
            for name, tensor in inputs.items()
        }
        return self._operation.read(wide, self._operation.run(wide, False))

    def candidates(self) -> Sequence[Candidate]:
        return [self._candidate(path) for path in PATHS]

    @cached_property
    def _compiled(self) -> Callable[[Inputs], Outputs]:
        """One for all input sets: they have one shape."""
        return compiled(self._operation.run)

    def _candidate(self, path: str) -> Candidate:
        run, read, use_triton = self._operation.run, self._operation.read, path == "triton"

        def bind(inputs: Inputs) -> BoundCall:
            own = _copies(inputs)  # some operations work in place
            call = self._compiled if path == "compile" else lambda t: run(t, use_triton)
            return BoundCall(lambda: call(own), read=lambda outputs: read(own, outputs))

        def probe() -> Any:
            tiny = ElementwiseBench(self.operation, self.config, 1, self.dtype, self.device)
            inputs = tiny.make_inputs(torch.Generator(device=self.device).manual_seed(0))
            return run(inputs, use_triton)

        return Candidate(path, bind, probe, {"operation": self.operation}, self._unsupported(path))

    def _unsupported(self, path: str) -> str | None:
        limit = self._operation.max_triton_tokens
        if path == "compile":
            reason = compile_unavailable(self.device)
        elif path == "torch":
            reason = None
        elif limit is not None and self.num_tokens > limit:
            reason = f"the Triton path takes {limit} tokens at most and leaves more to torch"
        else:
            reason = triton_unavailable(self.device)
        return self._operation.refusal(self.num_tokens) or reason


def _copies(inputs: Inputs) -> dict[str, Tensor]:
    """Copies with the same strides, so that views of a packed projection stay as far apart as they were."""
    copies = {}
    for name, tensor in inputs.items():
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        copies[name] = copy.copy_(tensor)
    return copies
