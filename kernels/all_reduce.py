"""One-shot all-reduce over peer memory: every rank publishes its tensor, and reads and sums those of all ranks.

As in TensorRT-LLM's and vLLM's custom all-reduce, but with one barrier a call instead of two. A rank's buffer is

    signals [NUM_PROGRAMS, SIGNALS] int32 | half 0 [max_bytes] | half 1 [max_bytes]

and call number c (1, 2, ...) of a program copies its tiles of x into its rank's half c % 2, writes c into its slot of
every peer's signals, waits until all its own slots have reached c, and sums the tiles of all ranks, in rank order and
in fp32. So every rank computes the same bits, which with two ranks are those of one rounded 16-bit addition.

One barrier is enough. A half is written again two calls later; before that, this rank has finished the call in between,
for which it waited for every peer to begin that call, and a peer begins it only when it has read all of the one before.
That holds since every call launches the same number of programs, and since a rank's calls follow one another on its
device, as they do on one stream; calls on two streams at once would be a fault. Graphs may be replayed: the number of
the call is kept on the device, by each program.

A program waits for as long as a peer stays away: nothing ends it but the end of its process, as it is with NCCL's
kernels. Whoever starts the ranks has to watch them, and to kill those that are left when one is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.triton_support import cdiv, next_power_of_2, on_device, tl, triton

# Of every call, whatever its size.
NUM_PROGRAMS = 32

# Signals of a program: a cache line of them, one a rank.
SIGNALS = 32

SIGNAL_BYTES = 4 * NUM_PROGRAMS * SIGNALS

# Elements of a program's tile.
MIN_TILE, MAX_TILE = 256, 4096

# Of buffers and their halves, bytes: what a thread reads at once.
ALIGNMENT = 16

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def buffer_bytes(max_bytes: int) -> int:
    """The size of each rank's buffer, for tensors of up to max_bytes."""
    return SIGNAL_BYTES + 2 * _round_up(max_bytes)


@dataclass(frozen=True, eq=False)
class PeerBuffers:
    """All ranks' buffers, each of buffer_bytes(max_bytes), as rank `rank` of `size` sees them.

    addresses: [size] int64 on the device: where this rank finds each rank's buffer, its own too. All of them have to
    be zero before any rank's first call. calls: [NUM_PROGRAMS] int32, the calls that each program has made. owner:
    whatever the memory at the addresses lives as long as.
    """

    rank: int
    size: int
    max_bytes: int
    addresses: Tensor
    calls: Tensor
    owner: Any

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size <= SIGNALS:
            raise ValueError(
                f"rank must be below size, and size at most {SIGNALS}, got {self.rank} of {self.size}"
            )
        if self.addresses.shape != (self.size,) or self.addresses.dtype != torch.int64:
            raise ValueError(f"addresses must be [{self.size}] int64, got {self.addresses}")

    @classmethod
    def at(
        cls, addresses: tuple[int, ...], rank: int, max_bytes: int, device: torch.device, owner: Any
    ) -> PeerBuffers:
        """Buffers at these addresses, which hold zeros, and which no other PeerBuffers of this rank has counted in."""
        misplaced = [address for address in addresses if address % ALIGNMENT]
        if misplaced:
            raise ValueError(f"buffers must start at multiples of {ALIGNMENT}, got {misplaced}")
        return cls(
            rank,
            len(addresses),
            max_bytes,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(NUM_PROGRAMS, dtype=torch.int32, device=device),
            owner,
        )


def one_shot_all_reduce(x: Tensor, buffers: PeerBuffers) -> Tensor:
    """The sum of all ranks' x, in place and returned; every rank calls it with the same shape and dtype.

    x: contiguous, fp32, fp16 or bf16, of 1 to buffers.max_bytes bytes. Raises ValueError for any other.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be one of {', '.join(map(str, DTYPES))}, got {x.dtype}")
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()} of shape {tuple(x.shape)}")
    if not 0 < x.nbytes <= buffers.max_bytes:
        raise ValueError(f"x must have 1 to {buffers.max_bytes} bytes, got {x.nbytes}")
    numel = x.numel()
    tile = min(max(next_power_of_2(cdiv(numel, NUM_PROGRAMS)), MIN_TILE), MAX_TILE)
    with on_device(x):
        _one_shot_kernel[(NUM_PROGRAMS,)](
            x,
            buffers.addresses,
            buffers.calls,
            numel,
            _round_up(buffers.max_bytes),
            buffers.rank,
            SIZE=buffers.size,
            LANES=next_power_of_2(buffers.size),
            TILE=tile,
            SIGNALS=SIGNALS,
            SIGNAL_BYTES=SIGNAL_BYTES,
            num_warps=max(1, min(16, tile // 256)),
        )
    return x


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@triton.jit(do_not_specialize=["rank"])
def _one_shot_kernel(
    x_ptr,
    addresses_ptr,
    calls_ptr,
    numel,
    half_bytes,
    rank,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    SIGNALS: tl.constexpr,
    SIGNAL_BYTES: tl.constexpr,
):
    program = tl.program_id(0)
    num_tiles = tl.cdiv(numel, TILE)
    columns = tl.arange(0, TILE)
    call = tl.load(calls_ptr + program) + 1
    start = SIGNAL_BYTES + (call & 1).to(tl.int64) * half_bytes
    mine = _elements(addresses_ptr + rank, start, x_ptr)
    for tile in range(program, num_tiles, tl.num_programs(0)):
        offsets = tile * TILE + columns
        tl.store(mine + offsets, tl.load(x_ptr + offsets, mask=offsets < numel), mask=offsets < numel)

    tl.debug_barrier()  # every thread's stores come before the release
    peers = tl.arange(0, LANES)
    others = (peers < SIZE) & (peers != rank)
    signals = tl.load(addresses_ptr + peers, mask=others, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(signals + program * SIGNALS + rank, call, mask=others, sem="release", scope="sys")
    slots = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int32)) + program * SIGNALS + peers
    ahead = _calls_ahead(slots, others, call)
    while ahead < 0:
        ahead = _calls_ahead(slots, others, call)
    tl.debug_barrier()  # every thread's loads come after the acquire

    for tile in range(program, num_tiles, tl.num_programs(0)):
        offsets = tile * TILE + columns
        mask = offsets < numel
        total = tl.load(_elements(addresses_ptr, start, x_ptr) + offsets, mask=mask).to(tl.float32)
        for peer in tl.static_range(1, SIZE):
            theirs = _elements(addresses_ptr + peer, start, x_ptr)
            total += tl.load(theirs + offsets, mask=mask).to(tl.float32)
        tl.store(x_ptr + offsets, total.to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(calls_ptr + program, call)


@triton.jit
def _elements(address_ptr, start, like_ptr):
    """A pointer to elements like like_ptr's, `start` bytes into the buffer whose address is at address_ptr."""
    return tl.multiple_of((tl.load(address_ptr) + start).to(like_ptr.dtype), 16)


@triton.jit
def _calls_ahead(slots, others, call):
    """Of the peer that is furthest behind: below 0 until it has reached this call. Right past 2^31 calls too."""
    seen = tl.atomic_add(slots, 0, mask=others, sem="acquire", scope="sys")
    return tl.min(tl.where(others, seen - call, 0), axis=0)
