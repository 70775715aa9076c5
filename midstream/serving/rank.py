"""One engine process as the engine's owner sees it: a child of this process, or one that another node has launched."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from abc import ABC, abstractmethod
from typing import Any, Protocol

from midstream.engine.process import EngineProcess
from midstream.errors import EngineDead, MidstreamError

CLOSE_S = 5.0


class Listener(Protocol):
    """Who is told of ranks."""

    def heard(self, rank: Rank, frame: bytes) -> None:
        """A message of its core: see :mod:`midstream.engine.process`."""

    def gone(self, rank: Rank) -> None:
        """Its process has ended, and what it said before that has been heard."""


class Rank(ABC):
    """One that is started again is another object. Subclasses say how its process is reached."""

    def __init__(self, index: int, listener: Listener) -> None:
        self.index = index
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        """Its first status, once it serves."""
        self.ended = asyncio.Event()
        """Its process is gone."""
        self.is_over = False
        """Lost, or told to end: nothing that it says counts."""
        self.error: MidstreamError | None = None
        """Why, once it is lost."""
        self.num_silent = 0
        """How many times it has been asked since it last said something."""
        self.asks: dict[Any, asyncio.Future[dict[str, Any]]] = {}
        """What it was asked beside the log of the group."""
        self._listener = listener

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it runs."""

    @abstractmethod
    def post(self, frame: bytes) -> None:
        """Without waiting: the queue is unbounded, and to a core that is gone there is nothing to wait for."""

    @abstractmethod
    def say_where(self) -> None:
        """Have it write on its standard error what its threads are doing."""

    @abstractmethod
    def kill(self) -> None:
        """At once; ``ended`` follows."""

    @abstractmethod
    async def clear(self) -> None:
        """Leave nothing of it. May be called twice."""

    def fail(self, error: MidstreamError) -> None:
        """Nothing that it was asked will be answered."""
        self.error = self.error or error
        for future in (self.ready, *self.asks.values()):
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: whoever waits gets it, and if nobody does there is nothing to warn of

    async def end(self, grace_s: float) -> None:
        """Its process is gone within ``grace_s``, or is killed; nothing is left of it."""
        self.is_over = True
        self.fail(EngineDead(f"rank {self.index} was ended"))
        try:
            await asyncio.wait_for(self.ended.wait(), grace_s)
        except TimeoutError:
            self.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), CLOSE_S)
        await self.clear()


class LocalRank(Rank):
    """A child of this process."""

    def __init__(self, index: int, listener: Listener, process: EngineProcess) -> None:
        super().__init__(index, listener)
        self.process = process
        process.launch()
        self._pidfd = os.pidfd_open(process.pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._process_ended)
        self._loop.add_reader(process.pipe, self._read)
        self.post(process.start_message)

    @property
    def exit_code(self) -> int | None:
        return self.process.exit_code

    def post(self, frame: bytes) -> None:
        if self._pidfd >= 0 and not self.process.pipe.send(frame):
            self._loop.add_writer(self.process.pipe, self._write)

    def say_where(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.exit_code is None and self.ready.done():  # from then on its core has a handler
                os.kill(self.process.pid, signal.SIGUSR1)

    def kill(self) -> None:
        self.process.kill()

    async def clear(self) -> None:
        if self._pidfd < 0:
            return
        for end in (self._pidfd, self.process.pipe):
            self._loop.remove_reader(end)
        self._loop.remove_writer(self.process.pipe)
        os.close(self._pidfd)
        self._pidfd = -1
        self.process.clear()

    def _read(self) -> None:
        while (frame := self.process.pipe.receive()) is not None:
            self._listener.heard(self, frame)
        if self.process.pipe.is_over:
            self._loop.remove_reader(self.process.pipe)

    def _write(self) -> None:
        if self.process.pipe.flush():
            self._loop.remove_writer(self.process.pipe)

    def _process_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._read()  # its last words
        self.ended.set()
        self._listener.gone(self)
