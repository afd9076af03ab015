"""How a rank's work on its device runs, whatever torch's settings are where it is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class OnDevice(Protocol):
    device: torch.device


S = TypeVar("S", bound=OnDevice)


def in_own_dtype(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """The method in inference mode, and in the dtypes of its own tensors if its caller has switched autocast on."""

    @functools.wraps(method)
    @torch.inference_mode()
    def run(self: S, *args: P.args, **options: P.kwargs) -> R:
        if not torch.is_autocast_enabled(self.device.type):
            return method(self, *args, **options)
        with torch.autocast(self.device.type, enabled=False):
            return method(self, *args, **options)

    return run
