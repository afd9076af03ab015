"""Triton's interpreter without the work that it repeats: less than half of the time of a test that runs in it.

Each launch replaces what kernels call of `triton.language`, and each call of a device function, of which a program
makes dozens, looks through all of it once more and finds nothing left to replace. Each value has its numpy type looked
up in a table that is made for it, and its shape, size and type's name put together anew, of which there are few. What
is computed stays the same, bit by bit.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

NEEDED = ("_patch_lang", "_get_np_dtype", "GridExecutor")


def make_quick() -> None:
    """Once in a process. Another Triton may have other insides: then nothing is changed, and tests take longer."""
    if not all(hasattr(interpreter, name) for name in NEEDED):
        return
    _replace_once_a_launch()
    _remember_numpy_types()
    _remember_shapes()
    _remember_block_types()


def _replace_once_a_launch() -> None:
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[int] = set()  # of the modules tl and tl.core, those that the current launch has replaced

    def replace_once(fn: Any) -> Any:
        seen = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if seen and seen <= replaced:  # a device function: the launch does not use what this returns
            return None
        replaced.update(seen)
        return replace(fn)

    def launch_anew(self: Any, *args: Any, **options: Any) -> Any:
        replaced.clear()
        try:
            return launch(self, *args, **options)
        finally:
            replaced.clear()

    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_anew


def _remember_numpy_types() -> None:
    look_up = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        element = dtype.element_ty if type(dtype) is tl.block_type else dtype
        if type(element) is not tl.dtype:  # a pointer
            return look_up(dtype)
        if element.name not in known:
            known[element.name] = look_up(element)
        return known[element.name]

    interpreter._get_np_dtype = remembered


def _remember_shapes() -> None:
    """Of tensors, unless they have other attributes than these."""
    make = tl.tensor.__init__
    expected = {"handle", "shape", "numel", "type", "dtype"}
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def made(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in known:
            make(self, handle, type)
            if vars(self).keys() != expected:
                tl.tensor.__init__ = make
            known[shape] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[shape]

    tl.tensor.__init__ = made


def _remember_block_types() -> None:
    make = tl.block_type.__init__
    known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def made(self: Any, element_ty: Any, shape: Any) -> None:
        key = str(element_ty), tuple(getattr(size, "value", size) for size in shape)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
            return
        self.element_ty = element_ty
        vars(self).update(known[key])

    tl.block_type.__init__ = made
