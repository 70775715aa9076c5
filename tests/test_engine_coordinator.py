"""The coordinator: one log, one answer for each call, clocks, and the loss of a rank."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.engine.coordinator import Agreed, Answer, Command, Coordinator, Lost, Send, StartWave, merge
from midstream.errors import Conflict, EngineDead, InvalidInput, MidstreamError, TimedOut, UpdateConflict


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
    assert commands(sends) == [(0, 4, "resume_generation")]
    assert group.answered(0, 3, {"was_paused": True}) == [], "nobody called it"
    assert group.next_deadline is None
    group.call("a", 3, "pause_generation", {"lease_s": 10.0}, 20.0)
    group.call("a", 4, "resume_generation", {}, 21.0)
    group.answered(0, 5, {"was_paused": True})
    assert group.next_deadline is None and group.tick(99.0) == []


def test_a_refused_resume_leaves_the_lease() -> None:
    group = Coordinator(2)
    group.call("a", 1, "pause_generation", {"owner": "a", "lease_s": 5.0}, 0.0)
    for rank in range(2):
        group.answered(rank, 0, {"paused": True})
    group.call("b", 1, "resume_generation", {"owner": "b"}, 1.0)
    for rank in range(2):
        group.answered(rank, 1, Conflict("it belongs to a"))
    assert (group.next_deadline, group.lease_left_s(2.0)) == (5.0, 3.0)
    assert commands(group.tick(5.0)) == [(0, 3, "resume_generation"), (1, 3, "resume_generation")]
    for rank in range(2):
        group.answered(rank, 2, Conflict("asleep"))
    assert group.tick(5.5) == [] and commands(group.tick(6.0)) == [(rank, 4, "resume_generation") for rank in range(2)]
    for rank in range(2):
        group.answered(rank, 3, {"was_paused": True})
    assert group.next_deadline is None


@pytest.mark.parametrize("limits", [{"timeout_s": -1}, {"lease_s": 0}, {"timeout_s": float("nan")}, {"lease_s": "x"}])
def test_wrong_limits_are_refused_and_leave_nothing(limits: dict[str, Any]) -> None:
    group = Coordinator(2)
    with pytest.raises(InvalidInput):
        group.call("a", 1, "pause_generation", {"timeout_s": 1.0, "mode": "keep", **limits}, 0.0)
    assert group.next_deadline is None and group.quiet_at == 0
    assert [m.op for _, m in group.call("a", 2, "resume_generation", {}, 0.0) if isinstance(m, Command)] == [0, 0]


def test_the_lease_of_an_update_is_the_coordinators() -> None:
    group = Coordinator(2, update_lease_s=10.0)
    group.call("a", 1, "start_weight_update", {}, 0.0)
    for rank in range(2):
        group.answered(rank, 0, {"session_id": "update-0"}, 1.0)
    assert group.next_deadline == 11.0
    group.call("a", 2, "update_weights", {}, 9.0)
    assert group.tick(30.0) == [], "a chunk is on its way"
    for rank in range(2):
        group.answered(rank, 1, {"received": 1}, 31.0)
    assert group.next_deadline == 41.0
    sends = group.tick(41.0)
    assert commands(sends) == [(rank, 2, "abort_weight_update") for rank in range(2)] and group.next_deadline is None
    assert sends[0][1].arguments["of"] == [0]  # type: ignore[union-attr]


def test_a_late_torn_chunk_aborts_no_other_update() -> None:
    group = Coordinator(2)
    for op, verb in enumerate(("start_weight_update", "update_weights", "abort_weight_update", "start_weight_update")):
        group.call("a", op, verb, {}, 0.0)
    group.answered(0, 1, {"received": 1})
    sends = group.answered(1, 1, UpdateConflict("aborted while received"))
    assert commands(sends)[0][2] == "abort_weight_update"
    assert sends[0][1].arguments["of"] == [0, 1], "the second start is call 3"  # type: ignore[union-attr]


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


def test_a_lost_replicas_part_of_a_call_is_not_waited_for() -> None:
    group = Coordinator(3, lockstep=False)
    group.call("a", 1, "pause_generation", {"mode": "wait"}, 0.0)
    group.call("a", 2, "finish_weight_update", {}, 0.0)
    group.prepared(0, 1)
    group.answered(0, 0, {"paused": True})
    group.answered(1, 0, {"paused": True})
    sends = group.rank_lost(2, "gone")
    assert answers(sends) == [("a", 1, {"paused": True})] and commands(sends) == []
    assert [to for to, m in sends if isinstance(m, Lost)] == ["a"]
    assert commands(group.prepared(1, 1)) == [(0, 3, "finish"), (1, 3, "finish")]
    group.call("a", 3, "status", {}, 0.0)
    group.rank_lost(0, "gone")
    assert group.ranks == {1} and group.error is None
    sends = group.rank_lost(1, "gone")
    assert [call for _, call, _ in answers(sends)] == [2, 3] and isinstance(group.error, EngineDead)


def test_no_replica_joins_beside_a_call_that_changes_something() -> None:
    group = Coordinator(2, lockstep=False)
    group.rank_lost(1, "gone")
    group.call("a", 1, "status", {}, 0.0)
    assert group.quiet_at == 0
    group.call("a", 2, "update_weights", {}, 0.0)
    assert group.quiet_at is None and not group.join(1, 0)
    group.answered(0, 1, {"number": 1})
    assert group.join(1, 0) and group.ranks == {0, 1}
