"""The exploration of the group's protocol: it is complete, holds, finds every mutant, and says where it did not."""

from __future__ import annotations

from itertools import combinations

import pytest

from midstream.check.explore import explore
from midstream.check.machine import Machine
from midstream.check.scenarios import ELEMENTS, MUTANTS, Mutant, check, deep_list, default_list, find, scenario
from midstream.check.state import Request, Scenario, Variant, Violation
from midstream.cli import main
from midstream.engine.protocol import Protocol
from midstream.engine.vote import StepVerdict


def test_the_default_list_is_complete_and_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """What ``midstream check protocol`` does, with what it prints."""
    assert main(["check", "protocol"]) == 0
    lines = capsys.readouterr().out.splitlines()
    explored = [line for line in lines if line.endswith("complete")]
    assert len(explored) == len(list(default_list())) and not any("cut at" in line for line in lines)
    assert {line.split("”")[0].split("“")[1] for line in lines if "”" in line} == {mutant.name for mutant in MUTANTS}
    assert sum("found: " in line for line in lines) == len(MUTANTS)


@pytest.mark.slow
def test_the_deep_list_is_complete_and_holds() -> None:
    lines: list[str] = []
    assert check(deep_list(), lines.append), "\n".join(line for line in lines if not line.endswith("complete"))


def test_every_pair_is_in_the_list() -> None:
    names = {one.name for one in default_list()}
    listed = {(frozenset(name.rpartition(" (")[0].split(" + ")), name.rpartition(" (")[2]) for name in names}
    for vote in ("step)", "interval)", "log)"):
        elements = [e for e in ELEMENTS if vote != "log)" or e != "cancel"]
        missing = [(a, b) for a, b in combinations(elements, 2) if (frozenset((a, b)), vote) not in listed]
        assert not missing, (vote, missing)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_scenario_without_the_mutation_holds(mutant: Mutant) -> None:
    """What finds the mutant is the mutant, not the scenario."""
    where = scenario(mutant.found_in, mutant.vote)
    assert explore(where, Machine(Variant(), where.num_ranks, where.vote_every), 200_000).is_complete
    assert find(mutant)[1] is not None


def test_a_violation_has_the_shortest_way_there() -> None:
    [front_end] = [mutant for mutant in MUTANTS if mutant.name == "pause in the front end"]
    text = str(find(front_end)[1])
    assert text.splitlines()[0] == "a forward during an acknowledged pause"
    assert "  1. controller 0 calls pause_generation {'mode': 'keep'}\n    2. request 0 is sent to rank 0\n" in text
    assert "all vote: which is what must not be\n       rank 0: in a vote, running" in text


def test_a_cut_is_a_failure() -> None:
    lines: list[str] = []
    assert not check([scenario(("pause keep",), "step")], lines.append, limit=50)
    assert lines[0].endswith("cut at 50 states") and lines[-1].startswith("NOT")


class NeverCompletes(Protocol):
    def conclude(self, verdict: StepVerdict):  # type: ignore[no-untyped-def]
        return super().conclude(StepVerdict(False, has_work=verdict.has_work))


def test_who_is_never_answered_is_found() -> None:
    """Votes go on for ever: no single state is wrong, the graph is."""
    where = Scenario("one pause", requests=(Request(1, 0),), controllers=((("pause_generation", {"mode": "keep"}),),))
    with pytest.raises(Violation, match="nothing settles this"):
        explore(where, Machine(Variant(NeverCompletes), 2, 1), 10_000)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("vote_every", [1, 2, 3])
def test_any_number_of_ranks_and_any_interval(num_ranks: int, vote_every: int) -> None:
    calls = (("pause_generation", {"mode": "wait"}), ("resume_generation", {}))
    where = Scenario("a pause", num_ranks, vote_every, (Request(2, 0), Request(1)), (calls,))
    assert explore(where, Machine(Variant(), num_ranks, vote_every), 200_000).is_complete
