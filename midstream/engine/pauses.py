"""Whose pause it is, and how long anything may wait for it. The protocol decides the rest; the core's thread only.

A pause taken with an owner is one caller's: nobody else may change or undo it, except by force. A pause with a lease
ends by itself unless it is taken again in time, so that a controller that died holds no engine for ever.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from midstream.config import check_limits
from midstream.engine import protocol as p
from midstream.errors import Conflict, InvalidInput
from midstream.types import PauseMode

if TYPE_CHECKING:
    from midstream.engine.core import EngineCore


class Pauses:
    """The pause and resume verbs, their clock and their owner."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.owner: str | None = None
        self.since: float | None = None
        """Wall-clock time of the call that began the pause in flight or held."""
        self.is_of_sleep = False
        """Sleep took it for itself, and nobody has called pause since: it ends when all is awake."""
        self._lease_until: float | None = None
        self._deadlines: dict[Any, float] = {}
        self._before: tuple[Any, str | None, float | None] = (None, None, None)
        """The newest pause call, and the owner and lease it found: what holds again if it times out."""

    @property
    def is_waiting(self) -> bool:
        """A time limit runs."""
        return bool(self._deadlines) or self._lease_until is not None

    @property
    def lease_left_s(self) -> float | None:
        return None if self._lease_until is None else max(self._lease_until - time.monotonic(), 0.0)

    def pause(
        self,
        op: int,
        mode: PauseMode = "abort",
        clear_cache: bool = True,
        timeout_s: float | None = None,
        owner: str | None = None,
        lease_s: float | None = None,
    ) -> None:
        check_limits(timeout_s, lease_s)
        if owner == "":
            raise InvalidInput("owner must be a string that is not empty")
        self._check_owner(owner, "pause")
        actions = self._core.protocol.pause(op, mode, clear_cache)
        self._before = (op, self.owner, self._lease_until)
        now = time.monotonic()
        self.owner, self._lease_until = owner, None if lease_s is None else now + lease_s
        if timeout_s is not None:
            self._deadlines[op] = now + timeout_s
        self.is_of_sleep = False
        self._core.act(actions)

    def timed_out(self, op: int, of: Any) -> None:
        """The clock of the group ended the wait of the pause ``of``."""
        self._core.act(self._core.protocol.pause_timed_out(of, self._still_running()))
        self._core.reply(op, {})

    def resume(self, op: int, owner: str | None = None, force: bool = False, lease_of: int | None = None) -> None:
        """``lease_of``: the lease of that pause has ended."""
        if not force and lease_of is None:
            self._check_owner(owner, "resume")
        self._core.sleep.require_awake()
        self._core.act(self._core.protocol.resume(op))

    def answered(self, op: Any, failed: bool = False) -> None:
        """The call ``op`` got its answer."""
        self._deadlines.pop(op, None)
        newest, owner, lease_until = self._before
        if failed and op == newest:
            self.owner, self._lease_until = owner, lease_until

    def settle(self) -> None:
        """After the protocol acted: nobody owns a pause that is over."""
        if self._core.protocol.is_paused:
            self.since = self.since or time.time()
        else:
            self.owner = self.since = self._lease_until = None
            self.is_of_sleep = False
            self._before = (None, None, None)
            self._core.sleep.unpaused()

    def watch(self, now: float) -> None:
        """Time limits that have come to their end."""
        core = self._core
        for op in [op for op, deadline in self._deadlines.items() if now >= deadline]:
            core.act(core.protocol.pause_timed_out(op, self._still_running()))
        if self._lease_until is not None and now >= self._lease_until and not core.sleep.is_deep:
            self.undo()

    def _still_running(self) -> str:
        live = list(self._core.scheduler.live)
        shown = ", ".join(live[:5]) + (f" and {len(live) - 5} more" if len(live) > 5 else "")
        return f"{len(live)} requests still run ({shown})"

    def undo(self) -> None:
        """Resume for the engine's own reasons: nobody waits for the answer."""
        self._core.act([a for a in self._core.protocol.resume(None) if a != p.Reply(None, {"was_paused": True})])

    def _check_owner(self, owner: str | None, verb: str) -> None:
        if self.owner not in (None, owner):
            raise Conflict(
                f"{verb}: the pause belongs to {self.owner!r}: it is changed by owner={self.owner!r}, or undone by "
                "resume with force",
                owner=self.owner,
            )
