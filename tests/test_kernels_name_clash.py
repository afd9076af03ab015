"""Our package `kernels` beside the one of that name that Transformers looks for (facts: the name clash)."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[1]


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_versions_stay_outside_the_window_in_which_transformers_uses_the_other_package() -> None:
    import kernels

    assert not Version("0.16") <= Version(version("decodelab")) < Version("0.20")
    assert not hasattr(kernels, "__version__")


def test_importing_kernels_is_light() -> None:
    loaded = run_python(
        "import sys, kernels; print([m for m in ('torch', 'triton', 'transformers') if m in sys.modules])"
    )
    assert loaded == "[]"


def test_transformers_is_told_that_the_other_package_is_absent() -> None:
    """Even where its own look-up would find a usable version, as with both packages installed."""
    code = """
import importlib.metadata, importlib.util
import transformers.utils.import_utils as import_utils
window = import_utils.KERNELS_MIN_VERSION if hasattr(import_utils, "KERNELS_MIN_VERSION") else "0.16.0"
import_utils._is_package_available.cache_clear() if hasattr(import_utils._is_package_available, "cache_clear") else None
real = import_utils._is_package_available
import_utils._is_package_available = lambda name, *a, **k: (True, window) if name == "kernels" else real(name, *a, **k)
assert import_utils.is_kernels_available(), "the clash is not set up"
from engine.transformers_guard import import_transformers
transformers = import_transformers()
assert not import_utils.is_kernels_available()
assert not transformers.utils.is_kernels_available()
config = transformers.Qwen3Config(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=4)
model = transformers.AutoModelForCausalLM.from_config(config)
import torch, kernels
print(tuple(model(torch.tensor([[1, 2]])).logits.shape), kernels.__file__.endswith("kernels/__init__.py"))
"""
    assert run_python(code) == "(1, 2, 16) True"


def test_every_use_of_transformers_goes_through_the_guard() -> None:
    for folder in ("engine", "experiments", "kernels"):
        for file in (REPOSITORY / folder).rglob("*.py"):
            if file.name == "transformers_guard.py":
                continue
            lines = [line.strip() for line in file.read_text().splitlines()]
            direct = [line for line in lines if line.startswith(("import transformers", "from transformers"))]
            assert not direct, f"{file}: {direct[0]}"
