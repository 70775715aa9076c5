"""The pause protocol at 10,000 ranks, on paper: the engine's own Protocol and Coordinator under a virtual clock.

    python -m bench.protocol_scale [--ranks N] [--rounds N]

Each round is one group that is busy: a pause (keep), an update and a resume inside it, an update without a pause, and
at last a rank that dies. Messages take 0.5 to 20 ms and now and then much longer (Pareto tail), a forward takes 30 ms
with 15 % noise and the slowest rank's time, one in a hundred meets a straggler that takes five times as long, a vote
1 ms and up to 1 ms more to be heard of everywhere. All of it follows from the seed of the round.

One JSON line per figure and sync interval (1: a vote before every forward). Ranks that have taken equally many commands
and have work alike are in equal states, as the exploration shows, so they share one Protocol; its decisions are real.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from bench.machine import figure
from midstream.engine.coordinator import Answer, Command, Coordinator, Send
from midstream.engine.protocol import Action, Commit, Fail, Protocol, Reply
from midstream.engine.vote import StepFacts, verdict

FORWARD_MS, NOISE, STRAGGLERS, SLOWER = 30.0, 0.15, 0.01, 5.0
VOTE_MS, HEARD_MS, SILENCE_MS = 1.0, 1.0, 1000.0
"""A vote; until every rank has its result; and after what silence of a connection its other end is given up."""


class Group:
    """One round. Times are in ms."""

    def __init__(self, num_ranks: int, interval: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_ranks = num_ranks
        self.now = 0.0
        self.coordinator = Coordinator(num_ranks)
        self.by_position = {0: Protocol(interval)}
        self.positions = np.zeros(num_ranks, dtype=np.int64)
        self.has_work = self.rng.random(num_ranks) < 0.5
        self.arrivals: list[np.ndarray] = []  # [command][rank], FIFO to each rank
        self.commands: list[Command] = []
        self.replies: dict[int, np.ndarray] = defaultdict(lambda: np.full(num_ranks, np.nan))
        self.results: dict[int, Any] = {}
        self.answers: dict[str, tuple[float, Any]] = {}
        self.version, self.num_steps = 0, 0
        self.commits: list[tuple[int, float]] = []
        """Of each commit: steps between its first and its last rank, and ms."""

    def delays(self) -> np.ndarray:
        usual = self.rng.uniform(0.5, 20.0, self.num_ranks)
        return usual + np.where(self.rng.random(self.num_ranks) < 0.01, self.rng.pareto(2.5, self.num_ranks) * 20.0, 0)

    # -- between the coordinator and the ranks ---------------------------------------------------------------------

    def call(self, name: str, verb: str, **arguments: Any) -> None:
        self.send(self.coordinator.call("controller", name, verb, arguments, self.now), self.now)

    def send(self, sends: list[Send], at: float) -> None:
        for to, message in sends:
            if isinstance(message, Answer):
                self.answers[message.call] = at, message.result
            elif isinstance(message, Command) and to == 0:  # the same to all
                arrival = at + self.delays()
                self.arrivals.append(np.maximum(arrival, self.arrivals[-1]) if self.arrivals else arrival)
                self.commands.append(message)

    def reply(self, op: int, ranks: np.ndarray, result: Any) -> None:
        """Ranks answer a command; once all have, the coordinator takes the answers in the order in which they come."""
        came = self.replies[op]
        came[ranks] = self.now + self.delays()[ranks]
        self.results[op] = result
        if not np.isnan(came).any():
            del self.replies[op]
            for rank in np.argsort(came).tolist():
                take = self.coordinator.prepared if result is None else self.coordinator.answered
                self.send(take(rank, op, *([] if result is None else [result])), float(came[rank]))  # type: ignore[operator]

    def take(self, until: np.ndarray | float) -> None:
        """Every rank takes what has come to it."""
        for index in range(int(self.positions.min()), len(self.commands)):
            ranks = np.flatnonzero((self.positions == index) & (self.arrivals[index] <= until))
            if not len(ranks):
                continue
            if index + 1 not in self.by_position:
                self.by_position[index + 1] = copy.copy(self.by_position[index])
                self.carry_out(self.by_position[index + 1], self.commands[index])
            self.positions[ranks] = index + 1
            command = self.commands[index]
            if command.verb == "finish_update":
                self.reply(command.op, ranks, None)
            elif command.verb == "resume":
                self.reply(command.op, ranks, {"was_paused": True})
        for position in [p for p in self.by_position if p < self.positions.min()]:
            del self.by_position[position]

    def carry_out(self, protocol: Protocol, command: Command) -> None:
        assert command.position is not None
        protocol.take(command.position)
        actions: list[Action] = []
        match command.verb:
            case "pause":
                actions = protocol.pause(command.op, "keep", False)
            case "resume":
                actions = protocol.resume(command.op)
            case "finish":
                actions = protocol.finish_update(command.op, None)
        assert all(isinstance(action, Reply) for action in actions), actions

    # -- a gap and what follows ------------------------------------------------------------------------------------

    def turn(self) -> None:
        """One gap of every rank, then a vote and a forward if they are due."""
        first = next(iter(self.by_position.values()))
        if first._is_in_wave or (self.has_work.any() and first.phase == "running"):
            self.take(self.now)
        else:  # outside a wave: each rank goes into the vote when the next command has come
            waits = len(self.commands) > self.positions.min()
            assert waits and (self.positions == self.positions.min()).all()
            arrival = self.arrivals[int(self.positions.min())]
            self.take(arrival)
            self.now = float(arrival.max())
        votes, turns = [], set()
        for position, protocol in self.by_position.items():
            for works in (True, False):
                ranks = (self.positions == position) & (self.has_work == works)
                if ranks.any():
                    facts = StepFacts(int(ranks.sum()) if works else 0, True, works, self.version)
                    turns.add(protocol.turn(facts))
                    votes.append(protocol.vote(facts))
        outcome = "step"
        if turns != {"step"}:
            assert "step" not in turns
            self.now += VOTE_MS
            decided = verdict(votes)
            for position, protocol in self.by_position.items():
                if (self.positions == position).any():
                    actions, outcome = protocol.conclude(decided)
                    self.settle(actions, np.flatnonzero(self.positions == position))
        if outcome == "step":
            noise = np.abs(self.rng.normal(0.0, NOISE, self.num_ranks)).max()
            slower = SLOWER if self.rng.random() < STRAGGLERS else 1.0
            self.now += FORWARD_MS * (1.0 + noise) * slower
            self.num_steps += 1
            for protocol in self.by_position.values():
                protocol.stepped()

    def settle(self, actions: list[Action], ranks: np.ndarray) -> None:
        for action in actions:
            assert not isinstance(action, Fail), action
            if isinstance(action, Commit):
                assert len(ranks) == self.num_ranks, "a commit that not all ranks make in this gap"
                self.version += 1
                self.commits.append((0, float(np.ptp(self.rng.uniform(0.0, HEARD_MS, self.num_ranks)))))
                self.reply(action.op, ranks, {"version": self.version})
            elif isinstance(action, Reply):
                self.reply(action.op, ranks, action.value)

    def until(self, name: str) -> float:
        """Go on until a call is answered; the time of its answer."""
        while name not in self.answers:
            self.turn()
        at, result = self.answers[name]
        assert isinstance(result, dict), result
        self.now = max(self.now, at)
        return at

    def lose(self) -> float:
        """A rank dies: its connection falls silent, or is closed, and the coordinator tells all. ms until all know."""
        heard = SILENCE_MS if self.rng.random() < 0.5 else float(self.rng.uniform(0.5, 20.0))
        sends = self.coordinator.rank_lost(int(self.rng.integers(self.num_ranks)), "its connection ended")
        assert len(sends) == self.num_ranks, "all other ranks, the front end, no open call"
        return heard + float(self.delays().max())


def round_of(num_ranks: int, interval: int, seed: int) -> dict[str, float]:
    group = Group(num_ranks, interval, seed)
    for _ in range(int(group.rng.integers(1, 40))):
        group.turn()
    called, steps = group.now, group.num_steps
    group.call("pause", "pause", mode="keep", clear_cache=False)
    paused = group.until("pause") - called
    pause_steps = group.num_steps - steps
    called = group.now
    group.call("update in the pause", "finish_update")
    idle = group.until("update in the pause") - called
    group.call("resume", "resume")
    group.until("resume")
    for _ in range(int(group.rng.integers(1, 40))):
        group.turn()
    called = group.now
    group.call("update", "finish_update")
    commit = group.until("update") - called
    skew_steps, skew_ms = max(group.commits)
    return {
        "pause": paused,
        "steps until a pause": pause_steps,
        "commit in a pause": idle,
        "commit in flight": commit,
        "commit skew": skew_ms,
        "commit skew in steps": skew_steps,
        "loss": group.lose(),
    }


def figures(num_ranks: int = 10_000, num_rounds: int = 8) -> Iterator[dict[str, Any]]:
    for interval in (1, 16, 32):
        rounds = [round_of(num_ranks, interval, seed) for seed in range(num_rounds)]
        for what in rounds[0]:
            values = sorted(one[what] for one in rounds)
            name = f"protocol on paper, {num_ranks:,} ranks, sync interval {interval}: {what}"
            unit = "steps" if "steps" in what else "ms"
            asked = {"at_most": 0.0} if what == "commit skew in steps" else {}
            yield figure(name, median(values), unit, **asked, worst=round(values[-1], 4), disturbed=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.protocol_scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=10_000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="of each interval (default: %(default)s)")
    arguments = parser.parse_args()
    for line in figures(arguments.ranks, arguments.rounds):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
