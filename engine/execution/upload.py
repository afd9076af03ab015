"""Several small host arrays to the device in one copy."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch


def upload(device: torch.device, *columns: Iterable[int | float] | np.ndarray) -> list[torch.Tensor]:
    """The columns as tensors on the device, in one transfer that nobody waits for.

    Integers become int64 and floats float64, whose bits travel as int64.
    """
    arrays = [column if isinstance(column, np.ndarray) else np.array(list(column)) for column in columns]
    is_float = [array.dtype.kind == "f" for array in arrays]
    bits = [
        array.astype(np.float64).view(np.int64) if floating else array.astype(np.int64)
        for array, floating in zip(arrays, is_float)
    ]
    host = torch.from_numpy(np.concatenate(bits))
    if device.type == "cuda":
        # Torch's pinned allocator does not hand this memory out again before the copy is done.
        host = host.pin_memory()
    parts = host.to(device, non_blocking=True).split([len(array) for array in bits])
    return [part.view(torch.float64) if floating else part for part, floating in zip(parts, is_float)]
