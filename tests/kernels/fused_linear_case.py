"""One product with a norm before and SwiGLU after it: by kernels/fused_linear.py, by separate kernels and in fp64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import silu_mul
from kernels.fused_linear import DotTile, Norm, dot_linear
from kernels.norm import rms_norm

# How much further from fp64 the fused product may be: it rounds less often, but where it rounds is another place.
FACTOR = 1.5
OPTIONS = ((True, False), (False, True), (True, True))


class Case:
    """Random operands as in a decoder: weights of in_features^-0.5, x of rms `stream`, norm weights around one."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        rows: int,
        out_features: int,
        in_features: int,
        *,
        bias: bool = False,
        stream: float = 3.0,
    ) -> None:
        generator = torch.Generator(device).manual_seed(rows)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        self.x = (stream * random(rows, in_features)).to(dtype)
        self.weight = (random(out_features, in_features) * in_features**-0.5).to(dtype)
        self.bias = random(out_features).to(dtype) if bias else None
        self.norm = Norm((1 + 0.5 * random(in_features)).to(dtype), 1e-6)

    def exact(self, normed: bool, gated: bool) -> Tensor:
        """In fp64, rounded nowhere."""
        x = self.x.double()
        if normed:
            x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + self.norm.eps) * self.norm.weight.double()
        out = x @ self.weight.double().T
        if self.bias is not None:
            out = out + self.bias.double()
        if not gated:
            return out
        gate, up = out.chunk(2, 1)
        return functional.silu(gate) * up

    def separate(self, normed: bool, gated: bool, tile: DotTile | None = None) -> Tensor:
        x = rms_norm(self.x, self.norm.weight, self.norm.eps, use_triton=True) if normed else self.x
        out = dot_linear(x, self.weight, self.bias, tile=tile)
        return silu_mul(out, use_triton=True) if gated else out

    def inside(self, normed: bool, gated: bool, tile: DotTile | None = None) -> Tensor:
        norm = self.norm if normed else None
        return dot_linear(self.x, self.weight, self.bias, norm=norm, gated=gated, tile=tile)

    def check(self, tile: DotTile | None = None, *, options: tuple[tuple[bool, bool], ...] = OPTIONS) -> None:
        """Raises AssertionError unless for each (normed, gated) the error is FACTOR of the separate kernels' at most.

        Errors are means, not means of squares: those one large silu(gate) * up decides.
        """
        for normed, gated in options:
            exact = self.exact(normed, gated)

            def error(actual: Tensor, exact: Tensor = exact) -> float:
                assert actual.shape == exact.shape
                assert actual.isfinite().all()
                return float((actual.double() - exact).abs().mean() / exact.abs().mean())

            separate = error(self.separate(normed, gated, tile))
            inside = error(self.inside(normed, gated, tile))
            assert inside <= FACTOR * separate, f"norm {normed}, gated {gated}: {inside}, separate {separate}"
