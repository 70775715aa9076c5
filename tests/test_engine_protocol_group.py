"""The protocol in a group, call by call: votes, waves and the log. test_check_explore has all interleavings."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from midstream.engine.protocol import AbortAll, Action, Commit, Fail, Protocol, Reply
from midstream.engine.vote import StepFacts, StepVote, verdict
from midstream.errors import EngineDead, EnginePaused, MidstreamError, PauseCancelled
from midstream.types import PAUSE_MODES


class Rank:
    """The shell around one rank in thirty lines."""

    def __init__(self, vote_every: int) -> None:
        self.protocol = Protocol(vote_every)
        self.log: deque[tuple[str, Any]] = deque()
        self.wakes: deque[int] = deque()
        self.live: dict[int, int] = {}
        self.ended: dict[int, str] = {}
        self.answers: dict[Any, Any] = {}
        self.position = 0
        self.version = 0
        self.num_steps = 0

    @property
    def facts(self) -> StepFacts:
        return StepFacts(len(self.live), True, bool(self.live), self.version)

    def add(self, request: int, num_tokens: int) -> None:
        try:
            self.protocol.admit()
        except EnginePaused:
            self.ended[request] = "refused"
        else:
            self.live[request] = num_tokens

    def take(self, count: int) -> None:
        """Up to ``count`` commands of the log."""
        for _ in range(min(count, len(self.log))):
            verb, arguments = self.log.popleft()
            self.position += 1
            self.protocol.take(self.position)
            self.do(getattr(self.protocol, verb)(*arguments))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case AbortAll():
                    self.ended |= dict.fromkeys(self.live, "abort")
                    self.live = {}
                case Commit(op, _):
                    self.version += 1
                    self.answers[op] = self.version
                case Reply(op, value):
                    assert op not in self.answers
                    self.answers[op] = value
                case Fail(op, error):
                    assert op not in self.answers
                    self.answers[op] = type(error)

    def step(self) -> None:
        self.num_steps += 1
        if self.protocol.may_step:
            for request in list(self.live):
                self.live[request] -= 1
                if not self.live[request]:
                    del self.live[request]
                    self.ended[request] = "stop"
        self.protocol.stepped()


class Group:
    """Ranks that meet in every collective: a gap each, then a vote or a forward of all."""

    def __init__(self, num_ranks: int = 2, vote_every: int = 1) -> None:
        self.ranks = [Rank(vote_every) for _ in range(num_ranks)]
        self.num_votes = 0
        self.outcome = ""

    def log(self, verb: str, *arguments: Any) -> None:
        for rank in self.ranks:
            rank.log.append((verb, arguments))

    def gap(self, *counts: int) -> None:
        """Each rank takes so many commands (all by default); then whatever they do together."""
        for rank, count in zip(self.ranks, counts or [99] * len(self.ranks), strict=True):
            rank.take(count)
            while rank.wakes:
                rank.protocol.start_wave(rank.wakes.popleft())
        turns = [rank.protocol.turn(rank.facts) for rank in self.ranks]
        for rank, turn in zip(self.ranks, turns, strict=True):
            if turn == "wake":
                for other in self.ranks:
                    if other is not rank:
                        other.wakes.append(rank.protocol.wave)
        if "step" in turns:
            assert set(turns) == {"step"}
            self.outcome = "step"
        else:
            if set(turns) <= {"idle"}:
                self.outcome = "idle"
                return
            for rank in self.ranks:  # who was not in the vote comes by its wake-up or by the command it has not taken
                while rank.wakes:
                    rank.protocol.start_wave(rank.wakes.popleft())
                while rank.protocol.turn(rank.facts) == "idle":
                    assert rank.log, "a rank waits alone in a vote"
                    rank.take(1)
            decided = verdict([rank.protocol.vote(rank.facts) for rank in self.ranks])
            self.num_votes += 1
            outcomes = set()
            for rank in self.ranks:
                actions, outcome = rank.protocol.conclude(decided)
                rank.do(actions)
                outcomes.add(outcome)
            assert len(outcomes) == 1
            self.outcome = outcomes.pop()
        if self.outcome == "step":
            assert len({rank.version for rank in self.ranks}) == 1
            for rank in self.ranks:
                rank.step()

    @property
    def num_steps(self) -> int:
        assert len({rank.num_steps for rank in self.ranks}) == 1
        return self.ranks[0].num_steps

    def answer(self, op: Any) -> Any:
        """The answer of all ranks, which is one."""
        answers = [rank.answers[op] for rank in self.ranks]
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]


@pytest.mark.parametrize("mode", PAUSE_MODES)
def test_an_idle_group_pauses_in_one_vote_without_a_forward(mode: str) -> None:
    group = Group()
    group.log("pause", "p", mode, False)
    group.gap()
    assert group.answer("p")["paused"] and (group.num_votes, group.num_steps, group.outcome) == (1, 0, "end")
    group.gap()
    assert group.outcome == "idle" and group.num_votes == 1


@pytest.mark.parametrize(("vote_every", "num_steps"), [(1, 1), (4, 4)])
def test_a_busy_group_pauses_with_the_next_agreed_vote(vote_every: int, num_steps: int) -> None:
    group = Group(vote_every=vote_every)
    group.ranks[0].add(0, 99)
    group.gap()
    assert group.num_steps == 1
    group.log("pause", "p", "keep", False)
    while "p" not in group.ranks[0].answers:
        group.gap()
    assert group.num_steps == num_steps and group.answer("p")["mode"] == "keep"
    assert group.ranks[0].live == {0: 98}, "the empty forwards on the way to the vote scheduled nothing"


def test_a_rank_that_has_paused_goes_on_taking_part_until_all_have() -> None:
    group = Group()
    group.ranks[0].add(0, 9)
    group.gap()
    group.log("pause", "p", "keep", False)
    for _ in range(3):
        group.gap(0, 1)
    assert group.num_steps == 4 and group.ranks[0].live == {0: 5} and not group.ranks[1].answers
    assert group.ranks[1].protocol.phase == "pausing" and group.ranks[0].protocol.phase == "running"
    group.gap()
    assert group.answer("p")["paused"] and group.num_steps == 4


def test_a_wait_drains_every_rank() -> None:
    group = Group()
    group.ranks[0].add(0, 2)
    group.ranks[1].add(1, 4)
    group.log("pause", "p", "wait", False)
    while "p" not in group.ranks[0].answers:
        group.gap()
    assert group.num_steps == 4
    assert [rank.ended for rank in group.ranks] == [{0: "stop"}, {1: "stop"}]


def test_a_wake_up_from_before_the_pause_says_nothing() -> None:
    group = Group()
    group.ranks[0].add(0, 1)
    group.ranks[1].add(1, 1)
    group.log("pause", "p", "keep", False)
    group.gap(0, 0)
    group.gap()
    assert group.answer("p")["paused"] and group.ranks[0].protocol.wave == 1
    for rank in group.ranks:
        rank.protocol.start_wave(0)
        assert rank.protocol.turn(rank.facts) == "idle"
    with pytest.raises(MidstreamError, match="wave 2 came in wave 1"):
        group.ranks[0].protocol.start_wave(2)


def test_no_forward_before_all_have_resumed() -> None:
    group = Group()
    group.ranks[0].add(0, 3)
    group.log("pause", "p", "keep", False)
    group.gap()
    group.log("finish_update", "f", None)
    group.log("resume", "r")
    group.gap(2, 1)
    assert (group.outcome, group.num_steps) == ("again", 0) and "f" not in group.ranks[0].answers
    group.gap(0, 0)
    assert (group.outcome, group.num_steps) == ("again", 0)
    group.gap()
    assert (group.outcome, group.num_steps) == ("step", 1)
    assert group.answer("f") == 1 and group.answer("r") == {"was_paused": True}


def test_a_resume_that_races_the_pause_cancels_it_on_every_rank() -> None:
    group = Group()
    group.ranks[0].add(0, 9)
    group.gap()
    group.log("pause", "p", "keep", False)
    group.gap(1, 0)
    group.log("resume", "r")
    group.gap(1, 1)  # one has both, the other one the pause alone: nobody completes anything
    assert group.outcome == "step" and group.ranks[1].protocol.phase == "pausing"
    group.gap()
    assert group.answer("p") is PauseCancelled and group.answer("r") == {"was_paused": True}
    assert all(rank.protocol.phase == "running" for rank in group.ranks)


def test_two_pauses_that_look_alike_are_told_apart_by_their_position() -> None:
    group = Group()
    group.log("pause", "p1", "keep", False)
    group.log("resume", "r")
    group.log("pause", "p2", "keep", False)
    group.gap(3, 1)
    assert group.outcome == "again" and not group.ranks[1].answers
    group.gap()
    assert group.answer("p1") is PauseCancelled and group.answer("p2")["paused"]


def test_a_commit_is_in_the_same_gap_on_every_rank() -> None:
    group = Group()
    group.ranks[1].add(0, 9)
    group.gap()
    group.log("finish_update", "f", None)
    group.gap(1, 0)
    assert [rank.version for rank in group.ranks] == [0, 0] and group.num_steps == 2
    group.gap(0, 1)
    assert group.answer("f") == 1 and group.num_steps == 3


def test_a_paused_group_commits_without_a_forward() -> None:
    group = Group(vote_every=32)
    group.ranks[0].add(0, 9)
    group.log("pause", "p", "keep", False)
    group.gap()
    group.log("finish_update", "f", None)
    group.gap()
    assert group.answer("f") == 1 and group.num_steps == 0 and group.outcome == "end"


def test_a_wave_goes_on_while_a_call_is_open() -> None:
    """A live request that nobody can schedule yet: what ends it is no command, so only votes can see it."""
    group = Group()
    rank = group.ranks[0]
    waiting = StepFacts(1, False, False)
    group.log("pause", "p", "wait", False)
    group.ranks[1].take(1)
    rank.take(1)
    for _ in range(2):
        decided = verdict([rank.protocol.vote(waiting), group.ranks[1].protocol.vote(StepFacts(0, True))])
        for each in group.ranks:
            assert each.protocol.conclude(decided) == ([], "again")
            assert each.protocol.turn(StepFacts(0, True)) == "vote"
    group.gap()
    assert group.answer("p")["paused"] and group.outcome == "end"


def test_a_shutdown_lets_all_leave_together() -> None:
    group = Group()
    group.ranks[0].add(0, 9)
    group.log("pause", "p", "wait", False)
    group.gap()
    group.log("shutdown", "s")
    group.gap(0, 1)
    assert group.outcome == "step" and "s" not in group.ranks[1].answers
    with pytest.raises(EngineDead):
        group.ranks[1].protocol.admit()
    group.gap()
    assert group.outcome == "stop" and group.answer("s") == {"stopped": True} and group.answer("p") is PauseCancelled
    assert group.ranks[0].ended == {0: "abort"}


def test_a_command_is_never_missed() -> None:
    protocol = Protocol()
    protocol.take(1)
    for wrong in (1, 3):
        with pytest.raises(MidstreamError, match=f"command {wrong} of the log came after command 1"):
            protocol.take(wrong)


@pytest.mark.parametrize("name", ["wave", "weight_number"])
def test_ranks_that_have_come_apart_do_not_compute_together(name: str) -> None:
    vote = StepVote(0, 3, 1, True, True, 7, False)
    assert verdict([vote, replace(vote, position=4)]).agrees is False
    with pytest.raises(MidstreamError, match=rf"differ in {name}: \[\d, 9\]"):
        verdict([vote, replace(vote, **{name: 9})])


def test_replicas_agree_through_the_log() -> None:
    first, second = Protocol(), Protocol()
    idle, busy = StepFacts(0, True), StepFacts(1, True, True)
    assert first.due(idle) is None
    for protocol in (first, second):
        protocol.take(1)
        assert protocol.pause("p", "wait", False) == []
    assert first.due(idle) == 1 and second.due(busy) is None and second.may_step
    assert second.due(idle) == 1
    paused = [Reply("p", {"paused": True, "mode": "wait", "clear_cache": False})]
    assert first.agree(1) == paused
    second.take(2)
    second.pause_timed_out("p")
    assert second.agree(1) == [], "what was agreed about another position is void"
    assert second.phase == "running"


@pytest.mark.parametrize("vote_every", [1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_a_group_of_up_to_eight_under_random_calls(seed: int, vote_every: int) -> None:
    """Each rank takes the log at its own pace; every call ends alike everywhere, every request once."""
    rng = random.Random(seed)
    group = Group(rng.randint(2, 8), vote_every)
    calls, num_requests = 0, 0
    for _ in range(150):
        if rng.random() < 0.4:
            rng.choice(group.ranks).add(num_requests, rng.randint(1, 5))
            num_requests += 1
        if rng.random() < 0.3:
            calls += 1
            verb = rng.choice(["pause", "resume", "finish_update"])
            if verb == "finish_update" and any(entry[0] == verb for rank in group.ranks for entry in rank.log):
                verb = "resume"
            if verb == "finish_update" and any(rank.protocol._finish for rank in group.ranks):
                verb = "resume"
            arguments = {"pause": (rng.choice(PAUSE_MODES), False), "resume": (), "finish_update": (None,)}[verb]
            group.log(verb, calls, *arguments)
        group.gap(*(rng.randint(0, 2) for _ in group.ranks))
    calls += 1
    group.log("resume", calls)
    while any(rank.log or rank.live for rank in group.ranks) or group.outcome != "idle":
        group.gap()
    for op in range(1, calls + 1):
        group.answer(op)
    ended = [request for rank in group.ranks for request in rank.ended]
    assert sorted(ended) == list(range(num_requests))
    assert len({rank.version for rank in group.ranks}) == 1
