"""Whose each request is, and at which rank it runs: of the engine's owner, for its own front end and those of nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from midstream.errors import InvalidInput, MidstreamError, to_wire
from midstream.serving.head import Front
from midstream.serving.router import Router
from midstream.types import RequestIncrement


@dataclass(slots=True)
class _Place:
    """Of a request: who asked for it, and where it runs."""

    front: Front | None
    """None: it has left, and the rank has not said its last word so far."""
    rank: int
    num_samples: int
    num_left: int
    """Samples that have not ended, of a guest's request."""


class RequestTable:
    """Requests by name, from their acceptance until they are forgotten. Sends nothing to a rank.

    ``own``: the front end of this process. It says itself when a request is over, so nothing is counted for it.
    """

    def __init__(self, own: Front, num_ranks: int) -> None:
        self.router = Router(num_ranks)
        """Only to ranks that serve."""
        self._own = own
        self._places: dict[str, _Place] = {}
        self._num_foreign = 0
        """Of them, those that are not of this process's own front end."""

    def __len__(self) -> int:
        return len(self._places)

    def add(self, front: Front, name: str, num_samples: int, session: str | None) -> int:
        """The rank where it is to run. Raises InvalidInput if the name is in use."""
        if name in self._places:
            raise InvalidInput(f"request id {name!r} is in use; choose another")
        rank = self.router.pick(session)
        self._places[name] = _Place(front, rank, num_samples, num_samples)
        self._num_foreign += front is not self._own
        self.router.begin(rank, num_samples)
        return rank

    def rank_of(self, name: str, front: Front) -> int | None:
        """Where it runs; None if this front end has no such request."""
        place = self._places.get(name)
        return place.rank if place is not None and place.front is front else None

    def forget(self, name: str, front: Front) -> int | None:
        """It is over, for its front end too. Returns the rank that has still to end it, if there is one."""
        place = self._places.get(name)
        if place is None or place.front is not front:
            return None  # it was refused, because it is another one's
        if front is self._own or place.num_left == 0:
            self._remove(name)
            return None
        place.front = None  # its name is free once the rank has said the last word: nobody may take that for theirs
        return place.rank

    def names_of(self, front: Front) -> list[str]:
        return [name for name, place in self._places.items() if place.front is front]

    def tell(self, increments: list[RequestIncrement], refused: list[tuple[str, dict[str, Any]]]) -> None:
        """Each front end of its own requests."""
        if not self._num_foreign:
            return self._own.take(increments, refused)
        parts: dict[Front, Any] = {}
        for increment in increments:
            if (place := self._places.get(increment.parent_id)) is not None:
                place.num_left -= increment.finish_reason is not None
                if place.front is not None:
                    parts.setdefault(place.front, ([], []))[0].append(increment)
                elif place.num_left == 0:
                    self._remove(increment.parent_id)
        for name, error in refused:
            if (place := self._places.get(name)) is not None:
                place.num_left = 0
                if place.front is not None:
                    parts.setdefault(place.front, ([], []))[1].append((name, error))
                else:
                    self._remove(name)
        for front, part in parts.items():
            front.take(*part)

    def end(self, rank: int | None, error: MidstreamError) -> None:
        """Those of a rank (None: of all) are over."""
        wire = to_wire(error)
        self.tell([], [(name, wire) for name, place in self._places.items() if rank in (None, place.rank)])

    def _remove(self, name: str) -> None:
        place = self._places.pop(name)
        self._num_foreign -= place.front is not self._own
        self.router.end(place.rank, place.num_samples)
