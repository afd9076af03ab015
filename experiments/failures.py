"""From an exception to a row's status and error text."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from experiments.columns import Status

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")


_INSIDE = "in "


class PointTimeout(BaseException):
    """A point took longer than its limit. Not an Exception, so that no handler on the way keeps it."""


class VerdictError(Exception):
    """A point ends without a time for a known reason, which its class's status names.

    columns: what the rows that say so are to carry besides.
    """

    status: Status

    def __init__(self, reason: str, columns: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.columns = dict(columns or {})


class UnsupportedError(VerdictError):
    """This machine or build cannot run the point, which is known beforehand and nobody's fault."""

    status = "unsupported"


class IncorrectError(VerdictError):
    """The result is wrong, so its time is not wanted."""

    status = "incorrect"


class NotTimedError(VerdictError):
    """The result is right, or was not asked for, and a time would mean nothing."""

    status = "not_timed"


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Whatever is raised meanwhile is described with the name of what it was raised in."""
    try:
        yield
    except BaseException as exception:
        exception.add_note(f"{_INSIDE}{name}")
        raise


def status_of(exception: BaseException) -> Status:
    """What a row says of a point that raised this."""
    if isinstance(exception, PointTimeout):
        return "timeout"
    if isinstance(exception, VerdictError):
        return exception.status
    if isinstance(exception, MemoryError) or type(exception).__name__ == "OutOfMemoryError":
        return "oom"
    text = str(exception).lower()
    return "oom" if any(phrase in text for phrase in _OUT_OF_MEMORY) else "error"


def describe(exception: BaseException, limit: int = 600) -> str:
    """One line: the type, the message, where in the code it arose, and inside what."""
    message = " ".join(str(exception).split())
    text = f"{type(exception).__name__}: {message}" if message else type(exception).__name__
    if isinstance(exception, PointTimeout | VerdictError):
        text = message
    elif frames := traceback.extract_tb(exception.__traceback__):
        text = f"{text[:limit]} ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})"
    notes = getattr(exception, "__notes__", ())
    return text + "".join(f" ({note})" for note in notes if note.startswith(_INSIDE))


def is_sticky(exception: BaseException) -> bool:
    """Whether a CUDA error has broken this process's context: nothing on the GPU works in it from now on."""
    return "CUDA error" in str(exception) or type(exception).__name__ == "AcceleratorError"
