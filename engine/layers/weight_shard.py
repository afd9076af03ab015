"""Which part of which checkpoint tensor fills which part of which parameter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class WeightShard:
    """`target` is filled from tensor `name`, which has `full_shape` in the checkpoint.

    It takes target.shape[dim] elements from `start` along `dim`, and all of every other dimension. target is a view of
    a parameter, so packed and sharded parameters are filled in place.
    """

    name: str
    full_shape: tuple[int, ...]
    target: Tensor
    dim: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        expected = list(self.full_shape)
        length = self.target.shape[self.dim]
        if self.start < 0 or self.start + length > expected[self.dim]:
            raise ValueError(f"{self.name}: {length} from {self.start} is outside its {self.full_shape}")
        expected[self.dim] = length
        if tuple(self.target.shape) != tuple(expected):
            raise ValueError(f"{self.name}: target is {tuple(self.target.shape)}, expected {tuple(expected)}")

    def slice_of(self, full: Tensor) -> Tensor:
        """The part of the full tensor that the target takes. full may also be a safetensors slice object."""
        index = [slice(None)] * len(self.full_shape)
        index[self.dim] = slice(self.start, self.start + self.target.shape[self.dim])
        return full[tuple(index)]
