"""How to cut a decode problem into programs: on the host, from its shape alone, the same every time."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kernels.decode.contract import DecodeProblem

# Without a GPU to ask (planning ahead of time, the interpreter): an H100's or H200's.
DEFAULT_SM_COUNT = 132

# Programs an SM that keep the memory busy: with these an H200 reads at nine tenths of its bandwidth, and more splits
# only add partial results (results/NOTES.md).
PROGRAMS_PER_SM = 3

# What a program costs before and after its tiles (launch, query, table, partial result), in tiles.
PROGRAM_OVERHEAD = 2.0

# What an SM of an H100 or H200 holds: bytes of shared memory, of which each program takes some for the system, warps
# and registers.
SHARED_PER_SM = 228 * 1024
SHARED_RESERVED = 1024
WARPS_PER_SM = 64
REGISTERS_PER_SM = 65536

# Registers a thread beside the accumulator, at most, for the shapes of TileShape.of, and more where head_dim is padded
# and so masked: the compiler's reports say so (tests/kernels/test_decode_aot.py).
THREAD_REGISTERS = 80
MASK_REGISTERS = 24


@dataclass(frozen=True)
class TileShape:
    """tile: keys a step; num_warps, num_stages: Triton's."""

    tile: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{field} is {value}, the least is 1")
        if self.tile & (self.tile - 1) or self.tile < 16:
            raise ValueError(f"tile is {self.tile}, expected a power of two from 16 on")

    @classmethod
    def of(
        cls,
        problem: DecodeProblem,
        tile: int | None = None,
        num_warps: int | None = None,
        num_stages: int | None = None,
    ) -> TileShape:
        """The given numbers, and the problem's own for those that are None.

        They fit the shared memory of every supported GPU without spills, and depend on neither batch nor context.
        Triton's pipeliner gives the table look-up two stages and the products one, so that five stages hold two
        tiles of keys and values in flight, and three or four only one. One tile each of five programs was faster on
        an H200 than two tiles each of three (results/NOTES.md).
        """
        wide = padded_dim(problem.head_dim) > 128
        if problem.dtype == torch.float32:
            # Exact fp32 products run without tensor cores and keep whole operands in registers.
            own = (16, 8, 1 if wide else 2)
        else:
            # An accumulator beyond this many elements is spread over twice the threads.
            warps = 8 if head_rows(problem) * padded_dim(problem.head_dim) > 4096 else 4
            own = (32, warps, 3) if wide else (64, warps, 3)
        return cls(tile or own[0], num_warps or own[1], num_stages or own[2])

    def programs_per_sm(self, problem: DecodeProblem) -> int:
        """Programs that an SM holds at once: what their tiles in flight, queries and scores leave room for."""
        dim, rows = padded_dim(problem.head_dim), head_rows(problem)
        in_flight = max(1, (self.num_stages - 1) // 2)
        row_bytes = dim * problem.dtype.itemsize
        shared = 2 * in_flight * self.tile * row_bytes + rows * (row_bytes + 4 * self.tile)
        threads = 32 * self.num_warps
        registers = THREAD_REGISTERS + rows * dim // threads + MASK_REGISTERS * (dim > problem.head_dim)
        most = (
            SHARED_PER_SM // (shared + SHARED_RESERVED),
            WARPS_PER_SM // self.num_warps,
            REGISTERS_PER_SM // (threads * registers),
        )
        return max(1, min(most))


@dataclass(frozen=True)
class SplitPlan:
    """num_splits: programs a sequence and tile of heads; shape: of each."""

    num_splits: int
    shape: TileShape

    def __post_init__(self) -> None:
        if self.num_splits < 1:
            raise ValueError(f"num_splits is {self.num_splits}, the least is 1")

    def options(self) -> dict[str, Any]:
        return {"num_splits": self.num_splits, **asdict(self.shape)}


def plan_splits(problem: DecodeProblem, sm_count: int | None = None) -> SplitPlan:
    """The plan of a problem. sm_count: of the GPU planned for; None asks problem.device."""
    shape = TileShape.of(problem)
    sm_count = sm_count or device_sm_count(problem.device)
    num_splits = choose_num_splits(
        num_tiles=-(-problem.max_context_len // shape.tile),
        programs_per_split=problem.batch_size * problem.num_kv_heads * head_tiles(problem),
        slots=shape.programs_per_sm(problem) * sm_count,
        saturating=PROGRAMS_PER_SM * sm_count,
    )
    return SplitPlan(num_splits, shape)


def choose_num_splits(num_tiles: int, programs_per_split: int, slots: int, saturating: int) -> int:
    """The number of splits that ends first, when `slots` programs run at once and each takes its tiles in turn.

    A round of programs lasts as long as its tiles plus PROGRAM_OVERHEAD. The last, partly filled round is counted
    by the share of the slots it fills, but as one whole program at least, since the memory is then shared by
    fewer. The memory gives no more than `saturating` programs at a time their tiles, however many run. Ties go to
    fewer splits.
    """
    memory = num_tiles * programs_per_split / min(saturating, slots)

    def duration(num_splits: int) -> float:
        rounds = max(1.0, programs_per_split * num_splits / slots)
        return max(memory, rounds * (-(-num_tiles // num_splits) + PROGRAM_OVERHEAD))

    most = max(1, min(num_tiles, -(-slots // programs_per_split)))
    return min(range(1, most + 1), key=duration)


def max_partials(problem: DecodeProblem, sm_count: int | None = None) -> int:
    """A bound on batch * num_splits over plans of this problem and of those with smaller batch or context."""
    slots = TileShape.of(problem).programs_per_sm(problem) * (sm_count or device_sm_count(problem.device))
    # choose_num_splits stays below slots / programs + 1.
    per_sequence = problem.num_kv_heads * head_tiles(problem)
    return -(-slots // per_sequence) + problem.batch_size


def head_rows(problem: DecodeProblem) -> int:
    """Rows of the query tile: the group's heads, padded to what tl.dot takes; larger groups are tiled."""
    most = 16 if problem.dtype == torch.float32 else 64
    rows = 16
    while rows < min(problem.group_size, most):
        rows *= 2
    return rows


def head_tiles(problem: DecodeProblem) -> int:
    """Programs that share a group's query heads."""
    return -(-problem.group_size // head_rows(problem))


def padded_dim(head_dim: int) -> int:
    """head_dim up to the power of two that Triton's blocks and the least dot product take."""
    return max(16, 1 << (head_dim - 1).bit_length())


@functools.cache
def device_sm_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; DEFAULT_SM_COUNT elsewhere."""
    if device.type != "cuda":
        return DEFAULT_SM_COUNT
    return torch.cuda.get_device_properties(device).multi_processor_count
