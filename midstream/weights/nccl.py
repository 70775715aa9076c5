"""Weights to engines that share no memory with the trainer, as vLLM's dense broadcast describes them.

Without a GPU the bytes go over TCP: the trainer listens on ``master_address:master_port`` and every worker opens one
connection to it. Then, per update, the tensors' bytes in the order of ``names``, no header, no padding; so ``packed``
makes no difference to the wire and is accepted in either place.

    trainer    listen ─▶ accept one connection per worker │ per update: bytes ───────────▶
    engine     init: connect                              │ update_weights: names, dtypes, shapes, then read as much

Nothing in the stream says where a tensor or an update begins. So a chunk that is not read to its end takes the
connection with it: both sides then see an error at once, and the next ``init`` opens a fresh one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream.errors import Conflict, InvalidInput, TimedOut, UpdateConflict, WeightUpdateError
from midstream.types import ParamMeta
from midstream.weights import packing
from midstream.weights.base import (
    TensorList,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferClient,
    WeightTransferEngine,
    answered,
)
from midstream.weights.columns import to_columns
from midstream.weights.source import paired

DEFAULT_TIMEOUT_S = 30.0
_SLOWEST_BYTES_PER_S = 1 << 20
"""A whole update may take its timeout_s plus its bytes at this rate: a trickle of bytes can not hold it for ever."""
_MAX_TIMEOUT_S = 1e6
"""Well below what a socket can be told."""
_RETRY_S = 0.05
_SEND_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class NCCLInitInfo:
    """What the worker half needs to join: vLLM's names."""

    master_address: str | None = None
    master_port: int | str | None = None
    rank_offset: int = 1
    """Rank of this engine's first worker; the trainer is 0."""
    world_size: int | None = 2
    """The trainer and all workers of all engines. None: the trainer takes whoever comes."""
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2
    """These three do not change what TCP carries."""
    nccl_unique_id_b64: str | None = None
    timeout_s: float | None = None
    """Longest wait for the trainer to listen, and later for its next byte; by default the engine's setting."""

    def __post_init__(self) -> None:
        if self.nccl_unique_id_b64 is not None:
            raise InvalidInput("nccl_unique_id_b64 needs NCCL between GPUs: give master_address and master_port here")
        if not isinstance(self.master_address, str) or not self.master_address or self.master_port is None:
            raise InvalidInput(
                f"master_address and master_port are needed, got {self.master_address!r} and {self.master_port!r}"
            )
        _check_address(self.master_address)
        _check_port(self.master_port, lowest=1)
        if self.world_size is not None and type(self.world_size) is not int:
            raise InvalidInput(f"world_size must be an integer, got {self.world_size!r}")
        self.rank(0)
        _check_timeout(self.timeout_s)

    def rank(self, worker: int) -> int:
        """Of the engine's worker number ``worker``, among all. ``InvalidInput`` where there is no such place."""
        size, is_int = self.world_size, type(self.rank_offset) is int
        if not (is_int and self.rank_offset >= 1 and (size is None or self.rank_offset + worker < size)):
            raise InvalidInput(
                f"rank_offset must be in [1, world_size) for each worker, got {self.rank_offset!r} of {size!r} for "
                f"worker {worker}: rank 0 is the trainer, so world_size is one more than all workers"
            )
        return self.rank_offset + worker


@dataclass(frozen=True, kw_only=True)
class NCCLUpdateInfo(TensorList):
    """What the next bytes are. All three lists empty: what they were in the round before."""

    packed: bool = True
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2
    is_checkpoint_format: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_checkpoint_format is not True:
            raise InvalidInput("is_checkpoint_format must be true: the engine takes weights under checkpoint names")


@dataclass(frozen=True, slots=True)
class NCCLTrainerInitInfo:
    """What the trainer half needs to open a channel."""

    master_address: str = "127.0.0.1"
    """Where to listen, and what the engine is told to connect to."""
    master_port: int = 0
    """0: a free one."""
    world_size: int | None = None
    """The trainer and all of the engine's workers; by default as many as the engine says it has."""
    packed: bool = True
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Longest wait for the workers to connect, for the engine to take bytes, and for its answer after the last one."""

    def __post_init__(self) -> None:
        _check_address(self.master_address)
        _check_port(self.master_port, lowest=0)
        if self.world_size is not None and (type(self.world_size) is not int or self.world_size < 2):
            raise InvalidInput(f"world_size must be at least 2 (the trainer and a worker), got {self.world_size!r}")
        _check_timeout(self.timeout_s)


class NCCLWeightTransferEngine(WeightTransferEngine):
    """The worker half over TCP. ``extra["timeout_s"]`` is the time limit of a trainer that names none."""

    init_info_cls = NCCLInitInfo
    update_info_cls = NCCLUpdateInfo

    def __init__(self, params: Mapping[str, ParamMeta], extra: Mapping[str, Any]) -> None:
        super().__init__(params, extra)
        timeout_s = extra.get("timeout_s", DEFAULT_TIMEOUT_S)
        _check_timeout(timeout_s)
        self._default_timeout_s = self._timeout_s = float(timeout_s)
        self._rank = 1
        self._lock = threading.Lock()  # around these two: ``interrupt`` comes from another thread
        self._socket: socket.socket | None = None
        self._closed_because = "it was never initialised"
        self._interrupted = threading.Event()
        self._last: list[ParamMeta] = []

    def init_transfer_engine(self, init_info: NCCLInitInfo) -> dict[str, Any]:
        self._close("it is being initialised")
        rank = init_info.rank(self.rank)
        self._interrupted.clear()
        self._timeout_s = init_info.timeout_s or self._default_timeout_s
        self._rank, self._last = rank, []
        address, port = str(init_info.master_address), int(init_info.master_port or 0)
        connection = self._connect(address, port)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with self._lock:
            self._socket = connection
        return {"transport": "tcp", "rank": self._rank, "world_size": init_info.world_size, "num_connections": 1}

    def _connect(self, address: str, port: int) -> socket.socket:
        """The trainer may call init before it listens, so a refusal is tried again until the time is over."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return socket.create_connection((address, port), max(deadline - time.monotonic(), _RETRY_S))
            except OSError as error:
                if isinstance(error, socket.gaierror):
                    raise InvalidInput(f"init: master_address {address!r} is not known: {error}") from error
                if time.monotonic() + _RETRY_S >= deadline:
                    raise TimedOut(
                        f"init: rank {self._rank} found no trainer (rank 0) listening on {address}:{port} within "
                        f"{self._timeout_s:g} s ({error}): start its half of the transfer, then init again"
                    ) from error
                if self._interrupted.wait(_RETRY_S):
                    raise UpdateConflict("init: ended by a later init or a shutdown") from error

    def receive_weights(self, update_info: NCCLUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        """One tensor after the other, each in the same memory: valid until the next one is taken."""
        with self._lock:
            connection = self._socket
        if connection is None:
            raise Conflict(f"the weight transfer has no connection, because {self._closed_because}: init again")
        metas = update_info.metas or self._last
        if not metas:
            raise InvalidInput("names, dtype_names and shapes are empty, and no round before this one had any")
        self._last = metas
        return self._receive(connection, metas)

    def _receive(self, connection: socket.socket, metas: list[ParamMeta]) -> Iterator[tuple[str, Tensor]]:
        sizes = [packing.num_bytes(meta) for meta in metas]
        memory = torch.empty(max(max(sizes), 1), dtype=torch.uint8)
        bytes_of = memory.numpy().data
        deadline = time.monotonic() + self._timeout_s + sum(sizes) / _SLOWEST_BYTES_PER_S
        num_done = 0
        try:
            for meta, nbytes in zip(metas, sizes, strict=True):
                self._fill(connection, bytes_of[:nbytes], deadline, metas, num_done)
                num_done += 1
                yield meta.name, packing.read(memory, packing.Slot(meta, 0, nbytes))
            self.require_drained()
        finally:
            if num_done < len(metas):  # what is left of it must not be taken for the next one
                self._close("an update was not read to its end")
                connection.close()

    def require_drained(self) -> None:
        """Between a chunk's last byte and the answer to it a trainer sends nothing: what lies here would be taken for
        the beginning of the next update, which would be wrong and fit."""
        with self._lock:
            if self._socket is None:
                return
            self._socket.setblocking(False)
            try:
                is_drained = not self._socket.recv(1, socket.MSG_PEEK)
            except OSError:  # nothing there; or lost, which the next chunk will say
                is_drained = True
        if not is_drained:
            why = "the trainer (rank 0) sent more bytes than its update_info announced"
            self._close(why)
            raise WeightUpdateError(f"update: {why} (a tensor too many, or a wider dtype?); init again")

    def _fill(
        self, connection: socket.socket, view: memoryview, deadline: float, metas: list[ParamMeta], num_done: int
    ) -> None:
        at = 0
        while at < len(view):
            where = f"update: tensor {num_done + 1} of {len(metas)}, {metas[num_done].name}, byte {at} of {len(view)}"
            rest = [meta.name for meta in metas[num_done:]]
            connection.settimeout(max(min(self._timeout_s, deadline - time.monotonic()), 0.001))
            try:
                got = connection.recv_into(view[at:])
                lost = "" if got else "the trainer (rank 0) is gone"
            except TimeoutError as error:
                raise TimedOut(
                    f"{where}: rank {self._rank} waited {self._timeout_s:g} s for the trainer (rank 0), which sent "
                    "less than its update_info announced; init again",
                    tensors=rest,
                ) from error
            except OSError as error:
                got, lost = 0, f"the trainer (rank 0) is lost: {error}"
            if lost:
                why = "this was ended by another call" if self._interrupted.is_set() else lost
                raise WeightUpdateError(f"{where}: {why}; init again", rest)
            at += got

    def interrupt(self) -> None:
        self._interrupted.set()
        # Only shut down: who reads wakes up and lets go of it, and its number is free again no sooner than that.
        self._close("a call that was refused or aborted left its bytes in it", only_shut_down=True)

    def shutdown(self) -> None:
        self._close("it was shut down")

    def _close(self, reason: str, only_shut_down: bool = False) -> None:
        with self._lock:
            connection, self._socket = self._socket, None
            if connection is not None or reason == "it was shut down":
                self._closed_because = reason
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            if not only_shut_down:
                connection.close()


class NCCLTrainerWeightTransferEngine(TrainerWeightTransferEngine):
    """The trainer half over TCP. Used by one thread; it has one more, which waits for the engine's answers."""

    init_info_cls = NCCLTrainerInitInfo

    def __init__(self, client: WeightTransferClient, source: WeightSource, info: NCCLTrainerInitInfo) -> None:
        super().__init__(client, source)
        self._timeout_s = info.timeout_s
        self._connections: list[socket.socket] = []
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="weight-transfer")
        try:
            self._connect(info)
        except BaseException:
            self.shutdown()
            raise

    def _connect(self, info: NCCLTrainerInitInfo) -> None:
        """Listen, and let the engine's workers connect while it answers the init."""
        try:
            listener = socket.create_server((info.master_address, info.master_port))
        except OSError as error:
            raise InvalidInput(f"can not listen on {info.master_address}:{info.master_port}: {error}") from error
        with listener:
            listener.settimeout(_RETRY_S)
            told = {**dataclasses.asdict(info), "master_port": listener.getsockname()[1], "rank_offset": 1}
            reply = self._executor.submit(self.init_channel, told)
            deadline = time.monotonic() + info.timeout_s
            wanted = None if info.world_size is None else info.world_size - 1
            while wanted is None or len(self._connections) < wanted:
                if reply.done():  # every worker has connected
                    wanted = reply.result().get("num_connections", 1) if wanted is None else wanted
                    if reply.exception() or len(self._connections) >= wanted:
                        break
                with contextlib.suppress(TimeoutError):
                    self._connections.append(listener.accept()[0])
                    continue
                if time.monotonic() > deadline:
                    missing = list(range(1 + len(self._connections), 1 + (wanted or 1 + len(self._connections))))
                    raise TimedOut(f"init: ranks {missing} did not connect within {info.timeout_s:g} s")
            answered(reply, info.timeout_s, "init: the engine did not answer").result()
        for connection in self._connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(info.timeout_s)

    def transfer(self, session_id: str) -> None:
        if not self._connections:
            raise Conflict("this weight transfer was shut down, or an update broke it off: call trainer_init again")
        metas = self.source.metadata()
        update_info = {**to_columns(metas), "update": session_id}
        reply = self._executor.submit(self.client.update_weights, {"update_info": update_info})
        try:
            for meta, tensor in paired(self.source):
                self._send(tensor.detach().to("cpu", packing.torch_dtype(meta.dtype)).contiguous(), meta, reply)
        except BaseException as error:
            self._hang_up()  # the engine waits for bytes that will not come: let it see that at once
            if isinstance(error, OSError) and not isinstance(error, TimedOut):
                self._answer_to(reply)  # the engine closed: its answer says why
                raise WeightUpdateError(f"update: the engine is gone: {error}") from error
            raise
        self._answer_to(reply)

    def _answer_to(self, reply: Future[dict[str, Any]]) -> None:
        answered(reply, self._timeout_s, "update: the engine did not answer").result()

    def _send(self, tensor: Tensor, meta: ParamMeta, reply: Future[dict[str, Any]]) -> None:
        data = tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
        for at in range(0, len(data), _SEND_BYTES):
            if reply.done():
                reply.result()  # raises what the engine said; a success before the last byte can not be one
                raise WeightUpdateError(f"update: the engine answered before it had {meta.name}", [meta.name])
            for rank, connection in enumerate(self._connections, 1):
                try:
                    connection.sendall(data[at : at + _SEND_BYTES])
                except TimeoutError as error:
                    raise TimedOut(
                        f"update: rank {rank} took no byte of {meta.name} for {self._timeout_s:g} s"
                    ) from error

    def _hang_up(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []

    def shutdown(self) -> None:
        self._hang_up()
        self._executor.shutdown(wait=False, cancel_futures=True)


def _check_address(address: object) -> None:
    try:
        is_one = isinstance(address, str) and "\0" not in address and address.encode("idna") != b""
    except UnicodeError:  # what a look-up would raise, where an OSError is expected
        is_one = False
    if not is_one:
        raise InvalidInput(f"master_address {address!r} is no host name and no IP address")


def _check_port(port: object, lowest: int) -> None:
    number = int(port) if isinstance(port, str) and port.isdecimal() and len(port) <= 5 else port
    if type(number) is not int or not lowest <= number <= 65535:
        raise InvalidInput(f"master_port must be in [{lowest}, 65535], got {port!r}")


def _check_timeout(timeout_s: object) -> None:
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise InvalidInput(f"timeout_s must be a positive number up to {_MAX_TIMEOUT_S:g}, got {timeout_s!r}")
