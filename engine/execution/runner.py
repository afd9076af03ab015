"""Who runs an engine's steps: this process, processes of its own, or this process as one of a launcher's."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.execution.model_runner import ModelRunner
from engine.execution.workers import Workers
from engine.models.checkpoint import ModelSource
from engine.models.config import check_parallel
from engine.parallel.group import ParallelGroup
from engine.parallel.rendezvous import ExternalRank

Runner = ModelRunner | Workers


def open_runner(config: EngineConfig, source: ModelSource) -> Runner:
    """A runner that is ready for steps; the caller closes it.

    With tensor_parallel_size > 1 it starts a process for each rank. Under a launcher that has started several processes
    already, such as torchrun, each of them is one rank: all make the same engine and the same calls on it, and all
    get the same results.

    Raises ValueError for a model that the ranks cannot divide, for devices that are not there, and for what ModelRunner
    refuses; WorkerError if a rank fails to start.
    """
    size = config.tensor_parallel_size
    check_parallel(source.config, size)
    external = ExternalRank.from_environment() if size > 1 else None
    if size > 1 and external is None:
        return Workers(config, source)
    if external is None:
        device, group = config.resolve_device(), ParallelGroup.single()
    else:
        if external.size != size:
            raise ValueError(
                f"tensor_parallel_size is {size}, but the launcher has started {external.size} processes (WORLD_SIZE)"
            )
        devices = config.resolve_devices(external.local_size)
        device = devices[external.local_rank]
        group = external.join(device, shared=len(set(devices)) < len(devices))
    runner = ModelRunner(config, source, device=device, group=group)
    runner.prepare()
    return runner
