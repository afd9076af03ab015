"""Importing Transformers beside a package of ours named `kernels`.

Transformers looks up an optional package of that name and, by its version, may try to use it. It finds ours instead.
So every use of Transformers in this project goes through `import_transformers`.
"""

from __future__ import annotations

from types import ModuleType


def import_transformers() -> ModuleType:
    """The transformers module, made to answer that the other `kernels` package is not available."""
    import transformers.utils
    import transformers.utils.import_utils

    # Both are looked up at import time of the modules that load models, which are themselves imported lazily.
    transformers.utils.import_utils.is_kernels_available = _not_available
    transformers.utils.is_kernels_available = _not_available
    return transformers


def _not_available(*args: object, **kwargs: object) -> bool:
    return False
