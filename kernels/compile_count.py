"""How many Triton kernels a block compiles: what was timed beside them was waiting for them too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kernels.triton_support import HAS_TRITON, triton


class CompileCount:
    """num_compiled: kernels that this process compiled, or took from Triton's cache on disk for the first time."""

    def __init__(self) -> None:
        self.num_compiled = 0


@contextlib.contextmanager
def count_compilations() -> Iterator[CompileCount]:
    """A block that counts; another listener of Triton's compilations hears of them as before.

    In Triton's interpreter, and without Triton, there are none.
    """
    count = CompileCount()
    if not HAS_TRITON:
        yield count
        return
    knobs = triton.knobs.compilation
    other = knobs.listener

    def listen(**event: Any) -> None:
        count.num_compiled += 1
        if other is not None:
            other(**event)

    knobs.listener = listen
    try:
        yield count
    finally:
        knobs.listener = other
