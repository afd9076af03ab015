"""What was measured on a GPU and decides between kernels there: JSON files in the folders named `tuned`, one a GPU."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

import torch

DEFAULT_GPU = "NVIDIA H200"
"""Whose tables stand in on a GPU that was never measured."""


@functools.cache
def device_name(device: torch.device) -> str:
    """A CUDA device's name; DEFAULT_GPU elsewhere."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else DEFAULT_GPU


def table_name(gpu: str) -> str:
    """The file of a GPU."""
    return f"{gpu.replace(' ', '_')}.json"


def tuned_table(package: str, gpu: str) -> dict[str, Any]:
    """The table of `package` for that GPU, or for DEFAULT_GPU."""
    folder = resources.files(package) / "tuned"
    for name in (gpu, DEFAULT_GPU):
        file = folder / table_name(name)
        if file.is_file():
            return dict(json.loads(file.read_text()))
    raise FileNotFoundError(f"{package.replace('.', '/')}/tuned has no {table_name(DEFAULT_GPU)}")
