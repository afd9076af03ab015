"""The process of an isolated point: `python -m experiments.isolated REQUEST ANSWER`. See execution.run_isolated."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from pathlib import Path


def main(request_path: Path, answer_path: Path) -> None:
    """Read what to measure, measure it, and write the rows; a crash leaves no answer."""
    request = json.loads(request_path.read_text())
    from experiments.devices import choose_interpreter, device_name

    choose_interpreter(request["config"]["device"])
    import torch

    from experiments import suites
    from experiments.execution import run_here
    from experiments.roofline import Ceilings
    from experiments.settings import Settings

    settings = Settings.parse(request["config"])
    for plugin in settings.plugins:
        importlib.import_module(plugin)
    suite = suites.get(settings.suite)
    device = torch.device(settings.device)
    context = suites.PointContext(
        settings=settings,
        device=device,
        ceilings=Ceilings(**request["ceilings"]),
        run_id=request["run_id"],
        device_name=device_name(device),
        columns=suite.columns,
    )
    result = run_here(suite, suites.Point(settings.suite, request["params"], request["on_engine"]), context)
    new = answer_path.with_suffix(".new")
    new.write_text(json.dumps(result.rows))
    new.replace(answer_path)


def end_with_parent() -> None:
    """Wait for the end of the parent's side of our standard input, then end with everything that we started."""
    os.read(0, 1)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
