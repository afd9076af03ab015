"""Messages between processes: whole, in order, bounded, and the other side's end is noticed."""

from __future__ import annotations

import socket
import struct
import threading
import time

import pytest

from engine.parallel import channel as module
from engine.parallel.channel import Channel, encode


def test_messages_of_all_sizes_arrive_whole_and_in_order_at_a_slow_reader():
    ours, theirs = Channel.pair()
    messages = [bytes([i]) * size for i, size in enumerate([10, 1_000_000, 0, 300_000, 70_000] * 10)]

    def read(received: list[bytes]) -> None:
        time.sleep(0.2)
        received.extend(theirs.receive() for _ in messages)

    received: list[bytes] = []
    reader = threading.Thread(target=read, args=(received,))
    reader.start()
    for message in messages:
        ours.send(encode(message), timeout_s=120)
    reader.join()
    assert received == messages


def test_a_reader_that_never_reads_is_noticed():
    ours, _theirs = Channel.pair()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        ours.send(encode(bytes(10_000_000)), timeout_s=0.3)
    assert time.monotonic() - start < 120
    with pytest.raises(TimeoutError):
        ours.receive(timeout_s=0.1)


def test_the_end_of_the_other_side_is_noticed():
    ours, theirs = Channel.pair()
    ours.send(encode("unread"))
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive(timeout_s=1)
    with pytest.raises(BrokenPipeError):
        ours.send(encode("more"), timeout_s=1)


def test_half_a_message_is_an_end():
    raw, connected = socket.socketpair()
    raw.sendall(struct.pack("<Q", 100) + b"half")
    raw.close()
    with pytest.raises(EOFError):
        Channel(connected).receive(timeout_s=1)


def test_messages_are_bounded_on_both_sides(monkeypatch):
    monkeypatch.setattr(module, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(ValueError, match=r"a message of \d+ bytes exceeds the limit of 1000"):
        encode(bytes(1000))
    raw, connected = socket.socketpair()
    raw.sendall(struct.pack("<Q", 1 << 60))
    with pytest.raises(EOFError, match="the limit is 1000"):
        Channel(connected).receive(timeout_s=1)
