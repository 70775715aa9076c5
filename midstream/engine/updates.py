"""The weight verbs: one update from start to commit, between the trainer's calls, the staging thread and the protocol.

    start ─▶ session OPEN     update ─▶ job: receive, check, hash, stage ─▶ record     finish ─▶ (all chunks recorded)
    verify ─▶ job: settle and pack ─▶ session PREPARED ─▶ protocol decides when ─▶ commit: two references change

Whatever fails on the way drops the staging and leaves the live weights alone. An update without a start opens a
session, is its only chunk, and finishes it: one call, one answer. A late chunk of a started update that has ended
without a commit looks the same; so for one lease from then on, whatever names no session is refused, until a start (or
an abort while nothing is open, the operator's word that no such trainer is left).
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from midstream.config import check_type
from midstream.engine.worker import Then
from midstream.errors import Conflict, InvalidInput, MidstreamError, UpdateConflict
from midstream.models.weights import ModelWeights
from midstream.types import KV_POLICIES, KVPolicy, WeightVersion
from midstream.weights.base import WeightTransferEngine
from midstream.weights.manifest import weights_id
from midstream.weights.session import SessionState, TensorRecord, UpdateSession

if TYPE_CHECKING:
    from midstream.engine.core import EngineCore


@dataclass(slots=True)
class _Finishing:
    """A finish that waits for the chunks before it, then for staging to settle, then for its commit."""

    op: int
    label: str | None
    kv_policy: KVPolicy | None
    own: bool = False
    """Its update is this one call: nobody could finish it again, so a finish that fails drops it."""
    only_paused: bool = False
    is_preparing: bool = False
    prepared_at: float = 0.0


class WeightUpdates:
    """Owns the update session. Every method runs on the core's thread, between two steps."""

    def __init__(self, core: EngineCore, session: UpdateSession) -> None:
        self._core = core
        self.session = session
        self._in_flight: list[WeightTransferEngine] = []
        """Of each chunk handed to the staging thread whose result has not come back: what reads it."""
        self._finishing: _Finishing | None = None
        self._broken_off: tuple[float, str] | None = None
        """Until when chunks that name no session may be late ones of a started update that has ended, and which."""
        self.trainer_fingerprint: dict[str, Any] | None = None
        """Numerics of the trainer that opened the channel, if it said."""

    # -- verbs -------------------------------------------------------------------------------------------------

    def init_transfer(self, op: int, request: dict[str, Any] | None = None) -> None:
        """Open the channel; an update that is open over the old one is dropped."""
        request = request or {"init_info": {}}
        init_info = _field("init_weight_transfer_engine", request, "init_info")
        numerics = request.get("fingerprint")
        check_type("fingerprint", "dict[str, Any] | None", numerics)
        if self.session.is_open:
            self._drop("the channel was initialised again")
        self.trainer_fingerprint = None  # the trainer before this one is gone
        self._core.worker.transfer.interrupt()  # who waits on the old channel waits no longer

        def opened(reply: dict[str, Any]) -> None:
            self.trainer_fingerprint = numerics
            self._core.reply(op, {**reply, "fingerprint": self._core.worker.fingerprint})

        self._core.worker.init_transfer(init_info, self._unless_failed(op, opened))

    def shutdown_transfer(self, op: int) -> None:
        if self.session.is_open:
            raise UpdateConflict(f"weight update {self.session.session_id} is open: finish or abort it first")
        reply = {"message": "Weight transfer shut down"}
        self._core.worker.shutdown_transfer(self._unless_failed(op, lambda _: self._core.reply(op, reply)))

    def _unless_failed(self, op: int, then: Then) -> Then:
        """For a job: its error answers ``op``, its value goes to ``then``."""
        return lambda value: self._core.fail(op, value) if isinstance(value, MidstreamError) else then(value)

    def start(
        self, op: int, manifest: dict[str, Any] | None = None, mode: str | None = None, cast: str | None = None
    ) -> None:
        reply = self._start(op, mode, cast, manifest)
        self._broken_off = None
        self._core.reply(op, {**reply, **self._core.version()})

    def _start(
        self, op: int, mode: str | None, cast: str | None, manifest: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        self._core.sleep.require_awake("weights")
        now = time.monotonic()
        self.watch_lease(now)
        config = self._core.config
        mode = config.default_update_mode if mode is None else mode
        cast = config.default_cast if cast is None else cast
        # ranks may have refused different starts, but a call has one number for all
        number = op if self._core.is_one_of_many else None
        return self.session.start(now, mode, cast, manifest, number)  # type: ignore[arg-type]

    def update(self, op: int, request: dict[str, Any] | None = None) -> None:
        """Stage one chunk beside the steps; answered when it is staged. Without a start: answered when it serves.

        ``{"update_info": {…}}`` through the configured backend, or ``{"weight_dir": path}`` from disk. The latter, on
        its own, is cast like a checkpoint at start-up; ``weight_version`` and ``kv_policy`` as for finish, and refused
        while an update is open, which would ignore them.
        """
        worker, request = self._core.worker, request or {}
        if "weight_dir" in request:
            transfer: WeightTransferEngine = worker.disk
            info = {"weight_dir": request["weight_dir"]}
        else:
            transfer, info = worker.transfer, _field("update_weights", request, "update_info")
        try:
            own = not self.session.is_open and info.get("update") is None
            if own:
                self._require_no_late_chunks()
                finishing = self._finishing_of(op, request.get("weight_version"), request.get("kv_policy"))
                self._start(op, None, "allow" if transfer is worker.disk else None)
                finishing.own = True
                self._finishing = finishing
            else:
                options = [f for f in ("weight_version", "kv_policy") if request.get(f) is not None]
                if options and self.session.is_open:
                    remedy = "finish takes them; a whole update in one call waits for its end, or abort_weight_update"
                    raise self.session.conflict(
                        time.monotonic(), f"a chunk of it takes no {' and no '.join(options)}: {remedy}"
                    )
                self.session.require_open(info.get("update"))
                if self._finishing:
                    raise UpdateConflict(f"weight update {self.session.session_id} is finishing: no more chunks")
        except MidstreamError:
            transfer.interrupt()
            raise
        worker.receive(transfer, info, self.session.check, self._staged(op, transfer, own))

    def reset(self, op: int) -> None:
        """All weights to zero, as a commit of its own; only while a pause holds."""
        if self._core.protocol.phase != "paused":
            raise Conflict("weight_checker reset needs a completed pause: call pause_generation first")
        finishing = _Finishing(op, "reset", None, own=True, only_paused=True)
        self._start(op, "full", None)
        self._finishing = finishing
        worker = self._core.worker
        worker.receive_zeros(self.session.check, self._staged(op, worker.disk, own=True))

    def _staged(self, op: int, transfer: WeightTransferEngine, own: bool) -> Then:
        """What to do with a chunk's records. ``own``: its session has no other chunk, and its finish answers ``op``."""
        session_id = self.session.session_id
        self._in_flight.append(transfer)
        self.session.touch(time.monotonic())

        def done(records: list[TensorRecord] | MidstreamError) -> None:
            self._in_flight.remove(transfer)
            is_current = self._is_current(session_id)
            try:
                if not is_current:
                    raise UpdateConflict(f"weight update {session_id} was aborted while this chunk was received")
                if isinstance(records, MidstreamError):
                    raise records
                self.session.record(records)
                if not own:
                    self._core.reply(op, {"received": len(records), "bytes": sum(r.nbytes for r in records)})
            except MidstreamError as error:
                if is_current:
                    self._drop(error.message, answer=error if own else None)
                if not own:
                    self._core.fail(op, error)
            self._continue()

        return done

    def finish(self, op: int, weight_version: str | None = None, kv_policy: KVPolicy | None = None) -> None:
        """Verify, settle, commit; answered when the engine serves the new version."""
        finishing = self._finishing_of(op, weight_version, kv_policy)
        if not self.session.is_open:
            self.session.require_open()
        self._finishing = finishing
        if self.session.state is SessionState.PREPARED:  # an earlier finish was refused by a pause
            return self._hand_over()
        self._continue()

    def _finishing_of(self, op: int, weight_version: Any, kv_policy: Any) -> _Finishing:
        check_type("weight_version", "str | None", weight_version)
        if kv_policy is not None and kv_policy not in KV_POLICIES:
            raise InvalidInput(f"kv_policy must be one of {', '.join(KV_POLICIES)}, got {kv_policy!r}")
        if self._finishing:
            raise UpdateConflict("a finish of this update is in progress already: wait for its answer")
        return _Finishing(op, weight_version, kv_policy)

    def relabel(self, op: int, new_version: str) -> None:
        """The version's label alone: its number, weights and id stay."""
        if not new_version:
            raise InvalidInput("new_version must be a string that is not empty")
        scheduler = self._core.scheduler
        scheduler.version = dataclasses.replace(scheduler.version, label=new_version)
        self._core.reply(op, {"success": True, "new_version": new_version, **self._core.version()})

    def check(self, op: int, action: str, baseline: dict[str, str] | None = None) -> None:
        """``weight_checker``: hash what is really held (beside the steps), compare it, or zero it."""
        if action == "reset":
            return self.reset(op)
        if action not in ("checksum", "compare"):
            raise InvalidInput(f"action must be checksum, compare or reset, got {action!r}")
        if action == "compare" and not baseline:
            raise InvalidInput("compare needs a baseline: an object of tensor name to digest, as checksum gives it")
        self._core.sleep.require_weights()
        version = self._core.version()

        def hashed(here: dict[str, str]) -> None:
            held = self.session.held_digests | here  # experts that another rank holds are as they were received
            if action == "checksum":
                return self._core.reply(op, {"checksums": held, **version})
            given = {self.session.owner(name): digest for name, digest in (baseline or {}).items()}
            wrong = sorted(name for name in held.keys() | given.keys() if held.get(name) != given.get(name))
            self._core.reply(op, {"match": not wrong, "mismatches": wrong, **version})

        self._core.worker.hash_weights(self._unless_failed(op, hashed))

    def digests(self, op: int) -> None:
        """Digest of every tensor really held, by checkpoint name, and their id."""
        self._core.sleep.require_weights()
        version = self._core.version()

        def hashed(here: dict[str, str]) -> None:
            held = self.session.held_digests | here  # as in check
            self._core.reply(op, {"digests": held, **version, "weights_id": weights_id(held)})

        self._core.worker.hash_weights(self._unless_failed(op, hashed))

    def save(self, op: int, directory: str) -> None:
        """What is served, as safetensors in ``directory``: for a replica that was started again."""
        self._core.sleep.require_weights()
        saved = self._core.version()
        self._core.worker.save_weights(directory, self._unless_failed(op, lambda _: self._core.reply(op, saved)))

    def adopt(self, op: int, position: int, number: int, version: str) -> None:
        """This replica, started again, has the weights of the others: it goes by their number and label, and is where
        they are in the log."""
        scheduler = self._core.scheduler
        scheduler.version = dataclasses.replace(scheduler.version, number=number, label=version)
        self._core.protocol.join(position)
        self._core.reply(op, self._core.version())

    def abort(self, op: int, of: list[int] | None = None, reason: str = "abort_weight_update was called") -> None:
        """``of``: only if one of these calls started it; the coordinator of several ranks names them."""
        is_meant = of is None or self.session.session_id in [f"update-{number}" for number in of]
        aborted = self.session.session_id if self.session.is_open and is_meant else None
        if aborted:
            self._drop(reason)
        elif of is None:
            self._broken_off = None
        self._core.reply(op, {"aborted": aborted, **self._core.version()})

    # -- on the way --------------------------------------------------------------------------------------------

    def _continue(self) -> None:
        """Once all chunks are recorded: verify the whole, and let the staging thread settle it."""
        finishing = self._finishing
        if finishing is None or finishing.is_preparing or self._in_flight:
            return
        try:
            self.session.verify()
        except MidstreamError as error:
            return self._drop(error.message, answer=error)
        session_id = self.session.session_id

        def settled(weights: ModelWeights | MidstreamError) -> None:
            if not self._is_current(session_id) or self._finishing is None:
                return  # dropped meanwhile, and the finish answered
            if isinstance(weights, MidstreamError):
                return self._drop(weights.message, answer=weights)
            self._core.worker.prepared(weights)
            self.session.prepared()
            self._hand_over()

        finishing.is_preparing = True
        self._core.worker.prepare(settled)

    def _hand_over(self) -> None:
        """Verified and packed: the protocol says when, ``commit`` does it."""
        finishing = self._finishing
        assert finishing is not None
        finishing.prepared_at = time.monotonic()
        if self._core.is_one_of_many:
            self._core.outputs.prepared.append(finishing.op)  # goes on once all ranks have said so
        else:
            self.all_prepared(finishing.op)

    def cancel(self, op: int, of: int, reason: str) -> None:
        """The update that call ``of`` prepared here, or prepares, will not be committed anywhere."""
        if self._finishing is not None and self._finishing.op == of:
            self._drop(reason)
        self._core.reply(op, {})

    def all_prepared(self, op: int) -> None:
        """Every rank could commit what call ``op`` finishes: the protocol says when."""
        finishing = self._finishing
        if finishing is None or finishing.op != op:
            return  # dropped meanwhile, and answered
        if finishing.only_paused and not self._core.protocol.is_paused:
            why = "the pause was undone before the weights were reset"
            return self._drop(why, answer=Conflict(f"{why}: nothing was changed"))
        try:
            self._core.act(self._core.protocol.finish_update(finishing.op, finishing.kv_policy))
        except MidstreamError as error:
            self.finish_refused(finishing.op)
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
        running = len(core.scheduler.running)
        core.worker.commit()
        core.scheduler.commit(version, policy)
        self.session.committed()
        self._finishing = None
        end = time.monotonic()
        core.record(event="commit", t0=start, t1=end, running=running, version=number, label=label)
        times = {"commit_wait_ms": (start - finishing.prepared_at) * 1e3, "stall_ms": (end - start) * 1e3}
        core.reply(op, {**summary, **core.version(), "kv_policy": policy, **times})

    def finish_refused(self, op: Any) -> None:
        """The protocol failed the finish, and answers it (a pause demands the other policy): the update stays prepared
        for another finish, unless it was one call."""
        finishing = self._finishing
        if finishing and finishing.op == op:
            self._finishing = None
            if finishing.own:
                self._discard("its finish was refused")

    def watch_lease(self, now: float) -> None:
        """Drop an update whose trainer has fallen silent, unless it waits for us: also when a step or a start came
        between two looks at the clock. Of several ranks none does so by its own clock: the coordinator does."""
        if self._core.is_one_of_many:
            return
        if self._core.worker.is_busy or self._finishing:
            self.session.touch(now)
        if self.session.expired(now):
            self._drop(f"its lease of {self.session.lease_s} s ended without a word from the trainer")

    def _drop(self, reason: str, answer: MidstreamError | None = None) -> None:
        """End the open update, answer whoever waits for its finish, keep serving what is served."""
        self._discard(reason)
        finishing, self._finishing = self._finishing, None
        if finishing is None or not finishing.own:
            until = time.monotonic() + self.session.lease_s
            self._broken_off = until, f"{self.session.session_id} is aborted ({self.session.reason})"
        held = self._core.protocol.cancel_update(reason)
        if held:
            self._core.act(held)
        elif finishing is not None:
            self._core.fail(finishing.op, answer or UpdateConflict(f"the weight update was aborted: {reason}"))

    def _require_no_late_chunks(self) -> None:
        until, which = self._broken_off or (0.0, "")
        if (left_s := until - time.monotonic()) > 0:
            raise UpdateConflict(
                f"weight update {which}: for {left_s:.1f} s more, what names no session may be a late chunk of it and "
                "is refused; call start_weight_update for another update, or abort_weight_update if its trainer is gone"
            )

    def _discard(self, reason: str) -> None:
        self.session.abort(reason)
        for transfer in set(self._in_flight):
            transfer.interrupt()
        self._core.worker.discard()

    def _is_current(self, session_id: str | None) -> bool:
        return self.session.is_open and self.session.session_id == session_id


def _field(verb: str, request: dict[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(request.get(key), dict):
        raise InvalidInput(f"{verb} takes an object with an object {key!r}, got {request!r}")
    return dict(request[key])
