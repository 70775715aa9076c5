"""Which group is launched when, and which groups a step trains on. Pure: no clock, no threads, no torch.

The two rules
-------------
Let G be ``groups_per_step`` and S ``max_staleness``. A *slot* is one launched group that is not released yet.

* **Launch**: the next g is launched if and only if fewer than (S + 1) * G slots are taken.
* **Consume**: step s trains on the first G useful groups in ascending g, beginning after the last group that step
  s - 1 consumed. It waits until every group below the last of these is resolved, so it cannot be hurried past a slow
  one: fast (mostly short) completions gain nothing by being fast.

A useless group (dynamic sampling: all rewards equal) is released as soon as that is known; its refill is simply the
next g. A consumed group keeps its slot until the engine *holds* the weights that its step produced.

::

    launch(g) ──> in flight ──resolve──> useful ──take(s)──> consumed ──release(s)──> slot free
                                   └───> useless ──────────────────────────────────> slot free

Why no token is older than S steps
----------------------------------
Let g be trained on in step s, and let R be the number of steps released when g was launched. ``release(s')`` is called
after the engine committed version s' + 1, and an engine never goes back, so every token of g was made by version R or
later: its staleness is at most s - R. At that launch the groups of steps R … s - 1 were all in their slots: they come
before g in the order of consumption, so they were launched before g; they are useful, so nothing but a release frees
them; and none of their steps was released. With g itself that is (s - R) * G + 1 slots, and the launch rule allowed at
most (S + 1) * G. Hence s - R < S + 1, that is s - R <= S.  ∎   ``take`` asserts it for every group.

Why S = 0 is the synchronous algorithm
--------------------------------------
With S = 0 the slots are the G groups of the step at hand, so nothing is launched between the moment a batch is
complete and the release of its step. A refill is launched only for a group known to be useless, so the launched
groups are exactly the G useful ones of the step and the useless ones below the last of them: the set, and the order,
that sampling G groups, waiting for all, and refilling the useless ones would give, in whatever order they finish.
"""

from __future__ import annotations

from dataclasses import dataclass

from midstream.rl.advantage import is_useless
from midstream.rl.types import RolloutGroup, TakenGroups


@dataclass
class RolloutBuffer:
    """The launch rule and the consumption rule of the module docstring. The caller serialises its calls."""

    groups_per_step: int
    max_staleness: int
    dynamic_sampling: bool = True
    """False: every group is useful."""
    next_group: int = 0
    """The g that the next launch gets. A resumed run begins beyond 0, as with ``next_step``."""
    next_step: int = 0
    """The step that the next ``take`` serves."""
    last_step: int | None = None
    """Exclusive: groups that no step can need any more are not launched."""

    def __post_init__(self) -> None:
        self.released_steps = self.next_step
        """Steps whose weights the engine holds."""
        self._in_flight: set[int] = set()
        self._useful: dict[int, RolloutGroup] = {}
        self._useless: dict[int, RolloutGroup] = {}

    @property
    def num_slots(self) -> int:
        """Launched groups not released: in flight, useful and waiting, or consumed by a step not yet released."""
        consumed = (self.next_step - self.released_steps) * self.groups_per_step
        return len(self._in_flight) + len(self._useful) + consumed

    @property
    def can_launch(self) -> bool:
        if self.num_slots >= (self.max_staleness + 1) * self.groups_per_step:
            return False
        if self.last_step is None:
            return True
        still_needed = (self.last_step - self.next_step) * self.groups_per_step
        return len(self._in_flight) + len(self._useful) < still_needed

    def launch(self) -> int:
        """Take a slot; returns its g."""
        assert self.can_launch, f"no free slot for group {self.next_group}: {self.num_slots} are taken"
        g = self.next_group
        self.next_group += 1
        self._in_flight.add(g)
        return g

    def resolve(self, group: RolloutGroup) -> bool:
        """A launched group is finished and scored. Returns whether it is useful; a useless one frees its slot."""
        self._in_flight.remove(group.index)
        useful = not (self.dynamic_sampling and is_useless(group.rewards))
        (self._useful if useful else self._useless)[group.index] = group
        return useful

    def take(self) -> TakenGroups | None:
        """The next step's groups, or None while they are not all known."""
        if len(self._useful) < self.groups_per_step:
            return None
        chosen = sorted(self._useful)[: self.groups_per_step]
        if any(g < chosen[-1] for g in self._in_flight):
            return None  # a slower group with a smaller g may still turn out useful
        step = self.next_step
        groups = [self._useful.pop(g) for g in chosen]
        passed = [self._useless.pop(g) for g in sorted(self._useless) if g < chosen[-1]]
        for group in groups:
            staleness = step - group.oldest_version
            # An invariant, not an input check: see the proof in the module docstring.
            assert 0 <= staleness <= self.max_staleness, (
                f"group {group.index} has tokens of version {group.oldest_version} in step {step}: "
                f"staleness {staleness} is not within 0..{self.max_staleness}"
            )
        self.next_step += 1
        return TakenGroups(step, groups, passed)

    def release(self, step: int) -> None:
        """The engine holds the weights that ``step`` produced: free the slots of its groups. Steps go in order."""
        assert step == self.released_steps < self.next_step, (
            f"step {step} cannot be released: steps below {self.released_steps} are released and steps below "
            f"{self.next_step} have consumed their groups"
        )
        self.released_steps += 1

    def leftovers(self) -> list[RolloutGroup]:
        """Resolved groups that no step has taken: useless ones beyond the last one consumed, and useful ones."""
        return [group for _, group in sorted((self._useful | self._useless).items())]

    def describe(self) -> str:
        """One line for a time-out's message."""
        return (
            f"step {self.next_step} has {len(self._useful)} of {self.groups_per_step} useful groups, "
            f"{len(self._useless)} useless (all rewards equal), {len(self._in_flight)} in flight"
            + (f" (lowest {min(self._in_flight)})" if self._in_flight else "")
        )
