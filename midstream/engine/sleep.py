"""Sleep: give memory back between two phases of a job that shares the machine, and know what is missing after it.

    level 0   a pause, no more
    level 1   and the KV cache's memory is freed; weights on a device go to host memory (a CPU's are there already)
    level 2   and the weights are dropped: after ``wake_up`` the engine refuses work until a full update has come

``wake_up`` may name what to wake: "weights", "kv_cache", "scheduling". No step runs while anything but the last is
asleep. A pause that sleep took for itself is undone when all is awake; one that somebody else took stays theirs, and
what it kept is computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from midstream.errors import Conflict, InvalidInput, UpdateConflict
from midstream.types import PAUSE_MODES, PauseMode

if TYPE_CHECKING:
    from midstream.engine.core import EngineCore

TAGS = ("weights", "kv_cache", "scheduling")


class Sleep:
    """What of the engine is asleep. Every method runs on the core's thread, between two steps."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.level: int | None = None
        """None: awake."""
        self.asleep: set[str] = set()

    @property
    def is_deep(self) -> bool:
        """Something that a step needs is asleep."""
        return bool(self.asleep - {"scheduling"})

    @property
    def weights_lost(self) -> bool:
        """Dropped, and not replaced by a commit yet."""
        return self._core.worker.has_lost_weights

    @property
    def may_step(self) -> bool:
        return not self.is_deep and not self.weights_lost

    def state(self) -> dict[str, Any]:
        status = "awake" if self.level is None else "sleeping"
        asleep = [tag for tag in TAGS if tag in self.asleep]
        return {"status": status, "level": self.level, "asleep": asleep, "weights_loaded": not self.weights_lost}

    def admit(self) -> None:
        """Called for each new request; a keep-pause queues it instead."""
        if not self.may_step and self._core.protocol.mode != "keep":
            missing = "weights not loaded: send a full update" if not self.is_deep else self._what()
            raise Conflict(f"the engine takes no new requests: {missing}")

    def require_awake(self, *tags: str) -> None:
        """Conflict if one of ``tags`` (none given: anything that a step needs) is asleep."""
        if self.asleep & set(tags or ("weights", "kv_cache")):
            raise Conflict(self._what())

    def require_weights(self) -> None:
        self.require_awake("weights")
        if self.weights_lost:
            raise Conflict("weights not loaded: send a full update")

    def unpaused(self) -> None:
        """No pause is left: that ends level 0, which is nothing else."""
        if self.level == 0:
            self.level, self.asleep = None, set()

    def sleep(self, op: int, level: int = 1, mode: PauseMode = "abort") -> None:
        if level not in (0, 1, 2):
            raise InvalidInput(f"level must be 0, 1 or 2, got {level!r}")
        if mode not in PAUSE_MODES:
            raise InvalidInput(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        self._check_no_update(level)
        if self.level is not None and level <= self.level:
            return self._core.reply(op, self.state())
        protocol = self._core.protocol
        if protocol.phase == "paused":
            return self._fall(op, level, False)
        own = not protocol.is_paused
        self._core.pauses.is_of_sleep |= own
        self._core.once_paused(op, lambda: self._fall(op, level, own))
        self._core.act(protocol.pause(op, protocol.mode or mode, level > 0))

    def _fall(self, op: int, level: int, own: bool) -> None:
        """The pause is complete: no step runs, nothing is in flight."""
        core = self._core
        try:
            self._check_no_update(level)
        except Conflict as error:
            if own and core.pauses.is_of_sleep:
                core.pauses.undo()
            return core.fail(op, error)
        self.level = level
        self.asleep.add("scheduling")
        if level:
            core.scheduler.drop_kv()
            core.worker.runner.free()
            core.worker.drop_weights() if level == 2 else core.worker.offload_weights()
            self.asleep |= {"kv_cache", "weights"}
        core.reply(op, self.state())

    def wake_up(self, op: int, tags: list[str] | None = None) -> None:
        if not set(tags or ()) <= set(TAGS):
            raise InvalidInput(f"tags must be a list of {', '.join(TAGS)}, or none for all, got {tags!r}")
        woken = self.asleep & set(tags or TAGS)
        if "kv_cache" in woken:
            self._core.worker.runner.allocate()
        if "weights" in woken:
            self._core.worker.restore_weights()
        was_deep, self.asleep = self.is_deep, self.asleep - woken
        if woken and not self.is_deep and (was_deep or "scheduling" in woken):
            self.level, self.asleep = None, set()
            if self._core.pauses.is_of_sleep:
                self._core.pauses.undo()
        self._core.reply(op, {**self.state(), "tags": tags, "woken": sorted(woken), "paused": self._core.is_paused})

    def _check_no_update(self, level: int) -> None:
        session = self._core.session
        if level and session.is_open:
            raise UpdateConflict(f"weight update {session.session_id} is open: finish or abort it before sleep")

    def _what(self) -> str:
        return f"asleep (level {self.level}): {', '.join(self.state()['asleep'])}; call wake_up first"
