"""A rank's process as its parent sees it: started, spoken to, asked whether it lives, and ended for certain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

from engine.execution.worker import Position
from engine.parallel.channel import Channel, encode
from engine.parallel.peer_memory import NO_MULTICAST

CLOSE_S = 5.0
"""Time for a process to end by itself; then it is killed."""

_PING = encode("where are you?")


class RankProcess:
    """Process `rank` of `size`, and our ends of its two channels.

    position: where it said it was when last asked. asked_at: when it was asked (time.monotonic), until it answers.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.commands, commands = Channel.pair()
        self.liveness, liveness = Channel.pair()
        fds = (commands.fileno(), liveness.fileno())
        try:
            self._process = subprocess.Popen(
                # Not multiprocessing: that runs the user's script again, and leaves a process of its own behind.
                [sys.executable, "-m", "engine.execution.worker", *map(str, (rank, *fds)), f"of-{size}"],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env=_environment(),
            )
        finally:
            commands.close()
            liveness.close()
        self.position = Position("starting", in_collective=False)
        self.asked_at: float | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def ping(self) -> None:
        """Ask where it is, unless an answer is still due. It comes over the liveness channel."""
        if self.asked_at is None:
            self.asked_at = time.monotonic()
            with suppress(OSError):  # it has ended, which shows on its channels
                self.liveness.send(_PING)

    def take_pong(self) -> None:
        self.position = self.liveness.receive()
        self.asked_at = None

    def how_it_ended(self) -> str:
        """What to say of a process whose channels have closed."""
        try:
            code = self._process.wait(timeout=CLOSE_S)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def end_processes(ranks: Iterable[RankProcess], owner: int, *, kill: bool) -> None:
    """End the processes and wait until they are gone; kill: at once, else when they have had time to end themselves.

    owner: the process that started them; in a fork of it this does nothing.
    """
    if os.getpid() != owner:
        return
    for process in ranks:
        if kill:
            process._process.kill()  # ends a stopped process too
        process.commands.close()
    deadline = time.monotonic() + CLOSE_S
    for process in ranks:
        try:
            process._process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process._process.kill()
            process._process.wait()
        process.liveness.close()


def _environment() -> dict[str, str]:
    """Ours, with the modules that we can import, and the ranks' talk kept on this host."""
    paths = [os.path.abspath(path) for path in sys.path]  # "" is the current directory
    ours = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    defaults = NO_MULTICAST | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
    return defaults | ours
