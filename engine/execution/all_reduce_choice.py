"""How the ranks of an engine sum: through torch.distributed alone, or small tensors over peer memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.parallel.group import ParallelGroup
from engine.parallel.peer_memory import PeerMemory, share_memory
from kernels.all_reduce import PeerBuffers, buffer_bytes, one_shot_all_reduce

MAX_PEER_BYTES = 8 << 20
"""What a rank reads from all its peers in one call, at most: they send each tensor whole, NCCL's ring two parts of it.

Two H200s: about a third of NCCL's time up to 128 KB, half at 2.6 MB, 0.84 of it at 8 MB
(results/tp2-h200/all_reduce.json). More ranks and other links are not measured: `python -m experiments.two_gpus
all_reduce` shows where NCCL is faster.
"""


@dataclass(frozen=True, eq=False)
class OneShotAllReduce:
    """group.SmallAllReduce by kernels/all_reduce.py, for what fits in the buffers."""

    buffers: PeerBuffers

    def takes(self, tensor: Tensor) -> bool:
        return 0 < tensor.nbytes <= self.buffers.max_bytes and tensor.is_contiguous()

    def __call__(self, tensor: Tensor) -> None:
        one_shot_all_reduce(tensor, self.buffers)


def choose_all_reduce(
    config: EngineConfig,
    group: ParallelGroup,
    device: torch.device,
    *,
    use_triton: bool,
    largest: int,
) -> ParallelGroup:
    """The group, which sums small tensors over peer memory if config.all_reduce says so. Collective.

    largest: bytes of the largest tensor of a decode step. Raises ValueError, on every rank, for "one_shot" where that
    cannot be had; "auto" then leaves the group as it is.
    """
    if group.size == 1 or config.all_reduce == "torch":
        return group
    reason = "it needs use_triton"
    if use_triton:
        max_bytes = min(largest, MAX_PEER_BYTES // (group.size - 1))
        memory = share_memory(group, device, buffer_bytes(max_bytes))
        if isinstance(memory, PeerMemory):
            buffers = PeerBuffers.at(memory.addresses, group.rank, max_bytes, device, memory)
            return replace(group, small_all_reduce=OneShotAllReduce(buffers))
        reason = memory
    if config.all_reduce == "auto":
        return group
    raise ValueError(f"all_reduce {config.all_reduce!r} cannot be had: {reason}")
