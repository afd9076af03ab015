"""Names to kernels: what users type in a configuration, and how kernels of other packages join."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from importlib import metadata
from typing import Any, Generic, Protocol, TypeVar

import torch


class Kernel(Protocol):
    """What a registry asks of its entries."""

    name: str

    def unavailable(self, device: torch.device) -> str | None:
        """Why the kernel cannot run on `device`, or None if it can."""


T = TypeVar("T", bound=Kernel)


class UnknownKernelError(ValueError):
    """No kernel has this name, or the package that offers it cannot be loaded."""


class Registry(Generic[T]):
    """Kernels of one kind by name; those of an entry-point group are found and loaded on demand.

    An entry point names a kernel object, or a class that makes one without arguments. What is installed is looked
    through when names are first asked for, and then no more: that reads a file of every installed package.
    """

    def __init__(self, noun: str, entry_point_group: str) -> None:
        self._noun = noun
        self._group = entry_point_group
        self._kernels: dict[str, T] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        """Decorator: registers an object as it is, or a class as the object it makes without arguments.

        Raises ValueError if the name is taken or is not the kernel's own.
        """

        def add(entry: Any) -> Any:
            kernel: T = entry() if isinstance(entry, type) else entry
            if name in self._kernels:
                raise ValueError(f"{self._noun} {name!r} is already registered")
            if kernel.name != name:
                raise ValueError(f"{self._noun} registered as {name!r} calls itself {kernel.name!r}")
            self._kernels[name] = kernel
            return entry

        return add

    def names(self) -> list[str]:
        """Every name: registered ones in order, then those of the entry-point group."""
        return [*self._kernels, *sorted(set(self._plugins) - set(self._kernels))]

    def get(self, name: str) -> T:
        """The kernel of that name; UnknownKernelError lists the known names."""
        plugin = None if name in self._kernels else self._plugins.get(name)
        if plugin is not None:
            try:
                entry = plugin.load()
            except Exception as error:
                raise UnknownKernelError(
                    f"{self._noun} {name!r} of {plugin.value} cannot be loaded: {error!r}"
                ) from error
            self.register(name)(entry)
        if name not in self._kernels:
            raise UnknownKernelError(f"unknown {self._noun} {name!r}; known: {', '.join(self.names())}")
        return self._kernels[name]

    def available(self, device: torch.device | str) -> list[str]:
        """The names of the kernels that can run on `device`; a plug-in that fails to load is warned of."""
        usable = []
        for name in self.names():
            try:
                kernel = self.get(name)
            except ValueError as error:
                warnings.warn(str(error), stacklevel=2)
                continue
            if kernel.unavailable(torch.device(device)) is None:
                usable.append(name)
        return usable

    @cached_property
    def _plugins(self) -> dict[str, metadata.EntryPoint]:
        return {point.name: point for point in metadata.entry_points(group=self._group)}
