"""A node beside the engine's owner: it launches ranks when told, passes their messages on, and has a front end.

For the AsyncLLM of this node it is what :class:`midstream.serving.ranks.Ranks` is for the owner's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Coroutine
from typing import Any

from midstream.config import EngineConfig
from midstream.engine.process import Add, EngineProcess, Shutdown, encode
from midstream.errors import EngineDead, MidstreamError, NotReady, from_wire
from midstream.serving.head import Front
from midstream.serving.link import (
    Answered,
    Ask,
    End,
    Ended,
    Forget,
    FromRank,
    Generate,
    Hello,
    Kill,
    Launch,
    Link,
    News,
    Over,
    Refused,
    SayWhere,
    Serving,
    ToNode,
    ToRank,
    Welcome,
    shared_options,
    to_node_decoder,
)
from midstream.serving.rank import CLOSE_S, LocalRank, Rank

_log = logging.getLogger(__name__)
_AGAIN_S = 0.5


class Node:
    """``front``: of this process."""

    def __init__(self, config: EngineConfig, front: Front) -> None:
        self.config = config
        self._front = front
        self._link: Link[ToNode] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._welcome: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._processes: dict[int, LocalRank] = {}
        """By key."""
        self._not_ready: MidstreamError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> dict[str, Any]:
        """Returns the engine's first status. Until there is somebody at the address, try again: nodes start in any
        order, and it is the caller who has a time limit. Raises what the owner refuses."""
        host, port = self.config.node_host, self.config.node_port
        has_said = False
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                break
            if not has_said:
                _log.warning("midstream: nobody is at %s:%d yet; waiting", host, port)
            has_said = True
            await asyncio.sleep(_AGAIN_S)
        self._link = Link(reader, writer, to_node_decoder)
        self._link.send(Hello(shared_options(self.config), list(self.config.local_ranks)))
        self._reader = asyncio.create_task(self._read(self._link))
        return await self._welcome

    async def close(self, error: MidstreamError) -> None:
        """End the processes of this node, and leave. Bounded; may be called twice."""
        if self._is_closing:
            return
        self._is_closing = True
        await self._end_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._link is not None:
            await self._link.close()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    def over(self, error: MidstreamError) -> None:
        if not self._welcome.done():
            self._welcome.set_exception(error)
            self._welcome.exception()  # seen: nobody may wait for it any more
        self._front.over(error)
        if not self._is_closing:  # nobody is there whom the processes could serve
            self._keep(self._end_all())

    async def _end_all(self) -> None:
        processes = list(self._processes.values())
        for process in processes:
            process.post(encode(Shutdown()))
        await asyncio.gather(*(process.end(CLOSE_S) for process in processes))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what is asked of the engine -------------------------------------------------------------------------------

    def check_serving(self) -> None:
        """Raises NotReady while no rank takes requests."""
        if not self._welcome.done():
            raise NotReady("the engine starts; try again later")
        if self._not_ready is not None:
            raise self._not_ready

    def call(self, front: Front, op: int, verb: str, arguments: dict[str, Any]) -> None:
        self._send(Ask(op, verb, arguments))

    def add(self, front: Front, message: Add, session: str | None) -> None:
        self._send(Generate(message, session))

    def abort(self, front: Front, request_id: str, sample: str | None = None) -> None:
        self._send(End(request_id, sample))

    def forget(self, front: Front, request_id: str) -> None:
        self._send(Forget(request_id))

    def _send(self, message: Any) -> None:
        if self._link is not None:
            self._link.send(message)

    # -- what the owner says ---------------------------------------------------------------------------------------

    async def _read(self, link: Link[ToNode]) -> None:
        where = f"{self.config.node_host}:{self.config.node_port}"
        try:
            while (message := await link.receive()) is not None:
                self._take(link, message)
            self.over(EngineDead(f"the engine at {where} is gone"))
        except Exception as error:  # nobody may wait for a reader that is gone
            self.over(EngineDead(f"the link to the engine at {where} failed: {type(error).__name__}: {error}"))

    def _take(self, link: Link[ToNode], message: ToNode) -> None:
        match message:
            case News(increments, refused):
                self._front.take(increments, refused)
            case Answered(op, value, error):
                self._front.answered(op, (value or {}) if error is None else from_wire(error))
            case ToRank(key, frame):
                if key in self._processes:
                    self._processes[key].post(frame)
            case Launch(key, rank, meeting, number):
                self._launch(link, key, rank, meeting, number)
            case Kill(key):
                if key in self._processes:
                    self._processes[key].kill()
            case SayWhere(key):
                if key in self._processes:
                    self._processes[key].say_where()
            case Welcome(status):
                if not self._welcome.done():
                    self._welcome.set_result(status)
            case Serving(why):
                self._not_ready = None if why is None else from_wire(why)
            case Refused(error) | Over(error):
                self.over(from_wire(error))

    # -- the processes of this node --------------------------------------------------------------------------------

    def _launch(self, link: Link[ToNode], key: int, rank: int, meeting: str | None, number: int) -> None:
        if self._is_closing:
            return
        try:
            process = EngineProcess(self.config, rank, meeting, number, link.host)
            self._processes[key] = _Relayed(rank, self, process, key)
        except (MidstreamError, OSError) as error:
            _log.warning("midstream: rank %d could not be started: %s", rank, error)
            link.send(Ended(key, 1))

    def heard(self, rank: Rank, frame: bytes) -> None:
        assert isinstance(rank, _Relayed)
        self._send(FromRank(rank.key, frame))

    def gone(self, rank: Rank) -> None:
        assert isinstance(rank, _Relayed)

        async def leave() -> None:
            self._processes.pop(rank.key, None)
            await rank.clear()
            self._send(Ended(rank.key, rank.exit_code or 0))

        if not self._is_closing:
            self._keep(leave())


class _Relayed(LocalRank):
    """A process of this node, for the owner under ``key``."""

    def __init__(self, index: int, node: Node, process: EngineProcess, key: int) -> None:
        self.key = key
        super().__init__(index, node, process)

    def say_where(self) -> None:
        """The owner asks only a rank that is ready."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR1)
