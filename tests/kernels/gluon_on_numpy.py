"""Gluon's language on numpy, for kernels whose warps are specialised for Hopper: no interpreter runs those.

A kernel's module is executed with this in place of Triton's Gluon. Each partition of a program is a thread; they take
turns at random (seeded), some far slower than others, and change over wherever another may act. Wrong turns show:

- A copy (TMA) makes its destination NaN at once, and lands at some later time, in any order.
- A product (WGMMA) has a result from its wait on; its operands in shared memory must not change until then.
- What a partition stores in shared memory is NaN to all until its fence and the meeting of its warps after that, and
  not for the partition itself to load before such a meeting.
- Barriers have phases, arrivals and bytes to come. Waits that nothing can end are a DeadlockError.
- An element is stored once in a launch; the largest int32 stands for integers never written, as NaN does for floats.

Values are as the tensors give them (fp64: exact but for its own rounding), though half precision's bytes are counted.
What stays unseen: layouts and swizzles, registers, warps of one partition apart from each other but for the meetings
above, and a fence forgotten after barriers are made. A tile lies in shared memory as [columns / 64, rows, 64].
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

ATOM_COLUMNS, ELEMENT_BYTES = 64, 2  # the 128 bytes of the widest swizzle
UNWRITTEN = np.iinfo(np.int32).max
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
class _PlainStore:
    """A store to shared memory that products and other partitions do not see yet."""

    memory: SharedMemory
    value: np.ndarray
    is_fenced: bool = False
    has_met: bool = False


@dataclass(eq=False)
class _Partition:
    index: int
    function: Callable[..., None]
    arguments: Sequence[Any]
    may_go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_ready: Callable[[], bool] | None = None
    is_done: bool = False
    stores: list[_PlainStore] = field(default_factory=list)
    products: list[Callable[[], None]] = field(default_factory=list)


class Scheduler:
    """A program: one partition runs at a time, or one copy lands, chosen at random wherever the running one pauses."""

    def __init__(self, seed: int, index: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self.index, self.grid = index, grid
        self.random = random.Random(f"{seed} {index}")
        self.copies: list[tuple[SharedMemory, Callable[[], None]]] = []  # where to, and what lets it land
        self.running: _Partition | None = None
        self._chosen = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._is_stopping = False

    def run(self, functions: Sequence[tuple[Callable[..., None], Sequence[Any]]]) -> None:
        """All to their ends; the first error of any is raised."""
        partitions = [_Partition(i, *function) for i, function in enumerate(functions)]
        speeds = [self.random.choice((SLOW, QUICK, QUICK)) for _ in range(len(partitions) + 1)]
        for partition in partitions:
            threading.Thread(target=self._body, args=(partition,), daemon=True).start()
        try:
            while live := [p for p in partitions if not p.is_done]:
                able = [p for p in live if p.is_ready is None or p.is_ready()]
                if not able and not self.copies:
                    raise DeadlockError(f"partitions {[p.index for p in live]} wait for ever")
                choices: list[_Partition | None] = [*able, *([None] if self.copies else [])]
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

    def _resume(self, partition: _Partition) -> None:
        self.running = partition
        partition.may_go.release()
        self._chosen.acquire()

    def _body(self, partition: _Partition) -> None:
        partition.may_go.acquire()
        try:
            if self._is_stopping:
                raise _Stopped
            with np.errstate(all="ignore"):
                partition.function(*partition.arguments)
            if partition.products:
                raise RaceError(f"partition {partition.index} ended before its products")
        except BaseException as error:
            self._error = error
        partition.is_done = True
        self._chosen.release()


_program: Scheduler
"""The one that runs: programs of a launch run one after another."""


def _pause(is_ready: Callable[[], bool] | None = None) -> None:
    _program.pause(is_ready)


def _partition() -> _Partition:
    partition = _program.running
    assert partition is not None, "this stands in for kernels that store and multiply in partitions only"
    return partition


class Memory:
    """What a tensor's pointer can reach: its storage from its first element on."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        self.data = tensor.as_strided((size,), (1,)).numpy()
        self.is_stored = np.zeros(size, dtype=bool)


def _raw(x: Any) -> Any:
    return x.values if isinstance(x, Array) else x


def _binary(function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """An operator and its reflection."""

    def apply(x: Any, y: Any) -> Array:
        memory = getattr(x, "memory", None) or getattr(y, "memory", None)
        return Array(function(_raw(x), _raw(y)), memory)

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


def _load(pointer: Array, mask: Array | None = None, other: float = 0.0) -> Array:
    memory, wanted = _reach(pointer, mask)
    found = memory.data[np.where(wanted, pointer.values, 0)]
    if memory.data.dtype == np.int32 and (found == UNWRITTEN)[wanted].any():
        raise AddressError("an integer was read that was never written")
    return Array(np.where(wanted, found, np.asarray(other, dtype=found.dtype)))


def _store(pointer: Array, value: Array, mask: Array | None = None) -> None:
    memory, wanted = _reach(pointer, mask)
    offsets = pointer.values[wanted]
    if memory.is_stored[offsets].any() or np.unique(offsets).size < offsets.size:
        raise RaceError("an element was stored twice")
    memory.is_stored[offsets] = True
    memory.data[offsets] = np.broadcast_to(value.values, wanted.shape)[wanted]


class SharedMemory:
    """Tiles [..., rows, columns], which lie in memory as [..., columns / 64, rows, 64]."""

    def __init__(self, data: np.ndarray, is_transposed: bool = False) -> None:
        self.data, self.is_transposed = data, is_transposed

    def index(self, i: Any) -> SharedMemory:
        return SharedMemory(self.data[int(_raw(i))], self.is_transposed)

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
        _pause()
        self.data[...] = np.nan
        _partition().stores.append(_PlainStore(self, _raw(value).copy()))

    def load(self, layout: Any) -> Array:
        _pause()
        tile = self.read()
        for store in _partition().stores:
            if not store.memory.overlaps(self):
                continue
            if not store.has_met:
                raise RaceError("a partition loads what its other warps may not have stored yet")
            assert store.memory.data.shape == self.data.shape, "parts of what was stored are not looked for"
            tile = store.value
        return Array(tile)


def _in_memory(shape: Sequence[int]) -> tuple[int, ...]:
    *lead, rows, columns = shape
    return (*lead, columns // ATOM_COLUMNS, rows, ATOM_COLUMNS)


def _fence() -> None:
    _pause()
    if _program.running is not None:
        for store in _partition().stores:
            store.is_fenced = True


def _meet() -> None:
    _pause()
    partition = _partition()
    for store in partition.stores:
        store.has_met = True
        if store.is_fenced:
            store.memory.write(store.value)
    partition.stores = [store for store in partition.stores if not store.is_fenced]


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
        return self.barriers[int(_raw(i))]


def _allocate(dtype: str, shape: Sequence[int], layout: Any) -> SharedMemory | BarrierArray | Barrier:
    if dtype != "int64":
        return SharedMemory(np.full(_in_memory(shape), np.nan))
    return BarrierArray(shape[0]) if len(shape) == 2 else Barrier()


def _wait(barrier: Barrier, parity: Any) -> None:
    """For the end of a phase of that parity: the present phase is of the other one."""
    _pause(lambda: barrier.phase % 2 != int(_raw(parity)))


def _arrive(barrier: Barrier, expected_bytes: int = 0) -> None:
    _pause()
    barrier.change(arrivals=1, expected_bytes=expected_bytes)


class TensorDescriptor:
    """The host's, of a matrix whose boxes are copied."""

    def __init__(self, base: torch.Tensor, shape: Any, strides: Any, block_shape: Any, layout: Any) -> None:
        assert strides[-1] == 1
        if base.data_ptr() % 16 or any(stride * ELEMENT_BYTES % 16 for stride in strides[:-1]):
            raise AddressError("a tensor that is not aligned to 16 bytes")
        self.matrix = base.as_strided(tuple(shape), tuple(strides)).numpy()
        self.block_shape = tuple(block_shape)


def _copy(descriptor: TensorDescriptor, corner: Any, barrier: Barrier, memory: SharedMemory) -> None:
    _pause()
    row, column = (int(_raw(x)) for x in corner)
    rows, columns = descriptor.block_shape
    num_rows, num_columns = descriptor.matrix.shape
    if not (0 <= row <= num_rows - rows and 0 <= column <= num_columns - columns):
        raise AddressError(f"a copy of the box at {row}, {column} of a matrix {num_rows} x {num_columns}")
    if any(other.overlaps(memory) for other, _ in _program.copies):
        raise RaceError("two copies to one place")
    memory.data[...] = np.nan

    def land() -> None:
        memory.write(descriptor.matrix[row : row + rows, column : column + columns])
        barrier.change(expected_bytes=-rows * columns * ELEMENT_BYTES)

    _program.copies.append((memory, land))


def _operand(x: Array | SharedMemory) -> np.ndarray:
    return x.read() if isinstance(x, SharedMemory) else x.values


def _multiply(
    a: Array | SharedMemory, b: SharedMemory, acc: Array, use_acc: bool = True, is_async: bool = False
) -> Array:
    _pause()
    left, right = _operand(a), _operand(b)
    result = Array(np.full_like(acc.values, np.nan))

    def finish() -> None:
        if not all(np.array_equal(old, _operand(x), equal_nan=True) for old, x in ((left, a), (right, b))):
            raise RaceError("an operand changed during a product")
        result.values = left @ right + (acc.values if use_acc else 0.0)

    _partition().products.append(finish)
    if not is_async:
        _await_products()
    return result


def _await_products(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    _pause()
    products = _partition().products
    while len(products) > num_outstanding:
        products.pop(0)()
    return deps[0] if len(deps) == 1 else tuple(deps)


class Kernel:
    """What gluon.jit makes: a device function, or kernel[grid](...) on tensors of the CPU."""

    def __init__(self, function: Callable[..., Any], seed: int) -> None:
        self.function, self.seed = function, seed
        self.launches = 0

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return partial(self._launch, tuple(grid))

    def _launch(self, grid: tuple[int, ...], *arguments: Any, num_warps: int, **constexprs: Any) -> None:
        global _program
        self.launches += 1
        pointers = [Array(np.int64(0), Memory(x)) if isinstance(x, torch.Tensor) else x for x in arguments]
        for index in itertools.product(*map(range, grid)):
            _program = Scheduler(self.seed, index, grid)
            with np.errstate(all="ignore"):
                self.function(*pointers, **constexprs)


def _language() -> SimpleNamespace:
    def of(function: Callable[..., Any]) -> Callable[..., Array]:
        return lambda *arguments: Array(function(*map(_raw, arguments)))

    kinds = "Blocked", "DotOperand", "NVMMADistributed", "NVMMAShared", "Slice"
    return SimpleNamespace(
        **dict.fromkeys((f"{kind}Layout" for kind in kinds), lambda *arguments, **options: None),
        **{name: name for name in ("int32", "int64", "float16", "bfloat16", "float32")},
        constexpr=object,
        static_range=range,
        program_id=lambda axis: Array(_program.index[axis]),
        num_programs=lambda axis: Array(_program.grid[axis]),
        arange=lambda start, end, layout: Array(np.arange(start, end)),
        zeros=lambda shape, dtype, layout: Array(np.zeros(shape)),
        full=lambda shape, value, dtype, layout: Array(np.full(shape, value)),
        zeros_like=of(np.zeros_like),
        expand_dims=lambda x, axis: Array(np.expand_dims(x.values, axis), x.memory),
        convert_layout=lambda x, layout: x,
        where=of(np.where),
        maximum=of(np.maximum),
        minimum=of(np.minimum),
        max=of(np.max),
        sum=of(np.sum),
        exp2=of(np.exp2),
        load=_load,
        store=_store,
        allocate_shared_memory=_allocate,
        warp_specialize=lambda functions, warps, registers: _program.run(functions),
        inline_asm_elementwise=lambda asm, constraints, arguments, **options: arguments[0],
    )


def execute(path: Path, *, seed: int = 0, changes: Sequence[tuple[str, str]] = ()) -> ModuleType:
    """The module at `path`, its kernels on numpy; `changes` to its source: text that occurs there once, and another."""
    source = path.read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"{source.count(old)} times in {path}: {old}"
        source = source.replace(old, new)

    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        return jit if function is None else Kernel(function, seed)

    hopper = SimpleNamespace(
        TensorDescriptor=TensorDescriptor,
        meet=_meet,
        fence_async_shared=_fence,
        mbarrier=SimpleNamespace(
            MBarrierLayout=lambda: None, init=Barrier.init, wait=_wait, arrive=_arrive, expect=_arrive
        ),
        tma=SimpleNamespace(async_copy_global_to_shared=_copy),
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=_await_products,
    )
    module = ModuleType(f"{path.stem}_on_numpy")
    language, gluon = _language(), SimpleNamespace(jit=jit)
    with mock.patch.multiple("kernels.triton_support", gl=language, gluon=gluon, hopper=hopper):
        exec(compile(source, str(path), "exec"), vars(module))
    return module
