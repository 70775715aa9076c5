"""Weights between two processes of one machine, through two shared buffers.

    trainer    write chunk 0 → buffer 0 │ write chunk 1 → buffer 1 │ (buffer 0 is read?) write chunk 2 → buffer 0 │ …
    engine                              │ read buffer 0 in place   │ read buffer 1 in place                      │ …

The engine owns the buffers: anonymous memory files, which the trainer opens as /proc/<pid>/fd/<n>. They have no name
anywhere, so they are gone with the last process that maps them, even after a kill. Each ``init`` makes a fresh pair
and a new channel id; a trainer that was replaced can write only into memory that nobody reads.

Of an engine of several workers each makes a pair, and says so in one reply. The trainer then names the first one's in
a second ``init``: from there on all workers read the same memory, and each byte is written once.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from midstream.config import check_types
from midstream.errors import Conflict, InvalidInput, UpdateConflict, WeightUpdateError
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

NUM_BUFFERS = 2


@dataclass(frozen=True)
class IPCInitInfo:
    """What both halves need to open a channel."""

    packed_buffer_size_bytes: int = 64 << 20
    """Of each buffer. Enlarged to the largest tensor; no more than the whole source needs, or the model in float64."""
    shared: dict[str, Any] = field(default_factory=dict)
    """The reply of the worker whose channel all are to use; empty: each makes its own."""

    def __post_init__(self) -> None:
        check_types(self)
        self.entries()
        if self.packed_buffer_size_bytes < 1:
            raise InvalidInput(f"packed_buffer_size_bytes must be at least 1, got {self.packed_buffer_size_bytes}")

    def entries(self) -> list[tuple[str, list[int]]]:
        """Path and identity of each buffer in ``shared``. Paths come from outside: only those of buffers are any."""
        if not self.shared:
            return []
        try:
            found = [(entry["path"], entry["identity"]) for entry in self.shared["buffers"]]
            fits = len(found) == NUM_BUFFERS and isinstance(self.shared["channel"], str)
            for path, identity in found:
                fits = fits and re.fullmatch(r"/proc/[0-9]+/fd/[0-9]+", path) is not None
                fits = fits and len(identity) == 3 and all(type(number) is int and number >= 0 for number in identity)
                fits = fits and identity[-1] > 0
        except (TypeError, KeyError):
            fits = False
        if not fits:
            raise InvalidInput(f"shared must be the reply of one worker's init, got {self.shared!r:.200}")
        return found


@dataclass(frozen=True)
class IPCTrainerInitInfo(IPCInitInfo):
    timeout_s: float = 60.0
    """Longest wait for the engine to have read one chunk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.timeout_s > 0:
            raise InvalidInput(f"timeout_s must be a positive number, got {self.timeout_s}")


@dataclass(frozen=True, kw_only=True)
class IPCUpdateInfo(TensorList):
    """One chunk: which buffer, and which tensors lie in it, as ``packing.plan`` lays them out."""

    channel: str
    """From the reply of init."""
    buffer: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.buffer) is not int or not 0 <= self.buffer < NUM_BUFFERS:
            raise InvalidInput(f"buffer must be 0 or 1, got {self.buffer!r}")
        if not self.names:
            raise InvalidInput("names, dtype_names and shapes must not be empty")


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
            if not _is_sealed(fd):
                raise InvalidInput(f"{path} is not the engine's buffer: it could be cut off under its readers")
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


def _is_sealed(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # not memory that can be sealed
        return False


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
        shared = init_info.shared
        if shared:
            if shared["channel"] != self._channel:
                self.shutdown()
                self._buffers = [SharedBuffer.open(path, identity) for path, identity in init_info.entries()]
                self._channel = shared["channel"]
            return dict(shared)
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
        chunk, *rest = packing.plan(update_info.metas, buffer.numel())
        if rest:
            names = [slot.meta.name for slots in rest for slot in slots]
            raise WeightUpdateError(f"a buffer of {buffer.numel()} bytes has no room for {', '.join(names)}", names)
        return ((slot.meta.name, packing.read(buffer, slot)) for slot in chunk)

    def shutdown(self) -> None:
        self._channel = None
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []


class IPCTrainerWeightTransferEngine(TrainerWeightTransferEngine):
    """The trainer half: writes each tensor once, in the dtype its metadata says, while the engine reads the buffer
    written before. Used by one thread; it has one more, which waits for the engine."""

    init_info_cls = IPCTrainerInitInfo

    def __init__(self, client: WeightTransferClient, source: WeightSource, info: IPCTrainerInitInfo) -> None:
        super().__init__(client, source)
        # in the dtypes to be sent, which with cast="allow" may be wider than those the engine holds
        sizes = [packing.aligned(packing.num_bytes(meta)) for meta in source.metadata()]
        wanted = max(min(info.packed_buffer_size_bytes, sum(sizes)), *sizes, packing.ALIGNMENT)
        reply = self.init_channel({"packed_buffer_size_bytes": wanted})
        if "buffers" not in reply:
            raise InvalidInput(f"the engine's weight_transfer_backend is not 'ipc': its reply has {sorted(reply)}")
        if isinstance(reply["channel"], list):  # of several workers, by rank
            first = {"channel": reply["channel"][0], "buffers": reply["buffers"][0]}
            first["buffer_bytes"] = reply["buffer_bytes"]
            reply = self.init_channel({"packed_buffer_size_bytes": wanted, "shared": first})
        self._channel: str = reply["channel"]
        self._buffer_bytes: int = reply["buffer_bytes"]
        self._buffers = [SharedBuffer.open(entry["path"], list(entry["identity"])) for entry in reply["buffers"]]
        self._timeout_s = info.timeout_s
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="weight-transfer")
        self._reading: list[Future[dict[str, Any]] | None] = [None] * NUM_BUFFERS

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
                listed = to_columns([slot.meta for slot in chunk])
                update_info = {"channel": self._channel, "buffer": which, "update": session_id, **listed}
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
        call = self._reading[which]
        if call is None:
            return
        answered(call, self._timeout_s, f"the engine has not read the chunk in buffer {which}")
        self._reading[which] = None
        if not earlier:
            call.result()
