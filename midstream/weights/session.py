"""One weight update at a time, as a transaction. No torch here: names, shapes, dtypes and digests only.

    IDLE ──start──▶ OPEN ──verify, prepared──▶ PREPARED ──committed──▶ COMMITTED
                     │  ▲ record                  │
                     └──┴───────── abort ─────────┴───▶ ABORTED           start works again from COMMITTED and ABORTED

Only the engine core calls the methods that change state. ``check`` reads what ``start`` fixed, so the staging thread
of the open update may call it too. Whether an update is complete is decided once, by ``verify``, never per chunk.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from midstream.config import CastPolicy as CastPolicy
from midstream.config import UpdateMode as UpdateMode
from midstream.errors import InvalidInput, UpdateConflict, WeightUpdateError
from midstream.types import ParamMeta as ParamMeta
from midstream.weights.columns import from_columns

# With cast="allow" a tensor may arrive in any of these for any of these. Quantised types mean nothing without scales.
_CASTABLE = frozenset({"float64", "float32", "float16", "bfloat16"})


class SessionState(enum.Enum):
    IDLE = "idle"
    OPEN = "open"
    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor that has been staged: its digest in the dtype the engine holds it in, and the bytes that arrived. One
    that the engine holds as several has them as ``parts``."""

    name: str
    digest: str
    nbytes: int
    parts: tuple[TensorRecord, ...] = ()


class UpdateSession:
    """The state of the engine's one weight update, and the digests of the weights it serves.

    ``params`` is every tensor the engine holds, by checkpoint name; ``tied`` maps an alias to the name that owns the
    storage, and either name fills it; ``fused``, to the ones it is cut into: they may arrive as this one tensor, which
    is in ``params`` too. ``held_digests`` has the digest of every tensor served (aliases may be left
    out). A failed call of any kind leaves the digests held as they were.
    """

    def __init__(
        self,
        params: Mapping[str, ParamMeta],
        tied: Mapping[str, str],
        lease_s: float,
        held_digests: Mapping[str, str],
        fused: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.lease_s = lease_s
        self.state = SessionState.IDLE
        self.session_id: str | None = None
        self.reason: str | None = None
        """Why the last update was aborted."""
        self.mode: UpdateMode = "full"
        self.cast: CastPolicy = "deny"
        self._tied, self._fused = dict(tied), dict(fused or {})
        self._metas = {**params, **{alias: params[owner] for alias, owner in tied.items()}}
        self._owners = [name for name in params if name not in tied and name not in self._fused]
        self._held = {self.owner(name): digest for name, digest in held_digests.items()}
        self._manifest: dict[str, str] | None = None
        self._received: dict[str, TensorRecord] = {}
        self._verified = False
        self._num_started = 0
        self._started_at = 0.0
        self._heard_at = 0.0

    # -- what stands ---------------------------------------------------------------------------------------------

    def owner(self, name: str) -> str:
        """The name that owns the storage ``name`` fills."""
        return self._tied.get(name, name)

    @property
    def is_open(self) -> bool:
        """An update holds the session: chunks are taken, or it waits prepared for its commit."""
        return self.state in (SessionState.OPEN, SessionState.PREPARED)

    @property
    def held_digests(self) -> dict[str, str]:
        """Digest by owner name of the weights now served. ``manifest.weights_id`` of it names the version."""
        return dict(self._held)

    @property
    def new_digests(self) -> dict[str, str]:
        """``held_digests`` as it will be once this update is committed; known after ``verify``."""
        received = {self.owner(n): record.digest for n, record in self._received.items() if n not in self._fused}
        return {**self._held, **received}

    def summary(self) -> dict[str, int]:
        """Of the open update: tensors it fills, tensors the engine holds, bytes received (a retry counts once)."""
        return {
            "updated": len({self.owner(name) for name in self._received if name not in self._fused}),
            "of": len(self._owners),
            "bytes": sum(record.nbytes for record in self._received.values()),
        }

    def progress(self, now: float) -> dict[str, Any] | None:
        """What one may want to see of the open update; None if there is none."""
        if not self.is_open:
            return None
        facts = {"session_id": self.session_id, "state": self.state.value, "mode": self.mode, "cast": self.cast}
        ages = {"age_s": now - self._started_at, "lease_left_s": max(self.lease_s - (now - self._heard_at), 0.0)}
        return {**facts, **ages, **self.summary()}

    def expired(self, now: float) -> bool:
        """The open update has heard nothing for ``lease_s``; the core aborts it. Time is the caller's clock, in s."""
        return self.is_open and now - self._heard_at > self.lease_s

    def touch(self, now: float) -> None:
        """A sign of life of the trainer. The core also calls it while it works or holds a finish itself."""
        self._heard_at = max(self._heard_at, now)

    def conflict(self, now: float, remedy: str) -> UpdateConflict:
        """For a call that the open update is in the way of."""
        age_s = round(now - self._started_at, 3)
        facts = f"weight update {self.session_id} is {self.state.value} since {age_s} s"
        return UpdateConflict(f"{facts}: {remedy}", session_id=self.session_id, age_s=age_s)

    # -- the verbs -----------------------------------------------------------------------------------------------

    def start(
        self,
        now: float,
        mode: UpdateMode = "full",
        cast: CastPolicy = "deny",
        manifest: Mapping[str, Any] | None = None,
        number: int | None = None,
    ) -> dict[str, Any]:
        """Open an update. The reply echoes every default that was taken. A refused start changes nothing. ``number``:
        of the update, by default one more than the last.

        Raises ``UpdateConflict`` while another is open (one whose lease has ended is aborted instead), ``InvalidInput``
        for an unknown mode or cast, ``WeightUpdateError`` for a manifest that could not lead to a commit.
        """
        if self.is_open and not self.expired(now):
            raise self.conflict(now, "finish or abort it first")
        for field, value, allowed in (("mode", mode, get_args(UpdateMode)), ("cast", cast, get_args(CastPolicy))):
            if value not in allowed:
                raise InvalidInput(f"{field} must be {' or '.join(allowed)}, got {value!r}")
        listed = None if manifest is None else self._read_manifest(manifest, mode)
        if self.is_open:
            self.abort(f"its lease of {self.lease_s} s ended")
        self._num_started = self._num_started + 1 if number is None else number
        self.session_id = f"update-{self._num_started}"
        self.state, self.reason = SessionState.OPEN, None
        self.mode, self.cast = mode, cast
        self._manifest = listed
        self._received, self._verified = {}, False
        self._started_at = self._heard_at = now
        return {
            "session_id": self.session_id,
            "lease_s": self.lease_s,
            "mode": mode,
            "cast": cast,
            "format": "checkpoint",
        }

    def require_open(self, session_id: str | None = None) -> None:
        """Raise ``UpdateConflict`` unless chunks can be taken now, and for ``session_id`` if one is named."""
        if self.state is SessionState.PREPARED:
            raise UpdateConflict(f"weight update {self.session_id} is prepared: it takes no more chunks; finish it")
        if self.state is not SessionState.OPEN:
            last = "" if self.session_id is None else f" (the last one, {self.session_id}, is {self.state.value}"
            last += "" if not last else f": {self.reason})" if self.reason else ")"
            raise UpdateConflict(f"no weight update is open{last}: call start_weight_update first")
        if session_id is not None and session_id != self.session_id:
            raise UpdateConflict(f"this belongs to weight update {session_id!r}, but {self.session_id} is open")

    def check(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """One tensor as it arrives. Raises ``WeightUpdateError`` naming it; the caller collects, then aborts."""
        remedy = ": cast it before it is sent" + (", or start with cast='allow'" if self.cast == "deny" else "")
        problem = self._mismatch(ParamMeta(name, dtype, tuple(shape)), self.cast, remedy)
        if problem is None and self._manifest is not None and name not in self._manifest:
            problem = "is not in the manifest this update was started with"
        if problem is not None:
            raise WeightUpdateError(f"{name} {problem}", [name])

    def record(self, records: Iterable[TensorRecord]) -> None:
        """Tensors that are staged. The same name with the same digest again is a retry; with another, a failure.

        Raises ``WeightUpdateError`` naming every such tensor, and aborts the update.
        """
        self.require_open()
        received, changed = dict(self._received), []
        for record in (one for whole in records for one in (whole, *whole.parts)):
            if received.setdefault(record.name, record).digest != record.digest:
                changed.append(record.name)
        if changed:
            self._fail([("sent twice with different bytes", changed)])
        self._received, self._verified = received, False

    def verify(self) -> list[str]:
        """Is the update whole? Returns the owner names it fills, in the engine's order.

        full: every tensor arrived under its own name or an alias. partial: at least one did. Two names of one storage
        carry the same bytes. Everything in the manifest arrived with its digest. Otherwise ``WeightUpdateError`` with
        all names at fault, and the update is aborted.
        """
        self.require_open()
        digests: dict[str, set[str]] = {}
        for name, record in self._received.items():
            digests.setdefault(self.owner(name), set()).add(record.digest)
        torn = [name for name in self._received if len(digests[self.owner(name)]) > 1]
        missing = [name for name in self._owners if name not in digests] if self.mode == "full" else []
        manifest = self._manifest or {}
        absent = [name for name in manifest if name not in self._received and self.owner(name) not in missing]
        wrong = [n for n, digest in manifest.items() if n in self._received and self._received[n].digest != digest]
        problems = [
            ("never received", missing + absent),
            ("tied, but sent with different bytes", torn),
            ("not the bytes the manifest has the digest of", wrong),
        ]
        if not self._received:
            self._fail(problems, "no tensor was received")
        if any(names for _, names in problems):
            self._fail(problems)
        self._verified = True
        return [name for name in self._owners if name in digests]

    def prepared(self) -> None:
        """Verified, and everything derived is built: only the commit is left."""
        self.require_open()
        if not self._verified:
            raise UpdateConflict(f"weight update {self.session_id} is not verified yet")
        self.state = SessionState.PREPARED

    def committed(self) -> None:
        """The engine now serves this update."""
        if self.state is not SessionState.PREPARED:
            raise UpdateConflict(f"no weight update is prepared: the session is {self.state.value}")
        self._held = self.new_digests
        self._close(SessionState.COMMITTED)

    def abort(self, reason: str) -> str | None:
        """End the open update, if there is one, and return its id. What is served does not change."""
        if not self.is_open:
            return None
        self.reason = reason
        self._close(SessionState.ABORTED)
        return self.session_id

    # -- inside --------------------------------------------------------------------------------------------------

    def _close(self, state: SessionState) -> None:
        self.state = state
        self._manifest, self._received, self._verified = None, {}, False

    def _mismatch(self, got: ParamMeta, cast: CastPolicy, remedy: str) -> str | None:
        held = self._metas.get(got.name)
        if held is None:
            return "is no tensor of this model"
        if got.shape != held.shape:
            return f"has shape {list(got.shape)}, the checkpoint format has {list(held.shape)}"
        if got.dtype == held.dtype or (cast == "allow" and {got.dtype, held.dtype} <= _CASTABLE):
            return None
        return f"has dtype {got.dtype}, the engine holds {held.dtype}{remedy}"

    def _read_manifest(self, data: Mapping[str, Any], mode: UpdateMode) -> dict[str, str]:
        """Name → digest. It must cover the update, and describes the tensors as held, so no cast applies to it."""
        keys = ("names", "dtype_names", "shapes", "digests")
        if not isinstance(data, Mapping) or set(data) != set(keys):
            got = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise InvalidInput(f"a manifest has exactly the keys {', '.join(keys)}; got {got}")
        metas = from_columns({key: data[key] for key in keys}, "manifest: ")
        listed = dict(zip(data["names"], data["digests"], strict=True))
        if not listed:
            raise WeightUpdateError("manifest: an update of no tensors", self._owners)
        by_owner: dict[str, set[str]] = {}
        for name, digest in listed.items():
            by_owner.setdefault(self.owner(name), set()).add(digest)
            for part in self._fused.get(name, ()):
                by_owner.setdefault(part, set())
        bad: dict[str, str] = {}
        for name, count in Counter(data["names"]).items():
            if count > 1:
                bad[name] = "is listed more than once"
            elif len(listed[name]) != 64 or not set(listed[name]) <= set("0123456789abcdef"):
                bad[name] = "has a digest that is not 64 hexadecimal digits"
            elif len(by_owner[self.owner(name)]) > 1:
                bad[name] = "is tied, but listed with another digest than its pair"
        bad |= {meta.name: why for meta in metas if (why := self._mismatch(meta, "deny", ""))}
        if mode == "full":
            bad |= {name: "is not listed" for name in self._owners if name not in by_owner}
        if bad:
            raise WeightUpdateError(f"manifest: {_listed([f'{n} {why}' for n, why in bad.items()], '; ')}", list(bad))
        return listed

    def _fail(self, problems: list[tuple[str, list[str]]], first: str = "") -> None:
        parts = [first] if first else []
        parts += [f"{what}: {_listed(names)}" for what, names in problems if names]
        tensors = list(dict.fromkeys(name for _, names in problems for name in names))
        message = "; ".join(parts)
        session_id = self.abort(message)
        raise WeightUpdateError(f"weight update {session_id} failed and is aborted: {message}", tensors)


def _listed(names: Sequence[str], separator: str = ", ", most: int = 12) -> str:
    """For a message; errors carry the whole list beside it, in ``tensors``."""
    rest = f"{separator}and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + rest
