"""How long a decode in splits takes: a model of few constants, which `python -m experiments.tune` measures on a GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kernels.tuned_tables import DEFAULT_GPU, tuned_table

# The part of a last, partial turn that the turns before do not hide: set, not fitted; an H200 showed 0.32 at the
# one shape that has such a turn (results/NOTES.md).
LAST_TURN = 0.4


@dataclass(frozen=True)
class Work:
    """What a call has to do, before it is split.

    programs: of one split, that is rows times KV heads times tiles of query heads. unit: keys that a split takes a
    multiple of. max_keys, mean_keys: of a row. key_bytes: of one key and its value of one KV head. result_bytes: of a
    program's partial result.
    """

    programs: int
    unit: int
    max_keys: int
    mean_keys: float
    key_bytes: int
    result_bytes: int


@dataclass(frozen=True)
class Gpu:
    """sm_count: multiprocessors; slots: programs that they hold at once."""

    sm_count: int
    slots: int


@dataclass(frozen=True)
class CostModel:
    """Constants of one kernel in one shape.

    start_us: what every call takes, launch and the first latencies. key_us: a key, for a program that waits for nothing
    but its own loads. extra_keys: what a program costs besides, in keys. programs_per_sm: how many do not slow one
    another down, fewer than a multiprocessor holds. sm_bytes_per_us: of the memory's bandwidth, a multiprocessor's
    share. merge_us: a second stage, and merge_split_us: each split in it.
    """

    start_us: float
    key_us: float
    extra_keys: float
    programs_per_sm: float
    sm_bytes_per_us: float
    merge_us: float
    merge_split_us: float

    def __post_init__(self) -> None:
        _check_positive(self)

    def time_us(self, work: Work, num_splits: int, gpu: Gpu) -> float:
        """Microseconds of a call in num_splits splits.

        Programs take turns on the multiprocessors, or the memory is the limit, whichever is slower; near the point
        where both take as long it is more than either (the fourth-power mean). Where rows differ in length, the
        longest row's programs end last, alone. A last turn of few programs cannot keep the memory busy: it takes as
        long as one of them. Partial results are written and read again.
        """
        longest = -(-work.max_keys // num_splits)
        longest = -(-longest // work.unit) * work.unit
        mean = longest * work.mean_keys / work.max_keys if work.max_keys else 0.0
        programs = work.programs * num_splits
        turns = max(1.0, programs / (self.programs_per_sm * gpu.sm_count))
        waiting = self.key_us * ((mean + self.extra_keys) * turns + longest - mean)
        moved = work.programs * work.mean_keys * work.key_bytes
        if num_splits == 1:
            merging = 0.0
        else:
            merging = self.merge_us + self.merge_split_us * num_splits
            moved += 2 * programs * work.result_bytes
        streaming = moved / (self.sm_bytes_per_us * gpu.sm_count)
        left_over = programs % gpu.slots if programs > gpu.slots else 0
        alone = max(0.0, self.key_us * mean - streaming * left_over / programs) if left_over else 0.0
        working = math.sqrt(math.hypot(waiting**2, streaming**2)) + LAST_TURN * alone
        return self.start_us + working + merging

    def best_num_splits(self, work: Work, most: int, gpu: Gpu) -> int:
        """Of 1 to `most` (all up to 16, then in steps of an eighth) the number that ends first; ties to fewer."""
        return min(_candidates(most), key=lambda splits: self.time_us(work, splits, gpu))


@dataclass(frozen=True)
class SharesModel:
    """Constants of a kernel that deals all keys out in equal shares (stream_k_tma): no row's length matters.

    start_us: launch, first latencies and the merge of what shares cut in two. sm_bytes_per_us: as in CostModel.
    """

    start_us: float
    sm_bytes_per_us: float

    def __post_init__(self) -> None:
        _check_positive(self)

    def time_us(self, work: Work, num_splits: int, gpu: Gpu) -> float:
        """Microseconds of a call; num_splits means nothing to it."""
        return self.start_us + work.programs * work.mean_keys * work.key_bytes / (
            self.sm_bytes_per_us * gpu.sm_count
        )


def _check_positive(model: CostModel | SharesModel) -> None:
    for field, value in asdict(model).items():
        if not 0 < value < math.inf:
            raise ValueError(f"{field} is {value}, expected a positive number")


@functools.cache
def _candidates(most: int) -> tuple[int, ...]:
    found = [1]
    while found[-1] < most:
        found.append(min(most, found[-1] + max(1, found[-1] // 8)))
    return tuple(found)


@functools.cache
def cost_model(kernel: str, tile: int, gpu: str) -> CostModel:
    """The constants of a kernel of splits in steps of `tile` keys, or of the measured tile nearest to it."""
    return CostModel(**_constants(kernel, tile, gpu))


@functools.cache
def shares_model(kernel: str, tile: int, gpu: str) -> SharesModel:
    """The same of a kernel of equal shares."""
    return SharesModel(**_constants(kernel, tile, gpu))


def _constants(kernel: str, tile: int, gpu: str) -> dict[str, float]:
    # A table written before a kernel was there does not have it.
    models = _tuned(gpu).get(kernel) or _tuned(DEFAULT_GPU)[kernel]
    return dict(models[min(models, key=lambda measured: abs(math.log2(int(measured) / tile)))])


@functools.cache
def _tuned(gpu: str) -> Mapping[str, Any]:
    """kernel -> tile -> constants, of the GPU by its name, or of DEFAULT_GPU."""
    return dict(tuned_table("kernels.decode", gpu)["models"])
