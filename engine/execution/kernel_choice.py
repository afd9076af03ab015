"""Which kernels an engine runs: names from the configuration to kernels from the registries."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from engine.config import EngineConfig
from engine.layers.attention_metadata import KernelChoice
from kernels import decode, prefill
from kernels.prefill import PrefillProblem
from kernels.triton_support import triton_unavailable


def choose_kernels(
    config: EngineConfig, device: torch.device, prompts: PrefillProblem | None = None
) -> KernelChoice:
    """Resolve use_triton, decode_attention, prefill_attention and layer_fusion for a device.

    "auto" takes the Triton kernels on a CUDA device that has Triton, and the torch ones elsewhere; where
    `warp_specialized` supports the prompts that the engine will have, it is the prefill kernel. A name that is
    unknown, or that cannot run on the device, is a ValueError naming those that can; nothing is ever substituted.
    """
    reason = triton_unavailable(device)
    if config.use_triton is True and reason is not None:
        raise ValueError(f"use_triton is True, but {reason}")
    native_triton = device.type == "cuda" and reason is None
    use_triton = native_triton if config.use_triton == "auto" else bool(config.use_triton)
    _check_layer_fusion(config, use_triton)
    fast = native_triton and use_triton
    prompts_by = "triton" if fast else "torch"
    if fast and prompts is not None and prefill.get("warp_specialized").supports(prompts) is None:
        prompts_by = "warp_specialized"
    return KernelChoice(
        decode=_choose(
            "decode_attention", config.decode_attention, decode, "planned" if fast else "torch", device
        ),
        prefill=_choose("prefill_attention", config.prefill_attention, prefill, prompts_by, device),
        use_triton=use_triton,
        persistent_layers=config.layer_fusion == "persistent",
    )


def _check_layer_fusion(config: EngineConfig, use_triton: bool) -> None:
    if config.layer_fusion == "off":
        return
    if not use_triton:
        raise ValueError(f"layer_fusion {config.layer_fusion!r} needs use_triton")
    if config.tensor_parallel_size > 1:
        raise ValueError(
            f"layer_fusion {config.layer_fusion!r} needs tensor_parallel_size 1, got {config.tensor_parallel_size}"
        )


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
