"""One rank's one-shot all-reduce where the other ranks are played: they have published before it begins."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.all_reduce import NUM_PROGRAMS, SIGNAL_BYTES, SIGNALS, PeerBuffers, buffer_bytes

MAX_BYTES = 40_000


class PlayedPeers:
    """The buffers of `size` ranks on one device, in which `publish` does what the peers of `rank` would."""

    def __init__(self, rank: int, size: int, device: torch.device, max_bytes: int = MAX_BYTES) -> None:
        self.rank, self.size, self.max_bytes = rank, size, max_bytes
        # Longer than needed, so that each can start at a multiple of 128.
        self._memory = [
            torch.zeros(buffer_bytes(max_bytes) + 128, dtype=torch.uint8, device=device) for _ in range(size)
        ]
        self.memory = [t[-t.data_ptr() % 128 :][: buffer_bytes(max_bytes)] for t in self._memory]
        addresses = tuple(t.data_ptr() for t in self.memory)
        self.buffers = PeerBuffers.at(addresses, rank, max_bytes, device, self.memory)
        self.call = 0

    def signals(self, rank: int) -> Tensor:
        """[NUM_PROGRAMS, SIGNALS] int32, a view of that rank's."""
        return self.memory[rank][:SIGNAL_BYTES].view(torch.int32).view(NUM_PROGRAMS, SIGNALS)

    def half(self, rank: int, call: int) -> Tensor:
        """The bytes of that rank's half of that call, a view."""
        return self.memory[rank][SIGNAL_BYTES:].view(2, -1)[call % 2]

    def publish(self, tensors: Sequence[Tensor]) -> None:
        """The next call of every peer, up to its own wait; the tensor of `rank` itself is left out."""
        self.call += 1
        for peer, tensor in enumerate(tensors):
            if peer != self.rank:
                self.half(peer, self.call)[: tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
                self.signals(self.rank)[:, peer] = self.call


def rank_order_sum(tensors: Sequence[Tensor]) -> Tensor:
    """In fp32, rounded once."""
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total.to(tensors[0].dtype)
