"""The process of one rank: `python -m engine.execution.worker RANK COMMANDS_FD LIVENESS_FD`, started by Workers.

It builds its part of the model, then runs the commands that arrive, in order, and answers each one once.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.parallel.channel import Channel, encode
from engine.scheduling.step import SampledToken

if TYPE_CHECKING:
    import torch

    from engine.config import EngineConfig
    from engine.models.checkpoint import ModelSource

_OTHERS = ("<", *{path for name, path in sysconfig.get_paths().items() if "lib" in name})
"""How the files of libraries, and what is no file, begin."""

_WHERE_RANKS_WAIT = ("parallel/group.py", "parallel/peer_memory.py")
"""Files whose functions return when the other ranks have called them too."""

PackedTokens = tuple[list[int | None], dict[int, dict[int, float]], tuple[float | None, float | None]]
"""The token of each row, the log-probabilities of the rows that asked for them, and the step's device_times."""


@dataclass(frozen=True)
class Assignment:
    """What a rank is to build: the first message it gets.

    runner_class: called as ModelRunner is. shared: several ranks have this device. port: of the store where the ranks
    meet. plugins: the kernels of other packages that the engine runs, "decode" and "prefill".
    """

    config: EngineConfig
    source: ModelSource
    runner_class: type
    rank: int
    size: int
    device: torch.device
    shared: bool
    port: int
    num_threads: int
    plugins: Mapping[str, Any]


@dataclass(frozen=True)
class Command:
    """A call of the runner's method. all_answer: every rank sends its result, not only rank 0."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    all_answer: bool = False


@dataclass(frozen=True)
class Answer:
    """Command `number` is done on this rank. value: its result, where that was asked for."""

    number: int
    value: Any = None


@dataclass(frozen=True)
class Failure:
    """An exception, as text. in_collective: it may only say that another rank has gone. is_refusal: a ValueError."""

    text: str
    traceback: str
    in_collective: bool
    is_refusal: bool

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        from engine.parallel.group import CollectiveError

        is_refusal = isinstance(error, ValueError)
        return cls(
            text=str(error) if is_refusal else f"{type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
            in_collective=isinstance(error, CollectiveError),
            is_refusal=is_refusal,
        )


@dataclass(frozen=True)
class Position:
    """Where a rank's main thread is. in_collective: waiting for the other ranks, perhaps."""

    text: str
    in_collective: bool


def main(rank: int, commands: Channel, liveness: Channel) -> None:
    """Run until the parent closes the engine or ends."""
    threading.Thread(target=_answer_pings, args=(liveness, threading.get_ident()), daemon=True).start()
    answers: queue.SimpleQueue[tuple[Command, Any]] = queue.SimpleQueue()
    threading.Thread(target=_send_answers, args=(rank, commands, answers), daemon=True).start()
    command: Command | None = Command(0, "report", all_answer=True)
    try:
        runner = _build_runner(commands.receive())
        while command is not None:
            outcome = getattr(runner, command.method)(*command.arguments, **command.options)
            answers.put((command, outcome))
            command = _next(commands)
    except BaseException as error:
        assert command is not None
        answers.put((command, Failure.of(error)))
        threading.Event().wait()  # until the parent ends this process: its death would be taken for the cause


def _build_runner(assignment: Assignment) -> Any:
    """Join the other ranks, load, and agree on the number of KV blocks."""
    import torch

    from engine.parallel.rendezvous import join_store
    from kernels import decode, prefill

    registries: dict[str, Any] = {"decode": decode, "prefill": prefill}
    for kind, kernel in assignment.plugins.items():
        if kernel.name not in registries[kind].names():
            registries[kind].register(kernel.name)(kernel)
    torch.set_num_threads(assignment.num_threads)
    device = assignment.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = join_store(assignment.port, assignment.rank, assignment.size, device, shared=assignment.shared)
    runner = assignment.runner_class(assignment.config, assignment.source, device=device, group=group)
    runner.prepare()
    return runner


def _next(commands: Channel) -> Command | None:
    """The next command; None when the parent has closed the engine."""
    try:
        command: Command | None = commands.receive()
    except EOFError:
        return None
    return command


def _send_answers(rank: int, commands: Channel, answers: queue.SimpleQueue[tuple[Command, Any]]) -> None:
    """Wait for each result in turn, while the main thread is already at the next command.

    Every rank waits for its own device, so that its faults show here; rank 0's result is the one that counts.
    """
    while True:
        command, outcome = answers.get()
        try:
            if hasattr(outcome, "result"):
                outcome = pack_tokens(outcome)
            if not isinstance(outcome, Failure):
                outcome = Answer(command.number, outcome if rank == 0 or command.all_answer else None)
            message = encode(outcome)
        except BaseException as error:
            message = encode(Failure.of(error))
        try:
            commands.send(message)
        except OSError:
            return  # the parent has ended, and _answer_pings ends this process


def _answer_pings(liveness: Channel, main_thread: int) -> None:
    """Tell the parent where the main thread is, whenever it asks; when the parent ends, end, whatever is under way."""
    while True:
        try:
            liveness.receive()
            liveness.send(encode(_position(main_thread)))
        except (EOFError, OSError):
            os._exit(1)


def _position(thread: int) -> Position:
    """The thread's innermost frame outside the libraries: "file:line in function"."""
    stack = traceback.extract_stack(sys._current_frames().get(thread))
    entry = next((e for e in reversed(stack) if not e.filename.startswith(_OTHERS)), stack[-1])
    in_collective = any(e.filename.endswith(_WHERE_RANKS_WAIT) for e in stack)
    return Position(f"{os.path.basename(entry.filename)}:{entry.lineno} in {entry.name}", in_collective)


def pack_tokens(pending: Any) -> PackedTokens:
    """A step's result when it is there, as lists and dicts, which travel faster than an object for each row."""
    tokens: list[SampledToken] = pending.result()
    logprobs = {row: token.logprobs for row, token in enumerate(tokens) if token.logprobs is not None}
    return [token.token_id for token in tokens], logprobs, getattr(pending, "device_times", (None, None))


def unpack_tokens(packed: PackedTokens) -> list[SampledToken]:
    token_ids, logprobs, _ = packed
    return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(token_ids)]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    rank, *fds = map(int, sys.argv[1:4])
    # As the module that pickled messages name, not as __main__.
    module = importlib.import_module("engine.execution.worker")
    module.main(rank, *(Channel(socket.socket(fileno=fd)) for fd in fds))
    os._exit(0)  # without the teardown of libraries, which may wait for ranks that have ended
