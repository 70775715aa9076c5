"""Whose a request is and where it runs, and what holds for the engine: pure logic, without a process."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.errors import Conflict, EngineDead, InvalidInput, NotReady
from midstream.serving.head import Front
from midstream.serving.held import Held
from midstream.serving.request_table import RequestTable
from midstream.types import RequestIncrement


class Hears:
    """A front end that keeps what it is told."""

    def __init__(self) -> None:
        self.increments: list[tuple[str, int]] = []
        self.refused: list[str] = []
        self.front = Front(self._take, lambda op, result: None, lambda error: None)

    def _take(self, increments: list[RequestIncrement], refused: list[tuple[str, dict[str, Any]]]) -> None:
        self.increments += [(increment.parent_id, increment.index) for increment in increments]
        self.refused += [name for name, _ in refused]


def news(name: str, index: int = 0, finished: bool = False) -> RequestIncrement:
    return RequestIncrement(name, index, [], [], 0, finish_reason="stop" if finished else None)


def test_each_front_end_hears_of_its_own_requests_alone() -> None:
    own, guest, other = Hears(), Hears(), Hears()
    table = RequestTable(own.front, 2)
    ranks = [table.add(who.front, name, 1, None) for who, name in ((own, "a"), (guest, "b"), (other, "c"))]
    assert ranks == [0, 1, 0], "the least loaded"
    table.tell([news("a"), news("b"), news("c"), news("nobody's")], [("c", {})])
    assert (own.increments, guest.increments, other.increments) == ([("a", 0)], [("b", 0)], [("c", 0)])
    assert (own.refused, guest.refused, other.refused) == ([], [], ["c"])
    assert table.rank_of("b", guest.front) == 1 and table.rank_of("b", own.front) is None
    table.end(1, EngineDead("lost"))
    assert guest.refused == ["b"] and not own.refused


def test_a_name_is_free_once_the_rank_has_said_the_last_word() -> None:
    own, guest = Hears(), Hears()
    table = RequestTable(own.front, 1)
    assert table.add(guest.front, "x", 2, None) == 0
    with pytest.raises(InvalidInput, match="in use"):
        table.add(own.front, "x", 1, None)
    assert table.forget("x", own.front) is None and len(table) == 1, "it is another one's"
    assert table.forget("x", guest.front) == 0, "the rank has still to end it"
    assert table.names_of(guest.front) == [] and len(table) == 1
    table.tell([news("x", 0, finished=True)], [])
    with pytest.raises(InvalidInput, match="in use"):
        table.add(guest.front, "x", 1, None)
    table.tell([news("x", 1, finished=True)], [])
    assert len(table) == 0 and table.router.num_live == [0] and not guest.increments
    table.add(own.front, "x", 1, None)
    assert table.forget("x", own.front) is None and len(table) == 0, "our own says so once it has heard the last word"


def held() -> Held:
    held = Held()
    held.start({"number": 3, "version": "v3", "weights_id": "abc", "state": "running"})
    return held


def test_what_holds_is_what_the_calls_have_left() -> None:
    known = held()
    known.remember("pause_generation", {"mode": "keep", "timeout_s": 5}, {})
    assert known.pause == {"mode": "keep"}, "when it is set again, nobody waits for it"
    known.remember("update_weight_version", {}, {"number": 3, "version": "new", "weights_id": "abc"})
    assert known.version == {"number": 3, "version": "new", "weights_id": "abc"}
    known.is_serving = False
    assert known.last_status == {"state": "starting", "mode": "keep", **known.version}
    known.remember("resume_generation", {}, {})
    assert known.pause is None


def test_a_commit_ends_the_wait_for_weights_and_a_label_does_not() -> None:
    known = held()
    known.check_serving()
    known.pending = "pending_weights: lost"
    with pytest.raises(NotReady, match="pending_weights"):
        known.check_serving()
    with pytest.raises(Conflict, match="no weights"):
        known.check_call("update_weight_version")
    known.check_call("update_weights")
    known.remember("update_weights", {}, {"number": 4, "version": "v4", "weights_id": "def"})
    known.check_serving()
    assert known.version["number"] == 4


def test_ranks_that_do_not_serve_are_in_the_status() -> None:
    known = held()
    known.why = {1: ("starting", "it was lost")}
    ranks = known.described({"ranks": [{"rank": 0, "running": 2}]}, 3)["ranks"]
    assert [rank.get("why") for rank in ranks] == [None, "it was lost", "it joins"]
    known.check_serving()
    known.is_serving = False
    with pytest.raises(NotReady, match="it was lost"):
        known.check_started()
