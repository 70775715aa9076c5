"""One weight update at a time, as a transaction. No torch here: names, shapes, dtypes and digests only.

    IDLE ──start──▶ OPEN ──verify, prepared──▶ PREPARED ──committed──▶ COMMITTED
                     │  ▲ record                  │
                     └──┴───────── abort ─────────┴───▶ ABORTED           start works again from COMMITTED and ABORTED

Only the engine core calls the methods that change state. ``check`` reads what ``start`` fixed, so the staging thread
of the open update may call it too. Whether an update is complete is decided once, by ``verify``, never per chunk.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from midstream.config import CastPolicy as CastPolicy
from midstream.config import UpdateMode as UpdateMode
from midstream.errors import InvalidInput, UpdateConflict, WeightUpdateError
from midstream.types import ParamMeta as ParamMeta

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
    """A tensor that has been staged: its digest in the dtype the engine holds it in, and the bytes that arrived."""

    name: str
    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """What an update will be, told at its start: one entry per tensor, in the dtype in which the engine holds it.

    A manifest only verifies. The digests are those of ``weights.manifest.digest``.
    """

    names: tuple[str, ...]
    dtype_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    digests: tuple[str, ...]

    def __post_init__(self) -> None:
        lengths = [len(self.names), len(self.dtype_names), len(self.shapes), len(self.digests)]
        if len(set(lengths)) != 1:
            raise InvalidInput(f"manifest: names, dtype_names, shapes, digests must be equally long, got {lengths}")
        if len(set(self.names)) != len(self.names):
            twice = [name for name, count in Counter(self.names).items() if count > 1]
            raise WeightUpdateError(f"manifest: listed more than once: {_listed(twice)}", twice)
        bad = [n for n, d in zip(self.names, self.digests, strict=True) if len(d) != 64 or not _is_hex(d)]
        if bad:
            raise WeightUpdateError(f"manifest: a digest is 64 hexadecimal digits; wrong for {_listed(bad)}", bad)

    @property
    def metas(self) -> list[ParamMeta]:
        return [ParamMeta(*entry) for entry in zip(self.names, self.dtype_names, self.shapes, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "dtype_names": list(self.dtype_names),
            "shapes": [list(shape) for shape in self.shapes],
            "digests": list(self.digests),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WeightManifest:
        """Inverse of :meth:`to_dict`. Anything else raises ``InvalidInput``."""
        keys = ("names", "dtype_names", "shapes", "digests")
        if not isinstance(data, Mapping) or set(data) != set(keys):
            got = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise InvalidInput(f"a manifest has exactly the keys {', '.join(keys)}; got {got}")
        for key in keys:
            if not isinstance(data[key], (list, tuple)):
                raise InvalidInput(f"manifest: {key} must be a list, got {type(data[key]).__name__}")
        for key in ("names", "dtype_names", "digests"):
            if not all(isinstance(value, str) for value in data[key]):
                raise InvalidInput(f"manifest: {key} must be a list of strings")
        if not all(is_shape(shape) for shape in data["shapes"]):
            raise InvalidInput("manifest: shapes must be a list of lists of integers >= 0")
        shapes = tuple(tuple(shape) for shape in data["shapes"])
        return cls(tuple(data["names"]), tuple(data["dtype_names"]), shapes, tuple(data["digests"]))


class UpdateSession:
    """The state of the engine's one weight update, and the digests of the weights it serves.

    ``params`` is every tensor the engine holds, by checkpoint name; ``tied`` maps an alias to the name that owns the
    storage, and either name fills it. ``held_digests`` has the digest of every tensor served (aliases may be left
    out). A failed call of any kind leaves the digests held as they were.
    """

    def __init__(
        self,
        params: Mapping[str, ParamMeta],
        tied: Mapping[str, str],
        lease_s: float,
        held_digests: Mapping[str, str],
    ) -> None:
        if not (lease_s > 0 and math.isfinite(lease_s)):
            raise InvalidInput(f"lease_s must be a positive number, got {lease_s}")
        dangling = sorted(alias for alias, owner in tied.items() if owner not in params or owner in tied)
        if dangling:
            raise InvalidInput(f"tied to a name that owns nothing: {_listed(dangling)}")
        self.lease_s = lease_s
        self.state = SessionState.IDLE
        self.session_id: str | None = None
        self.reason: str | None = None
        """Why the last update was aborted."""
        self.mode: UpdateMode = "full"
        self.cast: CastPolicy = "deny"
        self._tied = dict(tied)
        self._metas = {**params, **{alias: params[owner] for alias, owner in tied.items()}}
        self._owners = [name for name in params if name not in tied]
        self._held = {self.owner(name): digest for name, digest in held_digests.items()}
        without = [name for name in self._owners if name not in self._held]
        if without:
            raise InvalidInput(f"held_digests has no digest of {_listed(without)}")
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
        return {**self._held, **{self.owner(name): record.digest for name, record in self._received.items()}}

    def summary(self) -> dict[str, int]:
        """Of the open update: tensors it fills, tensors the engine holds, bytes received (a retry counts once)."""
        return {
            "updated": len({self.owner(name) for name in self._received}),
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

    # -- the verbs -----------------------------------------------------------------------------------------------

    def start(
        self,
        now: float,
        mode: UpdateMode = "full",
        cast: CastPolicy = "deny",
        manifest: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Open an update. The reply echoes every default that was taken. A refused start changes nothing.

        Raises ``UpdateConflict`` while another is open (one whose lease has ended is aborted instead), ``InvalidInput``
        for an unknown mode or cast, ``WeightUpdateError`` for a manifest that could not lead to a commit.
        """
        if self.is_open and not self.expired(now):
            age_s = round(now - self._started_at, 3)
            raise UpdateConflict(
                f"weight update {self.session_id} is {self.state.value} since {age_s} s: finish or abort it first",
                session_id=self.session_id,
                age_s=age_s,
            )
        for field, value, allowed in (("mode", mode, get_args(UpdateMode)), ("cast", cast, get_args(CastPolicy))):
            if value not in allowed:
                raise InvalidInput(f"{field} must be {' or '.join(allowed)}, got {value!r}")
        parsed = None if manifest is None else WeightManifest.from_dict(manifest)
        if parsed is not None:
            self._check_manifest(parsed, mode)
        if self.is_open:
            self.abort(f"its lease of {self.lease_s} s ended")
        self._num_started += 1
        self.session_id = f"update-{self._num_started}"
        self.state, self.reason = SessionState.OPEN, None
        self.mode, self.cast = mode, cast
        self._manifest = None if parsed is None else dict(zip(parsed.names, parsed.digests, strict=True))
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
        received, changed, unknown = dict(self._received), [], []
        for record in records:
            if record.name not in self._metas:
                unknown.append(record.name)
            elif received.setdefault(record.name, record).digest != record.digest:
                changed.append(record.name)
        if unknown or changed:
            self._fail([("the engine holds no tensor", unknown), ("sent twice with different bytes", changed)])
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

    def _check_manifest(self, manifest: WeightManifest, mode: UpdateMode) -> None:
        """Coverage, before a byte moves. The manifest describes the tensors as held, so no cast applies to it."""
        found = [(meta.name, self._mismatch(meta, "deny", "")) for meta in manifest.metas]
        bad = {name: f"{name} {problem}" for name, problem in found if problem is not None}
        digests: dict[str, set[str]] = {}
        for name, digest in zip(manifest.names, manifest.digests, strict=True):
            digests.setdefault(self.owner(name), set()).add(digest)
        for name in manifest.names:
            if name not in bad and len(digests[self.owner(name)]) > 1:
                bad[name] = f"{name} is tied, but listed with another digest than its pair"
        if mode == "full":
            bad.update({name: f"{name} is not listed" for name in self._owners if name not in digests})
        if not manifest.names:
            raise WeightUpdateError("manifest: an update of no tensors", list(bad))
        if bad:
            raise WeightUpdateError(f"manifest: {_listed(list(bad.values()), '; ')}", list(bad))

    def _fail(self, problems: list[tuple[str, list[str]]], first: str = "") -> None:
        parts = [first] if first else []
        parts += [f"{what}: {_listed(names)}" for what, names in problems if names]
        tensors = list(dict.fromkeys(name for _, names in problems for name in names))
        message = "; ".join(parts)
        session_id = self.abort(message)
        raise WeightUpdateError(f"weight update {session_id} failed and is aborted: {message}", tensors)


def is_shape(value: object) -> bool:
    """A list or tuple of integers >= 0."""
    return isinstance(value, (list, tuple)) and all(type(n) is int and n >= 0 for n in value)


def _is_hex(text: str) -> bool:
    return all(c in "0123456789abcdef" for c in text)


def _listed(names: Sequence[str], separator: str = ", ", most: int = 12) -> str:
    """For a message; errors carry the whole list beside it, in ``tensors``."""
    rest = f"{separator}and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + rest
