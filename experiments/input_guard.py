"""Whether what was called left its inputs alone: those that come after it, timed or checked, read the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class InputGuard:
    """Holds a copy of all tensors of an input set: a tensor, or a mapping or dataclass of tensors, nested or not."""

    def __init__(self, inputs: Any) -> None:
        self._tensors = dict(_named(inputs, ""))
        self._copies = {name: tensor.clone() for name, tensor in self._tensors.items()}

    def restore(self) -> list[str]:
        """Put back what has changed since, bit by bit, and return its names."""
        changed = [name for name, tensor in self._tensors.items() if not _same(tensor, self._copies[name])]
        for name in changed:
            self._tensors[name].copy_(self._copies[name])
        return changed


def _named(inputs: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(inputs, Tensor):
        yield name or "inputs", inputs
    elif isinstance(inputs, Mapping):
        for key, value in inputs.items():
            yield from _named(value, str(key))
    elif is_dataclass(inputs):
        for field in fields(inputs):
            yield from _named(getattr(inputs, field.name), field.name)


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit: slots without a token are NaN, which equals nothing."""
    bits = _BITS[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))
