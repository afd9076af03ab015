"""The command: `python -m experiments.run +suite=long_decode`. --help explains; conf/ holds the configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments import arguments, session

# What a request that makes no sense raises.
REFUSALS = (HydraException, OmegaConfBaseException, ValueError, OSError, ImportError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; the exit code: 0, 1 if a point failed, 2 for a senseless request."""
    cwd = Path.cwd()
    prepared = arguments.prepare(sys.argv[1:] if argv is None else argv, cwd)
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(arguments.CONF), config_name="config")
    def job(config: DictConfig) -> int:
        code = run_job(config)
        codes.append(code)
        return code

    # Hydra raises, with this set; what is shown of an error is decided here.
    full_errors = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [sys.argv[0], *prepared]
    try:
        job()
    except KeyboardInterrupt:
        codes.append(session.INTERRUPTED)
    except Exception as exception:
        # In a sweep whatever went wrong, a run that was killed, say, leaves the others' rows to be merged.
        if full_errors == "1" or not (isinstance(exception, REFUSALS) or arguments.is_multirun(prepared)):
            raise
        codes.append(session.BAD_REQUEST if isinstance(exception, REFUSALS) else session.FAILED)
        print(f"error: {explain(exception)}\n(HYDRA_FULL_ERROR=1 shows where)", file=sys.stderr)
    finally:
        if full_errors is None:
            del os.environ["HYDRA_FULL_ERROR"]
    if arguments.is_multirun(prepared) and arguments.sweep_folder(prepared).exists():
        from experiments import multirun

        codes.append(multirun.merge(arguments.sweep_folder(prepared)))
    return max(codes, default=session.OK)


def run_job(config: DictConfig) -> int:
    """One job of Hydra: in this process, or in one that a launcher started."""
    hydra_config = HydraConfig.get()
    cwd = Path(hydra_config.runtime.cwd)
    root = None
    if hydra_config.mode == RunMode.MULTIRUN:
        root = cwd / hydra_config.sweep.dir / f"{hydra_config.job.num:04d}"  # in the order of the sweep
    composed = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(composed, dict)
    overrides = [str(override) for override in hydra_config.overrides.task]
    code = session.run({str(key): value for key, value in composed.items()}, cwd, overrides, root)
    if code == session.INTERRUPTED and root is not None:
        raise KeyboardInterrupt  # the sweep's other runs are not wanted either
    return code


def explain(exception: BaseException) -> str:
    """The message, and that of what caused it where it says more."""
    text = str(exception).strip()
    if not isinstance(exception, REFUSALS):
        text = f"{type(exception).__name__}: {text}"
    cause = exception.__cause__
    if isinstance(cause, OmegaConfBaseException) and str(cause) not in text:
        text += f"\n{str(cause).strip()}"
    return text


if __name__ == "__main__":
    sys.exit(main())
