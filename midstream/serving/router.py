"""Which data-parallel rank a request goes to: the least loaded, and for a session the one it has been with."""

from __future__ import annotations

from collections import OrderedDict

_MAX_SESSIONS = 65_536
"""Most sessions remembered; the one that was silent longest is forgotten first, and starts anew."""


class Router:
    """Counts what each rank has to do. Pure logic."""

    def __init__(self, num_ranks: int) -> None:
        self.num_live = [0] * num_ranks
        """Samples under way, by rank."""
        self._sessions: OrderedDict[str, int] = OrderedDict()

    def pick(self, session: str | None = None) -> int:
        """The rank for the next request; of equally loaded ones the first."""
        if session is None:
            return self.num_live.index(min(self.num_live))
        rank = self._sessions.pop(session, None)
        if rank is None:
            rank = self.num_live.index(min(self.num_live))
        self._sessions[session] = rank
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return rank

    def begin(self, rank: int, num_samples: int) -> None:
        self.num_live[rank] += num_samples

    def end(self, rank: int, num_samples: int) -> None:
        self.num_live[rank] -= num_samples
