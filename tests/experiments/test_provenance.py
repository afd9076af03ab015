"""What a run says of where it was made."""

from __future__ import annotations

import subprocess
from pathlib import Path

from experiments.provenance import git_state


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_changed_files_are_named_in_full(tmp_path: Path) -> None:
    """The first line of git's status begins with a blank where a file is changed, but not added."""
    git(tmp_path, "init", "-b", "main")
    for name in ("kernels.py", "zebra.py"):
        (tmp_path / name).write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    clean = git_state(tmp_path)
    assert (clean["branch"], clean["dirty"], clean["changed"]) == ("main", False, [])
    (tmp_path / "kernels.py").write_text("two")
    (tmp_path / "new.py").write_text("three")
    changed = git_state(tmp_path)
    assert (changed["commit"], changed["dirty"]) == (clean["commit"], True)
    assert changed["changed"] == ["kernels.py", "new.py"]


def test_no_checkout_no_commit(tmp_path: Path) -> None:
    assert set(git_state(tmp_path).values()) == {None}
