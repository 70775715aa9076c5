"""Every interleaving of a small group, by breadth-first search over the real Protocol and Coordinator classes.

All orders of the world's transitions are tried until no new state appears; each state has the properties that the
world demands. And from every state, without anything new from outside, a *settled* one can be reached: nobody waits in
a collective, every channel is empty, every call is answered, and so is every request that a pause does not hold. So
nothing is ever stranded, and nobody ever waits alone.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import NamedTuple

from midstream.check.machine import Machine
from midstream.check.state import Label, Scenario, Violation
from midstream.check.world import State, World
from midstream.engine.coordinator import Command
from midstream.errors import MidstreamError


class Explored(NamedTuple):
    states: int
    edges: int
    depth: int
    is_complete: bool


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
