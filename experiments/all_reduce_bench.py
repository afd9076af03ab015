"""All-reduces of decode steps' tensors, method against method in CUDA graphs, a process for each rank.

Run by `python -m experiments.two_gpus all_reduce --tp N`. Every method has to give the right sum, and the same bits on
all ranks, eagerly and replayed, before it is timed. Those on peer memory never use NVLink multicast.
"""

from __future__ import annotations

import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from engine.config import EngineConfig
from engine.parallel.group import ParallelGroup
from engine.parallel.peer_memory import NO_MULTICAST, PeerMemory, share_memory
from engine.parallel.rendezvous import join_store, open_store
from experiments.records import read_rows
from experiments.stats import median_interval, paired_ratio, winner
from kernels.all_reduce import PeerBuffers, buffer_bytes, one_shot_all_reduce
from kernels.timing import Timing, time_interleaved
from kernels.triton_support import triton_unavailable

ROWS = (1, 2, 4, 8, 16, 64, 256, 1024)
HIDDEN_SIZES = (1024, 4096, 5120)
DTYPE = torch.bfloat16
METHODS = {
    "torch": "torch.distributed's, over NCCL or gloo",
    "one_shot": "kernels/all_reduce.py",
    "torch_one_shot": "a copy into peer memory, then symm_mem::one_shot_all_reduce_out",
    "torch_two_shot": "a copy into peer memory, then symm_mem::two_shot_all_reduce_out",
    "torch_one_shot_shared": "symm_mem::one_shot_all_reduce_out of what is in peer memory already",
    "torch_two_shot_shared": "symm_mem::two_shot_all_reduce_, in peer memory from first to last",
}
"""torch's one_shot_all_reduce_copy is left out: some versions signal before all threads of a block have copied."""

ROUNDS, SAMPLES = 8, 3
CHECKED_TURNS = 5
TIMEOUT_S = 480.0


@dataclass(frozen=True)
class Contender:
    """run() sums over ranks what is in x, and returns where the sum is."""

    x: Tensor
    run: Callable[[], Tensor]


def measure(device: str, size: int, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """rows, a method and shape each; medians, microseconds by shape and method; winners, by shape, None if not shown.

    ended_early: None, or why the ranks did: the rows are those of the shapes before.
    """
    devices = EngineConfig(device=device).resolve_devices(size)
    shapes = [(rows, hidden) for hidden in HIDDEN_SIZES for rows in ROWS]
    if devices[0].type == "cpu":  # to see that it runs
        shapes = shapes[:2]
    store = open_store()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.touch()
        ranks = mp.start_processes(
            _run_rank, args=(store.port, devices, shapes, file), nprocs=size, join=False
        )
        ended_early = _wait(ranks, timeout_s)
        rows = read_rows(file, needed=())
    by_shape: dict[str, dict[str, Sequence[float]]] = {}
    for row in rows:
        if row["status"] == "ok":
            times = by_shape.setdefault(f"{row['rows']} x {row['hidden_size']}", {})
            times[row["variant"]] = [median(samples) for samples in row["samples_us"]]
    return {
        "methods": METHODS,
        "ended_early": ended_early,
        "medians": {shape: {name: median(t) for name, t in each.items()} for shape, each in by_shape.items()},
        "winners": {shape: winner(times) for shape, times in by_shape.items()},
        "rows": rows,
    }


def _wait(ranks: Any, timeout_s: float) -> str | None:
    """What ended the ranks, if they did not end well. None of them is left."""
    deadline = time.monotonic() + timeout_s
    try:
        while not ranks.join(timeout=1.0):
            if time.monotonic() > deadline:
                return f"not done within {timeout_s:g} s"
    except Exception as error:  # what a rank raised, or how it ended
        return str(error)
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
    return None


# --- in a rank's process ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """One of the ranks, and the memory that it shares, or why it shares none: the same reason on every rank."""

    group: ParallelGroup
    device: torch.device
    buffers: PeerBuffers | str
    memory: PeerMemory | str

    @classmethod
    def join(cls, rank: int, port: int, devices: Sequence[torch.device], max_bytes: int) -> Rank:
        device, size = devices[rank], len(devices)
        group = join_store(port, rank, size, device, shared=len(set(devices)) < size)
        ours, torchs = (share_memory(group, device, count) for count in (buffer_bytes(max_bytes), max_bytes))
        buffers: PeerBuffers | str
        if isinstance(ours, PeerMemory):
            buffers = triton_unavailable(device) or PeerBuffers.at(
                ours.addresses, rank, max_bytes, device, ours
            )
        else:
            buffers = ours
        return cls(group, device, buffers, torchs)

    def contender(self, name: str, shape: tuple[int, int]) -> Contender | str:
        """A method of METHODS at a shape, or why there is none."""
        x = torch.empty(shape, dtype=DTYPE, device=self.device)
        if name == "torch":
            return Contender(x, lambda: self.group.all_reduce(x))
        if name == "one_shot":
            buffers = self.buffers
            return (
                buffers if isinstance(buffers, str) else Contender(x, lambda: one_shot_all_reduce(x, buffers))
            )
        if isinstance(self.memory, str):
            return self.memory
        if name.startswith("torch_two_shot") and self.group.size not in (2, 4, 8):
            return f"torch's two-shot kernels are for 2, 4 and 8 ranks, not {self.group.size}"
        assert dist.group.WORLD is not None
        ops, group_name = torch.ops.symm_mem, dist.group.WORLD.group_name
        shared = self.memory.buffer[: x.nbytes].view(DTYPE).view(shape)

        def copied(op: Callable[..., Tensor]) -> Tensor:
            shared.copy_(x)
            return op(shared, "sum", group_name, x)

        runs: dict[str, Contender] = {
            "torch_one_shot": Contender(x, lambda: copied(ops.one_shot_all_reduce_out)),
            "torch_two_shot": Contender(x, lambda: copied(ops.two_shot_all_reduce_out)),
            "torch_one_shot_shared": Contender(
                shared, lambda: ops.one_shot_all_reduce_out(shared, "sum", group_name, x)
            ),
            "torch_two_shot_shared": Contender(
                shared, lambda: ops.two_shot_all_reduce_(shared, "sum", group_name)
            ),
        }
        return runs[name]

    def failure(self, contender: Contender) -> dict[str, str] | None:
        """Status and error of a method that does not sum right, eagerly or replayed; the same on every rank."""
        found: dict[str, str] = {}
        try:
            if wrong := self._wrong_sum(contender, contender.run):
                found = {"status": "incorrect", "error": wrong}
            elif self.device.type == "cuda" and (wrong := self._wrong_sum(contender, _captured(contender))):
                found = {"status": "incorrect", "error": f"in a graph: {wrong}"}
        except RuntimeError as error:
            found = {"status": "error", "error": str(error).splitlines()[0]}
        texts = self.group.gather_texts(json.dumps(found) if found else "", self.device)
        return next((json.loads(text) for text in texts if text), None)

    def _wrong_sum(self, contender: Contender, run: Callable[[], Tensor]) -> str | None:
        wrong = None
        for turn in range(CHECKED_TURNS):  # to the end on every rank: the others wait for this one
            generator = torch.Generator(self.device).manual_seed(1000 * turn + self.group.rank)
            x = contender.x
            x.copy_(torch.randn(x.shape, generator=generator, device=self.device))
            parts = self.group.all_gather(x[None], dim=0).double()
            result = run().clone()
            # Each addition rounds to bf16, by half a unit in the last of 8 bits at most.
            bound = 2**-8 * (self.group.size - 1) * parts.abs().sum(dim=0)
            error = (result.double() - parts.sum(dim=0)).abs()
            results = self.group.all_gather(result[None].view(torch.uint8), dim=0)
            if not bool((error <= bound).all()):  # a NaN is not, either
                wrong = f"turn {turn}: off by {float(error.max()):.3g}"
            elif not bool((results == results[0]).all()):
                wrong = f"turn {turn}: ranks have different bits"
        return wrong

    def slowest(self, timings: Sequence[Timing]) -> list[list[float]]:
        """[rounds][samples], microseconds: of each sample the time of the rank that took longest."""
        own = torch.tensor([each.samples_us for each in timings], dtype=torch.float64, device=self.device)
        samples: list[list[float]] = self.group.all_gather(own[None], dim=0).amax(dim=0).tolist()
        return samples


def _captured(contender: Contender) -> Callable[[], Tensor]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # thread_local: NCCL's own thread may look at events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = contender.run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _run_rank(
    rank: int, port: int, devices: Sequence[torch.device], shapes: Sequence[tuple[int, int]], file: Path
) -> None:
    """Check and time every method at every shape. Rank 0 appends the rows to the file."""
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # how the parent's end is told: at once, also in a wait for the device
    os.environ.update(NO_MULTICAST)
    torch.set_num_threads(1)
    if devices[rank].type == "cuda":
        torch.cuda.set_device(devices[rank])
    largest = max(rows * hidden for rows, hidden in shapes) * DTYPE.itemsize
    own = Rank.join(rank, port, devices, largest)
    for shape in shapes:
        found = _measure_shape(own, shape)
        if rank == 0:
            with file.open("a") as lines:
                lines.writelines(json.dumps(row) + "\n" for row in found)
    dist.destroy_process_group()


def _measure_shape(own: Rank, shape: tuple[int, int]) -> list[dict[str, Any]]:
    contenders: dict[str, Contender] = {}
    failures: dict[str, dict[str, str]] = {}
    for name in METHODS:
        contender = own.contender(name, shape)
        if isinstance(contender, str):
            failures[name] = {"status": "unsupported", "error": contender}
        elif failure := own.failure(contender):
            failures[name] = failure
        else:
            contenders[name] = contender
            contender.x.zero_()  # which it stays, however often it is summed in place
    timings = time_interleaved(
        {name: [contender.run] for name, contender in contenders.items()},
        device=own.device,
        cache_state="hot",
        rounds=ROUNDS,
        samples=SAMPLES,
        agree=lambda times: own.group.smallest(times, own.device),
    )
    samples = {name: own.slowest(rounds) for name, rounds in timings.items()}
    common = {"operation": "all_reduce", "tp": own.group.size, "rows": shape[0], "hidden_size": shape[1]}
    common |= {"dtype": str(DTYPE).removeprefix("torch."), "bytes": math.prod(shape) * DTYPE.itemsize}
    rows = []
    for name in METHODS:
        row = common | {"variant": name}
        if name in failures:
            rows.append(row | failures[name])
        else:
            method = {"timing_method": timings[name][0].method, "cache_state": "hot"}
            rows.append(row | _columns(samples, name) | method)
    return rows


def _columns(samples: Mapping[str, list[list[float]]], name: str) -> dict[str, Any]:
    """A timed method's columns: its own, and its ratio to torch's, paired by rounds."""
    medians = {each: [median(times) for times in rounds] for each, rounds in samples.items()}
    own = median_interval(medians[name])
    columns: dict[str, Any] = {"status": "ok", "time_us": own.value}
    columns |= {"time_us_low": own.low, "time_us_high": own.high, "samples_us": samples[name]}
    if "torch" in medians:
        ratio = paired_ratio(medians[name], medians["torch"])
        columns |= {"ratio_to_torch": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high}
    return columns
