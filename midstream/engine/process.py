"""The engine core in a process of its own: typed messages over one local socket, msgpack, never pickle.

The child is a fresh interpreter, so nothing of the parent's state leaks in and no script needs an import guard. It
ends with its parent, or with the last that a fork of it has given the socket's other end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from midstream.config import EngineConfig
from midstream.engine.pipe import Pipe
from midstream.engine.protocol import Fail, Reply
from midstream.errors import InvalidInput, MidstreamError, from_wire, to_wire
from midstream.types import RequestIncrement, SamplingParams

if TYPE_CHECKING:
    from midstream.engine.core import EngineCore

_log = logging.getLogger(__name__)
_IDLE_POLL_MS = 1000
_WAITING_POLL_MS = 20
_AGAIN_POLL_MS = 1
_LINGER_S = 2.0
_ENVIRONMENT = {
    # glibc's arena for each thread keeps holes of its own: over a hundred updates they add up to megabytes
    "MALLOC_ARENA_MAX": "1",
    # between two steps the front end needs a processor, which OpenMP's threads would hold for 8 ms: 0.1 ms
    "GOMP_SPINCOUNT": "5000",
}
"""Of the child, where its own environment does not say otherwise."""


class Start(msgspec.Struct, tag=True):
    """First message to the core. ``path``: the parent's sys.path, for a user's own transfer engine. ``rank``: which of
    config.data_parallel_size; ``meeting``: where the ranks of a lockstep group meet, None for a replica."""

    config: EngineConfig
    path: list[str]
    rank: int = 0
    meeting: str | None = None
    number: int = 0
    """Commit number to go on from, of an engine that is started again."""
    host: str = "127.0.0.1"
    """Under which the other ranks of a lockstep group reach this one."""


class Add(msgspec.Struct, tag=True):
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0


class Abort(msgspec.Struct, tag=True):
    request_ids: list[str] | None


class Call(msgspec.Struct, tag=True):
    op: int
    verb: str
    arguments: dict[str, Any]
    position: int | None = None
    """In the log of the group."""


class StartWave(msgspec.Struct, tag=True):
    """START_DP_WAVE: another rank has work in this wave."""

    wave: int


class Agreed(msgspec.Struct, tag=True):
    """All replicas were due at this position of the log."""

    position: int


class Lost(msgspec.Struct, tag=True):
    """The group is over: end with this error."""

    error: dict[str, Any]


class Shutdown(msgspec.Struct, tag=True):
    pass


ToCore = Start | Add | Abort | Call | StartWave | Agreed | Lost | Shutdown


class Answer(msgspec.Struct):
    op: int
    value: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class Ready(msgspec.Struct, tag=True):
    """The core serves; ``status`` is its first one."""

    status: dict[str, Any]


class Failed(msgspec.Struct, tag=True):
    """The core could not start, or had to stop; it ends after this message."""

    error: dict[str, Any]


class Outputs(msgspec.Struct, tag=True):
    """One message per turn at most, in a lockstep group two. Increments come before the answers that refer to them."""

    increments: list[RequestIncrement]
    answers: list[Answer]
    refused: list[tuple[str, dict[str, Any]]]
    """(request id, error): refused at add, or ended by a step that failed."""
    prepared: list[int] = []
    """Calls whose update this rank of several could commit."""
    due: int | None = None
    """Position of the log at which this replica of several could settle its open call."""


class Wake(msgspec.Struct, tag=True):
    """This rank has work in this wave: send START_DP_WAVE to the others."""

    wave: int


FromCore = Ready | Failed | Outputs | Wake

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToCore | FromCore) -> bytes:
    return _encoder.encode(message)


to_core_decoder = msgspec.msgpack.Decoder(ToCore)
from_core_decoder = msgspec.msgpack.Decoder(FromCore)


class EngineProcess:
    """The parent's half: starts the child, owns the socket to it and the child's life."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int = 0,
        meeting: str | None = None,
        number: int = 0,
        host: str = "127.0.0.1",
    ) -> None:
        path = [p for p in sys.path if p] + [os.getcwd()]
        self.start_message = encode(Start(config, path, rank, meeting, number, host))
        ours, self._theirs = socket.socketpair()
        self.pipe = Pipe(ours)
        self._child: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start the child, which waits for ``start_message``."""
        end = self._theirs.fileno()
        with self._theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "midstream.engine.process", str(end)],
                stdin=subprocess.DEVNULL,
                pass_fds=[end],
                env={**_ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._child is None else self._child.poll()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def clear(self) -> None:
        """The child has ended: leave nothing of it."""
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(1.0)
        self.pipe.close()  # only now: losing its parent would end the child at once, its log unwritten


def _end_with_parent(end: int) -> None:
    """Blocks until the parent's end of the socket is closed, then ends this process, whatever it is doing."""
    poller = select.poll()
    poller.register(end, select.POLLRDHUP)
    poller.poll()
    os._exit(0)


def main(end: int) -> None:
    """The child; ``end`` is its file descriptor of the socket. Ends on Shutdown, when the parent is gone, or after an
    error, which it reports first."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they reach the whole group: the parent ends this process in order
    threading.Thread(target=_end_with_parent, args=(end,), daemon=True).start()
    sys.setswitchinterval(0.0005)  # staging must not hold up a step for Python's default 5 ms
    pipe = Pipe(socket.socket(fileno=end))
    try:
        _serve(pipe)
    except Exception as error:
        if not isinstance(error, MidstreamError):
            _log.exception("midstream: the core ends")
        pipe.send(encode(Failed(to_wire(error))))
    finally:
        pipe.close(_LINGER_S)


def _serve(pipe: Pipe) -> None:
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    while (frame := pipe.receive()) is None:
        poller.poll()
    try:
        start = to_core_decoder.decode(frame)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"an engine option has a wrong type: {error}") from error
    assert isinstance(start, Start)
    sys.path.extend(p for p in start.path if p not in sys.path)
    import torch

    if start.config.num_threads:
        torch.set_num_threads(start.config.num_threads)
    from midstream.engine.core import EngineCore
    from midstream.engine.data_parallel import Lockstep, Place

    faulthandler.register(signal.SIGUSR1)  # the parent asks where a rank is that has fallen silent
    group = None
    if start.meeting is not None:
        place = Place(start.rank, start.config.data_parallel_size, start.meeting, start.host)
        group = Lockstep(place, start.config.dp_timeout_s, lambda wave: pipe.send(encode(Wake(wave))))
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    core = EngineCore(start.config, lambda: os.eventfd_write(wake, 1), group, start.rank, start.number)
    pipe.send(encode(Ready(core.status())))
    poller.register(wake, select.POLLIN)
    while not pipe.is_over:
        pipe.flush()
        while (frame := pipe.receive()) is not None:
            try:
                message = to_core_decoder.decode(frame)
            except msgspec.DecodeError as error:  # the front end checks what it sends: say so, and serve the others
                _log.warning("midstream: a message to the core was dropped: %s", error)
                continue
            match message:
                case Add(request_id, prompt, params, cache_salt, priority):
                    try:
                        core.add(request_id, prompt, params, cache_salt, priority)
                    except MidstreamError as error:
                        core.outputs.failed.append((request_id, error))
                case Abort(request_ids):
                    core.abort(request_ids)
                case Call(op, verb, arguments, position):
                    core.call(op, verb, arguments, position)
                case StartWave(wave):
                    core.protocol.start_wave(wave)
                case Agreed(position):
                    core.agree(position)
                case Lost(reason):
                    raise from_wire(reason)
                case Shutdown():
                    core.close()
                    return
        if group is not None:
            _tell(pipe, core)  # what an abort ended, say: a vote may wait for a rank that hangs
        ran = core.step()
        _tell(pipe, core)
        if core.is_over:
            core.close()
            return
        if ran or (core.has_work and group is None):
            continue
        limit_ms = _WAITING_POLL_MS if core.is_waiting else _IDLE_POLL_MS
        if core.has_work:
            limit_ms = _AGAIN_POLL_MS  # a vote that did not agree: another message is on its way
        poller.modify(pipe, select.POLLIN if pipe.flush() else select.POLLIN | select.POLLOUT)
        if any(ready == wake for ready, _ in poller.poll(limit_ms)):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(wake)
    core.close()


def _tell(pipe: Pipe, core: EngineCore) -> None:
    """What is new, in one message."""
    outputs = core.take_outputs()
    if outputs.increments or outputs.failed or outputs.replies or outputs.prepared or outputs.due is not None:
        refused = [(request_id, to_wire(error)) for request_id, error in outputs.failed]
        answers = [_answer(reply) for reply in outputs.replies]
        pipe.send(encode(Outputs(outputs.increments, answers, refused, outputs.prepared, outputs.due)))


def _answer(reply: Reply | Fail) -> Answer:
    if isinstance(reply, Fail):
        return Answer(reply.op, error=to_wire(reply.error))
    return Answer(reply.op, reply.value)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # the interpreter would wait for a grammar's compilation, which nothing can stop
