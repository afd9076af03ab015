"""JSON files that a checkpoint brings: what they hold, or a ValueError that names the file, whatever is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a file. Raises ValueError, naming the file, for anything else, and for a key given twice."""
    require_regular(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return content


def require_regular(file: Path) -> None:
    """Raise ValueError unless file is a regular file or leads to one: opening a pipe would wait for ever."""
    if not file.is_file():
        raise ValueError(f"{file} is no regular file")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is there twice")
    return content
