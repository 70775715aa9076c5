"""Every interleaving of a small group, by breadth-first search over the real Protocol and Coordinator classes.

A state is: of each rank its protocol, its place (in a gap, in a vote, in a forward, ended, dead), its live requests and
what it has prepared; the FIFO channels from the coordinator to it, from clients to it, and from it to the coordinator;
the coordinator; what controllers and clients have done and been told. One transition is one of: a message is taken from
the head of a channel; a rank ends its gap and enters a collective; a collective that all ranks are in completes; a
controller calls, a client sends, a clock fires, a rank dies. All orders of these are tried until no new state appears.

In every state: ranks that wait in a collective wait in the same one (kind, wave, step and weights); no rank is in a
forward while a pause is acknowledged and nothing undoes it, or while another rank commits; ranks answer a call alike;
no call or request is answered twice. And from every state, without anything new from outside, a *settled* one can be
reached: nobody waits in a collective, every channel is empty, every call is answered, and so is every request that a
pause does not hold. So nothing is ever stranded, and nobody ever waits alone.

Each distinct (state of a class, event) is run once on the class itself and remembered; the search works on numbers.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from midstream.engine.coordinator import Agreed, Answer, Command, Coordinator, Lost, Send, StartWave
from midstream.engine.protocol import AbortAll, Action, Commit, Fail, Outcome, Protocol, Reply, Turn
from midstream.engine.vote import StepFacts, StepVerdict, StepVote, verdict
from midstream.errors import EngineDead, EnginePaused, MidstreamError, UpdateConflict


class Violation(AssertionError):
    """A property does not hold; the message has the shortest way there."""


@dataclass(frozen=True)
class Variant:
    """What is explored: the real classes, or a mutant of them."""

    protocol: type[Protocol] = Protocol
    coordinator: type[Coordinator] = Coordinator
    verdict: Callable[[Sequence[StepVote]], StepVerdict] = verdict


class Request(NamedTuple):
    tokens: int
    rank: int | None = None
    """None: any."""
    is_slow: bool = False
    """It is live for a while before it can be scheduled, and may fail then, as with a grammar that is compiled."""


@dataclass(frozen=True)
class Scenario:
    """What the world may do, in any order and at any time. ``vote_every`` 0: replicas that do not step together."""

    name: str
    num_ranks: int = 2
    vote_every: int = 1
    requests: tuple[Request, ...] = ()
    controllers: tuple[tuple[tuple[str, Mapping[str, Any]], ...], ...] = ()
    """Each calls (verb, arguments) after the answer to its last call, whenever it likes."""
    may_lose: bool = False
    """One rank may die at any time."""


class Explored(NamedTuple):
    states: int
    edges: int
    depth: int
    is_complete: bool


Label = tuple[Any, ...]
GAP, VOTE, FORWARD, ENDED, DEAD = "gap", "vote", "forward", "ended", "dead"


class Live(NamedTuple):
    """A request on a rank."""

    request: int
    tokens_left: int
    is_fresh: bool
    """No token since the last commit."""
    is_ready: bool = True


class Local(NamedTuple):
    """A rank without its channels: the shell around Protocol, in small."""

    protocol: Protocol
    place: str = GAP
    live: tuple[Live, ...] = ()
    version: int = 0
    prepared: int | None = None
    """The call whose update is staged."""
    said: int | None = None
    """Of a replica: the position at which it was due last."""
    rests: bool = False
    """It has reported a pause and has taken nothing since that may end it."""

    @property
    def facts(self) -> StepFacts:
        progressed = not self.live or not self.live[0].is_fresh
        return StepFacts(len(self.live), progressed, any(one.is_ready for one in self.live), self.version)


class Rank(NamedTuple):
    """A rank and its channels, oldest message first."""

    local: int
    commands: tuple[int, ...] = ()
    requests: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()


class Effects(NamedTuple):
    """Where a transition leads one rank, and which requests it ends."""

    to: int
    """A Local first, then the Rank around it."""
    sent: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    has_committed: bool = False


class Shape(NamedTuple):
    """What others may see of a rank."""

    place: str
    waits_in: tuple[Any, ...] | None
    """Which collective it waits in: all who wait must wait in the same."""
    rests: bool
    head: str | None
    """What the coordinator hears of it next."""


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
        local = local._replace(rests=local.rests and command.verb not in ("pause", "resume", "pause_timed_out"))
        if command.position is not None:
            protocol.take(command.position)
        match command.verb:
            case "pause":
                return local, protocol.pause(op, given["mode"], False)
            case "resume":
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
        return Effects(self.number(local._replace(live=_put(local.live, index, one._replace(is_ready=True)))))

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


# -- the world ---------------------------------------------------------------------------------------------------------


class Outside(NamedTuple):
    """What has been called, sent, answered and lost."""

    controllers: tuple[tuple[int, int], ...]
    """Of each: 2 × the call that is next, + 1 while it waits for its answer; and ``disturbed`` when it last called."""
    homes: tuple[int, ...]
    """Of each request, the rank that it was sent to; -1: not sent."""
    answered: tuple[bool, ...]
    disturbed: int = 0
    """Calls and time-outs so far after which a paused group may step."""
    is_quiet: bool = False
    """A pause is acknowledged and nothing has disturbed it."""
    lost: int = -1
    """The rank that died."""
    is_known: bool = False
    """The coordinator has heard of it, and the front ends have."""
    is_over: bool = False
    """Front ends were told that the group has ended."""


State = tuple[int, ...]
"""Numbers: of each rank, of the coordinator, of what is outside."""
Next = tuple[Label, State]
_STEPPING = frozenset({"resume", "pause"})


class World:
    """The states of one scenario and what leads from each to the next."""

    def __init__(self, scenario: Scenario, machine: Machine) -> None:
        self.scenario, self.machine = scenario, machine
        self.trying: Label = ()
        """The transition that is being looked at, for who wants to know which one failed."""
        self.calls = [[machine.number(call) for call in calls] for calls in scenario.controllers]
        self.requests = [machine.number(both) for both in enumerate(scenario.requests)]
        # Nothing but a loss or a clock can overtake an answer on its way: else it is delivered at once.
        self.has_clocks = any("timeout_s" in given for calls in scenario.controllers for _, given in calls)
        self.is_eager = not scenario.may_lose and not self.has_clocks and machine.lockstep

    def start(self) -> State:
        outside = Outside(
            controllers=((0, 0),) * len(self.scenario.controllers),
            homes=(-1,) * len(self.scenario.requests),
            answered=(False,) * len(self.scenario.requests),
        )
        ranks = (self.machine.fresh,) * self.scenario.num_ranks
        return (*ranks, self.machine.coordinator, self.machine.number(outside))

    def moves(self, state: State) -> tuple[list[Next], list[Next]]:
        """What goes on by itself, and what somebody outside may do and need not."""
        shapes = [self.machine.shape(number) for number in state[:-2]]
        if self.is_eager:
            for r, shape in enumerate(shapes):
                if shape.head == "answered":
                    self.trying = ("is heard", r)
                    return [self._receive(state, r)], []
        return list(self._inside(state, shapes)), list(self._outside(state, shapes))

    def _inside(self, state: State, shapes: list[Shape]) -> Iterator[Next]:
        machine = self.machine
        is_broken = any(shape.place in (ENDED, DEAD) for shape in shapes)
        for r, shape in enumerate(shapes):
            for label, effects in machine.moves(r, state[r]):
                self.trying = label
                if label[0] == "steps" and self.machine.value(state[-1]).is_quiet:
                    raise Violation("a replica steps during an acknowledged pause")
                yield label, self._after(state, shapes, {r: effects})
            if is_broken and shape.waits_in:
                yield ("has its collective fail", r), self._after(state, shapes, {r: machine.gone(state[r], ENDED)})
            if shape.head:
                self.trying = ("is heard", r)
                yield self._receive(state, r)
        if all(shape.place == VOTE for shape in shapes):
            self.trying = ("all vote",)
            decided = machine.decide(state[:-2])
            results = {r: machine.completes(number, decided) for r, number in enumerate(state[:-2])}
            yield ("vote", decided), self._after(state, shapes, results)
        elif all(shape.place == FORWARD for shape in shapes):
            results = {r: machine.completes(number, None) for r, number in enumerate(state[:-2])}
            yield ("forward",), self._after(state, shapes, results)
        outside = self.machine.value(state[-1])
        if outside.lost >= 0 and not outside.is_known:
            event = machine.coordinate(state[-2], "rank_lost", outside.lost, "its process ended")
            told = outside._replace(is_known=True)
            yield ("the coordinator hears of the loss",), self._send(state, told, event)

    def _outside(self, state: State, shapes: list[Shape]) -> Iterator[Next]:
        machine = self.machine
        outside: Outside = self.machine.value(state[-1])
        for index, (count, _) in enumerate(outside.controllers):
            calls = self.scenario.controllers[index]
            if count % 2 or count // 2 == len(calls):
                continue
            verb, arguments = calls[count // 2]
            stirs = verb in _STEPPING
            disturbed = outside.disturbed + stirs
            new = outside._replace(
                controllers=_put(outside.controllers, index, (count + 1, disturbed)),
                disturbed=disturbed,
                is_quiet=outside.is_quiet and not stirs,
            )
            event = machine.called(state[-2], index, count // 2, self.calls[index][count // 2])
            yield ("controller", index, verb, arguments), self._send(state, new, event)
        for request, home in enumerate(outside.homes):
            if home >= 0:
                continue
            wanted = self.scenario.requests[request].rank
            for r in range(len(shapes)) if wanted is None else (wanted,):
                new = outside._replace(homes=_put(outside.homes, request, r))
                ranks = state
                if outside.is_over or (outside.is_known and outside.lost == r):
                    new = self._end(new, (request,))
                else:  # to one that has ended: answered once the front end knows
                    ranks = _put(state, r, machine.append(state[r], "requests", self.requests[request]))
                yield ("client", request, r), (*ranks[:-1], self.machine.number(new))
        if self.has_clocks:
            event = machine.coordinate(state[-2], "tick", 1.0)
            if event[0] != state[-2]:
                new = outside._replace(disturbed=outside.disturbed + 1, is_quiet=False)
                yield ("the clock ends a pause",), self._send(state, new, event)
        if self.scenario.may_lose and outside.lost < 0:
            for r, shape in enumerate(shapes):
                if shape.place != ENDED:
                    new_number = self.machine.number(outside._replace(lost=r))
                    yield ("dies", r), (*_put(state, r, machine.gone(state[r], DEAD).to)[:-1], new_number)

    def is_settled(self, state: State) -> bool:
        """Nobody waits in a collective or for an answer, but requests that a pause holds."""
        outside: Outside = self.machine.value(state[-1])
        quiet = [self.machine.is_quiet(number) for number in state[:-2]]
        if not all(is_quiet for is_quiet, _ in quiet) or (outside.lost >= 0 and not outside.is_known):
            return False
        held = {request for _, requests in quiet for request in requests}
        sent = [request for request, home in enumerate(outside.homes) if home >= 0]
        return all(outside.answered[request] or request in held for request in sent) and not any(
            count % 2 for count, _ in outside.controllers
        )

    # -- parts of transitions --------------------------------------------------------------------------------------

    def _receive(self, state: State, r: int) -> Next:
        sent = self.machine.value(state[r]).sent[0]
        event = self.machine.receive(state[-2], r, sent)
        left = _put(state, r, self.machine.heard(state[r]))
        return ("is heard", r), self._send(left, self.machine.value(state[-1]), event)

    def _send(self, state: State, outside: Outside, event: tuple[int, tuple[tuple[int | str, int], ...]]) -> State:
        ranks = list(state[:-2])
        for to, number in event[1]:
            if isinstance(to, int):
                ranks[to] = self.machine.append(ranks[to], "commands", number)
                continue
            message = self.machine.value(number)
            if isinstance(message, Answer):
                outside = self._answer(outside, int(to[1:]), message)
            elif self.machine.lockstep:
                outside = self._end_lost(outside._replace(is_over=True), None)
            else:
                outside = self._end_lost(outside, message.error.details["rank"])
        if outside.is_known:  # a front end that never called hears it too
            outside = outside._replace(is_over=outside.is_over or self.machine.lockstep)
            outside = self._end_lost(outside, None if self.machine.lockstep else outside.lost)
        return (*ranks, event[0], self.machine.number(outside))

    def _end_lost(self, outside: Outside, lost: int | None) -> Outside:
        over = [r for r, home in enumerate(outside.homes) if home >= 0 and lost in (None, home)]
        return self._end(outside, [request for request in over if not outside.answered[request]])

    def _answer(self, outside: Outside, index: int, answer: Answer) -> Outside:
        count, disturbed = outside.controllers[index]
        if count != 2 * answer.call + 1:
            raise Violation(f"call {answer.call} of controller {index} is answered twice: {answer.result}")
        verb = self.scenario.controllers[index][answer.call][0]
        done = verb == "pause" and not isinstance(answer.result, MidstreamError)
        return outside._replace(
            controllers=_put(outside.controllers, index, (count + 1, 0)),
            is_quiet=outside.is_quiet or (done and disturbed == outside.disturbed),
        )

    def _end(self, outside: Outside, requests: Sequence[int]) -> Outside:
        answered = outside.answered
        for request in requests:
            if answered[request] and not (outside.is_over or outside.lost >= 0):  # else the front end drops it
                raise Violation(f"request {request} is answered twice")
            answered = _put(answered, request, True)
        return outside._replace(answered=answered)

    def _after(self, state: State, before: list[Shape], results: dict[int, Effects]) -> State:
        """The state after transitions of some ranks, checked."""
        machine = self.machine
        new = list(state)
        shapes = before.copy()
        for r, effects in results.items():
            new[r], shapes[r] = effects.to, machine.shape(effects.to)
            if effects.ended:
                new[-1] = self.machine.number(self._end(self.machine.value(new[-1]), effects.ended))
            if effects.has_committed and any(shape.place == FORWARD for shape in before):
                raise Violation("a rank commits while another is in a forward")
        waiting = [shape.waits_in for shape in shapes if shape.waits_in]
        if waiting:
            if any(one != waiting[0] for one in waiting):
                raise Violation(f"ranks wait in different collectives: {sorted(waiting)}")
            if waiting[0][0] == FORWARD:
                if self.machine.value(new[-1]).is_quiet:
                    raise Violation("a forward during an acknowledged pause")
                if any(shape.rests for shape in shapes):
                    raise Violation("a forward while a rank is in a global pause")
        return tuple(new)


def _put(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


# -- the search --------------------------------------------------------------------------------------------------------


def explore(scenario: Scenario, machine: Machine, limit: int) -> Explored:
    """Every reachable state. Raises Violation with the shortest trace to one where a property does not hold."""
    world = World(scenario, machine)
    first = world.start()
    numbers = {first: 0}
    states = [first]
    came = array("i", [-1])
    sources, targets = array("i"), array("i")
    settled = array("i")
    depth, level_end, index = 0, 1, 0
    while index < len(states):
        if index == level_end:
            depth, level_end = depth + 1, len(states)
        if len(states) > limit:
            return Explored(len(states), len(targets), depth, False)
        state = states[index]
        try:
            if world.is_settled(state):
                settled.append(index)
            for is_inside, moves in zip((True, False), world.moves(state), strict=True):
                for _, target in moves:
                    number = numbers.setdefault(target, len(states))
                    if number == len(states):
                        states.append(target)
                        came.append(index)
                    if is_inside:
                        sources.append(index)
                        targets.append(number)
        except (Violation, MidstreamError) as error:
            failed = world.trying
            raise Violation(f"{error}\n{trace(world, states, came, index, failed)}") from error
        index += 1
    stuck = _first_unable(len(states), sources, targets, settled)
    if stuck is not None:
        raise Violation(f"nothing settles this without help from outside\n{trace(world, states, came, stuck)}")
    return Explored(len(states), len(targets), depth, True)


def _first_unable(num_states: int, sources: array[int], targets: array[int], goals: array[int]) -> int | None:
    """The first state from which no goal can be reached."""
    head = array("i", [-1]) * num_states
    link = array("i", [-1]) * len(targets)
    for edge, target in enumerate(targets):
        link[edge] = head[target]
        head[target] = edge
    able = bytearray(num_states)
    queue = list(goals)
    for goal in goals:
        able[goal] = 1
    while queue:
        edge = head[queue.pop()]
        while edge >= 0:
            source = sources[edge]
            if not able[source]:
                able[source] = 1
                queue.append(source)
            edge = link[edge]
    return next((index for index, can in enumerate(able) if not can), None)


def trace(world: World, states: list[State], came: array[int], index: int, failed: Label | None = None) -> str:
    """The way to a state, one line a transition, and on to the one that ``failed`` there, or until nothing moves by
    itself; and how all stood before that."""
    way = [index]
    while came[way[-1]] >= 0:
        way.append(came[way[-1]])
    path = [states[number] for number in reversed(way)]
    lines = []
    for source, target in pairwise(path):
        inside, outside = world.moves(source)
        label = next(label for label, state in inside + outside if state == target)
        lines.append(_describe(world, source, label))
    last = path[-1]
    seen = {last}
    if failed is not None:
        lines.append(f"{_describe(world, last, failed)}: which is what must not be")
    else:
        while new := [move for move in world.moves(last)[0] if move[1] not in seen]:
            lines.append(_describe(world, last, new[0][0]))
            last = new[0][1]
            seen.add(last)
    text = [f"  {number:3}. {line}" for number, line in enumerate(lines, 1)]
    return "\n".join(text + [f"       rank {r}: {_describe_rank(world, number)}" for r, number in enumerate(last[:-2])])


def _describe(world: World, state: State, label: Label) -> str:
    value = world.machine.value
    rank = value(state[label[1]]) if len(label) == 2 and isinstance(label[1], int) else None
    match label:
        case ("controller", index, verb, arguments):
            return f"controller {index} calls {verb} {dict(arguments) or ''}"
        case ("client", request, r):
            return f"request {request} is sent to rank {r}"
        case ("takes", r) if rank:
            message = value(rank.commands[0])
            if isinstance(message, Command):
                return f"rank {r} takes {message.op}: {message.verb} {message.arguments or ''}"
            return f"rank {r} takes {message}"
        case ("admits", r) if rank:
            return f"rank {r} takes request {value(rank.requests[0])[0]}"
        case ("ends its gap", r) if rank:
            return f"rank {r} ends its gap: {world.machine.turn(rank.local)}"
        case ("is heard", r) if rank:
            return f"the coordinator hears of rank {r}: {value(rank.sent[0])}"
        case ("vote", decided):
            return f"all vote: {decided}"
        case ("forward",):
            return "all run the forward"
        case (what, r):
            return f"rank {r} {what}"
    return str(label[0])


def _describe_rank(world: World, number: int) -> str:
    rank = world.machine.value(number)
    local = world.machine.value(rank.local)
    p = local.protocol
    return (
        f"in a {local.place}, {p.phase}, position {p.position}, wave {p.wave}, weights {local.version}, "
        f"{len(local.live)} live, {len(rank.commands)} commands and {len(rank.requests)} requests to take"
    )
