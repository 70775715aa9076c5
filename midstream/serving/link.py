"""The connection between an engine's owner and another node: typed messages over TCP, msgpack, never pickle.

::

    node                                                      owner (rank 0's process)
      Hello(ranks it can launch, its options)      ──►
                                                   ◄──        Refused, or once the engine serves: Welcome;
                                                              Serving, whenever that changes
      ◄── Launch, ToRank, Kill, SayWhere   for each of its ranks   FromRank, Ended ──►
      Ask, Generate, End, Forget   of its front end ──►
                                                   ◄──        Answered, News, Over

There is no encryption and no password: it is for a private network, like the groups that ranks meet in.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import fields
from typing import Any, Generic, TypeVar

import msgspec

from midstream.config import EngineConfig
from midstream.engine.process import Add
from midstream.errors import InvalidInput
from midstream.types import RequestIncrement

T = TypeVar("T")
_OF_A_NODE = frozenset(
    ("model", "revision", "model_name", "tokenizer", "device", "num_threads", "kv_cache_bytes", "step_log")
    + ("data_parallel_rank", "data_parallel_size_local", "data_parallel_address")
)
"""Options that may differ between the nodes of one engine."""
_MAX_BYTES = 1 << 30
_SILENT_S = 60
"""A machine that answers no more, not even the kernel's probes, is gone after about so long."""


def shared_options(config: EngineConfig) -> dict[str, Any]:
    """What must be the same on every node of an engine. (That the weights are is seen when they are loaded.)"""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _OF_A_NODE}


class Hello(msgspec.Struct, tag=True):
    """``options``: what must be the same everywhere. ``ranks``: those that this node launches when told."""

    options: dict[str, Any]
    ranks: list[int]


class Launch(msgspec.Struct, tag=True):
    """Start rank ``rank``; in all other messages this process is ``key``."""

    key: int
    rank: int
    meeting: str | None
    number: int


class ToRank(msgspec.Struct, tag=True):
    key: int
    frame: bytes


class FromRank(msgspec.Struct, tag=True):
    key: int
    frame: bytes


class Kill(msgspec.Struct, tag=True):
    key: int


class SayWhere(msgspec.Struct, tag=True):
    key: int


class Ended(msgspec.Struct, tag=True):
    """That process is gone, or could not be started."""

    key: int
    exit_code: int


class Generate(msgspec.Struct, tag=True):
    request: Add
    session: str | None


class End(msgspec.Struct, tag=True):
    request_id: str
    sample: str | None


class Forget(msgspec.Struct, tag=True):
    request_id: str


class Ask(msgspec.Struct, tag=True):
    op: int
    verb: str
    arguments: dict[str, Any]


class Refused(msgspec.Struct, tag=True):
    error: dict[str, Any]


class Welcome(msgspec.Struct, tag=True):
    """The engine serves; ``status`` is that of now."""

    status: dict[str, Any]


class Serving(msgspec.Struct, tag=True):
    """Requests are taken again (None), or why not."""

    why: dict[str, Any] | None


class Answered(msgspec.Struct, tag=True):
    op: int
    value: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class News(msgspec.Struct, tag=True):
    increments: list[RequestIncrement]
    refused: list[tuple[str, dict[str, Any]]]


class Over(msgspec.Struct, tag=True):
    error: dict[str, Any]


ToOwner = Hello | FromRank | Ended | Generate | End | Forget | Ask
ToNode = Refused | Welcome | Serving | Launch | ToRank | Kill | SayWhere | Answered | News | Over

to_owner_decoder = msgspec.msgpack.Decoder(ToOwner)
to_node_decoder = msgspec.msgpack.Decoder(ToNode)
_encoder = msgspec.msgpack.Encoder()


class Link(Generic[T]):
    """One end. Messages arrive in the order in which they were sent, or the link is over."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[T]
    ) -> None:
        self._reader, self._writer, self._decoder = reader, writer, decoder
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", _SILENT_S // 3), ("TCP_KEEPINTVL", _SILENT_S // 6), ("TCP_KEEPCNT", 4)):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_S * 1000)

    @property
    def host(self) -> str:
        """Our own address, as the other end reaches it."""
        return str(self._writer.get_extra_info("sockname")[0])

    def send(self, message: ToOwner | ToNode) -> None:
        """Without waiting. To an end that is gone: nothing. Raises what a value raises that can not be encoded."""
        frame = _encoder.encode(message)
        if self._writer.transport.get_write_buffer_size() > _MAX_BYTES:  # it reads no more, though its machine lives
            self.abort()
        if not self._writer.is_closing():
            self._writer.write(len(frame).to_bytes(8, "big") + frame)

    async def receive(self, max_bytes: int = _MAX_BYTES) -> T | None:
        """None: it is over. Raises InvalidInput for what is no message."""
        try:
            size = int.from_bytes(await self._reader.readexactly(8), "big")
            if size > max_bytes:
                raise InvalidInput(f"a message of {size} bytes: is this a midstream node?")
            return self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            return None
        except msgspec.DecodeError as error:
            raise InvalidInput(f"this is no message of a midstream node: {error}") from error

    def abort(self) -> None:
        """Over at once, also where the other end hangs."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """What was sent is on its way. May be called twice."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 2.0)
