"""Memory of every rank on a host that all its ranks read and write over NVLink or PCIe: torch's symmetric memory.

Never with NVLink multicast: a program that faults while it uses that can take the host's GPUs away from all others.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.parallel.group import ParallelGroup

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""What keeps NCCL, NVSHMEM and torch from NVLink multicast; read when a rank starts to communicate."""

_NEEDED = ("empty", "rendezvous", "get_backend")


@dataclass(frozen=True, eq=False)
class PeerMemory:
    """buffer: [bytes] uint8 on this rank's device, zero at first. addresses: where this process finds each rank's.

    It lives as long as this object, and what peers have mapped as long as they do, also when this process has ended.
    Neither holds on to the process group that made it.
    """

    buffer: Tensor
    addresses: tuple[int, ...]
    handle: Any


def share_memory(
    group: ParallelGroup,
    device: torch.device,
    num_bytes: int,
    environment: Mapping[str, str] = os.environ,
) -> PeerMemory | str:
    """num_bytes on every rank, mapped into all; or why that cannot be had: on every rank memory, or on every rank text.

    Collective. Nothing is mapped before all ranks have found that they can: torch's rendezvous crashes some processes
    whose GPUs cannot reach each other. What still fails there fails on all ranks alike, as a rule; if one rank alone
    raised, the others would wait, and the start end with an error after rendezvous.TIMEOUT.
    """
    if not group.is_capturable:
        return "it needs a GPU for each rank, and these ranks talk over gloo"
    symmetric = _symmetric_memory()
    places = group.gather_texts(f"{device.index} of {socket.gethostname()}", device)
    reason = _first(group.gather_texts(_obstacle(symmetric, group.rank, places, device, environment), device))
    if reason:
        return reason
    assert symmetric is not None
    buffer: Tensor | None = None
    try:
        buffer = symmetric.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        reason = f"{num_bytes} bytes cannot be allocated: {_first_line(error)}"
    if reason := _first(group.gather_texts(reason, device)):
        return reason
    assert buffer is not None
    memory: PeerMemory | None = None
    try:
        memory = _rendezvous(symmetric, group.rank, buffer)
    except RuntimeError as error:
        reason = f"torch's rendezvous failed: {_first_line(error)}"
    if reason := _first(group.gather_texts(reason, device)):
        return reason
    assert memory is not None
    return memory


def _obstacle(
    symmetric: Any | None, rank: int, places: list[str], device: torch.device, environment: Mapping[str, str]
) -> str:
    """What keeps this rank from sharing memory with the others, or nothing. places: "device of host" of every rank."""
    if symmetric is None:
        return f"torch {torch.__version__} has no symmetric memory with {', '.join(_NEEDED)}"
    # Whatever else the variable holds, torch would create a multicast object as it maps the memory.
    if environment.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1":
        return "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 must be set where the ranks start, to keep off NVLink multicast"
    if (backend := symmetric.get_backend(device)) != "CUDA":
        return f"torch's symmetric memory is to come from {backend} (TORCH_SYMMMEM), not from CUDA"
    if len(set(places)) < len(places):
        return f"ranks have the same GPU, or see only their own: {'; '.join(places)}"
    if len({place.split(" of ", 1)[1] for place in places}) > 1:
        return f"the ranks are on several hosts: {'; '.join(places)}"
    for peer, place in enumerate(places):
        index = int(place.split(" of ", 1)[0])
        if index >= torch.cuda.device_count():
            return f"it does not see the GPU of rank {peer}, cuda:{index}"
        if peer != rank and not torch.cuda.can_device_access_peer(device, index):
            return f"{device} cannot reach the memory of cuda:{index} (no peer-to-peer access)"
    return ""


def _rendezvous(symmetric: Any, rank: int, buffer: Tensor) -> PeerMemory:
    """Returns when all ranks are here, so that all buffers are zero."""
    handle = symmetric.rendezvous(buffer, dist.group.WORLD)
    addresses = tuple(handle.buffer_ptrs)
    if handle.multicast_ptr:
        raise RuntimeError("a multicast object was made in spite of TORCH_SYMM_MEM_DISABLE_MULTICAST=1")
    if addresses[rank] != buffer.data_ptr():
        raise RuntimeError(f"the buffer at {buffer.data_ptr():#x} is mapped at {addresses[rank]:#x}")
    return PeerMemory(buffer, addresses, handle)


def _symmetric_memory() -> Any | None:
    """torch's module, if it has the functions used here (seen in 2.11, 2.13 and 2.14)."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return None
    return _symmetric_memory if all(hasattr(_symmetric_memory, name) for name in _NEEDED) else None


def _first(reasons: list[str]) -> str:
    """The first rank's reason that is one, with the rank's name; else nothing."""
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")


def _first_line(error: RuntimeError) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
