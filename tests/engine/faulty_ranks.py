"""What the ranks run in tests of faults: decode kernels that fail on rank 1, and runners with methods of their own."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from torch import Tensor

from engine.execution.model_runner import ModelRunner
from kernels import decode
from kernels.decode.torch_paged import TorchDecode


class FaultyDecode(TorchDecode):
    """The torch kernel; from its tenth call on, rank 1 raises or sleeps."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_calls = 0

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        self.num_calls += 1
        if self.num_calls >= 10 and dist.is_initialized() and dist.get_rank() == 1:
            if self.name == "raises_on_rank_1":
                raise ZeroDivisionError("the kernel's own fault")
            time.sleep(1000)
        return super().__call__(*args, **options)


def register_faulty_kernels() -> None:
    """Only where the tests want them: the tests of the registry count what is there."""
    for name in ("raises_on_rank_1", "sleeps_on_rank_1"):
        if name not in decode.names():
            decode.register(name)(FaultyDecode(name))


class UnequalRunner(ModelRunner):
    """Rank 0 has room for 41 blocks, rank 1 for 37. Remembers what it is told, slowly."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.told: list[tuple[int, int]] = []

    def num_blocks_that_fit(self) -> int:
        return (41, 37)[self.group.rank]

    def tell(self, number: int, payload: bytes) -> int:
        if number % 10 == self.group.rank:
            time.sleep(0.2)
        self.told.append((number, hash(payload)))
        return len(payload)

    def all_told(self) -> list[int]:
        return [number for number, _ in self.told]


class RaisingRunner(ModelRunner):
    """Rank 1 fails while it starts."""

    def prepare(self) -> None:
        if self.group.rank == 1:
            raise OSError("the disk of rank 1 is gone")
        super().prepare()
