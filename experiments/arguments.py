"""From what users type to what Hydra parses: a model by path, kernels that have no yaml, a sweep's own folder."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

CONF = Path(__file__).resolve().parent.parent / "conf"
_MULTIRUN = ("-m", "--multirun")
_COMPLETION = ("-sc", "--shell-completion", "--shell_completion")


def group_options(group: str) -> list[str]:
    """The names that `group=` can take from conf/."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def unique_name() -> str:
    """A folder's name: when it was made, and what no other one made in that second has."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def prepare(arguments: Sequence[str], cwd: Path) -> list[str]:
    """Hydra's arguments for a user's.

    model=X, where X is no yaml of conf/model, is model.path=X; attention=[a,b] may name any registered kernel;
    a sweep (-m) gets a folder of its own.
    """
    if any(argument.startswith(_COMPLETION) for argument in arguments):
        return list(arguments)
    prepared: list[str] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key == "model" and equals:
            prepared.append(_model(value, cwd))
        elif key == "attention" and equals:
            prepared += _attention(value)
        else:
            prepared.append(argument)
    # Hydra's parser takes the flag before the overrides or after them, not among them.
    prepared.sort(key=lambda argument: argument not in _MULTIRUN)
    if is_multirun(arguments) and not any(a.startswith("hydra.sweep.dir=") for a in arguments):
        roots = [a.partition("=")[2] for a in arguments if a.startswith("run.root=")]
        root = Path(_unquoted(roots[-1]) if roots else "outputs").expanduser()
        prepared.append(f"hydra.sweep.dir={_quoted(str(cwd / root / 'multirun' / unique_name()))}")
    return prepared


def is_multirun(arguments: Iterable[str]) -> bool:
    """Whether Hydra is asked for a sweep of runs."""
    return any(argument in _MULTIRUN for argument in arguments)


def sweep_folder(prepared: Iterable[str]) -> Path:
    """Where the runs of a prepared sweep go."""
    return Path(_unquoted(next(a.partition("=")[2] for a in prepared if a.startswith("hydra.sweep.dir="))))


def _model(value: str, cwd: Path) -> str:
    directory = cwd / Path(value).expanduser()
    if value in group_options("model") or not value or any(c in value for c in ",()[]*"):
        return f"model={value}"
    if directory.is_dir():
        return f"model.path={_quoted(str(directory.resolve()))}"
    if "/" in value or value.startswith((".", "~")):  # a hub id, or a path that will be reported as missing
        return f"model.path={_quoted(value)}"
    return f"model={value}"


def _attention(value: str) -> list[str]:
    if value.startswith("[") and value.endswith("]") and "]" not in value[:-1]:
        names = [name.strip() for name in value[1:-1].split(",") if name.strip()]
    elif any(c in value for c in ",()*"):  # a sweep: Hydra's to parse
        return [f"attention={value}"]
    else:
        names = [value]
    known = group_options("attention")
    names = list(dict.fromkeys(names))
    # Hydra adds single entries behind those of the group's files: behind the first kernel without a file, all are such.
    from_files = list(itertools.takewhile(lambda name: name in known, names))
    entries = [
        entry
        for name in names[len(from_files) :]
        for entry in (_file_entries(name) if name in known else [f"+attention.{name}={{decode: {name}}}"])
    ]
    return [f"attention=[{','.join(from_files)}]", *entries]


def _file_entries(name: str) -> list[str]:
    """What conf/attention/NAME.yaml holds, as overrides."""
    from omegaconf import OmegaConf

    held: Any = OmegaConf.to_container(OmegaConf.load(CONF / "attention" / f"{name}.yaml"))
    return [f"+attention.{key}={_override(value)}" for key, value in held.items()]


def _override(value: Any) -> str:
    """A value in the grammar of Hydra's overrides, whose keys have no quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_override(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"


def _unquoted(text: str) -> str:
    """What a value of Hydra's grammar stands for that may be in quotes."""
    mark = text[:1]
    if mark not in ("'", '"') or len(text) < 2 or not text.endswith(mark):
        return text
    return text[1:-1].replace(f"\\{mark}", mark)
