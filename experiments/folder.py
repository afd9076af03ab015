"""A run's folder: made for one run alone, or opened again to continue it, and held by one process at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from omegaconf import OmegaConf

from experiments.arguments import unique_name
from experiments.records import RECORDS, read_rows
from experiments.settings import RunOptions

# What may differ between a run and its continuation: how it is run, not what is measured.
_FREE = ("run", "plugins")


class RunFolder:
    """Paths of a run's files, and the lock that keeps other runs out; a context manager."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, options: RunOptions, suite: str, config: dict[str, Any]) -> RunFolder:
        """Make the run's folder, or with options.resume open it again (or make it, if the run never came so far).

        Raises ValueError if the folder exists and is not to be continued, was made for something else, or is in use.
        """
        if options.folder is None:
            path = Path(options.root) / suite.rpartition(".")[2] / unique_name()
            path.mkdir(parents=True, exist_ok=False)
        else:
            path = Path(options.folder)
            try:
                path.mkdir(parents=True, exist_ok=options.resume)
            except FileExistsError as error:
                raise ValueError(
                    f"run.folder {path} already exists; run.resume=true continues the run in it"
                ) from error
        lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise ValueError(f"another process is running in {path}") from error
        folder = cls(path, lock)
        try:
            folder._claim(config)
        except BaseException:
            folder.close()
            raise
        return folder

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def records(self) -> Path:
        return self.path / RECORDS

    @property
    def provenance(self) -> Path:
        return self.path / "provenance.json"

    def _claim(self, config: dict[str, Any]) -> None:
        """Write config.yaml, or compare with the one of the run that is continued."""
        if self.config.exists():
            before: Any = OmegaConf.to_container(OmegaConf.load(self.config))
            changed = _differences(before, config)
            if changed:
                raise ValueError(
                    f"{self.path} was made with another configuration; it differs in {', '.join(changed[:5])}"
                )
            return
        if self.records.exists() and read_rows(self.records):
            raise ValueError(f"{self.path} has rows but no config.yaml; start a new run")
        new = self.config.with_suffix(".new")
        new.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
        new.replace(self.config)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _differences(before: Any, after: Any, where: str = "") -> list[str]:
    """Dotted names of what differs between two configurations, less what may."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = [name for name in {**before, **after} if where or name not in _FREE]
        return [
            found
            for name in names
            for found in _differences(before.get(name), after.get(name), f"{where}{name}.")
        ]
    return [] if before == after else [where.rstrip(".")]
