"""One file a suite. A module here that defines `SUITE` is found by its name; another package's by its dotted name."""

from __future__ import annotations

import importlib
import pkgutil

from experiments.suites.protocol import Point, PointContext, Suite

__all__ = ["Point", "PointContext", "Suite", "get", "names"]

_NOT_SUITES = {"protocol", "options"}


def names() -> list[str]:
    """The suites of this package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _NOT_SUITES)


def get(name: str) -> Suite:
    """The suite of that name, or of that module (with a dot in it); ValueError lists the known ones."""
    if not isinstance(name, str):
        raise ValueError(f"bench.suite must be a suite's name, got {name!r}; known: {', '.join(names())}")
    if "." in name:
        suite = importlib.import_module(name).SUITE
    elif name in names():
        suite = importlib.import_module(f"{__name__}.{name}").SUITE
    else:
        raise ValueError(f"unknown suite {name!r}; known: {', '.join(names())}")
    if not isinstance(suite, Suite):
        raise ValueError(f"{name}.SUITE must be a Suite, got {type(suite).__name__}")
    return suite
