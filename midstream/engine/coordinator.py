"""The coordinator of a data-parallel group: one log of commands for all ranks, one answer for each caller.

Pure logic: no socket, no process; the time comes in as an argument. Every method returns what to send, in order, as
(to, message): ``to`` is a rank (int) or a front end (str), and messages to one receiver must arrive in the order sent.

::

    front ends ── call ──►  log ── Command(op, …) ──► every rank, in one order
               ◄─ Answer ──  merge ◄── answered / prepared, once per rank ──
                                   ◄── start_wave(n) ── one rank; StartWave(n) ──► the others

A call is one command; its number in the log, ``op``, is the identity under which ranks answer it. A rank that has
prepared an update reports that instead of an answer: once all have, "finish" is logged under the same ``op``, and so
nothing is committed anywhere before it can be committed everywhere. If one fails where others have prepared, "cancel"
is logged. Clocks run here alone and speak through the log: "pause_timed_out" of a pause that has been open for
``timeout_s``, and a resume when the ``lease_s`` of the pause that holds has ended.

In a lockstep group ranks agree by votes of their own, and the loss of one ends the group: every open call fails, all
ranks and front ends are told. Replicas (``lockstep=False``) agree through the log (:meth:`due`, :class:`Agreed`), and
the loss of one fails the open calls, undoes what they asked of the others, and leaves those serving. One that was
started again takes part once it is as the others are at a position of the log at which no call is open (:meth:`join`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from midstream.errors import EngineDead, MidstreamError, from_wire, to_wire

PLAIN = frozenset({"status", "is_paused", "is_sleeping", "update_weights", "weight_digests"})
"""Verbs that change nothing which ranks must agree about and that may come often: they have no position in the log, so
that a stream of them cannot keep votes from agreeing."""


SUMMED = frozenset(
    {
        *("running", "waiting", "held", "aborted", "reset_requests", "num_blocks", "num_free_blocks"),
        *("num_sampled_tokens", "num_reprefilled_tokens", "num_connections"),
    }
)
"""What each rank counts for itself."""
_DIGESTS = ("digests", "checksums")
_TORN = ("start_weight_update", "update_weights")
"""Where one rank refuses and another does not, no update can come of it: it is aborted on all."""


@dataclass(frozen=True, slots=True)
class Command:
    """What every rank takes next. ``verb``: "pause_generation", "resume_generation", "pause_timed_out" (of), "finish"
    (the update that call ``op`` prepared), "cancel" (of, reason: the update that call ``of`` prepared or prepares, if
    it does), "shutdown", or any other verb of the engine."""

    op: int
    verb: str
    arguments: dict[str, Any]
    position: int | None
    """For :meth:`Protocol.take`. None: not of the log."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """All replicas were due at ``position``: for :meth:`Protocol.agree`."""

    position: int


@dataclass(frozen=True, slots=True)
class StartWave:
    """START_DP_WAVE: another rank has work in this wave."""

    wave: int


@dataclass(frozen=True, slots=True)
class Lost:
    """To a rank of a lockstep group: end with this error, whatever you wait for. To a front end: fail the requests of
    the group, or of the replica that is named, with it."""

    error: MidstreamError


@dataclass(frozen=True, slots=True)
class Answer:
    """The one answer to a front end's call."""

    call: Any
    result: dict[str, Any] | MidstreamError


Send = tuple[int | str, Command | Agreed | StartWave | Lost | Answer]


@dataclass(slots=True)
class _Open:
    """A call that is not answered: by rank, an answer, an error, or None for "prepared"."""

    caller: str | None
    call: Any
    verb: str
    ranks: frozenset[int]
    """That were asked."""
    results: dict[int, dict[str, Any] | MidstreamError | None] = field(default_factory=dict)
    is_finishing: bool = False
    """All ranks had prepared: "finish" is logged, and what comes now is its result."""


class Coordinator:
    """One per group. Not thread-safe; front ends are told apart by name."""

    def __init__(self, num_ranks: int, lockstep: bool = True) -> None:
        self.ranks = set(range(num_ranks))
        self.lockstep = lockstep
        self.front_ends: set[str] = set()
        self.error: MidstreamError | None = None
        """Why a lockstep group has ended."""
        self._num_commands = self._position = 0
        self._open: dict[int, _Open] = {}
        self._deadlines: dict[int, float] = {}
        self._leases: dict[int, float | None] = {}
        """Of the pauses since the last resume, oldest first: when to undo it. The newest that has not failed counts."""
        self._due: dict[int, int] = {}

    # -- front ends ------------------------------------------------------------------------------------------------

    def call(self, caller: str, call: Any, verb: str, arguments: dict[str, Any], now: float) -> list[Send]:
        """A control call. ``timeout_s`` and ``lease_s`` of a pause are kept here; the rest goes to the ranks."""
        self.front_ends.add(caller)
        if self.error is not None:
            return [(caller, Answer(call, self.error))]
        arguments = dict(arguments)
        op = self._num_commands
        if verb == "pause_generation":
            timeout_s, lease_s = arguments.pop("timeout_s", None), arguments.pop("lease_s", None)
            if timeout_s is not None:
                self._deadlines[op] = now + timeout_s
            self._leases[op] = None if lease_s is None else now + lease_s
        elif verb == "resume_generation":
            self._leases.clear()
        self._open[op] = _Open(caller, call, verb, frozenset(self.ranks))
        return self._log(verb, arguments)

    def tick(self, now: float) -> list[Send]:
        """What time has ended by now."""
        late = [op for op, deadline in self._deadlines.items() if now >= deadline]
        sends = [send for op in late for send in self._time_out(op)]
        op, lease = self._newest_lease()
        if op is not None and lease is not None and now >= lease:
            self._leases.clear()
            sends += self._log("resume_generation", {"lease_of": op})
        return sends

    @property
    def next_deadline(self) -> float | None:
        """When ``tick`` has something to do."""
        lease = self._newest_lease()[1]
        return min([*self._deadlines.values(), *([] if lease is None else [lease])], default=None)

    # -- ranks -----------------------------------------------------------------------------------------------------

    def start_wave(self, rank: int, wave: int) -> list[Send]:
        """A rank outside a wave has work: the others are to come into it."""
        return [] if self.error else [(other, StartWave(wave)) for other in sorted(self.ranks - {rank})]

    def prepared(self, rank: int, op: int) -> list[Send]:
        """A rank could commit the update of call ``op``."""
        if op not in self._open and self.error is None:  # nobody waits for it any more
            return self._log("cancel", {"of": op, "reason": "its finish was ended"})
        return self._take(rank, op, None)

    def answered(self, rank: int, op: int, result: dict[str, Any] | MidstreamError) -> list[Send]:
        """A rank's answer to a command, or that it could not prepare the update of it."""
        return self._take(rank, op, result)

    def due(self, rank: int, position: int) -> list[Send]:
        """A replica could settle the open call at its position."""
        self._due[rank] = position
        return self._agree()

    def rank_lost(self, rank: int, reason: str) -> list[Send]:
        """A rank's process, or its connection, has ended. Known already: nothing."""
        if rank not in self.ranks:
            return []
        self.ranks.discard(rank)
        self._due.pop(rank, None)
        if self.error is not None:
            return []
        error = EngineDead(f"rank {rank} was lost: {reason}", rank=rank)
        if self.lockstep or not self.ranks:
            return self._end(error)
        sends: list[Send] = [(front_end, Lost(error)) for front_end in sorted(self.front_ends)]
        for op, call in list(self._open.items()):
            sends += self._undo(op, call, error.message)
            sends += self._answer(op, error)
        return sends + self._agree()

    @property
    def quiet_at(self) -> int | None:
        """The position of the log if no call of it is open."""
        return None if any(call.verb not in PLAIN for call in self._open.values()) else self._position

    def join(self, rank: int, position: int) -> bool:
        """A replica that is as the others were at ``position`` takes part from now on. False: they have moved on."""
        if self.lockstep or self.error is not None or self.quiet_at != position:
            return False
        self.ranks.add(rank)
        return True

    def _end(self, error: MidstreamError) -> list[Send]:
        """The group is over: whoever waits, or calls from now on, gets this error."""
        self.error = error
        told: list[int | str] = [*sorted(self.ranks), *sorted(self.front_ends)]
        sends: list[Send] = [(to, Lost(error)) for to in told]
        for op in list(self._open):
            sends += self._answer(op, error)
        self._leases.clear()
        return sends

    # -- the log ---------------------------------------------------------------------------------------------------

    def _log(self, verb: str, arguments: dict[str, Any], op: int | None = None) -> list[Send]:
        """Append: every rank takes it after all that was logged before."""
        self._position += verb not in PLAIN
        command = Command(
            self._num_commands if op is None else op, verb, arguments, None if verb in PLAIN else self._position
        )
        self._num_commands += 1
        return [(rank, command) for rank in sorted(self.ranks)]

    def _take(self, rank: int, op: int, result: dict[str, Any] | MidstreamError | None) -> list[Send]:
        call = self._open.get(op)
        if call is None or rank not in self.ranks:
            return []
        call.results[rank] = result
        return self._gathered(op, call)

    def _gathered(self, op: int, call: _Open) -> list[Send]:
        """Once every rank has spoken: commit, cancel, or answer."""
        asked = self.ranks & call.ranks
        if not asked <= call.results.keys():
            return []
        results = {rank: call.results[rank] for rank in sorted(asked)}
        if all(result is None for result in results.values()):
            call.results, call.is_finishing = {}, True
            return self._log("finish", {}, op)
        sends: list[Send] = []
        if not call.is_finishing and None in results.values():
            sends = self._log("cancel", {"of": op, "reason": "another rank could not prepare it"})
        values = {rank: result for rank, result in results.items() if isinstance(result, dict)}
        if call.verb in _TORN and 0 < len(values) < len(results):
            sends = self._log("abort_weight_update", {})
        is_status = call.verb == "status" and len(values) == len(results)
        return sends + self._answer(op, merge_status(values) if is_status else merge(results))

    def _answer(self, op: int, result: dict[str, Any] | MidstreamError) -> list[Send]:
        call = self._open.pop(op)
        sends: list[Send] = [] if call.caller is None else [(call.caller, Answer(call.call, result))]
        self._deadlines.pop(op, None)
        if call.verb == "pause_generation" and op in self._leases:
            if isinstance(result, MidstreamError):
                del self._leases[op]
            else:
                self._leases = {other: lease for other, lease in self._leases.items() if other >= op}
        if call.verb == "shutdown" and self.error is None and not isinstance(result, MidstreamError):
            sends += self._end(EngineDead("the engine was shut down"))
        return sends

    def _time_out(self, op: int) -> list[Send]:
        del self._deadlines[op]
        return self._log("pause_timed_out", {"of": op})

    def _newest_lease(self) -> tuple[int | None, float | None]:
        op = max(self._leases, default=None)
        return op, None if op is None else self._leases[op]

    def _undo(self, op: int, call: _Open, reason: str) -> list[Send]:
        """Replicas that go on are to be as they were before this call, which fails."""
        if call.verb == "pause_generation":
            return self._log("pause_timed_out", {"of": op})
        prepared = call.is_finishing or None in call.results.values()
        return self._log("cancel", {"of": op, "reason": reason}) if prepared else []

    def _agree(self) -> list[Send]:
        positions = {self._due.get(rank) for rank in self.ranks}
        if len(positions) != 1 or (position := positions.pop()) is None:
            return []
        self._due.clear()
        return [(rank, Agreed(position)) for rank in sorted(self.ranks)]


def merge(results: dict[int, dict[str, Any] | MidstreamError | None]) -> dict[str, Any] | MidstreamError:
    """One answer of all ranks'. The first error, with its rank unless all say the same; else key by key: counts their
    sum, what is equal on all ranks as it is, times (…_ms, …_s) and steps the most, the rest a list by rank. Digests
    name by name, all that there are of one joined by " != "; a comparison of them matches if all do."""
    errors = {rank: result for rank, result in results.items() if isinstance(result, MidstreamError)}
    if errors:
        rank, error = next(iter(errors.items()))
        if len(errors) == len(results) and len({str(e) for e in errors.values()}) == 1:
            return error
        wire = to_wire(error)
        return from_wire(
            {**wire, "message": f"rank {rank}: {error.message}", "details": {**error.details, "rank": rank}}
        )
    values = [result for result in results.values() if isinstance(result, dict)]
    return {key: _merged(key, [value.get(key) for value in values]) for key in values[0]}


def _merged(key: str, values: Sequence[Any]) -> Any:
    if key in SUMMED and all(isinstance(value, int) for value in values):
        return sum(values)
    if all(value == values[0] for value in values):
        return values[0]
    if key in _DIGESTS and all(isinstance(value, dict) for value in values):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: " != ".join(dict.fromkeys(v[name] for v in values if name in v)) for name in names}
    if key == "match":
        return all(values)
    if key == "mismatches":
        return sorted({name for value in values for name in value})
    is_most = key.endswith(("_ms", "_s")) or key in ("num_steps", "is_paused")
    if is_most and all(isinstance(value, (int, float)) for value in values):
        return max(values)
    return list(values)


def merge_status(by_rank: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """One engine's status of all ranks': paused once all are, pausing as soon as one is. ``ranks``: what may differ."""
    statuses = list(by_rank.values())
    found = {key: _merged(key, [status[key] for status in statuses]) for key in statuses[0]}
    states = {status["state"] for status in statuses}
    found["state"] = states.pop() if len(states) == 1 else "pausing"
    found["device_idle"] = all(status["device_idle"] for status in statuses)
    for key in ("mode", "paused_since", "owner", "update"):  # the first that has one
        found[key] = next((status[key] for status in statuses if status[key] is not None), None)
    own = ("state", "running", "waiting", "held", "number", "version", "num_steps", "num_free_blocks")
    return found | {"ranks": [{"rank": rank} | {key: status[key] for key in own} for rank, status in by_rank.items()]}
