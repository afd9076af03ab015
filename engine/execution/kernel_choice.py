"""Which kernels an engine runs: names from the configuration to kernels from the registries."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from engine.config import EngineConfig
from engine.layers.attention_metadata import KernelChoice
from engine.layers.fusion import NO_FUSION, LayerFusion, measured_fusion
from kernels import decode, prefill
from kernels.fused_linear import MAX_ROWS
from kernels.triton_support import triton_unavailable


def choose_kernels(
    config: EngineConfig, device: torch.device, *, hidden_size: int, dtype: torch.dtype
) -> KernelChoice:
    """Resolve use_triton, decode_attention, prefill_attention and layer_fusion for a device and a model.

    "auto" takes the Triton kernels on a CUDA device that has Triton, and the torch ones elsewhere. A name that is
    unknown, or that cannot run on the device, is a ValueError naming those that can; nothing is ever substituted.
    """
    reason = triton_unavailable(device)
    if config.use_triton is True and reason is not None:
        raise ValueError(f"use_triton is True, but {reason}")
    native_triton = device.type == "cuda" and reason is None
    use_triton = native_triton if config.use_triton == "auto" else bool(config.use_triton)
    fast = native_triton and use_triton
    return KernelChoice(
        decode=_choose(
            "decode_attention", config.decode_attention, decode, "planned" if fast else "torch", device
        ),
        prefill=_choose(
            "prefill_attention", config.prefill_attention, prefill, "triton" if fast else "torch", device
        ),
        use_triton=use_triton,
        fusion=_choose_fusion(config, use_triton, hidden_size, dtype),
        persistent_layers=config.layer_fusion == "persistent",
    )


def _choose_fusion(
    config: EngineConfig, use_triton: bool, hidden_size: int, dtype: torch.dtype
) -> LayerFusion:
    """ "auto" is off wherever the others would be refused."""
    name = config.layer_fusion
    if name == "off":
        return NO_FUSION
    reason = None
    if not use_triton:
        reason = "use_triton"
    elif config.tensor_parallel_size > 1:
        reason = f"tensor_parallel_size 1, got {config.tensor_parallel_size}"
    if reason and name != "auto":
        raise ValueError(f"layer_fusion {name!r} needs {reason}")
    if name == "on":
        return LayerFusion(max_rows=MAX_ROWS)
    half = dtype in (torch.float16, torch.bfloat16)
    return measured_fusion(hidden_size) if half and not reason else NO_FUSION


def _choose(field: str, name: str, registry: ModuleType, default: str, device: torch.device) -> Any:
    if name == "auto":
        name = default
    try:
        kernel = registry.get(name)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error
    available = registry.available(device)
    if name not in available:
        raise ValueError(f"{field} {name!r} does not run on {device} here; available: {', '.join(available)}")
    return kernel
