"""One end of the socket between a front end and its core: whole messages in order, and nobody waits to send one.

A message is eight bytes of length and its frame, over one half of ``socket.socketpair()``. Whoever sends gives the
bytes to the kernel itself: a library's thread between the two would have to be given a processor first, and during a
step there is none to spare.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import time
from collections import deque

_LENGTH = struct.Struct(">Q")
_READ_BYTES = 1 << 18


class Pipe:
    """Belongs to one thread. What the kernel does not take at once waits here, without a limit: a slow reader must not
    hold up a step."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self.is_over = False
        """The other end is closed, and all that came from it has been received."""

    def fileno(self) -> int:
        """-1 once closed."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> bool:
        """As :meth:`flush`. What is sent to an end that is gone is lost."""
        self._unsent.append(memoryview(_LENGTH.pack(len(frame)) + frame))
        return self.flush()

    def flush(self) -> bool:
        """False if something still waits: call again once ``fileno()`` can be written to."""
        while self._unsent:
            try:
                count = self._socket.send(self._unsent[0], socket.MSG_NOSIGNAL)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EINTR, errno.ENOBUFS, errno.ENOMEM):
                    return False
                # the other end is gone, of which :meth:`receive` tells, or this one is closed
                self._unsent.clear()
                return True
            rest = self._unsent.popleft()[count:]
            if rest:
                self._unsent.appendleft(rest)
        return True

    def receive(self) -> bytes | None:
        """The next frame; None while there is no whole one."""
        while (frame := self._first()) is None:
            try:
                part = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return None
            except OSError:  # it went without having read everything, or this end is closed
                part = b""
            if not part:
                self.is_over = True
                return None
            self._received += part
        return frame

    def _first(self) -> bytes | None:
        """Taken from what has been received."""
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        with memoryview(self._received) as view:
            frame = bytes(view[_LENGTH.size : end])
        del self._received[:end]
        return frame

    def close(self, linger_s: float = 0.0) -> None:
        """What still waits has ``linger_s`` to leave."""
        limit, poller = time.monotonic() + linger_s, select.poll()
        if linger_s:
            poller.register(self._socket, select.POLLOUT)
        while not self.flush() and (left_s := limit - time.monotonic()) > 0:
            poller.poll(left_s * 1000)
        self._socket.close()
