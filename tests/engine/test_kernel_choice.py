"""Which prefill kernel `auto` takes: that of specialised warps wherever it supports what the engine will ask of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.execution import kernel_choice
from engine.execution.kernel_choice import choose_kernels
from kernels.prefill import PrefillProblem, triton_flash, warp_specialized

HOPPER = torch.device("cuda", 0)
PROMPTS = PrefillProblem(256, 32, 8, 128, 16, 8192, 40_960, torch.bfloat16, HOPPER)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Triton compiled here and every device were an H200."""
    for module in (triton_flash, warp_specialized):
        monkeypatch.setattr(module, "INTERPRETING", False)
    for module in (kernel_choice, triton_flash):
        monkeypatch.setattr(module, "triton_unavailable", lambda device: None)
    for registry in (kernel_choice.decode, kernel_choice.prefill):
        monkeypatch.setattr(registry, "available", lambda device, names=registry.names: names())
    monkeypatch.setattr(warp_specialized, "gluon_unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def chosen(prompts: PrefillProblem | None, **options: Any) -> str:
    config = EngineConfig(device="cuda:0", **options)
    return choose_kernels(config, HOPPER, prompts).prefill.name


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "warp_specialized"),
        ({"head_dim": 64, "dtype": torch.float16, "num_kv_heads": 1}, "warp_specialized"),
        ({"dtype": torch.float32}, "triton"),
        ({"head_dim": 96}, "triton"),
        ({"block_size": 12}, "triton"),
    ],
    ids=str,
)
def test_by_what_will_be_asked(changes: dict[str, Any], name: str) -> None:
    assert chosen(dataclasses.replace(PROMPTS, **changes)) == name


@pytest.mark.usefixtures("on_hopper")
def test_by_name_and_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(PROMPTS, prefill_attention="triton") == "triton"
    assert chosen(PROMPTS, use_triton=False) == "torch"
    assert chosen(None) == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    assert chosen(PROMPTS) == "triton"
