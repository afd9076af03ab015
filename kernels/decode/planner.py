"""How to cut a decode problem into programs: on the host, from its shape alone, the same every time."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from kernels.decode.contract import DecodeProblem
from kernels.decode.cost_model import Gpu, Work, cost_model, shares_model
from kernels.triton_support import next_power_of_2
from kernels.tuned_tables import device_name

# Without a GPU to ask (planning ahead of time, the interpreter): an H100's or H200's.
DEFAULT_SM_COUNT = 132

# Programs an SM that keep the memory busy, where a fixed number of them shares the work out (stream_k).
PROGRAMS_PER_SM = 3

# Programs of all splits together, at most, in rounds of what the GPU holds at once: ragged batches gain from several.
MOST_ROUNDS = 8

# What an SM of an H100 or H200 holds: bytes of shared memory, of which each program takes some for the system, warps
# and registers.
SHARED_PER_SM = 228 * 1024
SHARED_RESERVED = 1024
WARPS_PER_SM = 64
REGISTERS_PER_SM = 65536

# Registers a thread beside the accumulator, at most, for the shapes of TileShape.of, and more where head_dim is padded
# and so masked, or above 128: the compiler's reports say so (tests/kernels/test_decode_aot.py).
THREAD_REGISTERS = 80
MASK_REGISTERS = 24
WIDE_REGISTERS = 56


@dataclass(frozen=True)
class TileShape:
    """tile: keys a step; num_warps, num_stages: Triton's; prefetch: table entries are read one tile ahead."""

    tile: int
    num_warps: int
    num_stages: int
    prefetch: bool = False

    def __post_init__(self) -> None:
        for field in ("tile", "num_warps", "num_stages"):
            value = getattr(self, field)
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
        prefetch: bool = False,
    ) -> TileShape:
        """The given numbers, and the problem's own for those that are None.

        They fit the shared memory of every supported GPU without spills, and depend on neither batch nor context.
        Triton's pipeliner gives a look-up in the table two stages and the products one, so that three stages hold one
        tile of keys and values in flight, or two with prefetch. Small tiles and many programs were fastest on an H200
        (results/NOTES.md).
        """
        wide = padded_dim(problem.head_dim) > 128
        if problem.dtype == torch.float32:
            # Exact fp32 products run without tensor cores and keep whole operands in registers.
            own = (16, 8, 1 if wide else 2)
        else:
            # An accumulator beyond this many elements is spread over twice the threads.
            warps = 8 if head_rows(problem) * padded_dim(problem.head_dim) > 4096 else 4
            own = (32 if wide or prefetch else 64, warps, 2 if wide and prefetch else 3)
        return cls(tile or own[0], num_warps or own[1], num_stages or own[2], prefetch)

    def programs_per_sm(self, problem: DecodeProblem) -> int:
        """Programs that an SM holds at once: what their tiles in flight, queries and scores leave room for."""
        dim, rows = padded_dim(problem.head_dim), head_rows(problem)
        in_flight = max(1, self.num_stages - 1 if self.prefetch else (self.num_stages - 1) // 2)
        row_bytes = dim * problem.dtype.itemsize
        shared = 2 * in_flight * self.tile * row_bytes + rows * (row_bytes + 4 * self.tile)
        threads = 32 * self.num_warps
        registers = THREAD_REGISTERS + rows * dim // threads
        registers += MASK_REGISTERS * (dim > problem.head_dim) + WIDE_REGISTERS * (dim > 128)
        most = (
            SHARED_PER_SM // (shared + SHARED_RESERVED),
            WARPS_PER_SM // self.num_warps,
            REGISTERS_PER_SM // (threads * registers),
        )
        return max(1, min(most))

    def options(self) -> dict[str, Any]:
        """tile, num_warps and num_stages, as options of a call."""
        return {"tile": self.tile, "num_warps": self.num_warps, "num_stages": self.num_stages}


@functools.lru_cache(maxsize=4096)
def plan_splits(
    problem: DecodeProblem,
    shape: TileShape,
    kernel: str = "split_kv",
    unit: int | None = None,
    sm_count: int | None = None,
) -> int:
    """The number of splits that `kernel` in this shape ends first with, by its CostModel.

    unit: keys that a split takes a multiple of; None for a tile. sm_count: of the GPU planned for; None asks
    problem.device.
    """
    gpu, work = gpu_of(problem, shape, sm_count), work_of(problem, unit or shape.tile)
    model = cost_model(kernel, shape.tile, device_name(problem.device))
    return model.best_num_splits(work, most_splits(work, gpu), gpu)


def planned_us(
    problem: DecodeProblem,
    shape: TileShape,
    kernel: str,
    unit: int | None = None,
    num_splits: int | None = None,
) -> float:
    """Microseconds that the CostModel gives so many splits; None: those of plan_splits."""
    if num_splits is None:
        num_splits = plan_splits(problem, shape, kernel, unit)
    model = cost_model(kernel, shape.tile, device_name(problem.device))
    return model.time_us(work_of(problem, unit or shape.tile), num_splits, gpu_of(problem, shape))


def shares_us(problem: DecodeProblem, shape: TileShape, kernel: str) -> float:
    """Microseconds that the SharesModel gives a kernel of equal shares."""
    model = shares_model(kernel, shape.tile, device_name(problem.device))
    return model.time_us(work_of(problem, shape.tile), 1, gpu_of(problem, shape))


def is_ragged(problem: DecodeProblem) -> bool:
    """Whether the contexts are known to differ."""
    return problem.mean_context_len is not None and problem.mean_context_len < problem.max_context_len


def gpu_of(problem: DecodeProblem, shape: TileShape, sm_count: int | None = None) -> Gpu:
    """The GPU of a problem, or one with sm_count multiprocessors, as programs of this shape find it."""
    sm_count = sm_count or device_sm_count(problem.device)
    return Gpu(sm_count, sm_count * shape.programs_per_sm(problem))


def work_of(problem: DecodeProblem, unit: int) -> Work:
    """All rows, KV heads and tiles of query heads; partial results in float32."""
    mean = problem.mean_context_len
    rows = min(problem.group_size, head_rows(problem))
    return Work(
        programs=problem.batch_size * problem.num_kv_heads * head_tiles(problem),
        unit=unit,
        max_keys=problem.max_context_len,
        mean_keys=problem.max_context_len if mean is None else mean,
        key_bytes=2 * problem.head_dim * (problem.kv_dtype or problem.dtype).itemsize,
        result_bytes=4 * rows * (problem.head_dim + 1),
    )


def most_splits(work: Work, gpu: Gpu) -> int:
    """Splits that are thought of, at most: a unit each, MOST_ROUNDS of what the GPU holds at once in all."""
    units = -(-work.max_keys // work.unit)
    return max(1, min(units, MOST_ROUNDS * -(-gpu.slots // work.programs)))


def max_partials(problem: DecodeProblem, shape: TileShape, sm_count: int | None = None) -> int:
    """A bound on batch * num_splits over plans of this problem and of those with smaller batch or context."""
    slots = shape.programs_per_sm(problem) * (sm_count or device_sm_count(problem.device))
    # MOST_ROUNDS * ceil(slots / programs) stays below MOST_ROUNDS * (slots / programs + 1).
    per_sequence = problem.num_kv_heads * head_tiles(problem)
    tiles = max(1, -(-problem.max_context_len // shape.tile))
    rounds = MOST_ROUNDS * (-(-slots // per_sequence) + problem.batch_size)
    return min(problem.batch_size * tiles, rounds)


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
    return max(16, next_power_of_2(head_dim))


@functools.cache
def device_sm_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; DEFAULT_SM_COUNT elsewhere."""
    if device.type != "cuda":
        return DEFAULT_SM_COUNT
    return torch.cuda.get_device_properties(device).multi_processor_count
