"""Tensor parallelism on one host: a process for each rank, and this process, which tells them what to run.

Commands go over a socket pair to each rank, which answers every one of them; pings have a pair of their own. Whatever
goes wrong (a rank raises, is killed or hangs, or Ctrl-C interrupts a step) ends all ranks at once. There is no state on
disk, no shared memory, and no port but that of the store where the ranks meet, on the loopback device.
"""

from __future__ import annotations

import math
import os
import selectors
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from engine.config import EngineConfig
from engine.execution.device_clock import DeviceTimes
from engine.execution.model_runner import ModelRunner
from engine.execution.rank_process import RankProcess, end_processes
from engine.execution.worker import Answer, Assignment, Command, Failure, unpack_tokens
from engine.layers.attention_metadata import KernelChoice
from engine.models.checkpoint import ModelSource
from engine.models.config import check_parallel
from engine.models.decoder import Decoder
from engine.parallel.channel import MAX_MESSAGE_BYTES, encode
from engine.parallel.rendezvous import open_store
from engine.scheduling.step import SampledToken, StepInput
from kernels import decode, prefill

PING_INTERVAL_S = 1.0
"""How long an answer may take before the ranks are asked whether they live."""

SILENCE_S = 30.0
"""A rank that leaves a ping unanswered for this long hangs, however long the work may take."""

BLAME_S = 1.0
"""How long after a failed collective the other ranks have to show that one of them was the cause."""

MAX_OUTSTANDING = 4
"""Commands sent and not yet answered; a further one waits."""


class WorkerError(RuntimeError):
    """Rank `rank` failed, and all ranks have ended. A note holds the rank's own traceback, if there is one."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"rank {rank} {cause}")
        self.rank = rank


class PendingAnswer:
    """A command that all ranks have been sent, and their answers as they come in."""

    def __init__(self, workers: Workers, command: Command) -> None:
        self.workers = workers
        self.command = command
        self.values: dict[int, Any] = {}

    def wait(self) -> list[Any]:
        """The ranks' results in rank order, None where it was not asked for. Raises WorkerError if a rank is lost."""
        self.workers.wait_for(self)
        return [self.values[rank] for rank in sorted(self.values)]


class PendingStep(PendingAnswer):
    """A step under way. device_times: rank 0's, once result() has returned."""

    device_times: DeviceTimes = (None, None)

    def result(self) -> list[SampledToken]:
        """One token a row. All ranks have chosen the same: see sharded_sampling."""
        packed = self.wait()[0]
        self.device_times = packed[2]
        return unpack_tokens(packed)


class Workers:
    """Runs steps (core.Executor) on config.tensor_parallel_size processes, as ModelRunner does on one.

    failure: None, or why the ranks have ended; every call then raises. runner_class: what each rank runs.

    Raises ValueError, before any process starts, for a model that cannot be divided or devices that are not there; for
    what only a rank can find out, the same ValueError as a ModelRunner here; WorkerError if a rank fails to start.
    """

    def __init__(
        self, config: EngineConfig, source: ModelSource, *, runner_class: type = ModelRunner
    ) -> None:
        size = config.tensor_parallel_size
        check_parallel(source.config, size)
        devices = config.resolve_devices(size)
        plugins = _plugins(config)
        self.config = config
        self.device = devices[0]
        self.vocab_size = source.config.vocab_size
        self.max_model_len = config.resolve_max_model_len(source.config.max_position_embeddings)
        self.failure: BaseException | None = None
        self.ranks: list[RankProcess] = []
        self._outstanding: deque[PendingAnswer] = deque()
        self._num_commands = 0
        self._selector = selectors.DefaultSelector()
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, end_processes, self.ranks, self._owner, kill=False)
        self._store: dist.TCPStore | None = open_store()
        try:
            for rank in range(size):
                process = RankProcess(rank, size)
                self.ranks.append(process)
                self._selector.register(process.commands, selectors.EVENT_READ, process)
                self._selector.register(process.liveness, selectors.EVENT_READ, process)
            for process, device in zip(self.ranks, devices):
                assignment = Assignment(
                    config=config,
                    source=source,
                    runner_class=runner_class,
                    rank=process.rank,
                    size=size,
                    device=device,
                    shared=device.type == "cuda" and len(set(devices)) < size,
                    port=self._store.port,
                    num_threads=max(1, torch.get_num_threads() // size),
                    plugins=plugins,
                )
                self._send(process, encode(assignment))
            start = PendingAnswer(
                self, Command(0, "report")
            )  # which every rank runs unasked, once it is ready
            self._outstanding.append(start)
            self._report: dict[str, Any] = start.wait()[0]
        except BaseException as error:
            self._fail(error)
            raise

    # --- what an engine needs of a runner -------------------------------------------------------------------

    @property
    def num_kv_blocks(self) -> int:
        """KV blocks of each rank, as many as the rank with the least room can hold."""
        num_blocks: int = self._report["num_kv_blocks"]
        return num_blocks

    @property
    def kernels(self) -> KernelChoice:
        """The kernels that the ranks run."""
        return KernelChoice(
            decode=decode.get(self._report["decode_attention"]),
            prefill=prefill.get(self._report["prefill_attention"]),
            use_triton=self._report["use_triton"],
        )

    @property
    def model(self) -> Decoder:
        """Not here: RuntimeError."""
        raise RuntimeError(
            f"with tensor_parallel_size {self.config.tensor_parallel_size} the model's parts are in processes of "
            "their own; tensor_parallel_size=1 lets you look at it"
        )

    def launch(self, step: StepInput) -> PendingStep:
        """Send a step to all ranks, encoded once."""
        pending = PendingStep(self, self._new_command("launch", step))
        self._start(pending)
        return pending

    def forced_logits(
        self, token_ids: Sequence[int], num_prompt_tokens: int, block_table: Sequence[int], *, eager: bool
    ) -> torch.Tensor:
        """As ModelRunner's, on the CPU. Raises ValueError for logits beyond what a message can hold."""
        num_rows = len(token_ids) - num_prompt_tokens
        if 4 * num_rows * self.vocab_size > MAX_MESSAGE_BYTES // 2:
            raise ValueError(
                f"forced_logits of {num_rows} tokens are {4 * num_rows * self.vocab_size} bytes; with "
                f"tensor_parallel_size > 1 the limit is {MAX_MESSAGE_BYTES // 2}"
            )
        logits = self.call("forced_logits_on_host", token_ids, num_prompt_tokens, block_table, eager=eager)[0]
        return torch.from_numpy(logits)

    def report(self) -> list[dict[str, Any]]:
        """Every rank's ModelRunner.report() as it is now, in rank order."""
        return self.call("report", all_answer=True)

    def capture_at_once(self, at_once: bool) -> None:
        """See ModelRunner: of every rank."""
        self.call("capture_at_once", at_once)

    def start_collective_timer(self) -> None:
        """As ModelRunner's, on every rank."""
        self.call("start_collective_timer")

    def stop_collective_timer(self) -> tuple[float, float]:
        """Rank 0's answer."""
        seconds, elapsed_s = self.call("stop_collective_timer")[0]
        return seconds, elapsed_s

    def start_trace(self) -> None:
        """As ModelRunner's, on every rank."""
        self.call("start_trace")

    def stop_trace(self, path: str) -> None:
        """As ModelRunner's, on every rank."""
        self.call("stop_trace", path)

    def call(self, method: str, *arguments: Any, all_answer: bool = False, **options: Any) -> list[Any]:
        """Call a method of every rank's runner. Results in rank order, None but for rank 0's unless all_answer."""
        pending = PendingAnswer(self, self._new_command(method, *arguments, all_answer=all_answer, **options))
        self._start(pending)
        return pending.wait()

    def close(self) -> None:
        """End the processes and wait until they are gone. Calling it again does nothing."""
        self._fail(RuntimeError("the engine is closed"), kill=False)

    # --- commands and answers -------------------------------------------------------------------------------

    def _new_command(self, method: str, *arguments: Any, all_answer: bool = False, **options: Any) -> Command:
        self._num_commands += 1
        return Command(self._num_commands, method, arguments, options, all_answer)

    def _start(self, pending: PendingAnswer) -> None:
        """Send a command to all ranks, when the oldest one under way has made room for it."""
        self._refuse_after_failure()
        message = encode(pending.command)
        if len(self._outstanding) >= MAX_OUTSTANDING:
            self.wait_for(self._outstanding[0])
        try:
            self._outstanding.append(pending)
            for process in self.ranks:
                self._send(process, message)
        except BaseException as error:
            self._fail(error)
            raise

    def _send(self, process: RankProcess, message: bytes) -> None:
        try:
            process.commands.send(message, self.config.worker_timeout_s)
        except TimeoutError as error:
            cause = f"hangs: it has taken no command for {self.config.worker_timeout_s:g} s"
            raise WorkerError(process.rank, cause) from error
        except OSError as error:
            raise WorkerError(process.rank, process.how_it_ended()) from error

    def wait_for(self, pending: PendingAnswer) -> None:
        """Take answers until all ranks have answered this command."""
        if len(pending.values) == len(self.ranks):
            return
        self._refuse_after_failure()
        start = last_ping = time.monotonic()
        # Loading takes what it takes, as long as the ranks live.
        limit_s = self.config.worker_timeout_s if pending.command.number else math.inf
        try:
            while len(pending.values) < len(self.ranks):
                self._take_messages(PING_INTERVAL_S)
                now = time.monotonic()
                if now - last_ping >= PING_INTERVAL_S:
                    self._check_life(now)
                    last_ping = now
                if now - start > limit_s:
                    raise self._overdue(pending)
        except BaseException as error:
            self._fail(error)
            raise

    def _take_messages(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            process: RankProcess = key.data
            failure = self._take_message(process, key.fileobj)
            if failure is not None:
                raise self._blame(process, failure)

    def _take_message(self, process: RankProcess, channel: Any) -> Failure | None:
        """Take one message; the failure, if it says so. Raises WorkerError if the process has ended."""
        try:
            if channel is process.liveness:
                process.take_pong()
                return None
            message = process.commands.receive(self.config.worker_timeout_s)
        except TimeoutError as error:
            raise WorkerError(process.rank, "hangs: it stopped in the middle of an answer") from error
        except (EOFError, OSError) as error:
            raise WorkerError(process.rank, process.how_it_ended()) from error
        if isinstance(message, Failure):
            return message
        self._take_answer(process.rank, message)
        return None

    def _take_answer(self, rank: int, answer: Answer) -> None:
        pending = next((p for p in self._outstanding if rank not in p.values), None)
        if pending is None or answer.number != pending.command.number:
            raise WorkerError(rank, f"answered command {answer.number}, which is not its next one")
        pending.values[rank] = answer.value
        while self._outstanding and len(self._outstanding[0].values) == len(self.ranks):
            self._outstanding.popleft()

    # --- faults ---------------------------------------------------------------------------------------------

    def _blame(self, process: RankProcess, failure: Failure) -> Exception:
        """The error to raise when a rank reports a failure.

        A collective that failed is the fault of a rank that died or raised something else: that rank has a moment to
        show itself.
        """
        deadline = time.monotonic() + BLAME_S
        while failure.in_collective and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                try:
                    other = self._take_message(key.data, key.fileobj)
                except WorkerError as error:
                    return error
                if other is not None and not other.in_collective:
                    process, failure = key.data, other
        refused = failure.is_refusal and self._is_starting
        cause = ValueError(failure.text) if refused else WorkerError(process.rank, f"failed: {failure.text}")
        cause.add_note(f"On rank {process.rank}:\n{failure.traceback}")
        return cause

    @property
    def _is_starting(self) -> bool:
        return bool(self._outstanding) and self._outstanding[0].command.number == 0

    def _check_life(self, now: float) -> None:
        """Ask every rank where it is, and raise WorkerError for one that has left the last question unanswered."""
        for process in self.ranks:
            process.ping()
            self._refuse_silence(process, now, SILENCE_S)

    def _refuse_silence(self, process: RankProcess, now: float, limit_s: float) -> None:
        silence_s = 0.0 if process.asked_at is None else now - process.asked_at
        if silence_s > limit_s:
            raise WorkerError(
                process.rank,
                f"(pid {process.pid}) hangs: no sign of life for {silence_s:.0f} s; it was at "
                f"{process.position.text}",
            )

    def _overdue(self, pending: PendingAnswer) -> WorkerError:
        """The error of a command that takes too long: the fault of a rank that is not waiting for the others."""
        for process in self.ranks:
            self._refuse_silence(process, time.monotonic(), PING_INTERVAL_S)
        late = [process for process in self.ranks if process.rank not in pending.values]
        busy = [process for process in late if not process.position.in_collective]
        places = "; ".join(f"rank {process.rank} is at {process.position.text}" for process in self.ranks)
        return WorkerError(
            (busy or late)[0].rank,
            f"hangs: {pending.command.method} was not done within {self.config.worker_timeout_s:g} s "
            f"(worker_timeout_s); {places}",
        )

    def _refuse_after_failure(self) -> None:
        if self.failure is not None:
            raise RuntimeError(f"the ranks have ended: {self.failure}") from self.failure

    def _fail(self, error: BaseException, *, kill: bool = True) -> None:
        """End everything, and remember why."""
        if self.failure is None:
            is_cause = isinstance(error, Exception)
            self.failure = error if is_cause else RuntimeError(f"interrupted by {type(error).__name__}")
        self._outstanding.clear()
        self._selector.close()
        if self._finalizer.detach() is not None:
            end_processes(self.ranks, self._owner, kill=kill)
        self._store = None  # its port is free again


def _plugins(config: EngineConfig) -> dict[str, Any]:
    """The chosen kernels that do not come with this package, to be registered in the ranks too.

    Raises ValueError for one that a rank could not import. What is wrong with a name, the ranks will say.
    """
    chosen = {"decode": (decode, config.decode_attention), "prefill": (prefill, config.prefill_attention)}
    plugins = {}
    for kind, (registry, name) in chosen.items():
        if name not in registry.names():
            continue
        kernel = registry.get(name)
        module = type(kernel).__module__
        if module == "__main__":
            raise ValueError(
                f"{kind}_attention {name!r} is defined in the script that runs; with tensor_parallel_size > 1 it must "
                "be in a module, which the ranks can import"
            )
        if not module.startswith("kernels."):
            plugins[kind] = kernel
    return plugins
