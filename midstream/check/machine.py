"""One rank and the coordinator of a small group, as values: what each event makes of the real classes.

A rank is its protocol, its place (in a gap, in a vote, in a forward, ended, dead), its live requests, what it has
prepared, and the FIFO channels to and from it. Each distinct (state of a class, event) is run once on the class itself
and remembered; the rest works on numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from midstream.check.state import (
    DEAD,
    ENDED,
    FORWARD,
    GAP,
    VOTE,
    Effects,
    Label,
    Live,
    Local,
    Outside,
    Rank,
    Request,
    Shape,
    Variant,
    Violation,
    put,
)
from midstream.engine.coordinator import Agreed, Command, Lost, Send, StartWave
from midstream.engine.protocol import AbortAll, Action, Commit, Fail, Outcome, Protocol, Reply, Turn
from midstream.engine.vote import StepVerdict, StepVote
from midstream.errors import EngineDead, EnginePaused, MidstreamError, UpdateConflict


class Machine:
    """The real classes behind tables: numbers in, numbers out."""

    def __init__(self, variant: Variant, num_ranks: int, vote_every: int) -> None:
        self.variant, self.num_ranks, self.lockstep = variant, num_ranks, vote_every > 0
        self._numbers: dict[Any, int] = {}
        self._values: list[Any] = []
        self.append = cache(self._append)
        self.called = cache(self._called)
        self.completes = cache(self._completes)
        self.coordinate = cache(self._coordinate)
        self.decide = cache(self._decide)
        self.gone = cache(self._gone)
        self.heard = cache(self._heard)
        self.is_quiet = cache(self._is_quiet)
        self.moves = cache(self._moves)
        self.receive = cache(self._receive)
        self.shape = cache(self._shape)
        self.turn = cache(self._turn)
        self.vote = cache(self._vote)
        self.fresh = self.number(Rank(self.number(Local(variant.protocol(max(vote_every, 1))))))
        self.coordinator = self.number(variant.coordinator(num_ranks, self.lockstep))

    def number(self, value: Any) -> int:
        """Equal values have equal numbers."""
        key = value if isinstance(value, (Rank, Outside)) else freeze(value)  # those hold numbers only
        found = self._numbers.setdefault(key, len(self._values))
        if found == len(self._values):
            self._values.append(value)
        return found

    def value(self, number: int) -> Any:
        """Not to be changed."""
        return self._values[number]

    # -- one rank --------------------------------------------------------------------------------------------------

    def _shape(self, number: int) -> Shape:
        rank = self._values[number]
        local = self._values[rank.local]
        protocol, place = local.protocol, local.place
        waits_in = (place, protocol._wave, protocol._step, local.version) if place in (VOTE, FORWARD) else None
        return Shape(place, waits_in, local.rests, self._values[rank.sent[0]][0] if rank.sent else None)

    def _moves(self, r: int, number: int) -> list[tuple[Label, Effects]]:
        """What a rank in a gap may do by itself."""
        rank = self._values[number]
        if self._values[rank.local].place != GAP:
            return []
        found = []
        if rank.commands:
            effects = self._take(r, rank.local, rank.commands[0])
            found.append((("takes", r), self._with(rank._replace(commands=rank.commands[1:]), effects)))
        if rank.requests:
            effects = self._admit(rank.local, *self._values[rank.requests[0]])
            found.append((("admits", r), self._with(rank._replace(requests=rank.requests[1:]), effects)))
        for index, one in enumerate(self._values[rank.local].live):
            if not one.is_ready:
                found.append((("makes ready", r), self._with(rank, self._settle(rank.local, index, True))))
                found.append((("fails to make ready", r), self._with(rank, self._settle(rank.local, index, False))))
        if (turn := self.turn(rank.local)) != "idle":
            what = "steps" if turn == "step" and not self.lockstep else "ends its gap"
            found.append(((what, r), self._with(rank, self._end_gap(rank.local))))
        return found

    def _with(self, rank: Rank, effects: Effects) -> Effects:
        """The same effects, with the rank's channels around its new Local. Who has ended takes nothing more."""
        place = self._values[effects.to].place
        ended = effects.ended
        if place in (ENDED, DEAD):
            ended += tuple(self._values[request][0] for request in rank.requests)
            sent = (*rank.sent, *effects.sent) if place == ENDED else ()
            rank = Rank(effects.to, (), (), sent)
        else:
            rank = rank._replace(local=effects.to, sent=(*rank.sent, *effects.sent))
        return Effects(self.number(rank), (), ended, effects.has_committed)

    def _completes(self, number: int, decided: StepVerdict | None) -> Effects:
        """The collective that the rank is in: a vote with its verdict, else the forward."""
        rank = self._values[number]
        effects = self._stepped(rank.local) if decided is None else self._conclude(rank.local, decided)
        return self._with(rank, effects)

    def _gone(self, number: int, place: str) -> Effects:
        """The rank died, or its collective failed because another one is gone."""
        rank = self._values[number]
        return self._with(rank, Effects(self.number(self._values[rank.local]._replace(place=place, live=()))))

    def _append(self, number: int, channel: str, message: int) -> int:
        """A message is on its way to a rank. One that has ended or died takes none."""
        rank = self._values[number]
        if self._values[rank.local].place in (ENDED, DEAD):
            return number
        return self.number(rank._replace(**{channel: (*getattr(rank, channel), message)}))

    def _heard(self, number: int) -> int:
        rank = self._values[number]
        return self.number(rank._replace(sent=rank.sent[1:]))

    def _is_quiet(self, number: int) -> tuple[bool, tuple[int, ...]]:
        """It does nothing more by itself; and the requests that its pause holds."""
        rank = self._values[number]
        local = self._values[rank.local]
        is_idle = local.place == GAP and not rank.commands and not rank.requests
        held = tuple(one.request for one in local.live) if local.protocol.phase == "paused" else ()
        ends = local.place in (ENDED, DEAD) or (is_idle and self.turn(rank.local) == "idle")
        return ends and not rank.sent, held

    def _turn(self, number: int) -> Turn:
        local = self._values[number]
        if self.lockstep:
            return local.protocol.turn(local.facts)  # type: ignore[no-any-return]
        due = local.protocol.due(local.facts)
        if due is not None and due != local.said:
            return "vote"
        return "step" if local.facts.has_ready and local.protocol.may_step else "idle"

    def _end_gap(self, number: int) -> Effects:
        """After a gap: into a collective; a replica says that it is due, or steps alone."""
        local = self._values[number]
        turn = self.turn(number)
        if self.lockstep:
            sent = (self.number(("start_wave", local.protocol.wave)),) if turn == "wake" else ()
            place = FORWARD if turn == "step" else VOTE
            return Effects(self.number(local._replace(place=place)), sent)
        if turn == "step":
            return self._stepped(number)
        due = local.protocol.due(local.facts)
        return Effects(self.number(local._replace(said=due)), (self.number(("due", due)),))

    def _take(self, rank: int, number: int, message: int) -> Effects:
        """A message of the coordinator's is taken in a gap."""
        local = self._values[number]
        local = local._replace(protocol=copy.copy(local.protocol))
        match self._values[message]:
            case Command() as command:
                return self._carry_out(*self._command(rank, local, command))
            case Agreed(position):
                return self._carry_out(local, local.protocol.agree(position))
            case StartWave(wave):
                local.protocol.start_wave(wave)
                return Effects(self.number(local))
            case Lost():
                return Effects(self.number(local._replace(place=ENDED, live=())))
        raise AssertionError(message)

    def _command(self, rank: int, local: Local, command: Command) -> tuple[Local, list[Action]]:
        protocol, op, given = local.protocol, command.op, command.arguments
        local = local._replace(rests=local.rests and command.verb not in _UNRESTING)
        if command.position is not None:
            protocol.take(command.position)
        match command.verb:
            case "pause_generation":
                return local, protocol.pause(op, given["mode"], False)
            case "resume_generation":
                return local, protocol.resume(op)
            case "pause_timed_out":
                return local, protocol.pause_timed_out(given["of"])
            case "finish_update":
                if local.prepared is not None:
                    return local, [Fail(op, UpdateConflict("another update is being finished"))]
                if rank == given.get("fails_on"):
                    return local, [Fail(op, UpdateConflict("a chunk is missing"))]
                return local._replace(prepared=op), [_PREPARED]
            case "finish":
                return local, protocol.finish_update(op, None) if local.prepared == op else []
            case "cancel":
                if local.prepared != given["of"]:
                    return local, []
                return local._replace(prepared=None), protocol.cancel_update(given["reason"])
            case "abort_update":
                actions = protocol.cancel_update("it was aborted")
                if not actions and local.prepared is not None:
                    actions = [Fail(local.prepared, UpdateConflict("it was aborted"))]
                return local._replace(prepared=None), [*actions, Reply(op, {"aborted": bool(actions)})]
            case "shutdown":
                return local, protocol.shutdown(op)
        raise AssertionError(command.verb)

    def _admit(self, number: int, request: int, wanted: Request) -> Effects:
        """A request is taken in a gap."""
        local = self._values[number]
        try:
            local.protocol.admit()
        except (EnginePaused, EngineDead):
            return Effects(number, ended=(request,))
        one = Live(request, wanted.tokens, True, not wanted.is_slow)
        return Effects(self.number(local._replace(live=(*local.live, one))))

    def _settle(self, number: int, index: int, is_ready: bool) -> Effects:
        """A slow request can be scheduled from now on, or has failed."""
        local = self._values[number]
        one, rest = local.live[index], (*local.live[:index], *local.live[index + 1 :])
        if not is_ready:
            return Effects(self.number(local._replace(live=rest)), (), (one.request,))
        return Effects(self.number(local._replace(live=put(local.live, index, one._replace(is_ready=True)))))

    def _vote(self, number: int) -> StepVote:
        local = self._values[self._values[number].local]
        return local.protocol.vote(local.facts)  # type: ignore[no-any-return]

    def _decide(self, numbers: tuple[int, ...]) -> StepVerdict:
        return self.variant.verdict([self.vote(number) for number in numbers])

    def _conclude(self, number: int, decided: StepVerdict) -> Effects:
        local = self._values[number]
        local = local._replace(protocol=copy.copy(local.protocol))
        actions, outcome = local.protocol.conclude(decided)
        places: dict[Outcome, str] = {"step": FORWARD, "again": GAP, "end": GAP, "stop": ENDED}
        return self._carry_out(local._replace(place=places[outcome]), actions)

    def _stepped(self, number: int) -> Effects:
        """The forward ran: every request that may be scheduled has a token more."""
        local = self._values[number]
        protocol = copy.copy(local.protocol)
        may_step = protocol.may_step
        protocol.stepped()
        live, ended = local.live, ()
        if may_step:
            ended = tuple(one.request for one in live if one.is_ready and one.tokens_left == 1)
            ran = (Live(r, left - 1, False) if is_ready else one for one in live for r, left, _, is_ready in [one])
            live = tuple(one for one in ran if one.tokens_left)
        return Effects(self.number(local._replace(protocol=protocol, place=GAP, live=live)), (), ended)

    def _carry_out(self, local: Local, actions: Sequence[Action]) -> Effects:
        sent: list[int] = []
        ended: tuple[int, ...] = ()
        committed = False
        for action in actions:
            match action:
                case AbortAll():
                    ended += tuple(one.request for one in local.live)
                    local = local._replace(live=())
                case Commit(op, _):
                    if local.prepared != op:
                        raise Violation(f"commits call {op}, whose update is not prepared here")
                    live = tuple(one._replace(is_fresh=True) for one in local.live)
                    local = local._replace(version=local.version + 1, prepared=None, live=live)
                    committed = True
                    sent.append(self.number(("answered", op, {"version": local.version})))
                case Reply() if action is _PREPARED:
                    sent.append(self.number(("prepared", local.prepared)))
                case Reply(op, value):
                    local = local._replace(rests=local.rests or "paused" in value)
                    sent.append(self.number(("answered", op, value)))
                case Fail(op, error):
                    if op == local.prepared:
                        local = local._replace(prepared=None)
                    sent.append(self.number(("answered", op, error)))
        return Effects(self.number(local), tuple(sent), ended, committed)

    # -- the coordinator -------------------------------------------------------------------------------------------

    def _coordinate(self, number: int, method: str, *arguments: Any) -> tuple[int, tuple[tuple[int | str, int], ...]]:
        coordinator = copy.deepcopy(self._values[number])
        sends: list[Send] = getattr(coordinator, method)(*arguments)
        return self.number(coordinator), tuple((to, self.number(message)) for to, message in sends)

    def _called(self, number: int, index: int, call: int, what: int) -> tuple[int, tuple[tuple[int | str, int], ...]]:
        verb, arguments = self._values[what]
        return self._coordinate(number, "call", f"c{index}", call, verb, arguments, 0.0)

    def _receive(self, number: int, rank: int, message: int) -> tuple[int, tuple[tuple[int | str, int], ...]]:
        method, *arguments = self._values[message]
        if method == "answered" and self.lockstep:
            opened = self._values[number]._open.get(arguments[0])
            others = [] if opened is None else [r for other, r in opened.results.items() if other != rank]
            wrong = [r for r in others if r is not None and freeze(r) != freeze(arguments[1])]
            # A failure to prepare is one rank's own; everything else follows from the log.
            if wrong and opened.verb != "finish_update":
                raise Violation(f"ranks answer {opened.verb} differently: {arguments[1]!r} and {wrong[0]!r}")
        return self._coordinate(number, method, rank, *arguments)


_UNRESTING = ("pause_generation", "resume_generation", "pause_timed_out")
"""After these a paused rank may vote, and step."""
_PREPARED = Reply(None, {})
"""Not an action of the protocol: the staged update of this rank is prepared."""


def freeze(value: Any) -> Any:
    """A hashable stand-in: equal for what is equal in all that it remembers."""
    if value is None or isinstance(value, (int, str, float)):
        return value
    if isinstance(value, MidstreamError):
        return type(value).__name__, value.message
    if isinstance(value, Protocol):
        slots = tuple(getattr(value, slot) for slot in Protocol.__slots__)
        return type(value).__name__, slots, freeze(getattr(value, "__dict__", None))
    if isinstance(value, Mapping):
        return "dict", tuple((freeze(key), freeze(item)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return "set", tuple(sorted(map(freeze, value)))
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(map(freeze, value))
    if is_dataclass(value):
        return type(value).__name__, tuple(freeze(getattr(value, f.name)) for f in fields(value))
    return type(value).__name__, freeze(vars(value))
