"""Running the fake suite: in this process, or by the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import session

ROOT = Path(__file__).resolve().parents[2]
SUITE = "tests.experiments.fake_suite"


def composed(
    points: Sequence[str], *, root: Path, bench: dict[str, Any] | None = None, **run: Any
) -> dict[str, Any]:
    """What Hydra would compose for a run of the fake suite."""
    options = {
        "root": str(root),
        "folder": None,
        "resume": False,
        "retry_failed": False,
        "isolate": False,
        "timeout_s": None,
        "plots": False,
    }
    return {
        "device": "cpu",
        "seed": 0,
        "plugins": [],
        "model": {"name": "auto", "path": None, "load_format": None, "dtype": "auto", "config": None},
        "engine": {},
        "attention": {"torch": {"decode": "torch"}},
        "size": {"name": "smoke", "rounds": 3, "samples": 3, "timeout_s": 300},
        "bench": {"suite": SUITE, "points": list(points), **(bench or {})},
        "sizes": {"smoke": {}},
        "run": options | run,
    }


def run(points: Sequence[str], *, root: Path, **options: Any) -> int:
    """The exit code of a run in this process."""
    return session.run(composed(points, root=root, **options), ROOT, ["a=b"])


def only_folder(root: Path) -> Path:
    """The folder of the only run under root."""
    (folder,) = [path.parent for path in root.rglob("config.yaml")]
    return folder


def command(points: Sequence[str], *, root: Path, bench: str = "", more: Sequence[str] = ()) -> list[str]:
    """The command line of a run of the fake suite, without plots."""
    return [
        sys.executable,
        "-m",
        "experiments.run",
        "device=cpu",
        f"bench={{suite: {SUITE}, rows: 3, points: [{','.join(points)}]{bench}}}",
        "+sizes.smoke={}",
        f"run.root={root}",
        "run.plots=false",
        "attention=torch",
        *more,
    ]
