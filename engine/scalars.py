"""One number as a user gave it: Python's or numpy's, but never a bool in a number's place."""

from __future__ import annotations

import math
import numbers
import operator


def as_integer(field: str, value: object) -> int:
    """The int that value is (numpy's integers too); ValueError naming the field for anything else, bools included."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise ValueError(f"{field} must be an integer, got {value!r}")


def as_number(field: str, value: object) -> float:
    """The float that value is (numpy's too); ValueError naming the field for NaN, bools and anything else."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf if value > 0 else -math.inf  # type: ignore[operator]
        if not math.isnan(number):
            return number
    raise ValueError(f"{field} must be a number, got {value!r}")
