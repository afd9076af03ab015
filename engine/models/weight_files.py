"""Where a checkpoint directory keeps each tensor: its index, or its single file. Only safetensors, never pickle."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.models.json_file import read_json_object, require_regular

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def locate_tensors(directory: Path) -> dict[str, Path]:
    """Tensor name to the file that holds it, checked against the files' own headers.

    Raises ValueError, naming the tensor or file: no safetensors, both an index and a single file, a missing file
    or a broken one, a tensor in two files, in another file than the index says, or in none.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists() and index.exists():
        raise ValueError(f"{directory} has both {SINGLE_FILE} and {INDEX_FILE}; keep the one that is meant")
    if single.exists():
        return dict.fromkeys(tensor_names(single), single)
    if not index.exists():
        raise ValueError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{_what_else(directory)}")
    listed = _read_index(index)
    held: dict[str, Path] = {}
    for file in sorted(set(listed.values())):
        for name in tensor_names(file):
            if name in held:
                raise ValueError(
                    f"tensor {name!r} is in both {held[name].name} and {file.name} of {directory}"
                )
            held[name] = file
    for name, file in listed.items():
        if held.get(name) != file:
            where = f"it is in {held[name].name}" if name in held else "no file holds it"
            raise ValueError(f"{INDEX_FILE} puts tensor {name!r} in {file.name}, but {where} of {directory}")
    return held


def tensor_names(file: Path) -> Iterable[str]:
    """The names in a file's header."""
    require_regular(file)
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors: {error}") from error


def _read_index(index: Path) -> dict[str, Path]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(
                f"{index} puts tensor {name!r} in {file!r}, which is no safetensors file beside it"
            )
        if not (index.parent / file).exists():
            raise ValueError(f"{index} puts tensor {name!r} in {file}, which is missing")
    return {name: index.parent / file for name, file in weight_map.items()}


def _what_else(directory: Path) -> str:
    """A hint at what the directory holds instead."""
    pickles = sorted(
        file.name for file in directory.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt")
    )
    if pickles:
        return f": {pickles[0]} is a pickle, which is never read; convert the checkpoint to safetensors"
    others = sorted(file.name for file in directory.glob("*.safetensors"))
    return f", though it has {others[0]}" if others else ""
