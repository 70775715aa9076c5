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
``timeout_s``, a resume when the ``lease_s`` of the pause that holds has ended, an abort of an update that was silent.

In a lockstep group ranks agree by votes of their own, and the loss of one ends the group: every open call fails, all
ranks and front ends are told. Replicas (``lockstep=False``) agree through the log (:meth:`due`, :class:`Agreed`), and
after the loss of one the others answer for themselves. One that was started again takes part once it is as the others
are at a position of the log, and no call is open that changes anything (:meth:`join`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from midstream.config import check_limits
from midstream.engine.merge import merge, merge_status
from midstream.errors import EngineDead, MidstreamError

PLAIN = frozenset({"status", "is_paused", "is_sleeping", "update_weights", "weight_digests"})
"""Verbs that change nothing which ranks must agree about and that may come often: they have no position in the log, so
that a stream of them cannot keep votes from agreeing."""


_TORN = ("start_weight_update", "update_weights")
"""Where one rank refuses and another does not, no update can come of it: it is aborted on all."""
_UPDATING = (*_TORN, "finish_weight_update")
_RETRY_S = 1.0
"""After the resume of a lease that has ended was refused, as while the engine sleeps."""


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
    updates: tuple[int, ...] = ()
    """The calls that may have started the update which this one is of."""
    results: dict[int, dict[str, Any] | MidstreamError | None] = field(default_factory=dict)
    is_finishing: bool = False
    """All ranks had prepared: "finish" is logged, and what comes now is its result."""


class Coordinator:
    """One per group. Not thread-safe; front ends are told apart by name."""

    def __init__(self, num_ranks: int, lockstep: bool = True, update_lease_s: float = 60.0) -> None:
        """``update_lease_s``: an open update of which nothing is heard for so long is aborted."""
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
        self._update_lease_s = update_lease_s
        self._started = -1
        """The last call that started an update."""
        self._update: tuple[int, float] | None = None
        """The update that is open: the call that started it, and until when nothing need be heard of it."""

    # -- front ends ------------------------------------------------------------------------------------------------

    def call(self, caller: str, call: Any, verb: str, arguments: dict[str, Any], now: float) -> list[Send]:
        """A control call. ``timeout_s`` and ``lease_s`` of a pause are kept here; the rest goes to the ranks. Raises
        InvalidInput for such limits as there are none, and has done nothing then."""
        self.front_ends.add(caller)
        if self.error is not None:
            return [(caller, Answer(call, self.error))]
        arguments = dict(arguments)
        op = self._num_commands
        if verb == "pause_generation":
            timeout_s, lease_s = arguments.pop("timeout_s", None), arguments.pop("lease_s", None)
            check_limits(timeout_s, lease_s)
            if timeout_s is not None:
                self._deadlines[op] = now + timeout_s
            self._leases[op] = None if lease_s is None else now + lease_s
        if verb == "start_weight_update":
            self._started = op
        self._open[op] = _Open(caller, call, verb, frozenset(self.ranks), (self._started, op))
        self._touch_update(verb, now)
        return self._log(verb, arguments)

    def tick(self, now: float) -> list[Send]:
        """What time has ended by now."""
        late = [op for op, deadline in self._deadlines.items() if now >= deadline]
        sends = [send for op in late for send in self._time_out(op)]
        op, lease = self._newest_lease()
        if op is not None and lease is not None and now >= lease:
            self._leases[op] = now + _RETRY_S
            self._open[self._num_commands] = _Open(None, None, "resume_generation", frozenset(self.ranks))
            sends += self._log("resume_generation", {"lease_of": op})
        if self._update is not None and now >= self._update[1]:
            if any(call.verb in _UPDATING for call in self._open.values()):
                self._touch_update("update_weights", now)  # it waits for the ranks, not they for it
            else:
                why = f"its lease of {self._update_lease_s} s ended without a word from the trainer"
                sends += self._log("abort_weight_update", {"of": [self._update[0]], "reason": why})
                self._update = None
        return sends

    @property
    def next_deadline(self) -> float | None:
        """When ``tick`` has something to do."""
        lease, update = self._newest_lease()[1], None if self._update is None else self._update[1]
        return min([*self._deadlines.values(), *(at for at in (lease, update) if at is not None)], default=None)

    def lease_left_s(self, now: float) -> float | None:
        """Of the pause that holds, or is in flight."""
        lease = self._newest_lease()[1]
        return None if lease is None else max(lease - now, 0.0)

    # -- ranks -----------------------------------------------------------------------------------------------------

    def start_wave(self, rank: int, wave: int) -> list[Send]:
        """A rank outside a wave has work: the others are to come into it."""
        return [] if self.error else [(other, StartWave(wave)) for other in sorted(self.ranks - {rank})]

    def prepared(self, rank: int, op: int) -> list[Send]:
        """A rank could commit the update of call ``op``."""
        if op not in self._open and self.error is None:  # nobody waits for it any more
            return self._log("cancel", {"of": op, "reason": "its finish was ended"})
        return self._take(rank, op, None, 0.0)

    def answered(self, rank: int, op: int, result: dict[str, Any] | MidstreamError, now: float = 0.0) -> list[Send]:
        """A rank's answer to a command, or that it could not prepare the update of it."""
        return self._take(rank, op, result, now)

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
        for op, call in list(self._open.items()):  # the others answer for themselves
            sends += self._gathered(op, call, 0.0) if self.ranks & call.ranks else self._answer(op, error, 0.0)
        return sends + self._agree()

    @property
    def quiet_at(self) -> int | None:
        """The position of the log if no call is open that changes anything."""
        is_quiet = all(call.verb in PLAIN and call.verb not in _UPDATING for call in self._open.values())
        return self._position if is_quiet else None

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
            sends += self._answer(op, error, 0.0)
        self._leases.clear()
        self._update = None
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

    def _take(self, rank: int, op: int, result: dict[str, Any] | MidstreamError | None, now: float) -> list[Send]:
        call = self._open.get(op)
        if call is None or rank not in self.ranks:
            return []
        call.results[rank] = result
        return self._gathered(op, call, now)

    def _gathered(self, op: int, call: _Open, now: float) -> list[Send]:
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
            why = "it was refused on one rank and not on another"
            sends = self._log("abort_weight_update", {"of": list(call.updates), "reason": why})
        is_status = call.verb == "status" and len(values) == len(results)
        return sends + self._answer(op, merge_status(values) if is_status else merge(results), now)

    def _answer(self, op: int, result: dict[str, Any] | MidstreamError, now: float) -> list[Send]:
        call = self._open.pop(op)
        is_done = not isinstance(result, MidstreamError)
        sends: list[Send] = [] if call.caller is None else [(call.caller, Answer(call.call, result))]
        self._deadlines.pop(op, None)
        if call.verb == "pause_generation" and op in self._leases:
            if is_done:
                self._leases = {other: lease for other, lease in self._leases.items() if other >= op}
            else:
                del self._leases[op]
        if call.verb == "resume_generation" and is_done:
            self._leases = {other: lease for other, lease in self._leases.items() if other > op}
        if call.verb == "start_weight_update" and is_done:
            self._update = op, now + self._update_lease_s
        elif call.verb in ("finish_weight_update", "abort_weight_update") and is_done:
            self._update = None
        self._touch_update(call.verb, now)
        if call.verb == "shutdown" and self.error is None and is_done:
            sends += self._end(EngineDead("the engine was shut down"))
        return sends

    def _time_out(self, op: int) -> list[Send]:
        del self._deadlines[op]
        return self._log("pause_timed_out", {"of": op})

    def _newest_lease(self) -> tuple[int | None, float | None]:
        op = max(self._leases, default=None)
        return op, None if op is None else self._leases[op]

    def _touch_update(self, verb: str, now: float) -> None:
        """Something was heard of the open update."""
        if self._update is not None and verb in _UPDATING:
            self._update = self._update[0], max(self._update[1], now + self._update_lease_s)

    def _agree(self) -> list[Send]:
        positions = {self._due.get(rank) for rank in self.ranks}
        if len(positions) != 1 or (position := positions.pop()) is None:
            return []
        self._due.clear()
        return [(rank, Agreed(position)) for rank in sorted(self.ranks)]
