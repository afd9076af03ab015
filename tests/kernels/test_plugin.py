"""A decode kernel of another (test) package joins through the entry-point group, as an installed one would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent / "example_plugin"

SCRIPT = """
import pytest, torch
from kernels import decode
from tests.kernels.decode_cases import expected, make_case, worst_error

assert decode.names()[-2:] == ["broken_example", "example_row_by_row"], decode.names()
kernel = decode.get("example_row_by_row")
case = make_case([40, 0, 7])
kernel(*case.inputs, out=case.out, **kernel.plan(case.problem))
assert worst_error(case.out, expected(case)) < 1e-5
with pytest.raises(decode.UnknownKernelError, match="broken_example.*Missing"):
    decode.get("broken_example")
with pytest.warns(UserWarning, match="broken_example"):
    assert "example_row_by_row" in decode.available("cpu")
print("joined")
"""


def test_a_kernel_of_another_package() -> None:
    root = PACKAGE.parents[2]
    # In a process of its own: a registered kernel stays for the life of the process.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE), str(root)])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "joined", done.stderr
