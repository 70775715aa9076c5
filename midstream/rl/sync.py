"""Weights to the engine, beside the next step's work.

After an optimizer step the trainer calls ``push`` and goes on to its next forward and backward pass; the update runs
in a thread of its own. The trainer calls ``wait`` before it next changes a weight, so what is being sent never moves
while it is sent, no copy of the model is needed for that, and no two updates overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from midstream.errors import Conflict
from midstream.rl.engine_thread import EngineThread, result_within
from midstream.weights.base import TrainerWeightTransferEngine, WeightTransferClient, trainer_engines
from midstream.weights.source import WeightSource

if TYPE_CHECKING:
    from midstream.serving.client import EngineClient


class SyncClient:
    """The engine's verbs as ``TrainerWeightTransferEngine`` wants them: those of ``client``, blocking, each within
    ``timeout_s``. May be used from any thread but the engine thread."""

    def __init__(self, client: EngineClient, engine: EngineThread, timeout_s: float) -> None:
        self._client = client
        self._engine = engine
        self._timeout_s = timeout_s

    def __getattr__(self, verb: str) -> Callable[..., dict[str, Any]]:
        method = getattr(self._client, verb)
        return lambda *args, **kwargs: self._engine.run(method(*args, **kwargs), self._timeout_s, verb)


def open_transfer(
    backend: str, client: EngineClient, engine: EngineThread, source: WeightSource, *, timeout_s: float
) -> TrainerWeightTransferEngine:
    """The trainer half of a registered backend (or "module:Class"), its channel to the engine open."""
    cls = trainer_engines.lookup(backend)
    blocking = cast(WeightTransferClient, SyncClient(client, engine, timeout_s))
    return cls.trainer_init({}, client=blocking, source=source)


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


class WeightSync:
    """Pushes policy versions to the engine, one at a time, in the background. Used from one thread, the trainer's."""

    def __init__(self, transfer: TrainerWeightTransferEngine, timeout_s: float) -> None:
        self._transfer = transfer
        self._timeout_s = timeout_s
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-update")
        self._pending: Future[None] | None = None

    def push(
        self,
        policy_version: int,
        on_commit: Callable[[UpdateRecord], None] = lambda record: None,
        on_error: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Start sending; returns at once. ``on_commit`` runs when the engine holds the weights, which are still at
        rest, ``on_error`` if it never will (``wait`` raises the error too). Both run on the update's thread."""

        def send() -> None:
            try:
                t0 = time.monotonic()
                reply = self._transfer.send_weights(weight_version=str(policy_version))
                said = {name: reply[name] for name in UpdateRecord.__dataclass_fields__ if name in reply}
                on_commit(UpdateRecord(policy_version=policy_version, t0=t0, t1=time.monotonic(), **said))
            except BaseException as error:
                on_error(error)
                raise

        if self._pending is not None:
            raise Conflict("the update before this one was not waited for; call wait() before changing weights")
        self._pending = self._executor.submit(send)

    def wait(self) -> None:
        """Wait until the last push is committed, if there is one. Weights may change after this. Raises what made the
        update fail, or ``TimedOut``."""
        pending, self._pending = self._pending, None
        if pending is not None:
            result_within(self._timeout_s, pending, "the weight update")

    def close(self) -> None:
        """Let a running update end (its verbs have time limits of their own) without waiting for it."""
        self._executor.shutdown(wait=False, cancel_futures=True)
