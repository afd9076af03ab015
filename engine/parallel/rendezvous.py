"""How the ranks of a group find each other: through a store of the engine's own, or as an external launcher says."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.parallel.group import ParallelGroup

LOOPBACK = "127.0.0.1"

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others in one collective: they may still be loading."""


def open_store() -> dist.TCPStore:
    """A store at a free port of the loopback device; ranks reach it by its .port while this object lives.

    The port is bound before anyone is told of it, so no other program can take it in between.
    """
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def join_store(port: int, rank: int, size: int, device: torch.device, *, shared: bool) -> ParallelGroup:
    """Become rank `rank` of the `size` processes that meet at a store on this host. Once in a process.

    shared: several ranks have the same GPU, which NCCL refuses, so that they talk over gloo.
    """
    store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=TIMEOUT)
    return _join(rank, size, device, shared=shared, store=store)


@dataclass(frozen=True)
class ExternalRank:
    """This process's place among those that an external launcher, such as torchrun, started on one or more hosts."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ExternalRank | None:
        """What torchrun's variables say (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

        None outside a launcher, and in one that started a single process. Raises ValueError for values that are
        missing or make no sense.
        """
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        if size == 1:
            return None
        for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
            if name not in environment:
                raise ValueError(f"RANK and WORLD_SIZE={size} are set as a launcher would, but {name} is not")
        local_rank = _number(environment, "LOCAL_RANK")
        local_size = (
            _number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else local_rank + 1
        )
        if not (rank < size and local_rank < local_size <= size):
            raise ValueError(
                f"the launcher's RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={local_rank}, "
                f"LOCAL_WORLD_SIZE={local_size} contradict each other"
            )
        return cls(rank, size, local_rank, local_size)

    def join(self, device: torch.device, *, shared: bool) -> ParallelGroup:
        """The group of all the launcher's processes, which stays joined until this process ends."""
        if not dist.is_initialized():
            group = _join(self.rank, self.size, device, shared=shared)
            atexit.register(dist.destroy_process_group)
            return group
        if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.size):
            raise ValueError(
                f"torch.distributed is initialised as rank {dist.get_rank()} of {dist.get_world_size()}, the launcher "
                f"says rank {self.rank} of {self.size}"
            )
        return ParallelGroup(self.rank, self.size)


def _join(
    rank: int, size: int, device: torch.device, *, shared: bool, store: dist.Store | None = None
) -> ParallelGroup:
    """Without a store, MASTER_ADDR and MASTER_PORT tell where one is."""
    over_nccl = device.type == "cuda" and not shared
    dist.init_process_group(
        "nccl" if over_nccl else "gloo",
        init_method=None if store is not None else "env://",
        store=store,
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=device if over_nccl else None,
    )
    return ParallelGroup(rank, size)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise ValueError(f"the environment variable {name} must be a whole number, got {text!r}")
    return int(text)
