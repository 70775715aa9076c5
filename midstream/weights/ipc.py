"""Weights between two processes of one machine, through two shared buffers.

    trainer    write chunk 0 → buffer 0 │ write chunk 1 → buffer 1 │ (buffer 0 is read?) write chunk 2 → buffer 0 │ …
    engine                              │ read buffer 0 in place   │ read buffer 1 in place                      │ …

The engine owns the buffers: anonymous memory files, which the trainer opens as /proc/<pid>/fd/<n>. They have no name
anywhere, so they are gone with the last process that maps them, even after a kill. Each ``init`` makes a fresh pair
and a new channel id; a trainer that was replaced can write only into memory that nobody reads.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import secrets
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from midstream.errors import Conflict, InvalidInput, TimedOut, UpdateConflict, WeightUpdateError
from midstream.types import ParamMeta
from midstream.weights import packing
from midstream.weights.base import (
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferClient,
    WeightTransferEngine,
    init_request,
    parse_info,
)
from midstream.weights.session import is_shape
from midstream.weights.source import paired

NUM_BUFFERS = 2
DEFAULT_BUFFER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class IPCInitInfo:
    """What the worker half needs to open a channel."""

    packed_buffer_size_bytes: int = DEFAULT_BUFFER_BYTES
    """Of each buffer. Enlarged to the largest tensor the engine holds; never more than the model in float64."""

    def __post_init__(self) -> None:
        _check_size(self.packed_buffer_size_bytes)


@dataclass(frozen=True, slots=True)
class IPCUpdateInfo:
    """One chunk: which buffer, and where in it each tensor lies, in bytes."""

    channel: str
    """From the reply of init."""
    buffer: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    nbytes: list[int]
    update: str | None = None
    """Session id from the reply of start; the engine refuses a chunk of another update."""

    def __post_init__(self) -> None:
        if type(self.buffer) is not int or not 0 <= self.buffer < NUM_BUFFERS:
            raise InvalidInput(f"buffer must be 0 or 1, got {self.buffer!r}")
        columns = {name: getattr(self, name) for name in ("names", "dtype_names", "shapes", "offsets", "nbytes")}
        for name, column in columns.items():
            if not isinstance(column, (list, tuple)):
                raise InvalidInput(f"{name} must be a list, got {type(column).__name__}")
        if len({len(column) for column in columns.values()}) != 1 or not self.names:
            raise InvalidInput(
                "names, dtype_names, shapes, offsets, nbytes must be equally long and not empty, got "
                f"{[len(column) for column in columns.values()]}"
            )
        if not all(isinstance(text, str) for text in (*self.names, *self.dtype_names)):
            raise InvalidInput("names and dtype_names must be lists of strings")
        if not (all(map(is_shape, self.shapes)) and is_shape(self.offsets) and is_shape(self.nbytes)):
            raise InvalidInput("shapes, offsets and nbytes must hold integers >= 0")


@dataclass(frozen=True, slots=True)
class IPCTrainerInitInfo:
    """What the trainer half needs to open a channel."""

    packed_buffer_size_bytes: int = DEFAULT_BUFFER_BYTES
    """Of each of the two buffers. Enlarged to the largest tensor, cut down to what the whole source needs."""
    timeout_s: float = 60.0
    """Longest wait for the engine to have read one chunk."""

    def __post_init__(self) -> None:
        _check_size(self.packed_buffer_size_bytes)
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise InvalidInput(f"timeout_s must be a positive number, got {self.timeout_s}")


class SharedBuffer:
    """Memory of the engine, mapped by one more process. ``data`` is it, as uint8 [bytes].

    The engine keeps ``fd`` open, since that is how the trainer finds the memory; -1 at the trainer.
    """

    def __init__(self, data: Tensor, fd: int = -1) -> None:
        self.data = data
        self.fd = fd
        self.identity = [] if fd < 0 else _identity(fd)
        self._close_fd = None if fd < 0 else weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, nbytes: int) -> SharedBuffer:
        """Allocate, whole and at once: too little memory is an error here, not a bus error during an update."""
        if not hasattr(os, "memfd_create"):
            raise InvalidInput("weight transfer 'ipc' needs Linux (memfd_create): choose another backend")
        fd = os.memfd_create("midstream-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            # the other side must not be able to shrink it under a reader
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(_mapped(fd, nbytes), fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, path: str, identity: list[int]) -> SharedBuffer:
        """Map the memory at ``path``, if it is still the one that ``identity`` was read from."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidInput(
                f"the engine's buffer {path} can not be opened ({error.strerror}): backend 'ipc' needs engine and "
                "trainer on one machine, under one user and in one process namespace"
            ) from error
        try:
            if _identity(fd) != identity:
                raise InvalidInput(f"{path} is not the engine's buffer: the engine has ended, or runs elsewhere")
            return cls(_mapped(fd, identity[-1]))
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let go. The memory is freed when its last view, here or in the other process, is gone."""
        if self._close_fd is not None:
            self._close_fd()
        self.data = torch.empty(0, dtype=torch.uint8)


def _mapped(fd: int, nbytes: int) -> Tensor:
    # The tensor holds the mapping, and every view of the tensor does; nothing else has to close it.
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


def _identity(fd: int) -> list[int]:
    stat = os.fstat(fd)
    return [stat.st_dev, stat.st_ino, stat.st_size]


class IPCWeightTransferEngine(WeightTransferEngine):
    """The worker half: owns the buffers, hands out views of them."""

    init_info_cls = IPCInitInfo
    update_info_cls = IPCUpdateInfo

    def __init__(self, params: Mapping[str, ParamMeta], extra: Mapping[str, Any]) -> None:
        super().__init__(params, extra)
        self._channel: str | None = None
        self._buffers: list[SharedBuffer] = []

    def init_transfer_engine(self, init_info: IPCInitInfo) -> dict[str, Any]:
        self.shutdown()
        sizes = [packing.aligned(packing.num_bytes(meta)) for meta in self.params.values()]
        wanted = min(packing.aligned(init_info.packed_buffer_size_bytes), 4 * sum(sizes))
        nbytes = max(wanted, *sizes, packing.ALIGNMENT)
        try:
            for _ in range(NUM_BUFFERS):
                self._buffers.append(SharedBuffer.create(nbytes))
        except OSError as error:
            self.shutdown()
            raise InvalidInput(
                f"no memory for {NUM_BUFFERS} transfer buffers of {nbytes} bytes ({error.strerror}): "
                "lower packed_buffer_size_bytes"
            ) from error
        self._channel = secrets.token_hex(8)
        return {
            "channel": self._channel,
            "buffer_bytes": nbytes,
            "buffers": [
                {"path": f"/proc/{os.getpid()}/fd/{buffer.fd}", "identity": buffer.identity} for buffer in self._buffers
            ],
        }

    def receive_weights(self, update_info: IPCUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        """Views of the buffer. Everything is checked before the first one is handed out."""
        if self._channel is None:
            raise Conflict("the weight transfer is not initialised: call init_weight_transfer_engine first")
        if update_info.channel != self._channel:
            raise UpdateConflict(
                f"channel {update_info.channel!r} was replaced by a later init_weight_transfer_engine: init again"
            )
        buffer = self._buffers[update_info.buffer].data
        slots = _slots(update_info, buffer.numel())
        return ((slot.meta.name, packing.read(buffer, slot)) for slot in slots)

    def shutdown(self) -> None:
        self._channel = None
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []


def _slots(info: IPCUpdateInfo, buffer_bytes: int) -> list[packing.Slot]:
    """The chunk's slots, if all of them can be right; else ``WeightUpdateError`` with every tensor that can not."""
    slots: list[packing.Slot] = []
    bad: dict[str, str] = {}
    columns = zip(info.names, info.dtype_names, info.shapes, info.offsets, info.nbytes, strict=True)
    for name, dtype, shape, offset, nbytes in columns:
        meta = ParamMeta(name, dtype, tuple(shape))
        try:
            needed = packing.num_bytes(meta)
        except InvalidInput as error:
            bad[name] = str(error)
            continue
        if nbytes != needed:
            bad[name] = f"{nbytes} bytes sent, but {dtype} {shape} has {needed}"
        elif offset % packing.ALIGNMENT:
            bad[name] = f"offset {offset} is no multiple of {packing.ALIGNMENT}"
        elif offset + nbytes > buffer_bytes:
            bad[name] = f"bytes {offset} to {offset + nbytes} of a buffer of {buffer_bytes}"
        slots.append(packing.Slot(meta, offset, nbytes))
    end = 0
    for slot in sorted(slots, key=lambda slot: (slot.offset, slot.nbytes)):
        if slot.offset < end and slot.nbytes:
            bad.setdefault(slot.meta.name, f"offset {slot.offset} lies in another tensor of this chunk")
        end = max(end, slot.offset + slot.nbytes)
    if bad:
        raise WeightUpdateError("; ".join(f"{name}: {problem}" for name, problem in bad.items()), list(bad))
    return slots


class IPCTrainerWeightTransferEngine(TrainerWeightTransferEngine):
    """The trainer half: writes each tensor once, in the dtype its metadata says, while the engine reads the buffer
    written before. Used by one thread; it has one more, which waits for the engine."""

    def __init__(
        self,
        client: WeightTransferClient,
        source: WeightSource,
        channel: str,
        buffers: list[SharedBuffer],
        buffer_bytes: int,
        timeout_s: float,
    ) -> None:
        super().__init__(client, source)
        self._channel = channel
        self._buffers = buffers
        self._buffer_bytes = buffer_bytes
        self._timeout_s = timeout_s
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="weight-transfer")
        self._reading: list[Future[dict[str, Any]] | None] = [None] * NUM_BUFFERS

    @classmethod
    def trainer_init(cls, init_info: Mapping[str, Any], *, client: WeightTransferClient, source: WeightSource) -> Self:
        info = parse_info(IPCTrainerInitInfo, init_info)
        # in the dtypes to be sent, which with cast="allow" may be wider than those the engine holds
        sizes = [packing.aligned(packing.num_bytes(meta)) for meta in source.metadata()]
        wanted = max(min(info.packed_buffer_size_bytes, sum(sizes)), *sizes, packing.ALIGNMENT)
        worker_info = {"packed_buffer_size_bytes": wanted}
        reply = client.init_weight_transfer_engine(init_request(worker_info, source))
        if "buffers" not in reply:
            raise InvalidInput(f"the engine's weight_transfer_backend is not 'ipc': its reply has {sorted(reply)}")
        buffers = [SharedBuffer.open(entry["path"], list(entry["identity"])) for entry in reply["buffers"]]
        return cls(client, source, reply["channel"], buffers, reply["buffer_bytes"], info.timeout_s)

    def transfer(self, session_id: str) -> None:
        if not self._buffers:
            raise Conflict("this weight transfer was shut down: call trainer_init again")
        # After a failure the engine may still be reading; what that chunk came to belongs to the update that failed.
        for which in range(NUM_BUFFERS):
            self._await(which, earlier=True)
        pairs = paired(self.source)
        try:
            for index, chunk in enumerate(packing.plan(self.source.metadata(), self._buffer_bytes)):
                which = index % NUM_BUFFERS
                self._await(which)
                for slot in chunk:
                    _, tensor = next(pairs)
                    packing.write(self._buffers[which].data, tensor, slot)
                update_info = {"channel": self._channel, "buffer": which, "update": session_id, **_columns(chunk)}
                self._reading[which] = self._executor.submit(self.client.update_weights, {"update_info": update_info})
            next(pairs, None)  # raises if the source has more than it announced
            for which in range(NUM_BUFFERS):
                self._await(which)
        except BaseException:
            self._reading = [f if f is not None and not f.cancel() else None for f in self._reading]
            raise

    def shutdown(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []

    def _await(self, which: int, earlier: bool = False) -> None:
        """Until the engine has read the chunk in this buffer. Raises what its call raised, unless it is an earlier
        update's, and ``TimedOut``."""
        future = self._reading[which]
        if future is None:
            return
        done, _ = wait([future], self._timeout_s)
        if not done:
            raise TimedOut(
                f"the engine has not read the chunk in buffer {which} within {self._timeout_s} s; if it does not "
                "recover, call trainer_init again"
            )
        self._reading[which] = None
        if not earlier:
            future.result()


def _check_size(nbytes: object) -> None:
    if type(nbytes) is not int or nbytes < 1:
        raise InvalidInput(f"packed_buffer_size_bytes must be an integer >= 1, got {nbytes!r}")


def _columns(chunk: list[packing.Slot]) -> dict[str, Any]:
    return {
        "names": [slot.meta.name for slot in chunk],
        "dtype_names": [slot.meta.dtype for slot in chunk],
        "shapes": [list(slot.meta.shape) for slot in chunk],
        "offsets": [slot.offset for slot in chunk],
        "nbytes": [slot.nbytes for slot in chunk],
    }
