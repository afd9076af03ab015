"""Gluon's language on numpy, for kernels whose warps are specialised for Hopper: no interpreter runs those.

A kernel's modules are executed with this in place of Triton's Gluon. Each partition of a program is a thread; they take
turns at random (seeded), some far slower than others, and change over wherever another may act. Wrong turns show:

- A copy (TMA) makes its destination NaN at once, and lands at some later time, in any order.
- A product (WGMMA) has a result from its wait on; its operands in shared memory must not change until then.
- What a partition stores in shared memory is NaN to all until its fence and the meeting of its warps after that, and
  not for the partition itself to load before such a meeting. Nor may it store again, if it has several warps, where it
  has loaded since the last one.
- What it copies there itself (cp.async) is NaN at once, and as if stored from its wait for the copy's group on.
- Barriers have phases, arrivals and bytes to come. Waits that nothing can end are a DeadlockError.
- An element is stored once in a launch; the largest int32 stands for integers never written, as NaN does for floats.

Values are as the tensors give them (fp64: exact but for its own rounding), though half precision's bytes are counted.
What stays unseen: layouts and swizzles, registers, warps of one partition apart from each other but for the meetings
above, offsets of more than 32 bits, and a fence forgotten after barriers are made. A tile lies in shared memory as
[columns / 64, rows, 64].
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.kernels import gluon_memory as memory
from tests.kernels.gluon_memory import Array, Memory, SharedMemory, TensorDescriptor, raw
from tests.kernels.gluon_scheduler import (
    RaceError,
    Scheduler,
    begin,
    current_partition,
    current_program,
    pause,
)


def _operand(x: Array | SharedMemory) -> np.ndarray:
    return x.read() if isinstance(x, SharedMemory) else x.values


def _multiply(
    a: Array | SharedMemory, b: SharedMemory, acc: Array, use_acc: bool = True, is_async: bool = False
) -> Array:
    pause()
    left, right = _operand(a), _operand(b)
    result = Array(np.full_like(acc.values, np.nan))

    def finish() -> None:
        if not all(np.array_equal(old, _operand(x), equal_nan=True) for old, x in ((left, a), (right, b))):
            raise RaceError("an operand changed during a product")
        result.values = left @ right + (acc.values if use_acc else 0.0)

    current_partition().products.append(finish)
    if not is_async:
        _await_products()
    return result


def _await_products(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    pause()
    products = current_partition().products
    while len(products) > num_outstanding:
        products.pop(0)()
    return deps[0] if len(deps) == 1 else tuple(deps)


class Kernel:
    """What gluon.jit makes: a device function, or kernel[grid](...) on tensors of the CPU."""

    def __init__(self, function: Callable[..., Any], seed: int) -> None:
        self.function, self.seed = function, seed
        self.grids: list[tuple[int, ...]] = []
        """Of its launches."""

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return partial(self._launch, tuple(grid))

    def _launch(self, grid: tuple[int, ...], *arguments: Any, num_warps: int, **constexprs: Any) -> None:
        self.grids.append(grid)
        pointers = [Array(np.int64(0), Memory(x)) if isinstance(x, torch.Tensor) else x for x in arguments]
        for index in itertools.product(*map(range, grid)):
            begin(Scheduler(self.seed, index, num_warps))
            with np.errstate(all="ignore"):
                self.function(*pointers, **constexprs)


def _language() -> SimpleNamespace:
    def of(function: Callable[..., Any]) -> Callable[..., Array]:
        return lambda *arguments: Array(function(*map(raw, arguments)))

    kinds = "Blocked", "DotOperand", "NVMMADistributed", "NVMMAShared", "Slice"
    return SimpleNamespace(
        **dict.fromkeys((f"{kind}Layout" for kind in kinds), lambda *arguments, **options: None),
        **{name: name for name in ("int32", "int64", "float16", "bfloat16", "float32")},
        constexpr=object,
        static_range=range,
        program_id=lambda axis: Array(current_program().index[axis]),
        to_tensor=Array,
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
        load=memory.load,
        store=memory.store,
        allocate_shared_memory=memory.allocate,
        warp_specialize=lambda functions, warps, registers: current_program().run(functions, warps),
        inline_asm_elementwise=lambda asm, constraints, arguments, **options: arguments[0],
    )


def execute(*modules: ModuleType, seed: int = 0, changes: Sequence[tuple[str, str]] = ()) -> ModuleType:
    """The last of the modules, its kernels on numpy, as those of the modules before, which it or each other import.

    changes: to their sources, of text that occurs there once to another.
    """
    sources = [Path(module.__file__ or "").read_text() for module in modules]
    for old, new in changes:
        found = [source.count(old) for source in sources]
        assert sum(found) == 1, f"{sum(found)} times in {[module.__name__ for module in modules]}: {old}"
        sources = [source.replace(old, new) for source in sources]

    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        return jit if function is None else Kernel(function, seed)

    hopper = SimpleNamespace(
        TensorDescriptor=TensorDescriptor,
        meet=memory.meet,
        fence_async_shared=memory.fence,
        mbarrier=SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=memory.Barrier.init,
            wait=memory.wait,
            arrive=memory.arrive,
            expect=memory.arrive,
        ),
        tma=SimpleNamespace(async_copy_global_to_shared=memory.copy_box),
        async_copy=SimpleNamespace(
            async_copy_global_to_shared=memory.copy_elements,
            commit_group=memory.commit_copies,
            wait_group=memory.await_copies,
        ),
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=_await_products,
    )
    language, gluon = _language(), SimpleNamespace(jit=jit)
    with (
        mock.patch.multiple("kernels.triton_support", gl=language, gluon=gluon, hopper=hopper),
        mock.patch.dict(sys.modules),  # put back what they were
    ):
        for module, source in zip(modules, sources, strict=True):
            made = ModuleType(module.__name__)
            exec(compile(source, str(module.__file__), "exec"), vars(made))
            sys.modules[module.__name__] = made
    return made
