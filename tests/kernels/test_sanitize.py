"""The sanitizer's driver: every launch is right, and every Triton kernel of the package is among them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kernels import decode
from kernels.decode.launch import TritonDecodeKernel
from kernels.triton_support import INTERPRETING
from tests.kernels import sanitize

KERNELS = Path(sanitize.__file__).resolve().parents[2] / "kernels"
# Launched by name with a grid, or handed to a method that does.
LAUNCH = re.compile(r"\b(_\w+)\[(?:\(|grid\])|_launch\(\s*(_\w+kernel)\b")
NOT_HERE = {"_read"}  # of ceilings.py: a measurement


def launched_in_source() -> set[str]:
    sources = [path.read_text() for path in KERNELS.rglob("*.py")]
    return {a or b for source in sources for a, b in LAUNCH.findall(source)} - NOT_HERE


@pytest.mark.skipif(not INTERPRETING, reason="launches are counted in Triton's interpreter")
def test_all_is_right_and_every_kernel_is_launched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from triton.runtime.interpreter import GridExecutor

    launched: set[str] = set()
    launch = GridExecutor.__call__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.add(self.fn.__name__)
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", recorded)
    assert sanitize.main([]) == 0
    expected = launched_in_source()
    assert len(expected) > 15
    assert launched == expected
    printed = capsys.readouterr().out
    for name in decode.names():
        if isinstance(decode.get(name), TritonDecodeKernel):
            assert f"decode {name}: ok" in printed
    assert ", 0 wrong" in printed


def test_a_choice_by_part_of_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["silu", "write_kv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if ": ok" in line] == [
        "elementwise silu_mul",
        "elementwise write_kv",
    ]
    assert sanitize.main(["no such kernel"]) == 2
    assert "nothing is called no such kernel" in capsys.readouterr().out
    assert sanitize.main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines() == list(sanitize.all_runs())


def test_a_wrong_result_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "all_runs", lambda: {"good": lambda: 0.0, "bad": lambda: float("nan")})
    assert sanitize.main(["good"]) == 0
    assert sanitize.main([]) == 1
