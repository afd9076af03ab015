"""Sweeps, measurements and reports over the kernels and the engine.

    python -m experiments.run +suite=long_decode
    df = experiments.load("outputs/long_decode/...")

Light to import: pandas comes with the first use of `load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.records import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from experiments.records import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
