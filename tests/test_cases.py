"""The table of tests/README.md: every case has a test, and every test it names exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
CASES = [
    "P1",
    "P2",
    "P3",
    "P4",
    "P6",
    "P7",
    "P8",
    "P10",
    "S2",
    "S3",
    "S5",
    "S6",
    "G1",
    "G4",
    "G5",
    "K5",
    "K7",
    "K8",
    "K9",
    "K10",
    "K11",
    "K12",
    "D1",
    "D3",
    "D4",
    "E1",
    "E2",
    "E3",
    "E5",
    "E6",
    "F1",
    "F4",
    "F5",
    "F6",
    "F7",
    "F8",
    "T1",
    "T2",
    "T3",
    "W2",
    "W3",
    "W4",
    "W5",
    "W6",
    "W7",
    "W8",
    "W9",
    "W10",
    "W11",
]


def test_the_table_of_cases_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| ([A-Z]\d+) \|(.*)$", (TESTS / "README.md").read_text(), re.MULTILINE)
    assert [case for case, _ in rows] == CASES
    for case, row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, f"{case} has no test"
        for file, test in named:
            source = (TESTS / file).read_text()
            assert re.search(rf"^def {test}\(", source, re.MULTILINE), f"{case}: {file} has no {test}"
