"""A tensor-parallel group: this process's rank among its peers, and the collectives the layers need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ParallelGroup:
    """Rank `rank` of `size` ranks, which all call the same collectives in the same order.

    process_group: a torch.distributed group (gloo or NCCL) of that size; None only for a group of one.
    """

    rank: int
    size: int
    process_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be in [0, size), got rank {self.rank} of size {self.size}")

    @classmethod
    def single(cls) -> ParallelGroup:
        """A group of one, whose collectives do nothing."""
        return cls(rank=0, size=1)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place and returned. Every rank gets the same bits, also in 16-bit formats."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._peers())
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The ranks' tensors, all of one shape, joined along dim in rank order."""
        if self.size == 1:
            return tensor
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        dist.all_gather_into_tensor(gathered.flatten(0, 1), tensor.contiguous(), group=self._peers())
        return torch.cat(gathered.unbind(0), dim=dim)

    def _peers(self) -> dist.ProcessGroup:
        if self.process_group is None:
            raise RuntimeError(f"rank {self.rank} of {self.size} has no process group to communicate over")
        return self.process_group
