"""FakeEngine: the weight verbs over a plain dict of tensors. What the core does with a session, without a model."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from midstream.errors import MidstreamError, WeightUpdateError, from_wire, to_wire
from midstream.types import ParamMeta
from midstream.weights.base import WeightTransferEngine, worker_engines
from midstream.weights.manifest import digest, weights_id
from midstream.weights.packing import dtype_name, torch_dtype
from midstream.weights.session import TensorRecord, UpdateSession


def metas_of(tensors: dict[str, Tensor]) -> dict[str, ParamMeta]:
    return {name: ParamMeta(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()}


def random_weights(seed: int, dtype: torch.dtype = torch.bfloat16, layers: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (32, 8)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.{p}_proj.weight": (8, 8) for p in "qkv"} | {f"layers.{layer}.norm.weight": (7,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


class DictSource:
    """A WeightSource over a dict; ``dtype`` is what the floats are declared as."""

    def __init__(self, tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> None:
        self.tensors = tensors
        self.dtype = dtype

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, dtype_name(self.dtype or tensor.dtype), tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


class FakeEngine:
    """A WeightTransferClient and the engine behind it, in one process. ``held`` is what it serves."""

    def __init__(
        self,
        held: dict[str, Tensor],
        tied: dict[str, str] | None = None,
        backend: str | type[WeightTransferEngine] = "ipc",
        lease_s: float = 60.0,
    ) -> None:
        self.held = {name: tensor.clone() for name, tensor in held.items()}
        self.params = metas_of(held)
        self.worker = worker_engines.lookup(backend)(self.params, {})
        digests = {name: digest(tensor) for name, tensor in self.held.items()}
        self.session = UpdateSession(self.params, tied or {}, lease_s, digests)
        self.version, self.number = "v0", 0
        self.staged: dict[str, Tensor] = {}
        self.now = 0.0
        self.gate: threading.Event | None = None
        """When set, ``update_weights`` waits here first: a slow engine."""
        self.corrupt: set[int] = set()
        """Which update_weights calls, counted from 0, have a bit flipped on the way."""
        self.views: list[int] = []
        """data_ptr of every tensor received."""
        self._calls = itertools.count()

    def init_weight_transfer_engine(self, request: dict[str, Any], /) -> dict[str, Any]:
        return self.worker.init_transfer_engine(self.worker.parse_init_info(request["init_info"]))

    def start_weight_update(self, **kwargs: Any) -> dict[str, Any]:
        reply = self.session.start(self.now, **kwargs)
        self.staged = {}
        return {**reply, "version": self.version}

    def update_weights(self, request: dict[str, Any], /) -> dict[str, Any]:
        if self.gate is not None and not self.gate.wait(30):
            raise AssertionError("the gate of this test was never opened")
        self.session.require_open(request["update_info"].get("update"))
        flip = next(self._calls) in self.corrupt
        records, errors = [], []
        try:
            info = self.worker.parse_update_info(request["update_info"])
            for name, tensor in self.worker.receive_weights(info):
                self.views.append(tensor.data_ptr())
                if flip:
                    tensor.view(-1).view(torch.uint8)[0] ^= 1
                try:
                    self.session.check(name, dtype_name(tensor.dtype), tensor.shape)
                except WeightUpdateError as error:
                    errors.append(error)
                    continue
                staged = tensor.to(torch_dtype(self.params[self.session.owner(name)].dtype), copy=True)
                self.staged[self.session.owner(name)] = staged
                records.append(TensorRecord(name, digest(staged), tensor.numel() * tensor.element_size()))
            if errors:
                names = [name for error in errors for name in error.tensors]
                raise WeightUpdateError("; ".join(map(str, errors)), names)
            self.session.record(records)
        except MidstreamError as error:
            self.session.abort(str(error))
            self.staged = {}
            raise
        return {"received": len(records), "bytes": sum(record.nbytes for record in records)}

    def finish_weight_update(
        self, *, weight_version: str | None = None, kv_policy: str | None = None
    ) -> dict[str, Any]:
        names = self.session.verify()
        reply = self.session.summary()
        self.session.prepared()
        self.held.update({name: self.staged[name] for name in names})
        self.session.committed()
        self.number += 1
        self.version = weight_version or str(self.number)
        identity = weights_id(self.session.held_digests)
        return {**reply, "version": self.version, "number": self.number, "weights_id": identity}

    def abort_weight_update(self) -> dict[str, Any]:
        self.staged = {}
        return {"aborted": self.session.abort("the trainer asked for it")}

    def digests(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self.held.items()}


VERBS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "abort_weight_update",
    "digests",
)


def serve(connection: Any, held_seed: int) -> None:
    """The engine as a process of its own: one verb after another over a pipe."""
    torch.set_num_threads(1)
    engine = FakeEngine(random_weights(held_seed))
    while True:
        try:
            verb, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("ok", getattr(engine, verb)(*args, **kwargs)))
        except MidstreamError as error:
            connection.send(("error", to_wire(error)))


class PipeClient:
    """A WeightTransferClient whose engine is at the other end of a pipe."""

    def __init__(self, connection: Any, timeout_s: float = 30.0) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._lock = threading.Lock()

    def __getattr__(self, verb: str) -> Any:
        if verb not in VERBS:
            raise AttributeError(verb)
        return lambda *args, **kwargs: self._call(verb, args, kwargs)

    def _call(self, verb: str, args: Any, kwargs: Any) -> Any:
        with self._lock:
            try:
                self._connection.send((verb, args, kwargs))
                if not self._connection.poll(self._timeout_s):
                    raise AssertionError(f"{verb}: no answer in {self._timeout_s} s")
                kind, value = self._connection.recv()
            except (EOFError, OSError) as error:
                raise from_wire({"type": "EngineDead", "message": f"{verb}: the engine process ended"}) from error
        if kind == "error":
            raise from_wire(value)
        return value
