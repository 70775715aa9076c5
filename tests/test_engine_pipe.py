"""Whole messages in order, whatever their sizes and however the kernel cuts them; and no end waits for the other."""

from __future__ import annotations

import os
import random
import select
import socket
import subprocess
import sys
import threading

import pytest

from midstream.engine.pipe import Pipe


@pytest.fixture
def ends() -> tuple[Pipe, Pipe]:
    one, other = socket.socketpair()
    return Pipe(one), Pipe(other)


def test_messages_of_all_sizes_arrive_whole_and_in_order(ends: tuple[Pipe, Pipe]) -> None:
    near, far = ends
    rng = random.Random(0)
    messages = [rng.randbytes(rng.choice((0, 1, 7, 8, 9, 5_000, 300_000, 3_000_000))) for _ in range(60)]
    found: list[bytes] = []
    sent = 0
    while len(found) < len(messages):
        for _ in range(rng.randrange(4)):
            if sent < len(messages):
                near.send(messages[sent])
                sent += 1
        near.flush()
        for _ in range(rng.randrange(1, 4)):
            if (frame := far.receive()) is not None:
                found.append(frame)
    assert found == messages and far.receive() is None and not far.is_over


def test_a_message_that_comes_byte_by_byte_is_one_message() -> None:
    near, end = socket.socketpair()
    far = Pipe(end)
    found = []
    for byte in (3).to_bytes(8, "big") + b"abc" + (0).to_bytes(8, "big") + (1).to_bytes(8, "big") + b"z":
        near.send(bytes([byte]))
        found.append(far.receive())
    assert [frame for frame in found if frame is not None] == [b"abc", b"", b"z"]
    assert found[10] == b"abc" and found[18] == b"" and found[27] == b"z"


def test_a_reader_that_does_not_read_keeps_nobody_waiting_and_loses_nothing(ends: tuple[Pipe, Pipe]) -> None:
    near, far = ends
    messages = [bytes([i]) * 1_000_000 for i in range(20)]
    assert [near.send(message) for message in messages][-1] is False  # and we are here
    poller = select.poll()
    poller.register(near, select.POLLOUT)
    assert not poller.poll(0)
    found = []
    while len(found) < len(messages):
        if (frame := far.receive()) is None:
            assert poller.poll(0)  # there is room again
            near.flush()
        else:
            found.append(frame)
    assert found == messages and near.flush()


def test_what_was_sent_before_the_end_is_received_before_it(ends: tuple[Pipe, Pipe]) -> None:
    near, far = ends
    near.send(b"last words")
    near.close()
    assert near.fileno() == -1 and not far.is_over
    assert far.receive() == b"last words" and far.receive() is None and far.is_over
    assert far.send(b"nobody hears") and near.send(b"closed") and near.receive() is None and near.is_over


def test_to_send_to_an_end_that_is_gone_is_no_signal() -> None:
    """Also where SIGPIPE is not ignored, as Python does."""
    code = """
import signal, socket
from midstream.engine.pipe import Pipe
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
one, other = socket.socketpair()
other.close()
print(Pipe(one).send(b"nobody hears"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "True\n"), done


def test_a_message_that_was_cut_off_is_none(ends: tuple[Pipe, Pipe]) -> None:
    near, far = ends
    near.send(bytes(5_000_000))
    near.close()
    assert far.receive() is None and far.is_over


def test_an_end_that_leaves_unread_messages_is_gone_too(ends: tuple[Pipe, Pipe]) -> None:
    near, far = ends
    near.send(b"unread")
    far.send(b"unread")
    near.close()
    frames = [far.receive(), far.receive()]
    assert frames[-1] is None and far.is_over  # the kernel may drop what came before: it is an end, not an error


@pytest.mark.parametrize("reads", [True, False])
def test_close_lets_leave_what_waits_but_not_for_ever(ends: tuple[Pipe, Pipe], reads: bool) -> None:
    near, far = ends
    near.send(bytes(5_000_000))
    found: list[bytes] = []

    def read() -> None:
        poller = select.poll()
        poller.register(far, select.POLLIN)
        while not far.is_over:
            poller.poll()
            if (frame := far.receive()) is not None:
                found.append(frame)

    if reads:
        reader = threading.Thread(target=read)
        reader.start()
        near.close(linger_s=30.0)
        reader.join()
        assert found == [bytes(5_000_000)]
    else:
        near.close(linger_s=0.02)
        assert far.receive() is None and far.is_over


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        for end in [Pipe(one) for one in socket.socketpair()]:
            end.close(0.01)
            end.close()
    assert len(os.listdir("/proc/self/fd")) == before
