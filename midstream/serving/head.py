"""Where other nodes come to: the ranks that they launch, and their front ends. Of the engine's owner, rank 0's process.

A node that goes takes its ranks along, as lost ones, and its front end's requests. Ranks that are launched elsewhere
and that nobody offers are waited for, at the start and, with ``elastic``, when they were lost.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from midstream.errors import Conflict, InvalidInput, MidstreamError, NotReady, to_wire
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
    ToOwner,
    ToRank,
    Welcome,
    shared_options,
    to_owner_decoder,
)
from midstream.serving.rank import Rank
from midstream.types import RequestIncrement

if TYPE_CHECKING:
    from midstream.serving.ranks import Ranks

_HELLO_S = 10.0
_HELLO_BYTES = 1 << 16

Result = dict[str, Any] | MidstreamError


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """Who asks something of the engine, and hears of it: an AsyncLLM, here or at the other end of a link."""

    take: Callable[[list[RequestIncrement], list[tuple[str, dict[str, Any]]]], None]
    """What is new of its requests; (request id, error) of those that are over with an error."""
    answered: Callable[[int, Result], None]
    """(op, result), once for each call."""
    over: Callable[[MidstreamError], None]
    """The engine is gone."""


class RemoteRank(Rank):
    """A process that a node launches, as soon as there is one that offers it."""

    def __init__(self, index: int, head: Head, ranks: Ranks, key: int, meeting: str | None, number: int) -> None:
        super().__init__(index, ranks)
        self.key = key
        self._head = head
        self._order = Launch(key, index, meeting, number)
        self.link: Link[ToOwner] | None = None
        """To its node, once it was told to launch it."""
        self._exit_code: int | None = None

    def launch(self, link: Link[ToOwner]) -> None:
        self.link = link
        link.send(self._order)

    @property
    def exit_code(self) -> int | None:
        return self._exit_code

    def post(self, frame: bytes) -> None:
        if self.link is not None and not self.ended.is_set():
            self.link.send(ToRank(self.key, frame))

    def say_where(self) -> None:
        if self.link is not None:
            self.link.send(SayWhere(self.key))

    def kill(self) -> None:
        if self.link is not None:
            self.link.send(Kill(self.key))

    async def end(self, grace_s: float) -> None:
        if self.link is None:
            self.ended.set()  # there is no process
        await super().end(grace_s)

    async def clear(self) -> None:
        self._head.drop(self)
        if self.link is not None and not self.ended.is_set():
            self.link.abort()  # its node hangs: the rank is free for another one

    def refuse(self, error: MidstreamError) -> None:
        """It is not what it has to be: its node leaves."""
        if self.link is not None:
            self.link.send(Refused(to_wire(error)))

    def hear(self, frame: bytes) -> None:
        self._listener.heard(self, frame)

    def leave(self, exit_code: int | None) -> None:
        """Its process has ended, or (None) its node is gone."""
        if not self.ended.is_set():
            self._exit_code = exit_code
            self.ended.set()
            self._listener.gone(self)


class Head:
    """The listener at ``config.data_parallel_address``."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._config = ranks.config
        self._server: asyncio.Server | None = None
        self._links: dict[Link[ToOwner], Hello] = {}
        self._launched: dict[int, RemoteRank] = {}
        """By key: those that are wanted, or run."""
        self._keys = itertools.count(1)
        self._is_open = False
        """The engine has started: nodes are welcome."""
        self._not_ready: MidstreamError | None = None
        self._elsewhere = set(range(self._config.data_parallel_size)) - set(self._config.local_ranks)
        self._came = asyncio.Event()

    async def open(self) -> None:
        """Raises InvalidInput if the address can not be listened on."""
        host, port = self._config.node_host, self._config.node_port
        try:
            self._server = await asyncio.start_server(self._serve, host, port)
        except OSError as error:
            raise InvalidInput(f"can not listen on data_parallel_address {host}:{port}: {error}") from error

    async def close(self, error: MidstreamError) -> None:
        if self._server is None:
            return
        self._server.close()
        for link in list(self._links):
            link.send(Over(to_wire(error)))
            await link.close()

    def welcome(self) -> None:
        """The engine has started: so does every front end from now on."""
        self._is_open = True
        for link in self._links:
            self._welcome(link)

    def _welcome(self, link: Link[ToOwner]) -> None:
        """With the status of now: a label, or a number, may be of any update."""

        def answered(_: int, result: Result) -> None:  # an error: ranks are lost in this moment
            link.send(Welcome(self._ranks.held_status() if isinstance(result, MidstreamError) else result))

        if self._not_ready is not None:
            link.send(Serving(to_wire(self._not_ready)))
        asker = Front(lambda increments, refused: None, answered, lambda error: None)
        try:
            self._ranks.call(asker, 0, "status", {})
        except MidstreamError as error:
            answered(0, error)

    def announce(self, not_ready: MidstreamError | None) -> None:
        """Whether requests are taken."""
        if str(not_ready) != str(self._not_ready):
            self._not_ready = not_ready
            for link in self._links:
                link.send(Serving(None if not_ready is None else to_wire(not_ready)))

    # -- ranks -----------------------------------------------------------------------------------------------------

    async def wait_for_ranks(self, ranks: Iterable[int] | None = None) -> None:
        """Until these (None: all that are launched elsewhere) are offered. Without a limit: people start nodes, and
        ranks that meet wait for each other much less long. An engine that is being closed waits for nobody: of who
        waits here a cancellation may have been lost before, in wait_for."""
        wanted = self._elsewhere if ranks is None else self._elsewhere.intersection(ranks)
        while not wanted <= {rank for hello in self._links.values() for rank in hello.ranks}:
            if self._ranks.is_closing:
                return
            self._came.clear()
            await self._came.wait()

    def launch(self, index: int, meeting: str | None, number: int) -> RemoteRank:
        """Rank ``index``, by the node that offers it, now or once it is here."""
        rank = RemoteRank(index, self, self._ranks, next(self._keys), meeting, number)
        self._launched[rank.key] = rank
        link = next((link for link, hello in self._links.items() if index in hello.ranks), None)
        if link is not None:
            rank.launch(link)
        return rank

    def drop(self, rank: RemoteRank) -> None:
        self._launched.pop(rank.key, None)

    # -- nodes -----------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer, to_owner_decoder)
        try:
            try:
                hello = await asyncio.wait_for(link.receive(_HELLO_BYTES), _HELLO_S)
            except TimeoutError as error:
                raise InvalidInput(f"a node says Hello within {_HELLO_S:g} s") from error
            if not isinstance(hello, Hello):
                raise InvalidInput("the first message of a node is Hello")
            self._check(hello)
        except Exception as error:  # nobody may wait for who does not answer
            link.send(Refused(to_wire(error)))
            return await link.close()
        front = Front(
            lambda increments, refused: link.send(News(increments, refused)),
            lambda op, result: link.send(_answered(op, result)),
            lambda error: link.send(Over(to_wire(error))),
        )
        self._links[link] = hello
        self._came.set()
        self._ranks.guests.add(front)
        if self._is_open:
            self._welcome(link)
        try:
            for rank in self._launched.values():
                if rank.index in hello.ranks and rank.link is None:
                    rank.launch(link)
            while (message := await link.receive()) is not None:
                self._take(front, link, message)
        except Exception as error:
            link.send(Over(to_wire(error)))
        finally:
            del self._links[link]
            self._ranks.leave(front)
            for rank in [rank for rank in self._launched.values() if rank.link is link]:
                rank.leave(None)
            await link.close()

    def _check(self, hello: Hello) -> None:
        for name, value in shared_options(self._config).items():
            if hello.options.get(name) != value:
                raise InvalidInput(
                    f"{name} is {value!r} at rank 0 and {hello.options.get(name)!r} here: start all alike"
                )
        if not self._elsewhere.issuperset(hello.ranks):
            known = sorted(self._elsewhere)
            raise InvalidInput(f"rank 0 waits for ranks {known}, and this command launches {hello.ranks[:9]}")
        taken = {rank for other in self._links.values() for rank in other.ranks}
        if taken.intersection(hello.ranks):
            raise Conflict(f"rank {min(taken.intersection(hello.ranks))} has been launched by another node")

    def _take(self, front: Front, link: Link[ToOwner], message: ToOwner) -> None:
        match message:
            case FromRank(key, frame):
                if key in self._launched:
                    self._launched[key].hear(frame)
            case Ended(key, exit_code):
                if key in self._launched:
                    self._launched[key].leave(exit_code)
            case Ask(op, verb, arguments):
                try:
                    self._check_serving()
                    self._ranks.call(front, op, verb, arguments)
                except MidstreamError as error:
                    link.send(_answered(op, error))
            case Generate(request, session):
                try:
                    self._check_serving()
                    self._ranks.add(front, request, session)
                except MidstreamError as error:
                    link.send(News([], [(request.request_id, to_wire(error))]))
            case End(request_id, sample):
                self._ranks.abort(front, request_id, sample)
            case Forget(request_id):
                self._ranks.forget(front, request_id)
            case Hello():
                raise InvalidInput("a node says Hello once")

    def _check_serving(self) -> None:
        if not self._is_open:
            raise NotReady("the engine starts: wait until it says Welcome")


def _answered(op: int, result: Result) -> Answered:
    return Answered(op, error=to_wire(result)) if isinstance(result, MidstreamError) else Answered(op, result)
