"""A run's configuration: Hydra's, with every "auto" and null decided, as frozen dataclasses that refuse bad values."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.arguments import CONF, group_options
from experiments.devices import choose_interpreter, resolve_device

DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelChoice:
    """A checkpoint (path: directory or hub id) or, where path is None, config.json's fields for dummy weights."""

    name: str
    path: str | None
    load_format: str
    dtype: str
    config: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        if self.config is not None and not isinstance(self.config, Mapping):
            raise ValueError(f"model.config must be a mapping of config.json's fields, got {self.config!r}")
        if self.path is None and self.config is None:
            raise ValueError(f"model {self.name!r} has neither a path nor a config")
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"model.load_format must be auto or dummy, got {self.load_format!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"model.dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.path is None and self.load_format != "dummy":
            raise ValueError(
                f"model {self.name!r} has no path, so load_format must be dummy, got {self.load_format!r}"
            )

    @property
    def argument(self) -> str | dict[str, Any]:
        """What LLM takes as its model."""
        return self.path if self.path is not None else dict(self.config or {})


@dataclass(frozen=True)
class Variant:
    """What a comparison is between: a decode kernel with options, and the prefill kernel beside it in the engine.

    options: keyword arguments of the kernel, over those of its plan; kernel-level suites alone can pass them.
    """

    name: str
    decode: str
    prefill: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.options, Mapping):
            raise ValueError(f"attention.{self.name}.options must be a mapping, got {self.options!r}")


MAX_THREADS = 1024


@dataclass(frozen=True)
class Size:
    """How much is measured: rounds over the variants, samples in each, and the seconds a point may take.

    threads: of torch on a CPU; None leaves the number to torch.
    """

    name: str
    rounds: int
    samples: int
    timeout_s: float
    threads: int | None = None

    def __post_init__(self) -> None:
        counts = ("rounds", "samples") if self.threads is None else ("rounds", "samples", "threads")
        for name in counts:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"size.{name} must be an integer >= 1, got {value!r}")
        if (
            self.threads is not None and self.threads > MAX_THREADS
        ):  # torch ends the process where it can have no more
            raise ValueError(f"size.threads must be at most {MAX_THREADS}, got {self.threads}")
        value = self.timeout_s
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value <= threading.TIMEOUT_MAX
        ):
            raise ValueError(
                f"run.timeout_s (else size.timeout_s) must be a number of seconds above 0 and at most "
                f"{threading.TIMEOUT_MAX:.2g}, got {value!r}"
            )


@dataclass(frozen=True)
class RunOptions:
    """Where a run goes and how its points are executed."""

    root: str
    folder: str | None
    resume: bool
    retry_failed: bool
    isolate: bool | str
    timeout_s: float | None
    plots: bool

    def __post_init__(self) -> None:
        for name in ("resume", "retry_failed", "plots"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"run.{name} must be true or false, got {getattr(self, name)!r}")
        if self.isolate not in (True, False, "auto"):
            raise ValueError(f"run.isolate must be true, false or auto, got {self.isolate!r}")
        if self.resume and self.folder is None:
            raise ValueError("run.resume=true needs run.folder=FOLDER, the run to continue")
        if self.retry_failed and not self.resume:
            raise ValueError("run.retry_failed=true needs run.resume=true: a new run has no failed points")


@dataclass(frozen=True)
class Settings:
    """Everything a suite may depend on. bench: the suite's own options, still a mapping (see Suite.options)."""

    suite: str
    bench: Mapping[str, Any]
    device: str
    seed: int
    plugins: tuple[str, ...]
    model: ModelChoice
    engine: Mapping[str, Any]
    variants: tuple[Variant, ...]
    size: Size
    run: RunOptions

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Settings:
        """From a resolved configuration (see resolve), which is also what a run's config.yaml holds."""
        bench = dict(config["bench"])
        run = parse_fields(RunOptions, config["run"], "run")
        size = parse_fields(Size, config["size"], "size")
        return cls(
            suite=bench.pop("suite"),
            bench=bench,
            device=config["device"],
            seed=config["seed"],
            plugins=tuple(config["plugins"]),
            model=parse_fields(ModelChoice, config["model"], "model"),
            engine=config["engine"],
            variants=tuple(
                parse_fields(Variant, {"name": name, **(entry or {})}, f"attention.{name}")
                for name, entry in config["attention"].items()
            ),
            size=size,
            run=run,
        )


def parse_fields(kind: type, values: Mapping[str, Any], where: str) -> Any:
    """A dataclass from a mapping; ValueError for keys it does not have, listing those it has."""
    known = [f.name for f in fields(kind)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"unknown option {where}.{unknown[0]}; known: {', '.join(known)}")
    return kind(**values)


def resolve(config: Mapping[str, Any], cwd: Path) -> dict[str, Any]:
    """Decide what a composed configuration leaves open: device, model, size, the suite's options, kernels.

    cwd: where relative paths start. Imports the plugins. Raises ValueError for what cannot be.
    """
    config = dict(config)
    if not config.get("bench"):
        raise ValueError(f"choose a suite: +suite=NAME, known: {', '.join(group_options('suite'))}")
    for name in ("bench", "sizes"):
        if not isinstance(config[name], Mapping):
            raise ValueError(f"{name} must be a mapping of options, got {config[name]!r}")
    device = resolve_device(config["device"])
    choose_interpreter(device)
    on_gpu = device != "cpu"
    _import_plugins(config["plugins"], cwd)
    size = _filled(config["size"], "size", "full" if on_gpu else "smoke")
    run = dict(config["run"], root=str(_path("run.root", config["run"]["root"], cwd)))
    if run["folder"] is not None:
        run["folder"] = str(_path("run.folder", run["folder"], cwd))
    if run["timeout_s"] is not None:
        size["timeout_s"] = run["timeout_s"]
    sizes = config.pop("sizes")
    if size["name"] not in sizes:
        raise ValueError(f"the suite has no size {size['name']!r}; known: {', '.join(sizes)}")
    chosen = sizes[size["name"]]
    if not isinstance(chosen, Mapping):
        raise ValueError(f"sizes.{size['name']} must be a mapping of options, got {chosen!r}")
    bench = {name: chosen.get(name) if value is None else value for name, value in config["bench"].items()}
    if isinstance(config["seed"], bool) or not isinstance(config["seed"], int):
        raise ValueError(f"seed must be an integer, got {config['seed']!r}")
    return config | {
        "device": device,
        "model": _model(config["model"], cwd, on_gpu),
        "attention": _variants(config.get("attention") or chosen.get("attention"), device),
        "size": size,
        "bench": bench,
        "run": run,
    }


def _import_plugins(plugins: Any, cwd: Path) -> None:
    names = plugins if isinstance(plugins, list | tuple) else None
    if names is None or not all(isinstance(name, str) and name.strip(".") == name != "" for name in names):
        raise ValueError(f"plugins must be a list of modules, plugins=[my_kernel], got {plugins!r}")
    if names and str(cwd) not in sys.path:
        sys.path.insert(0, str(cwd))  # a console script has its own folder there
    for name in names:
        importlib.import_module(name)


def _path(name: str, value: Any, cwd: Path) -> Path:
    """Where a relative path leads from cwd."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a path (in quotes, if it is a number), got {value!r}")
    return cwd / Path(value).expanduser()


def _filled(values: Mapping[str, Any], group: str, default: str) -> dict[str, Any]:
    """A group's values; where its name is "auto", those of the default yaml under what was overridden."""
    if values["name"] != "auto":
        return dict(values)
    loaded: Any = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{default}.yaml"))
    return loaded | {name: value for name, value in values.items() if value is not None and value != "auto"}


def _model(values: Mapping[str, Any], cwd: Path, on_gpu: bool) -> dict[str, Any]:
    path = values["path"]
    if path is None:
        model = _filled(values, "model", "qwen3_0_6b" if on_gpu else "tiny_qwen3")
        return model | {"load_format": model["load_format"] or "dummy"}
    directory = _path("model.path", path, cwd)
    if directory.is_dir():
        path = str(directory.resolve())
    elif path.startswith((".", "/", "~")):
        raise ValueError(f"model.path: there is no directory {directory}")
    return dict(values) | {
        "name": Path(path).name if values["name"] == "auto" else values["name"],
        "path": path,
        "load_format": values["load_format"] or "auto",
        "config": None,
    }


def _variants(attention: Mapping[str, Any] | Sequence[str] | None, device: str) -> dict[str, Any]:
    """Variants by name, each with its decode kernel; "*" stands for every kernel that runs on the device."""
    import torch

    from kernels import decode

    if not isinstance(attention, Mapping):
        attention = {name: {} for name in attention or ["*"]}
    variants: dict[str, Any] = {}
    for name, entry in attention.items():
        if entry is not None and not isinstance(entry, Mapping):
            raise ValueError(
                f"attention.{name} must be a mapping, {{decode: KERNEL}} at least, got {entry!r}"
            )
        variant = {"decode": name, **(entry or {})}
        if variant["decode"] != "*":
            variants[name] = variant
            continue
        for each in decode.available(torch.device(device)):
            if each != "reference":
                variants.setdefault(each, {"decode": each})
    for name, variant in variants.items():
        if variant["decode"] == "auto":  # the engine's own choice
            continue
        try:
            decode.get(variant["decode"])
        except ValueError as error:
            raise ValueError(f"attention.{name}: {error}") from error
    return variants
