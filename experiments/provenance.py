"""What a number's reader needs to repeat it: code, versions, machine, its clocks and throttling, seeds, command."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGES = (
    *("decodelab", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "hydra-core"),
    *("omegaconf", "pandas", "matplotlib", "xxhash"),
)
_GPU_FIELDS = (
    *(
        "name",
        "uuid",
        "driver_version",
        "pstate",
        "clocks.sm",
        "clocks.mem",
        "clocks.max.sm",
        "clocks.max.mem",
    ),
    *(
        "clocks.applications.graphics",
        "power.draw",
        "power.limit",
        "temperature.gpu",
        "memory.used",
        "memory.total",
    ),
    *("ecc.mode.current", "persistence_mode", "mig.mode.current", "clocks_throttle_reasons.active"),
)
# NVML's reasons that make a GPU slower than its clocks promise: power cap, hardware and thermal slowdown, power brake.
# Idle, application clocks, sync boost and display settings are not among them.
_THROTTLING = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


def capture(
    device: torch.device, *, seed: int, overrides: Sequence[str], device_name: str, cwd: Path
) -> dict[str, Any]:
    """Everything about this run that config.yaml does not say."""
    import torch

    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": repeat_command(overrides),
        "overrides": list(overrides),
        "cwd": str(cwd),
        "seed": seed,
        "git": git_state(),
        "python": sys.version.split()[0],
        "packages": versions(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": {"count": os.cpu_count(), "usable": usable_cpus(), "torch_threads": torch.get_num_threads()},
        "device": str(device),
        "device_name": device_name,
        "visible_gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "cuda": torch.version.cuda,
        "gpu_before": gpu_state(device),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("CUDA_", "TRITON_", "NCCL_", "OMP_", "MKL_", "PYTORCH_", "TORCH_"))
        },
    }


def repeat_command(overrides: Sequence[str]) -> str:
    """A shell command that repeats the run in a new folder."""
    import shlex

    kept = [o for o in overrides if not o.startswith(("run.folder=", "run.resume=", "run.retry_failed="))]
    return "python -m experiments.run " + shlex.join(kept)


ROOT = Path(__file__).resolve().parent.parent


def git_state(root: Path = ROOT) -> dict[str, Any]:
    """The commit of the code that runs and whether its working tree differs from it; nulls outside a checkout."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.rstrip()  # a line's first two characters may be blank: they are its status

    status = git("status", "--porcelain", "--untracked-files=normal")
    return {
        "commit": git("rev-parse", "HEAD"),
        "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": None if status is None else bool(status),
        "changed": None if status is None else [line[3:] for line in status.splitlines()][:50],
    }


def versions() -> dict[str, str | None]:
    """Installed versions of the packages that matter; None for those that are missing."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["decodelab"] = found["decodelab"] or _checkout_version()
    return found


def _checkout_version() -> str | None:
    """The version in pyproject.toml, for a checkout that is used without being installed."""
    path = Path(__file__).resolve().parent.parent / "pyproject.toml"
    return tomllib.loads(path.read_text())["project"]["version"] if path.exists() else None


def usable_cpus() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_state(device: torch.device) -> dict[str, str] | None:
    """nvidia-smi's answers for the device, as text with units; None for a CPU or without nvidia-smi."""
    return _query(device, _GPU_FIELDS)


def is_throttled(device: torch.device) -> bool | None:
    """Whether the GPU holds its clocks down right now for power or heat; None where that cannot be known."""
    state = _query(device, ("clocks_throttle_reasons.active",))
    if state is None:
        return None
    try:
        return bool(int(state["clocks_throttle_reasons.active"], 16) & _THROTTLING)
    except ValueError:
        return None


def _query(device: torch.device, names: Sequence[str]) -> dict[str, str] | None:
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        return None
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(names)}",
        "--format=csv,noheader",
        f"--id={_identity(device)}",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")] if done.stdout else []
    return dict(zip(names, values)) if len(values) == len(names) else None


def _identity(device: torch.device) -> str:
    """The GPU's UUID: nvidia-smi does not count as CUDA does when CUDA_VISIBLE_DEVICES narrows the view."""
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def read(path: Path, needed: Sequence[str] = ()) -> dict[str, Any]:
    """provenance.json of a run; ValueError, with its path, for what is none or lacks what is needed of it."""
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path}: not an object, but {type(record).__name__}")
    for name in needed:
        if name not in record:
            raise ValueError(f"{path}: no {name}")
    return record


def write(path: Path, record: dict[str, Any]) -> None:
    """provenance.json, replaced as a whole."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(record, indent=2) + "\n")
    new.replace(path)
