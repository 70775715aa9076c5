"""The weight verbs: one update from start to commit, between the trainer's calls, the staging thread and the protocol.

    start ─▶ session OPEN     update ─▶ job: receive, check, hash, stage ─▶ record     finish ─▶ (all chunks recorded)
    verify ─▶ job: settle and pack ─▶ session PREPARED ─▶ protocol decides when ─▶ commit: two references change

Whatever fails on the way drops the staging and leaves the live weights alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from midstream.engine.worker import Done
from midstream.errors import InvalidInput, MidstreamError, UpdateConflict
from midstream.types import KV_POLICIES, KVPolicy, WeightVersion
from midstream.weights.manifest import weights_id
from midstream.weights.session import SessionState, UpdateSession

if TYPE_CHECKING:
    from midstream.engine.core import EngineCore


@dataclass(slots=True)
class _Finishing:
    """A finish that waits for the chunks before it, then for staging to settle, then for its commit."""

    op: int
    label: str | None
    kv_policy: KVPolicy | None
    is_preparing: bool = False
    prepared_at: float = 0.0


class WeightUpdates:
    """Owns the update session. Every method runs on the core's thread, between two steps."""

    def __init__(self, core: EngineCore, session: UpdateSession) -> None:
        self._core = core
        self.session = session
        self._num_chunks = 0
        """Chunks handed to the staging thread whose result has not come back."""
        self._finishing: _Finishing | None = None

    # -- verbs -------------------------------------------------------------------------------------------------

    def init_transfer(self, op: int, request: dict[str, Any] | None = None) -> None:
        """Open the channel; an update that is open over the old one is dropped."""
        init_info = _field("init_weight_transfer_engine", request or {"init_info": {}}, "init_info")
        if self.session.is_open:
            self._drop("the channel was initialised again")

        def done(result: Done) -> None:
            if result.error:
                return self._core.fail(op, _as_midstream(result.error))
            self._core.reply(op, {**result.value, "fingerprint": self._core.worker.fingerprint})

        self._core.run_job(self._core.worker.init_transfer(init_info), done)

    def shutdown_transfer(self, op: int) -> None:
        if self.session.is_open:
            raise UpdateConflict(f"weight update {self.session.session_id} is open: finish or abort it first")

        def done(result: Done) -> None:
            if result.error:
                return self._core.fail(op, _as_midstream(result.error))
            self._core.reply(op, {"message": "Weight transfer shut down"})

        self._core.run_job(self._core.worker.shutdown_transfer(), done)

    def start(self, op: int, manifest: dict[str, Any] | None = None, mode: str = "full", cast: str = "deny") -> None:
        now = time.monotonic()
        self._keep_lease(now)
        reply = self.session.start(now, mode, cast, manifest)  # type: ignore[arg-type]
        self._core.worker.discard()  # what an expired lease left
        self._core.reply(op, {**reply, **self._core.version()})

    def update(self, op: int, request: dict[str, Any] | None = None) -> None:
        """Stage one chunk beside the steps; answered when it is staged."""
        update_info = _field("update_weights", request, "update_info")
        self.session.require_open(update_info.get("update"))
        if self._finishing:
            raise UpdateConflict(f"weight update {self.session.session_id} is finishing: it takes no more chunks")
        session_id = self.session.session_id
        self._num_chunks += 1

        def done(result: Done) -> None:
            self._num_chunks -= 1
            try:
                if not self._is_current(session_id):
                    raise UpdateConflict(f"weight update {session_id} was aborted while this chunk was received")
                if result.error:
                    raise _as_midstream(result.error)
                self.session.record(result.value)
                self._core.reply(op, {"received": len(result.value), "bytes": sum(r.nbytes for r in result.value)})
            except MidstreamError as error:
                if self.session.session_id == session_id:
                    self._drop(error.message)
                self._core.fail(op, error)
            self._continue()

        self._core.run_job(self._core.worker.receive(update_info, self.session.check), done)
        self.session.touch(time.monotonic())

    def finish(self, op: int, weight_version: str | None = None, kv_policy: KVPolicy | None = None) -> None:
        """Verify, settle, commit; answered when the engine serves the new version."""
        if weight_version is not None and not isinstance(weight_version, str):
            raise InvalidInput(f"weight_version must be a string, got {weight_version!r}")
        if kv_policy is not None and kv_policy not in KV_POLICIES:
            raise InvalidInput(f"kv_policy must be one of {', '.join(KV_POLICIES)}, got {kv_policy!r}")
        if self._finishing:
            raise UpdateConflict("a finish of this update is in progress already: wait for its answer")
        if not self.session.is_open:
            self.session.require_open()
        self._finishing = _Finishing(op, weight_version, kv_policy)
        if self.session.state is SessionState.PREPARED:  # an earlier finish was refused by a pause
            return self._hand_over()
        self._continue()

    def abort(self, op: int) -> None:
        aborted = self.session.session_id if self.session.is_open else None
        self._drop("abort_weight_update was called")
        self._core.reply(op, {"aborted": aborted, **self._core.version()})

    # -- on the way --------------------------------------------------------------------------------------------

    def _continue(self) -> None:
        """Once all chunks are recorded: verify the whole, and let the staging thread settle it."""
        finishing = self._finishing
        if finishing is None or finishing.is_preparing or self._num_chunks:
            return
        try:
            self.session.verify()
        except MidstreamError as error:
            return self._drop(error.message, answer=error)
        session_id = self.session.session_id

        def done(result: Done) -> None:
            if not self._is_current(session_id) or self._finishing is None:
                return  # dropped meanwhile, and the finish answered
            if result.error:
                error = _as_midstream(result.error)
                return self._drop(error.message, answer=error)
            self._core.worker.prepared(result.value)
            self.session.prepared()
            self._hand_over()

        finishing.is_preparing = True
        self._core.run_job(self._core.worker.prepare(), done)

    def _hand_over(self) -> None:
        """Verified and packed: the protocol says when, ``commit`` does it."""
        finishing = self._finishing
        assert finishing is not None
        finishing.prepared_at = time.monotonic()
        try:
            self._core.act(self._core.protocol.finish_update(finishing.op, finishing.kv_policy))
        except MidstreamError as error:
            self._finishing = None
            self._core.fail(finishing.op, error)

    def commit(self, op: Any, policy: KVPolicy) -> None:
        """The protocol's Commit: the new version serves from the next step on. Moves no weight bytes."""
        core, finishing = self._core, self._finishing
        assert finishing is not None and finishing.op == op
        start = time.monotonic()
        number = core.scheduler.version.number + 1
        label = str(number) if finishing.label is None else finishing.label
        version = WeightVersion(number, label, weights_id(self.session.new_digests))
        summary = self.session.summary()
        running = core.scheduler.num_running
        core.worker.commit()
        core.scheduler.commit(version, policy)
        self.session.committed()
        self._finishing = None
        end = time.monotonic()
        core.record(event="commit", t0=start, t1=end, running=running, version=number, label=label)
        times = {"commit_wait_ms": (start - finishing.prepared_at) * 1e3, "stall_ms": (end - start) * 1e3}
        core.reply(op, {**summary, **core.version(), "kv_policy": policy, **times})

    def finish_refused(self, op: Any) -> None:
        """The protocol failed the finish (a pause it belonged to was undone); the update stays prepared."""
        if self._finishing and self._finishing.op == op:
            self._finishing = None

    def watch_lease(self, now: float) -> None:
        """Drop an update whose trainer has fallen silent."""
        self._keep_lease(now)
        if self.session.expired(now):
            self._drop(f"its lease of {self.session.lease_s} s ended without a word from the trainer")

    def _keep_lease(self, now: float) -> None:
        """The trainer waits for us, not we for it: also when a step or a start came between two looks at the clock."""
        if self._core.has_jobs or self._finishing:
            self.session.touch(now)

    def _drop(self, reason: str, answer: MidstreamError | None = None) -> None:
        """End the open update, answer whoever waits for its finish, keep serving what is served."""
        self.session.abort(reason)
        self._core.worker.discard()
        finishing, self._finishing = self._finishing, None
        held = self._core.protocol.cancel_update(reason=reason)
        if held:
            self._core.act(held)
        elif finishing is not None:
            self._core.fail(finishing.op, answer or UpdateConflict(f"the weight update was aborted: {reason}"))

    def _is_current(self, session_id: str | None) -> bool:
        return self.session.is_open and self.session.session_id == session_id


def _field(verb: str, request: Any, key: str) -> dict[str, Any]:
    if not isinstance(request, dict) or not isinstance(request.get(key), dict):
        raise InvalidInput(f"{verb} takes an object with an object {key!r}, got {request!r}")
    return dict(request[key])


def _as_midstream(error: BaseException) -> MidstreamError:
    if isinstance(error, MidstreamError):
        return error
    wrapped = MidstreamError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
