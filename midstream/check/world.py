"""All that may happen to a small group, in any order: the states of a scenario, and what leads from each to the next.

One transition is one of: a message is taken from the head of a channel; a rank ends its gap and enters a collective; a
collective that all ranks are in completes; a controller calls, a client sends, a clock fires, a rank dies.

In every state: ranks that wait in a collective wait in the same one (kind, wave, step and weights); no rank is in a
forward while a pause is acknowledged and nothing undoes it, or while another rank commits; ranks answer a call alike;
no call or request is answered twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from midstream.check.machine import Machine
from midstream.check.state import DEAD, ENDED, FORWARD, VOTE, Effects, Label, Outside, Scenario, Shape, Violation, put
from midstream.engine.coordinator import Answer
from midstream.errors import MidstreamError

State = tuple[int, ...]
"""Numbers: of each rank, of the coordinator, of what is outside."""
Next = tuple[Label, State]
_STEPPING = frozenset({"resume_generation", "pause_generation"})


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
                controllers=put(outside.controllers, index, (count + 1, disturbed)),
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
                new = outside._replace(homes=put(outside.homes, request, r))
                ranks = state
                if outside.is_over or (outside.is_known and outside.lost == r):
                    new = self._end(new, (request,))
                else:  # to one that has ended: answered once the front end knows
                    ranks = put(state, r, machine.append(state[r], "requests", self.requests[request]))
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
                    yield ("dies", r), (*put(state, r, machine.gone(state[r], DEAD).to)[:-1], new_number)

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
        left = put(state, r, self.machine.heard(state[r]))
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
        done = verb == "pause_generation" and not isinstance(answer.result, MidstreamError)
        return outside._replace(
            controllers=put(outside.controllers, index, (count + 1, 0)),
            is_quiet=outside.is_quiet or (done and disturbed == outside.disturbed),
        )

    def _end(self, outside: Outside, requests: Sequence[int]) -> Outside:
        answered = outside.answered
        for request in requests:
            if answered[request] and not (outside.is_over or outside.lost >= 0):  # else the front end drops it
                raise Violation(f"request {request} is answered twice")
            answered = put(answered, request, True)
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
