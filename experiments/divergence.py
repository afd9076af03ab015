"""Where two runs of one network part: its modules' outputs for one token, compared in the order they are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_IN_A_LAYER = (
    *("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "self_attn"),
    *("post_attention_layernorm", "mlp"),
)


@dataclass(frozen=True)
class ModuleError:
    """How far one module's outputs are apart. layer: None outside the layers. operation: its name within the layer.

    rel_err: the largest error over the reference's largest magnitude.
    """

    layer: int | None
    operation: str
    rel_err: float

    def __str__(self) -> str:
        place = self.operation if self.layer is None else f"layer {self.layer} {self.operation}"
        return f"{place} ({self.rel_err:.2g})"


def module_names(num_layers: int) -> list[str]:
    """Modules that both networks have, in the order they are computed; not every architecture has every one."""
    layers = [f"layers.{i}.{name}" for i in range(num_layers) for name in _IN_A_LAYER]
    return ["embed_tokens", *layers, "norm", "lm_head"]


def capture(
    modules: Mapping[str, nn.Module], names: Sequence[str], run: Callable[[], object], *, batched: bool
) -> dict[str, Tensor]:
    """The outputs that the named modules gave for the last token they saw in run(): flat, fp32, on the CPU.

    batched: outputs have a batch dimension of one before that of tokens, as Transformers' do and the engine's do not.
    Of a module that returns several tensors, the first. Modules that are not there, or did not run, are left out.
    """
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            last = first[0, -1] if batched else first[-1]
            # A copy, at once: RoPE then works in place on what the norms return.
            seen[name] = last.detach().to("cpu", torch.float32, copy=True).flatten()

        return hook

    handles = [modules[name].register_forward_hook(keep(name)) for name in names if name in modules]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def module_errors(
    reference: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Sequence[str]
) -> list[ModuleError]:
    """The errors of the modules captured in both runs, in the order of names. Not-a-number counts as infinite."""
    errors = []
    for name in names:
        if name not in reference or name not in other:
            continue
        largest = float(reference[name].abs().max())
        error = float((other[name] - reference[name]).abs().max().nan_to_num(nan=torch.inf))
        rel_err = error / largest if largest > 0 else (torch.inf if error else 0.0)
        parts = name.split(".", 2)
        is_inside = parts[0] == "layers"
        errors.append(
            ModuleError(int(parts[1]) if is_inside else None, parts[2] if is_inside else name, rel_err)
        )
    return errors


def first_beyond(errors: Sequence[ModuleError], tolerance: float) -> ModuleError | None:
    """Where the difference arises: the first module whose error is above tolerance."""
    return next((error for error in errors if error.rel_err > tolerance), None)
