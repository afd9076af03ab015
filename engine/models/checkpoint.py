"""From what a user calls a model to its configuration and its files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.config import ModelConfig, eos_ids
from engine.models.json_file import read_json_object

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TOKENIZER_FILES = ("*.json", "*.model", "*.tiktoken", "*.jinja", "vocab.txt", "merges.txt")


@dataclass(frozen=True)
class ModelSource:
    """A model ready to be loaded.

    path: the checkpoint's directory, absolute; None for a bare configuration. eos_token_ids: config.json's, then those
    that only generation_config.json has. ValueError for one outside the vocabulary.
    """

    config: ModelConfig
    path: Path | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for token in self.eos_token_ids:
            if token >= self.config.vocab_size:
                raise ValueError(
                    f"eos_token_id holds {token}, outside the vocabulary of {self.config.vocab_size}: it could "
                    "never end a request (config.json or generation_config.json)"
                )


def resolve_model(model: str | Path | Mapping[str, Any], load_format: str) -> ModelSource:
    """Find a model's configuration.

    model: a checkpoint directory, a hub id (then fetched by huggingface_hub into its cache), or, with
    load_format="dummy", a mapping of config.json's fields. Raises ValueError, naming the model, if there is no such
    thing, and for any configuration that ModelConfig refuses.
    """
    if isinstance(model, Mapping):
        if load_format != "dummy":
            raise ValueError(f"model is a mapping, which needs load_format 'dummy', got {load_format!r}")
        config = ModelConfig.from_hf(model)
        return ModelSource(config, None, config.eos_token_ids)
    if not isinstance(model, str | Path):
        raise ValueError(f"model must be a directory, a hub id or a mapping, got {model!r}")
    directory = resolve_directory(model, with_weights=load_format != "dummy")
    config_file = directory / "config.json"
    if not config_file.exists():
        raise ValueError(f"model {str(model)!r}: {directory} has no config.json")
    try:
        config = ModelConfig.from_hf(read_json_object(config_file))
    except ValueError as error:
        raise ValueError(f"model {str(model)!r}: {error}") from error
    generation_file = directory / "generation_config.json"
    generation = read_json_object(generation_file) if generation_file.exists() else {}
    all_eos = (*config.eos_token_ids, *eos_ids(generation.get("eos_token_id"), str(generation_file)))
    try:
        return ModelSource(config, directory, tuple(dict.fromkeys(all_eos)))
    except ValueError as error:
        raise ValueError(f"model {str(model)!r}: {error}") from error


def resolve_directory(model: str | Path, *, with_weights: bool) -> Path:
    """The absolute directory of a local checkpoint or tokenizer, or of a hub id's snapshot.

    Only JSON, tokenizer files and, with_weights, safetensors are fetched. Raises ValueError naming the model.
    """
    name = str(model)
    if not isinstance(model, str | Path) or not name:
        raise ValueError(f"a model or tokenizer must be named by a directory or a hub id, got {model!r}")
    directory = Path(os.path.expanduser(model))
    try:
        is_directory, exists = directory.is_dir(), directory.exists()
    except OSError as error:
        raise ValueError(f"model {name[:100]!r}...: {error.strerror}") from error
    if is_directory:
        return directory.resolve()
    if exists:
        raise ValueError(f"model {name!r} is a file; a directory with config.json is needed")
    if isinstance(model, Path) or not _HUB_ID.fullmatch(name) or ".." in name:
        raise ValueError(f"model {name!r} is neither an existing directory nor a hub id")
    from huggingface_hub import snapshot_download

    patterns = [*_TOKENIZER_FILES, *(["*.safetensors"] if with_weights else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns)).resolve()
    except Exception as error:
        raise ValueError(
            f"model {name!r} is neither an existing directory (looked in {Path.cwd()}) nor a hub id that can be "
            f"fetched or is cached: {type(error).__name__}: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
