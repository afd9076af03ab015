"""What differs between two runs besides their times: code, versions, machine, clocks, configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import provenance

# Of provenance.json: what makes times differ for reasons outside the code under test.
_FACTS = (
    *("git", "packages", "python", "platform", "host", "device_name", "cuda", "visible_gpus", "environment"),
    *("cpu", "seed"),
)
_GPU_FACTS = (
    *("uuid", "driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem"),
    *("clocks.applications.graphics", "ecc.mode.current", "persistence_mode", "mig.mode.current"),
)
# Of config.yaml: how a run is made, not what it measures; the model's fields are told by its name.
_NOT_MEASURED = ("run", "plugins", "model.config")

# Measured ceilings that differ by more than this were not measured on equally fast machines.
CEILING_MARGIN = 0.05


def changes(run_a: Path, run_b: Path) -> list[str]:
    """What differs between the provenance and the configuration of two run folders, a line each."""
    facts_a, facts_b = _facts(run_a), _facts(run_b)
    names = sorted({**facts_a, **facts_b}, key=lambda name: (name.startswith("config."), name))
    return [
        f"{name}: {facts_a.get(name)} -> {facts_b.get(name)}"
        for name in names
        if facts_a.get(name) != facts_b.get(name)
    ]


def warnings(run_a: Path, run_b: Path) -> list[str]:
    """Why the times of two run folders may not be comparable, a line each."""
    a, b = _read(run_a), _read(run_b)
    found = []
    if a.get("device_name") != b.get("device_name"):
        found.append(f"different devices: {a.get('device_name')} and {b.get('device_name')}")
    for name, record in (("A", a), ("B", b)):
        if (record.get("git") or {}).get("dirty"):
            found.append(
                f"run {name} was made from a working tree with changes: its commit does not tell its code"
            )
        if record and not record.get("ended"):
            found.append(f"run {name} did not end: some of its points are missing")
    before, after = ((record.get("ceilings") or {}).get("read_bytes_per_s") for record in (a, b))
    if a.get("device_name") == b.get("device_name") and before and after:
        ratio = after / before
        if not 1 / (1 + CEILING_MARGIN) <= ratio <= 1 + CEILING_MARGIN:
            found.append(
                f"the device read its memory {ratio:.2f} times as fast in run B as in run A (measured ceilings): "
                "it was busy or throttled in one of them"
            )
    return found


def _facts(run: Path) -> dict[str, Any]:
    """Flat provenance and configuration of a run."""
    record = _read(run)
    facts = {name: record.get(name) for name in _FACTS}
    facts["gpu"] = {
        name: value for name, value in (record.get("gpu_before") or {}).items() if name in _GPU_FACTS
    }
    flat = _flat({name: value for name, value in facts.items() if value is not None}, "")
    for name in ("git.changed", "git.branch"):
        flat.pop(name, None)
    return flat | {f"config.{name}": value for name, value in _flat(_config(run), "").items()}


def _config(run: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    path = run / "config.yaml"
    config: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.exists() else {}
    for dotted in _NOT_MEASURED:
        *parents, last = dotted.split(".")
        inner = config
        for parent in parents:
            inner = inner.get(parent) or {}
        inner.pop(last, None)
    config.pop("seed", None)  # among the facts already
    return config


def _flat(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Nested mappings by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{where}{name}.") if isinstance(value, Mapping) else {f"{where}{name}": value}
    return flat


def _read(run: Path) -> dict[str, Any]:
    path = run / "provenance.json"
    return provenance.read(path) if path.exists() else {}
