"""Weights to the engine, beside the next step's work.

After an optimizer step the trainer calls ``push`` and goes on to its next forward and backward pass; the update runs
in a thread of its own. The trainer calls ``wait`` before it next changes a weight, so what is being sent never moves
while it is sent, no copy of the model is needed for that, and no two updates overlap.

::

    trainer   │ forward, backward, step s │ push ─► forward, backward s+1 ..... wait │ step s+1 │ push ─► …
    update    │                           │ start, chunks, finish ─► on_commit(s)    │
    engine    │ steps ............................. │ commit │ steps ..................
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from midstream.errors import Conflict, TimedOut
from midstream.rl.engine_thread import EngineThread
from midstream.types import KVPolicy
from midstream.weights.base import CastPolicy, TrainerWeightTransferEngine, UpdateMode, trainer_engines
from midstream.weights.source import WeightSource

if TYPE_CHECKING:
    from midstream.serving.client import EngineClient


class SyncClient:
    """The engine's weight verbs as ``TrainerWeightTransferEngine`` wants them: blocking, each within ``timeout_s``.

    May be used from any thread but the engine thread.
    """

    def __init__(self, client: EngineClient, engine: EngineThread, timeout_s: float) -> None:
        self._client = client
        self._engine = engine
        self._timeout_s = timeout_s

    def init_weight_transfer_engine(self, request: dict[str, Any], /) -> dict[str, Any]:
        return self._run(self._client.init_weight_transfer_engine(request), "init_weight_transfer_engine")

    def start_weight_update(
        self, *, manifest: dict[str, Any] | None = None, mode: UpdateMode = "full", cast: CastPolicy = "deny"
    ) -> dict[str, Any]:
        call = self._client.start_weight_update(manifest=manifest, mode=mode, cast=cast)
        return self._run(call, "start_weight_update")

    def update_weights(self, request: dict[str, Any], /) -> dict[str, Any]:
        return self._run(self._client.update_weights(request), "update_weights")

    def finish_weight_update(
        self, *, weight_version: str | None = None, kv_policy: KVPolicy | None = None
    ) -> dict[str, Any]:
        call = self._client.finish_weight_update(weight_version=weight_version, kv_policy=kv_policy)
        return self._run(call, "finish_weight_update")

    def abort_weight_update(self) -> dict[str, Any]:
        return self._run(self._client.abort_weight_update(), "abort_weight_update")

    def _run(self, call: Coroutine[Any, Any, dict[str, Any]], what: str) -> dict[str, Any]:
        return self._engine.run(call, self._timeout_s, what)


def open_transfer(
    backend: str,
    client: EngineClient,
    engine: EngineThread,
    source: WeightSource,
    *,
    timeout_s: float,
    init_info: Mapping[str, Any] | None = None,
) -> TrainerWeightTransferEngine:
    """The trainer half of a registered backend (or "module:Class"), its channel to the engine open."""
    cls = trainer_engines.lookup(backend)
    return cls.trainer_init(dict(init_info or {}), client=SyncClient(client, engine, timeout_s), source=source)


class Sends(Protocol):
    """What ``WeightSync`` needs of a ``TrainerWeightTransferEngine``."""

    def send_weights(self, weight_version: str | None = None) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """One committed update, as the trainer saw it. Times are of the monotonic clock that all processes share."""

    policy_version: int
    """Optimizer steps behind the weights; also their label."""
    number: int
    """The engine's count of commits."""
    weights_id: str
    bytes: int
    updated: int
    """Tensors that changed hands."""
    t0: float
    t1: float
    commit_wait_ms: float
    """How long the commit was held for the oldest request's progress; steps went on."""
    stall_ms: float
    """How long no step ran because of the commit."""

    @property
    def seconds(self) -> float:
        return self.t1 - self.t0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": self.seconds}


class WeightSync:
    """Pushes policy versions to the engine, one at a time, in the background.

    ``on_update`` is called on the update's thread after each commit, while the weights are still at rest: the place to
    keep a copy of them. Used from one thread, the trainer's.
    """

    def __init__(
        self, transfer: Sends, *, timeout_s: float, on_update: Callable[[UpdateRecord], None] | None = None
    ) -> None:
        self._transfer = transfer
        self._timeout_s = timeout_s
        self._on_update = on_update
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-update")
        self._pending: Future[UpdateRecord] | None = None

    def push(
        self,
        policy_version: int,
        on_commit: Callable[[], None] = lambda: None,
        on_error: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Start sending; returns at once. ``on_commit`` runs when the engine holds the weights, ``on_error`` if it
        never will (the error is also raised by ``wait``). Both run on the update's thread."""
        if self._pending is not None:
            raise Conflict("the update before this one was not waited for; call wait() before changing weights")
        self._pending = self._executor.submit(self._send, policy_version, on_commit, on_error)

    def _send(
        self, policy_version: int, on_commit: Callable[[], None], on_error: Callable[[BaseException], None]
    ) -> UpdateRecord:
        try:
            t0 = time.monotonic()
            reply = self._transfer.send_weights(weight_version=str(policy_version))
            record = UpdateRecord(
                policy_version=policy_version,
                number=int(reply["number"]),
                weights_id=str(reply["weights_id"]),
                bytes=int(reply["bytes"]),
                updated=int(reply["updated"]),
                t0=t0,
                t1=time.monotonic(),
                commit_wait_ms=float(reply.get("commit_wait_ms", 0.0)),
                stall_ms=float(reply.get("stall_ms", 0.0)),
            )
            on_commit()  # first, so that generation need not wait for what follows
            if self._on_update is not None:
                self._on_update(record)
        except BaseException as error:
            on_error(error)
            raise
        return record

    def wait(self) -> UpdateRecord | None:
        """Wait until the last push is committed, and return its record; None if there is none. Weights may change
        after this. Raises what made the update fail, or ``TimedOut``."""
        pending = self._pending
        if pending is None:
            return None
        try:
            record = pending.result(self._timeout_s)
        except TimeoutError as error:
            if pending.done():  # the error is the update's own
                self._pending = None
                raise
            raise TimedOut(f"the weight update was not committed within {self._timeout_s:g} s") from error
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        return record

    def close(self) -> None:
        """Let a running update end (its verbs have time limits of their own) without waiting for it."""
        self._executor.shutdown(wait=False, cancel_futures=True)
