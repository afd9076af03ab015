"""Does a kernel run in Triton's interpreter? Seen from outside, so that a kernel need not say what it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock


def is_interpreted(call: Callable[[], Any]) -> bool:
    """Whether `call` launches Triton kernels in the interpreter; what it raises is left to its next caller."""
    from kernels.triton_support import INTERPRETING

    if not INTERPRETING:
        return False
    from triton.runtime.interpreter import GridExecutor

    launches = 0
    launch = GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal launches
        launches += 1
        return launch(self, *args, **kwargs)

    with mock.patch.object(GridExecutor, "__call__", counted):
        try:
            call()
        except Exception:
            return launches > 0
    return launches > 0
