"""A program of a Gluon kernel on numpy: its partitions in turns at random, and what each has under way.

See gluon_on_numpy.py. Each partition is a thread; where another may act, they change over.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.kernels.gluon_memory import PlainStore, SharedMemory

SLOW, QUICK = 0.01, 1.0  # how likely a partition, or a copy, is chosen to go on


class KernelError(Exception):
    """What a kernel did wrong, whatever it computes."""


class DeadlockError(KernelError):
    """All that is left to run waits."""


class RaceError(KernelError):
    """The result depends on who comes first."""


class AddressError(KernelError):
    """Outside a tensor, or a value that was never written."""


class _Stopped(BaseException):
    """Ends the threads of a program that failed."""


@dataclass(eq=False)
class Partition:
    index: int
    function: Callable[..., None]
    arguments: Sequence[Any]
    num_warps: int = 1
    may_go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_ready: Callable[[], bool] | None = None
    is_done: bool = False
    stores: list[PlainStore] = field(default_factory=list)  # not seen by products and other partitions yet
    loads: list[SharedMemory] = field(default_factory=list)  # since its warps met
    copies: list[PlainStore] = field(default_factory=list)  # by cp.async, in no group yet
    groups: list[list[PlainStore]] = field(default_factory=list)  # of such copies
    products: list[Callable[[], None]] = field(default_factory=list)


class Scheduler:
    """A program: one partition runs at a time, or one copy lands, chosen at random wherever the running one pauses."""

    def __init__(self, seed: int, index: tuple[int, ...], num_warps: int) -> None:
        self.index, self.num_warps = index, num_warps
        self.random = random.Random(f"{seed} {index}")
        self.copies: list[tuple[SharedMemory, Callable[[], None]]] = []  # where to, and what lets it land
        self.running: Partition | None = None
        self._chosen = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._is_stopping = False

    def run(
        self, functions: Sequence[tuple[Callable[..., None], Sequence[Any]]], warps: Sequence[int]
    ) -> None:
        """All to their ends; the first error of any is raised. warps: of the partitions after the first."""
        partitions = [Partition(i, *function) for i, function in enumerate(functions)]
        for partition, num_warps in zip(partitions[1:], warps, strict=True):
            partition.num_warps = num_warps
        partitions[0].num_warps = self.num_warps
        speeds = [self.random.choice((SLOW, QUICK, QUICK)) for _ in range(len(partitions) + 1)]
        for partition in partitions:
            threading.Thread(target=self._body, args=(partition,), daemon=True).start()
        try:
            while live := [p for p in partitions if not p.is_done]:
                able = [p for p in live if p.is_ready is None or p.is_ready()]
                if not able and not self.copies:
                    raise DeadlockError(f"partitions {[p.index for p in live]} wait for ever")
                choices: list[Partition | None] = [*able, *([None] if self.copies else [])]
                weights = [speeds[-1 if choice is None else choice.index] for choice in choices]
                (choice,) = self.random.choices(choices, weights)
                if choice is None:
                    _, land = self.copies.pop(self.random.randrange(len(self.copies)))
                    land()
                else:
                    self._resume(choice)
                if self._error is not None:
                    raise self._error
            if self.copies:
                raise RaceError("the program ended before its copies had landed")
        finally:
            self._is_stopping = True
            for partition in partitions:
                if not partition.is_done:
                    self._resume(partition)
            self.running = None

    def pause(self, is_ready: Callable[[], bool] | None = None) -> None:
        """The running partition lets others go first; with `is_ready`, until that holds."""
        partition = self.running
        if partition is None:  # before the program divides
            return
        partition.is_ready = is_ready
        self._chosen.release()
        partition.may_go.acquire()
        if self._is_stopping:
            raise _Stopped
        partition.is_ready = None

    def _resume(self, partition: Partition) -> None:
        self.running = partition
        partition.may_go.release()
        self._chosen.acquire()

    def _body(self, partition: Partition) -> None:
        partition.may_go.acquire()
        try:
            if self._is_stopping:
                raise _Stopped
            with np.errstate(all="ignore"):
                partition.function(*partition.arguments)
            if partition.products or partition.copies or partition.groups:
                raise RaceError(f"partition {partition.index} ended before its products or copies")
        except BaseException as error:
            self._error = error
        partition.is_done = True
        self._chosen.release()


_programs: list[Scheduler] = []
"""The one that runs: programs of a launch run one after another."""


def begin(program: Scheduler) -> None:
    _programs[:] = [program]


def current_program() -> Scheduler:
    return _programs[0]


def current_partition() -> Partition:
    partition = current_program().running
    assert partition is not None, "this stands in for kernels that store and multiply in partitions only"
    return partition


def pause(is_ready: Callable[[], bool] | None = None) -> None:
    current_program().pause(is_ready)
