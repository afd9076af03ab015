"""What a Gluon kernel on numpy computes with: arrays, tensors behind pointers, shared memory, copies, barriers.

See gluon_on_numpy.py for the rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.kernels.gluon_scheduler import (
    AddressError,
    RaceError,
    current_partition,
    current_program,
    pause,
)

ATOM_COLUMNS, ELEMENT_BYTES = 64, 2  # the 128 bytes of the widest swizzle
UNWRITTEN = np.iinfo(np.int32).max


class Memory:
    """What a tensor's pointer can reach: its storage from its first element on."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        self.data = tensor.as_strided((size,), (1,)).numpy()
        self.is_stored = np.zeros(size, dtype=bool)


def raw(x: Any) -> Any:
    return x.values if isinstance(x, Array) else x


def _binary(function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """An operator and its reflection."""

    def apply(x: Any, y: Any) -> Array:
        memory = getattr(x, "memory", None) or getattr(y, "memory", None)
        return Array(function(raw(x), raw(y)), memory)

    return apply, lambda x, y: apply(y, x)


class Array:
    """A kernel's value, of any shape; with `memory`, pointers: offsets into it."""

    __array_ufunc__ = None  # numpy leaves operators to this
    dtype = SimpleNamespace(element_ty="as the tensor's")

    def __init__(self, values: Any, memory: Memory | None = None) -> None:
        self.values, self.memory = np.asarray(values), memory

    __add__, __radd__ = _binary(np.add)
    __sub__, __rsub__ = _binary(np.subtract)
    __mul__, __rmul__ = _binary(np.multiply)
    __truediv__, __rtruediv__ = _binary(np.true_divide)
    __floordiv__, __rfloordiv__ = _binary(np.floor_divide)
    __mod__, __rmod__ = _binary(np.remainder)
    __and__, __rand__ = _binary(np.bitwise_and)
    __lt__, __gt__ = _binary(np.less)
    __le__, __ge__ = _binary(np.less_equal)

    def to(self, dtype: str) -> Array:
        return Array(self.values.astype(np.int64) if dtype == "int64" else self.values, self.memory)

    def __bool__(self) -> bool:
        return bool(self.values)

    def __index__(self) -> int:
        return int(self.values)


def _reach(pointer: Array, mask: Array | None) -> tuple[Memory, np.ndarray]:
    """The memory behind pointers, and which of them are wanted."""
    memory, offsets = pointer.memory, pointer.values
    assert memory is not None
    wanted = np.broadcast_to(True if mask is None else mask.values, offsets.shape)
    if ((offsets < 0) | (offsets >= memory.data.size))[wanted].any():
        raise AddressError("a pointer outside its tensor")
    return memory, wanted


def load(pointer: Array, mask: Array | None = None, other: float = 0.0) -> Array:
    memory, wanted = _reach(pointer, mask)
    found = memory.data[np.where(wanted, pointer.values, 0)]
    if memory.data.dtype == np.int32 and (found == UNWRITTEN)[wanted].any():
        raise AddressError("an integer was read that was never written")
    return Array(np.where(wanted, found, np.asarray(other, dtype=found.dtype)))


def store(pointer: Array, value: Array, mask: Array | None = None) -> None:
    memory, wanted = _reach(pointer, mask)
    offsets = pointer.values[wanted]
    if memory.is_stored[offsets].any() or np.unique(offsets).size < offsets.size:
        raise RaceError("an element was stored twice")
    memory.is_stored[offsets] = True
    memory.data[offsets] = np.broadcast_to(value.values, wanted.shape)[wanted]


def _at(items: Any, i: Any) -> Any:
    if not 0 <= (place := int(raw(i))) < len(items):
        raise AddressError(f"number {place} of {len(items)}")
    return items[place]


class SharedMemory:
    """Tiles [..., rows, columns], which lie in memory as [..., columns / 64, rows, 64]."""

    def __init__(self, data: np.ndarray, is_transposed: bool = False) -> None:
        self.data, self.is_transposed = data, is_transposed

    def index(self, i: Any) -> SharedMemory:
        return SharedMemory(_at(self.data, i), self.is_transposed)

    def permute(self, order: Sequence[int]) -> SharedMemory:
        assert tuple(order) == (1, 0)
        return SharedMemory(self.data, not self.is_transposed)

    def _reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> SharedMemory:
        return SharedMemory(self.data.reshape(_in_memory(shape)))

    def read(self) -> np.ndarray:
        """A copy of the tile that products see."""
        tile = self.data.transpose(1, 0, 2).reshape(self.data.shape[1], -1)
        return (tile.T if self.is_transposed else tile).copy()

    def write(self, tile: np.ndarray) -> None:
        assert not self.is_transposed
        self.data[...] = tile.reshape(len(tile), -1, ATOM_COLUMNS).transpose(1, 0, 2)

    def overlaps(self, other: SharedMemory) -> bool:
        return np.may_share_memory(self.data, other.data)

    def store(self, value: Array) -> None:
        pause()
        self.leave()
        current_partition().stores.append(PlainStore(self, raw(value).copy()))

    def leave(self) -> None:
        """To what the running partition writes here: NaN until that is there."""
        partition = current_partition()
        if any(self.overlaps(other) for other in partition.loads):
            raise RaceError("a partition writes what its other warps may not have loaded yet")
        if any(self.overlaps(copy.memory) for copy in itertools.chain(partition.copies, *partition.groups)):
            raise RaceError("a partition writes where its copies land")
        partition.stores = [store for store in partition.stores if not self.overlaps(store.memory)]
        self.data[...] = np.nan

    def load(self, layout: Any) -> Array:
        pause()
        partition, tile = current_partition(), self.read()
        if partition.num_warps > 1:
            partition.loads.append(self)
        for store in partition.stores:
            if not store.memory.overlaps(self):
                continue
            if not store.has_met:
                raise RaceError("a partition loads what its other warps may not have stored yet")
            assert store.memory.data.shape == self.data.shape, "parts of what was stored are not looked for"
            tile = store.value
        return Array(tile)


@dataclass(eq=False)
class PlainStore:
    """A store to shared memory that products and other partitions do not see yet."""

    memory: SharedMemory
    value: np.ndarray
    is_fenced: bool = False
    has_met: bool = False


def _in_memory(shape: Sequence[int]) -> tuple[int, ...]:
    *lead, rows, columns = shape
    return (*lead, columns // ATOM_COLUMNS, rows, ATOM_COLUMNS)


def fence() -> None:
    pause()
    if current_program().running is not None:
        for store in current_partition().stores:
            store.is_fenced = True


def meet() -> None:
    pause()
    partition = current_partition()
    for store in partition.stores:
        store.has_met = True
        if store.is_fenced:
            store.memory.write(store.value)
    partition.stores = [store for store in partition.stores if not store.is_fenced]
    partition.loads = []


def copy_elements(memory: SharedMemory, pointer: Array, mask: Array | None = None) -> None:
    """cp.async: a plain store, but for what comes before it."""
    pause()
    memory.leave()
    current_partition().copies.append(PlainStore(memory, load(pointer, mask).values))


def commit_copies() -> None:
    partition = current_partition()
    partition.groups.append(partition.copies)
    partition.copies = []


def await_copies(num_outstanding: int = 0) -> None:
    pause()
    partition = current_partition()
    while len(partition.groups) > num_outstanding:
        partition.stores += partition.groups.pop(0)


class Barrier:
    """Its phase is over when `count` have arrived and all bytes that were announced have landed."""

    def __init__(self) -> None:
        self.count = self.phase = self.missing = self.missing_bytes = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def change(self, arrivals: int = 0, expected_bytes: int = 0) -> None:
        assert self.count, "a barrier is used before it is made"
        self.missing -= arrivals
        self.missing_bytes += expected_bytes
        if self.missing < 0 or (self.missing == 0 and self.missing_bytes < 0):
            raise RaceError("more arrives at a barrier than its phase is for")
        if self.missing == 0 and self.missing_bytes == 0:
            self.phase += 1
            self.missing = self.count


class BarrierArray:
    def __init__(self, size: int) -> None:
        self.barriers = [Barrier() for _ in range(size)]

    def index(self, i: Any) -> Barrier:
        return _at(self.barriers, i)


def allocate(dtype: str, shape: Sequence[int], layout: Any) -> SharedMemory | BarrierArray | Barrier:
    if dtype != "int64":
        return SharedMemory(np.full(_in_memory(shape), np.nan))
    return BarrierArray(shape[0]) if len(shape) == 2 else Barrier()


def wait(barrier: Barrier, parity: Any, pred: Any = True) -> None:
    """For the end of a phase of that parity: the present phase is of the other one."""
    pause(lambda: not pred or barrier.phase % 2 != int(raw(parity)))


def arrive(barrier: Barrier, expected_bytes: int = 0, pred: Any = True) -> None:
    pause()
    if pred:
        barrier.change(arrivals=1, expected_bytes=expected_bytes)


class TensorDescriptor:
    """The host's, of a matrix whose boxes are copied."""

    def __init__(self, base: torch.Tensor, shape: Any, strides: Any, block_shape: Any, layout: Any) -> None:
        assert strides[-1] == 1
        if base.data_ptr() % 16 or any(stride * ELEMENT_BYTES % 16 for stride in strides[:-1]):
            raise AddressError("a tensor that is not aligned to 16 bytes")
        self.matrix = base.as_strided(tuple(shape), tuple(strides)).numpy()
        self.block_shape = tuple(block_shape)


def copy_box(descriptor: TensorDescriptor, corner: Any, barrier: Barrier, memory: SharedMemory) -> None:
    pause()
    row, column = (int(raw(x)) for x in corner)
    rows, columns = descriptor.block_shape
    num_rows, num_columns = descriptor.matrix.shape
    if not (0 <= row <= num_rows - rows and 0 <= column <= num_columns - columns):
        raise AddressError(f"a copy of the box at {row}, {column} of a matrix {num_rows} x {num_columns}")
    if any(other.overlaps(memory) for other, _ in current_program().copies):
        raise RaceError("two copies to one place")
    memory.data[...] = np.nan

    def land() -> None:
        memory.write(descriptor.matrix[row : row + rows, column : column + columns])
        barrier.change(expected_bytes=-rows * columns * ELEMENT_BYTES)

    current_program().copies.append((memory, land))
