"""The coordinator: one log, one answer for each call, clocks, and the loss of a rank."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.engine.coordinator import Agreed, Answer, Command, Coordinator, Lost, Send, StartWave, merge
from midstream.errors import Conflict, EngineDead, MidstreamError, TimedOut, UpdateConflict


def commands(sends: list[Send]) -> list[tuple[Any, int, str]]:
    """(rank, position, verb) of the commands among ``sends``."""
    return [(to, m.position or 0, m.verb) for to, m in sends if isinstance(m, Command)]


def answers(sends: list[Send]) -> list[tuple[Any, Any, Any]]:
    return [(to, m.call, m.result) for to, m in sends if isinstance(m, Answer)]


def test_every_rank_gets_every_command_in_one_order() -> None:
    group = Coordinator(3)
    sends = group.call("a", 1, "pause_generation", {"mode": "keep", "clear_cache": True}, 0.0)
    assert commands(sends) == [(rank, 1, "pause_generation") for rank in range(3)]
    resumed = group.call("b", 1, "resume_generation", {}, 0.0)
    assert commands(resumed) == [(rank, 2, "resume_generation") for rank in range(3)]
    plain = group.call("b", 2, "status", {}, 0.0)
    assert all(isinstance(m, Command) and m.position is None for _, m in plain), "status is no reason for a vote"
    assert len({m.op for _, m in sends + plain if isinstance(m, Command)}) == 2


def test_front_ends_get_one_answer_each_once_all_ranks_have_spoken() -> None:
    group = Coordinator(2)
    group.call("a", "x", "pause_generation", {}, 0.0)
    group.call("b", "x", "pause_generation", {}, 0.0)
    assert group.answered(0, 1, {"paused": True}) == []
    assert group.answered(1, 0, {"paused": True}) == []
    assert answers(group.answered(0, 0, {"paused": True})) == [("a", "x", {"paused": True})]
    assert answers(group.answered(1, 1, {"paused": True})) == [("b", "x", {"paused": True})]
    assert group.answered(1, 1, {"paused": True}) == [], "nobody is answered twice"


def test_merging() -> None:
    both = {"mode": "keep", "aborted": 1, "stall_ms": 2.0, "exact": "yes", "ok": True}
    other = {**both, "aborted": 2, "stall_ms": 5.0, "exact": "no", "ok": False}
    merged = {"mode": "keep", "aborted": 3, "stall_ms": 5.0, "exact": ["yes", "no"], "ok": [True, False]}
    assert merge({0: both, 1: other}) == merged
    held = [{"checksums": {"a": "1", "b": "2"}}, {"checksums": {"a": "1", "b": "3"}}]
    assert merge(dict(enumerate(held))) == {"checksums": {"a": "1", "b": "2 != 3"}}, "one rank alone has gone wrong"
    compared = [{"match": True, "mismatches": []}, {"match": False, "mismatches": ["b"]}]
    assert merge(dict(enumerate(compared))) == {"match": False, "mismatches": ["b"]}
    assert merge({0: {"num_connections": 1, "rank": 1}, 1: {"num_connections": 1, "rank": 2}})["num_connections"] == 2
    alike = merge({0: Conflict("no"), 1: Conflict("no")})
    assert type(alike) is Conflict and alike.message == "no"
    one = merge({0: {"received": 3}, 1: UpdateConflict("digest differs", tensors=["a"])})
    assert type(one) is UpdateConflict and one.message == "rank 1: digest differs"
    assert one.details == {"tensors": ["a"], "rank": 1}


def test_a_wave_is_announced_to_the_others() -> None:
    assert Coordinator(3).start_wave(1, 7) == [(0, StartWave(7)), (2, StartWave(7))]


def test_nothing_is_committed_anywhere_before_all_have_prepared() -> None:
    group = Coordinator(2)
    group.call("a", 1, "finish_weight_update", {}, 0.0)
    assert group.prepared(0, 0) == []
    sends = group.prepared(1, 0)
    assert commands(sends) == [(0, 2, "finish"), (1, 2, "finish")]
    assert all(isinstance(m, Command) and m.op == 0 for _, m in sends)
    group.answered(1, 0, {"version": "1"})
    assert answers(group.answered(0, 0, {"version": "1"})) == [("a", 1, {"version": "1"})]


@pytest.mark.parametrize("first", [0, 1])
def test_one_rank_that_cannot_prepare_cancels_the_update_on_the_others(first: int) -> None:
    group = Coordinator(2)
    group.call("a", 1, "finish_weight_update", {}, 0.0)
    failed = UpdateConflict("3 tensors are missing")
    steps = [lambda: group.prepared(0, 0), lambda: group.answered(1, 0, failed)]
    assert steps[first]() == []
    sends = steps[1 - first]()
    assert commands(sends) == [(0, 2, "cancel"), (1, 2, "cancel")]
    assert sends[0][1].arguments["of"] == 0  # type: ignore[union-attr]
    [(to, call, error)] = answers(sends)
    assert (to, call, error.message) == ("a", 1, "rank 1: 3 tensors are missing")


@pytest.mark.parametrize("verb", ["start_weight_update", "update_weights"])
def test_what_one_rank_alone_refuses_is_aborted_on_all(verb: str) -> None:
    group = Coordinator(2)
    group.call("a", 1, verb, {}, 0.0)
    group.answered(0, 0, {"received": 1})
    sends = group.answered(1, 0, Conflict("no"))
    assert [(to, verb) for to, _, verb in commands(sends)] == [(0, "abort_weight_update"), (1, "abort_weight_update")]
    assert [str(result) for _, _, result in answers(sends)] == ["rank 1: no"]
    group.call("a", 2, verb, {}, 0.0)
    group.answered(0, 2, Conflict("no"))
    assert commands(group.answered(1, 2, Conflict("no"))) == [], "refused by all: another update may be open"


def test_a_finish_that_all_refuse_cancels_nothing() -> None:
    """As a second one, while the first is still being prepared."""
    group = Coordinator(2)
    group.call("a", 1, "finish_weight_update", {}, 0.0)
    group.call("b", 1, "finish_weight_update", {}, 0.0)
    group.answered(0, 1, UpdateConflict("in progress"))
    sends = group.answered(1, 1, UpdateConflict("in progress"))
    assert commands(sends) == [] and answers(sends)[0][0] == "b"
    group.prepared(0, 0)
    assert commands(group.prepared(1, 0)) == [(0, 3, "finish"), (1, 3, "finish")]


def test_the_clock_of_a_pause_speaks_through_the_log() -> None:
    group = Coordinator(2)
    sends = group.call("a", 1, "pause_generation", {"mode": "wait", "timeout_s": 5.0}, 100.0)
    assert isinstance(sends[0][1], Command) and sends[0][1].arguments == {"mode": "wait"}
    assert group.next_deadline == 105.0 and group.tick(104.9) == []
    sends = group.tick(105.0)
    assert commands(sends) == [(0, 2, "pause_timed_out"), (1, 2, "pause_timed_out")]
    assert sends[0][1].arguments == {"of": 0}  # type: ignore[union-attr]
    assert group.tick(200.0) == [] and group.next_deadline is None
    group.answered(0, 0, TimedOut("late"))
    assert isinstance(answers(group.answered(1, 0, TimedOut("late")))[0][2], TimedOut)


def test_an_answer_ends_its_clock() -> None:
    group = Coordinator(1)
    group.call("a", 1, "pause_generation", {"timeout_s": 5.0}, 0.0)
    group.answered(0, 0, {"paused": True})
    assert group.tick(9.0) == [] and group.next_deadline is None


def test_the_lease_of_the_newest_pause_that_holds_resumes() -> None:
    group = Coordinator(1)
    group.call("a", 1, "pause_generation", {"lease_s": 10.0}, 0.0)
    group.answered(0, 0, {"paused": True})
    group.call("a", 2, "pause_generation", {"timeout_s": 1.0}, 1.0)
    group.tick(3.0)
    assert group.next_deadline is None, "the newer pause has no lease"
    group.answered(0, 1, TimedOut("late"))
    assert group.next_deadline == 10.0, "and has failed"
    sends = group.tick(10.0)
    assert commands(sends) == [(0, 4, "resume_generation")] and group.next_deadline is None
    assert group.answered(0, 3, {"was_paused": True}) == [], "nobody called it"
    group.call("a", 3, "pause_generation", {"lease_s": 10.0}, 20.0)
    group.call("a", 4, "resume_generation", {}, 21.0)
    assert group.tick(99.0) == []


def test_a_lost_rank_ends_a_lockstep_group() -> None:
    group = Coordinator(3)
    group.call("a", 1, "pause_generation", {}, 0.0)
    group.call("b", 1, "status", {}, 0.0)
    group.answered(0, 0, {"paused": True})
    sends = group.rank_lost(1, "killed by signal 9")
    assert [to for to, m in sends if isinstance(m, Lost)] == [0, 2, "a", "b"]
    failed = answers(sends)
    assert [(to, call) for to, call, _ in failed] == [("a", 1), ("b", 1)]
    assert all(isinstance(e, EngineDead) and "rank 1 was lost: killed by signal 9" in str(e) for *_, e in failed)
    assert group.rank_lost(1, "again") == [] and group.rank_lost(2, "ended with it") == []
    assert group.answered(0, 0, {"paused": True}) == [] and group.prepared(0, 7) == [] and group.start_wave(0, 0) == []
    [(to, call, error)] = answers(group.call("a", 2, "resume_generation", {}, 0.0))
    assert (to, call) == ("a", 2) and isinstance(error, EngineDead)


def test_a_shutdown_fails_what_is_open_and_what_comes() -> None:
    group = Coordinator(1)
    group.call("a", 1, "shutdown", {}, 0.0)
    group.call("b", 1, "resume_generation", {}, 0.0)
    sends = group.answered(0, 0, {"stopped": True})
    assert answers(sends)[0] == ("a", 1, {"stopped": True}) and isinstance(answers(sends)[1][2], EngineDead)
    assert {to for to, m in sends if isinstance(m, Lost)} == {0, "a", "b"}
    assert isinstance(answers(group.call("a", 2, "status", {}, 0.0))[0][2], MidstreamError)


def test_replicas_settle_a_call_once_all_are_due_at_one_position() -> None:
    group = Coordinator(2, lockstep=False)
    group.call("a", 1, "pause_generation", {"mode": "wait"}, 0.0)
    assert group.due(0, 1) == []
    group.call("a", 2, "resume_generation", {}, 0.0)
    assert group.due(1, 2) == [], "they speak of different positions"
    assert group.due(0, 2) == [(0, Agreed(2)), (1, Agreed(2))]
    assert group.due(0, 2) == [], "each agreement needs a word of its own"


def test_a_lost_replica_fails_the_open_calls_and_leaves_the_others_as_they_were() -> None:
    group = Coordinator(3, lockstep=False)
    group.call("a", 1, "pause_generation", {"mode": "wait"}, 0.0)
    group.call("a", 2, "finish_weight_update", {}, 0.0)
    group.prepared(0, 1)
    sends = group.rank_lost(2, "gone")
    assert commands(sends) == [(0, 3, "pause_timed_out"), (1, 3, "pause_timed_out"), (0, 4, "cancel"), (1, 4, "cancel")]
    assert [call for _, call, _ in answers(sends)] == [1, 2]
    assert [to for to, m in sends if isinstance(m, Lost)] == ["a"]
    assert commands(group.prepared(1, 1)) == [(0, 5, "cancel"), (1, 5, "cancel")], "it had not heard yet"
    group.call("a", 3, "status", {}, 0.0)
    group.answered(0, 2, {"state": "running"})
    assert answers(group.answered(1, 2, {"state": "running"})) == []
    group.rank_lost(0, "gone")
    assert isinstance(group.error, MidstreamError) or group.ranks == {1}
