"""The registry: names, refusals, and kernels that other packages offer through entry points."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from kernels import decode
from kernels.registry import Registry, UnknownKernelError


class Plain:
    """The least that a registry asks of a kernel."""

    def __init__(self, name: str = "plain", reason: str | None = None) -> None:
        self.name = name
        self.reason = reason

    def unavailable(self, device: torch.device) -> str | None:
        return self.reason if device.type == "cpu" else None


def offer(monkeypatch: pytest.MonkeyPatch, **targets: str) -> None:
    """Let installed packages seem to offer these entry points."""
    points = [metadata.EntryPoint(name, value, "group") for name, value in targets.items()]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == "group" else [])


def test_names_in_order_and_get() -> None:
    registry: Registry[Plain] = Registry("kernel", "group")
    second, first = Plain("second"), Plain("first")
    assert registry.register("second")(second) is second
    registry.register("first")(first)
    assert registry.names() == ["second", "first"]
    assert registry.get("first") is first


def test_a_class_is_registered_as_its_object() -> None:
    registry: Registry[Plain] = Registry("kernel", "group")
    assert registry.register("plain")(Plain) is Plain
    assert isinstance(registry.get("plain"), Plain)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(UnknownKernelError, match=r"unknown decode kernel 'splitkv'.*reference.*split_kv"):
        decode.get("splitkv")


def test_a_name_is_taken_once_and_is_the_kernels_own() -> None:
    registry: Registry[Plain] = Registry("kernel", "group")
    registry.register("plain")(Plain())
    with pytest.raises(ValueError, match="'plain' is already registered"):
        registry.register("plain")(Plain())
    with pytest.raises(ValueError, match="'other' calls itself 'plain'"):
        registry.register("other")(Plain())


def test_available_asks_each_kernel() -> None:
    registry: Registry[Plain] = Registry("kernel", "group")
    registry.register("here")(Plain("here"))
    registry.register("gpu")(Plain("gpu", reason="needs a GPU"))
    assert registry.available("cpu") == ["here"]
    assert registry.available(torch.device("meta")) == ["here", "gpu"]


def test_entry_points_join_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, plain=f"{__name__}:Plain")
    registry: Registry[Plain] = Registry("kernel", "group")
    assert registry.names() == ["plain"]
    kernel = registry.get("plain")
    assert kernel is registry.get("plain")
    assert registry.names() == ["plain"]


def test_a_broken_package_harms_only_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, broken="no_such_module_here:kernel", plain=f"{__name__}:Plain")
    registry: Registry[Plain] = Registry("kernel", "group")
    with pytest.raises(UnknownKernelError, match="'broken' of no_such_module_here:kernel cannot be loaded"):
        registry.get("broken")
    with pytest.warns(UserWarning, match="broken"):
        assert registry.available("cpu") == ["plain"]


def test_an_entry_point_never_replaces_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, plain="no_such_module_here:kernel")
    registry: Registry[Plain] = Registry("kernel", "group")
    mine = Plain()
    registry.register("plain")(mine)
    assert registry.get("plain") is mine
    assert registry.names() == ["plain"]


def test_the_foundations_kernels_are_there() -> None:
    assert {"reference", "torch", "single_pass", "split_kv"} <= set(decode.names())
    for name in decode.names():
        assert decode.get(name).name == name
