"""The notebooks run as they are, on the runs under results/, with the kernel that every machine has."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"

# How many figures a notebook shows at least: a notebook of tables alone has lost something.
FIGURES = {
    "attribution": 3,
    "bring_your_own_kernel": 1,
    "engine_and_suites": 3,
    "kernels_and_roofline": 4,
}


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def without_ports(folder: Path) -> Config:
    """Let the kernel listen on sockets in a folder: a free port that it is told of may be taken when it listens."""
    return Config({"KernelManager": {"transport": "ipc", "connection_file": str(folder / "kernel.json")}})


def test_every_notebook_is_known_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_a_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    # Another working folder than the notebook's: what it reads it finds by itself.
    resources = {"metadata": {"path": str(tmp_path)}}
    with TemporaryDirectory() as sockets:
        client = NotebookClient(
            notebook,
            timeout=300,
            startup_timeout=300,
            kernel_name="python3",
            resources=resources,
            config=without_ports(Path(sockets)),
        )
        client.execute()
    images = [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert len(images) >= FIGURES[name]
    shown = "".join(output.get("text", "") for output in outputs(notebook) if output.output_type == "stream")
    assert "Warning" not in shown
    if name == "bring_your_own_kernel":
        assert re.search(r"cold +blockwise +ok", shown)


@pytest.mark.parametrize("name", FIGURES)
def test_a_notebook_as_committed_was_run_without_an_error(name: str) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata["kernelspec"]["name"] == "python3"
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
