"""Whole messages between two processes over a connected socket."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

MAX_MESSAGE_BYTES = 1 << 30
"""A message beyond this is refused where it is sent; a length beyond it on arrival means that the stream is broken."""

_LENGTH = struct.Struct("<Q")


def encode(message: Any) -> bytes:
    """The message as bytes, its length in front: encode once, send to as many as need it. ValueError if too large."""
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    if len(content) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(content)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(content)) + content


class Channel:
    """One end. A sender waits while the other side's buffer is full, so nothing that was not read is ever lost.

    One thread may send while another receives, if neither has a time-out. A TimeoutError leaves the channel unusable:
    part of a message may have been moved. The other side's end is an EOFError when receiving, an OSError when sending.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two ends that are connected to each other and to nothing else: no port, no name."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, encoded: bytes, timeout_s: float | None = None) -> None:
        """Send what `encode` made."""
        self._socket.settimeout(timeout_s)
        self._socket.sendall(encoded)

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message; waits until there is one."""
        self._socket.settimeout(timeout_s)
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise EOFError(f"a message claims {length} bytes, the limit is {MAX_MESSAGE_BYTES}")
        return pickle.loads(self._read(length))

    def _read(self, length: int) -> bytearray:
        content = bytearray(length)
        view, done = memoryview(content), 0
        while done < length:
            try:
                count = self._socket.recv_into(view[done:])
            except ConnectionError as error:
                raise EOFError(f"the other side has ended: {error}") from error
            if count == 0:
                raise EOFError("the other side has ended")
            done += count
        return content

    def close(self) -> None:
        self._socket.close()
