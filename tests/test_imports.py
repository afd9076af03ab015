"""Imports run one way: experiments -> engine -> kernels, and a few packages promise more."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

FORBIDDEN = {
    "kernels": ("engine", "experiments", "transformers", "hydra", "omegaconf", "pandas"),
    "engine": ("experiments", "hydra", "omegaconf", "pandas", "matplotlib"),
    "engine/parallel": ("engine", "kernels", "experiments"),
    "engine/scheduling": ("torch", "kernels", "engine.execution", "engine.layers", "engine.models"),
    "engine/layers": ("engine.execution", "engine.scheduling", "engine.models"),
    "engine/models": ("engine.execution", "engine.scheduling"),
}
ALLOWED = {"engine/parallel": ("engine.parallel",)}


def imports_of(file: Path) -> Iterator[str]:
    """Absolute names of all modules that a file imports, at any depth."""
    package = file.relative_to(REPOSITORY).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_run_one_way(folder: str) -> None:
    files = sorted((REPOSITORY / folder).rglob("*.py"))
    assert files
    for file in files:
        for module in imports_of(file):
            wrong = is_within(module, FORBIDDEN[folder]) and not is_within(module, ALLOWED.get(folder, ()))
            assert not wrong, f"{file.relative_to(REPOSITORY)} imports {module}"


def test_the_check_sees_every_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.REPOSITORY", tmp_path)
    file = tmp_path / "kernels" / "decode" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "def f():\n    import engine.core\nfrom . import y\nfrom ..norm import z\nfrom engine import llm\n"
    )
    assert set(imports_of(file)) == {
        "engine.core",
        *("kernels.decode", "kernels.decode.y"),
        *("kernels.norm", "kernels.norm.z"),
        *("engine", "engine.llm"),
    }


def test_the_scheduler_runs_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import engine.scheduling.scheduler"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


def test_suites_are_looked_up_without_torch() -> None:
    """Tables and reports need no more, and what imports Triton before the device is chosen decides how kernels run."""
    code = "import sys; sys.modules['torch'] = sys.modules['triton'] = None\nfrom experiments import suites\n"
    code += "for name in suites.names():\n    suites.get(name)"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
