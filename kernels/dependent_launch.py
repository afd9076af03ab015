"""Programmatic dependent launch: a kernel's programs start while the kernel before them still runs (Hopper and later).

The rule, which every kernel launched with launch_options(pdl=True) keeps: before `start_after_previous` a program
reads nothing but what no kernel of the chain ever writes (weights, tables made at start-up), and writes nothing. The
call comes in every program, on every path. Then it orders all: it returns once the kernel before has ended and its
writes are seen, and that kernel itself had waited for the one before it, so everything earlier in the stream has ended
too. That covers reads after writes, writes after reads and memory that an allocator hands out again. A kernel that did
not wait would break the chain for all that follow. Kernels launched without the option still wait for everything
before them, so the two kinds mix freely, also in a CUDA graph (the edge is kept by stream capture).

The dependents are let in at once: they start as soon as all programs of this kernel have started, take only what
room is left on the SMs, fetch their first weights, and wait.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.triton_support import INTERPRETING, tl, triton


@triton.jit
def start_after_previous(PDL: tl.constexpr):
    """Let the next kernel start, then wait for the kernel before; nothing without PDL, also when interpreting."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def launch_options(pdl: bool) -> dict[str, Any]:
    """Constexpr and launch option of a kernel that calls start_after_previous(PDL)."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def supports_pdl(device: torch.device) -> bool:
    """Whether kernels can be launched so on this device."""
    return device.type == "cuda" and not INTERPRETING and torch.cuda.get_device_capability(device) >= (9, 0)
