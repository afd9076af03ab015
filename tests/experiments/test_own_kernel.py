"""The README's guide to a kernel of one's own, exactly as printed: from the file to its row in the table."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import experiments
from experiments import suites

ROOT = Path(__file__).resolve().parents[2]


def guide() -> tuple[str, list[str]]:
    """The code and the commands under the README's heading."""
    text = (ROOT / "README.md").read_text().split("### Add your own kernel", 1)[1]
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    commands = re.search(r"```bash\n(.*?)```", text, re.DOTALL)
    assert code is not None
    assert commands is not None
    return code[1], [line.partition("#")[0].strip() for line in commands[1].splitlines() if line.strip()]


def test_the_guide_is_short() -> None:
    code, commands = guide()
    assert len(code.splitlines()) + len(commands) <= 40


@pytest.mark.parametrize("number", [0, 1])
def test_the_guide_works_as_printed(tmp_path: Path, number: int) -> None:
    code, commands = guide()
    (tmp_path / "my_kernel.py").write_text(code)
    typed = shlex.split(commands[number])
    assert typed[:3] == ["python", "-m", "experiments.run"]
    suite = next(word.partition("=")[2] for word in typed if word.startswith("+suite="))
    smaller = [
        "bench.context_lens=[64]",
        "bench.batch_sizes=[2]",
        "size.rounds=2",
        "run.plots=false",
        "run.timeout_s=300",
        "device=cpu",
    ]
    if suite == "attribution":
        smaller += ["bench.engine_passes=1", "bench.rounds=2"]
    done = subprocess.run(
        [sys.executable, *typed[1:], *smaller],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    df = experiments.load(tmp_path / "outputs")
    mine = df[df["variant"] == "mine"]
    assert set(mine["status"]) == {"ok"}
    assert set(mine["level"]) == ({"kernel"} if suite == "decode_kernel" else {"kernel", "step", "workload"})
    assert "mine" in done.stdout
    if suite == "decode_kernel":
        assert {point for line in drawn(df, "mine") for point in line} == set(points(df, "mine"))


def drawn(df: pd.DataFrame, variant: str) -> list[list[tuple[float, float]]]:
    """The points of a variant's lines in the latency plot: those in its colour."""
    from matplotlib import pyplot as plt

    from experiments.plots import COLOURS

    figures = suites.get("decode_kernel").figures(df)
    for figure in figures.values():
        plt.close(figure)
    figure = figures["kernel_latency"]
    colour = COLOURS[list(dict.fromkeys(df["variant"])).index(variant)]
    lines = [
        container.lines[0]
        for axes in figure.axes
        for container in axes.containers
        if container.lines[0].get_color() == colour
    ]
    return [list(zip(*(values.tolist() for values in line.get_data()))) for line in lines]


def points(df: pd.DataFrame, variant: str) -> list[tuple[float, float]]:
    """The same from the table: context length and median time."""
    table = suites.get("decode_kernel").summary(df)
    of_variant = table[table["variant"] == variant]
    return list(zip(of_variant["context_len"].astype(float), of_variant["time_us"]))
