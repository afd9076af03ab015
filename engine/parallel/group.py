"""A tensor-parallel group: this process's rank among its peers, and the collectives the layers need."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in torch 2.13.
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Bytes of a text that ranks tell each other.
_MAX_TEXT_BYTES = 512


class CollectiveError(RuntimeError):
    """A collective failed. Most often that is another rank's fault: it has ended, or never came."""


@dataclass
class HostTime:
    """Seconds in collectives of torch.distributed: over gloo all of their time, over NCCL only the launching."""

    seconds: float = 0.0


class SmallAllReduce(Protocol):
    """Sums small tensors over ranks otherwise than torch.distributed does."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether it sums this one: the same answer on every rank."""

    def __call__(self, tensor: Tensor) -> None:
        """The sum over ranks, in place, the same bits on each; can be captured in a CUDA graph."""


@dataclass(frozen=True)
class ParallelGroup:
    """Rank `rank` of `size` ranks, which all call the same collectives in the same order.

    More than one communicate over torch.distributed's default process group (gloo or NCCL). It is looked up at each
    call and never kept: a model that outlived destroy_process_group() would keep gloo's threads alive with it, and one
    of them that releases its last tensor while the interpreter ends aborts the process. small_all_reduce: what sums
    the tensors that it takes; it keeps no process group either.
    """

    rank: int
    size: int
    host_time: HostTime = field(default_factory=HostTime, compare=False)
    small_all_reduce: SmallAllReduce | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be in [0, size), got rank {self.rank} of size {self.size}")

    @classmethod
    def single(cls) -> ParallelGroup:
        """A group of one, whose collectives do nothing."""
        return cls(rank=0, size=1)

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can hold the collectives: gloo's run on the host, so the host waits for the device."""
        return self.size == 1 or dist.get_backend(self._peers()) == "nccl"

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place and returned.

        Every rank gets the same bits, also in 16-bit formats: each element is summed in one place and then copied, or
        on every rank in the same order.
        """
        if self.small_all_reduce is not None and self.small_all_reduce.takes(tensor):
            self.small_all_reduce(tensor)
        elif self.size > 1:
            self._call(dist.all_reduce, tensor)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The ranks' tensors, all of one shape, joined along dim in rank order."""
        if self.size == 1:
            return tensor
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        self._call(_ALL_GATHER, gathered.flatten(0, 1), tensor.contiguous())
        return torch.cat(gathered.unbind(0), dim=dim)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's values on every rank, in place and returned."""
        if self.size > 1:
            self._call(dist.broadcast, tensor, group_src=0)
        return tensor

    def smallest(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values. device: where this rank communicates."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=device)
        self._call(dist.all_reduce, tensor, op=dist.ReduceOp.MIN)
        return int(tensor.item())

    def agrees(self, text: str, device: torch.device) -> bool:
        """Whether all ranks ask with the same text. device: where this rank communicates."""
        number = zlib.crc32(text.encode())
        return self.smallest(number, device) == -self.smallest(-number, device)

    def gather_texts(self, text: str, device: torch.device) -> list[str]:
        """Every rank's text, in rank order, cut to 512 bytes. device: where this rank communicates."""
        encoded = text.encode()[:_MAX_TEXT_BYTES].ljust(_MAX_TEXT_BYTES, b"\0")
        mine = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device)
        gathered = self.all_gather(mine[None], dim=0).tolist()
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in gathered]

    def _peers(self) -> dist.ProcessGroup:
        process_group = dist.group.WORLD
        if process_group is None:
            raise RuntimeError(f"rank {self.rank} of {self.size} has no process group to communicate over")
        return process_group

    def _call(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        group = self._peers()
        start = time.perf_counter()
        try:
            collective(*arguments, group=group, **options)
        except RuntimeError as error:
            raise CollectiveError(f"{collective.__name__}: {error}") from error
        self.host_time.seconds += time.perf_counter() - start
