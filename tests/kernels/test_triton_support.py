"""What launches need by the hundred, cheap: arithmetic as Triton's own, and the device of a tensor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.triton_support import cdiv, next_power_of_2, on_device

triton = pytest.importorskip("triton")


def test_the_least_power_of_two_that_is_not_below() -> None:
    assert next_power_of_2(0) == 1
    for n in [*range(1, 1030), 151_936, 2**31 - 1, 2**31, 2**31 + 1]:
        assert next_power_of_2(n) == triton.next_power_of_2(n)


def test_rounded_up() -> None:
    for a in (0, 1, 7, 8, 9, 151_936):
        for b in (1, 2, 3, 8, 4096):
            assert cdiv(a, b) == triton.cdiv(a, b)


def test_a_device_is_entered_where_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    tensors = [SimpleNamespace(is_cuda=True, device=f"cuda:{i}", get_device=lambda i=i: i) for i in range(3)]
    for tensor in (*tensors, torch.empty(1)):
        on_device(tensor)  # type: ignore[arg-type]
    assert entered == ["cuda:0", "cuda:2"]
    with on_device(torch.empty(1)), on_device(torch.empty(1)):
        pass
