"""Which data-parallel rank a request goes to: the least loaded, and for a session the one it has been with."""

from __future__ import annotations

from collections import OrderedDict

_MAX_SESSIONS = 65_536
"""Most sessions remembered; the one that was silent longest is forgotten first, and starts anew."""


class Router:
    """Counts what each rank has to do. Pure logic."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks = set(range(num_ranks))
        """Those that take requests."""
        self.num_live = [0] * num_ranks
        """Samples under way, by rank."""
        self._sessions: OrderedDict[str, int] = OrderedDict()

    def pick(self, session: str | None = None) -> int:
        """The rank for the next request; of equally loaded ones the first. There must be one that takes any."""
        least = min(sorted(self.ranks), key=lambda rank: self.num_live[rank])
        if session is None or len(self.num_live) == 1:
            return least
        rank = self._sessions.pop(session, least)
        if rank not in self.ranks:  # lost: the session moves for good, what was cached for it is gone
            rank = least
        self._sessions[session] = rank
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return rank

    def begin(self, rank: int, num_samples: int) -> None:
        self.num_live[rank] += num_samples

    def end(self, rank: int, num_samples: int) -> None:
        self.num_live[rank] -= num_samples
