"""What was lost is started again (``elastic``): one replica beside the others, or all ranks.

::

    replica: lost ─► starting ─► pending: the others' weights, by their id, then their pause ─► joins, once no call is
             open and it is as the others are
    all:     lost ─► starting ─► what held before: label, pause, tokenizer; where an update had been committed the
             checkpoint is not what the engine served, and it waits for the next full update
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from typing import TYPE_CHECKING, Any

from midstream.errors import EngineDead, MidstreamError
from midstream.serving.rank import Rank

if TYPE_CHECKING:
    from midstream.serving.ranks import Ranks

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
LEAVE_S = 2.0
"""For a rank that was told that its group is over."""
_TRIES = 3
"""Starts, one after another, that may fail before a rank is given up."""


class Restart:
    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._held = ranks.held
        self._replacing: dict[int, asyncio.Task[None]] = {}
        """By rank, whoever brings that replica back."""

    # -- all of them -----------------------------------------------------------------------------------------------

    def all(self, reason: str) -> None:
        """Begin: every rank anew, with what held for the engine, but for its weights: nobody has those any more."""
        for task in self._replacing.values():
            task.cancel()
        self._replacing.clear()
        self._ranks.begin(self._all(reason))

    async def _all(self, reason: str) -> None:
        ranks, held = self._ranks, self._held
        held.status = {**held.status, "state": "starting", "why": reason}
        _tell(f"{reason}; all ranks are started again")
        last = ""
        for _ in range(_TRIES):
            await ranks.end_all(LEAVE_S)
            if ranks.head is not None:
                await ranks.head.wait_for_ranks()
            if ranks.is_closing:
                return
            try:
                status = await asyncio.wait_for(ranks.start_all(int(held.version["number"])), START_TIMEOUT_S)
                await self._restore(status, reason)
            except (MidstreamError, OSError) as error:
                last = str(error) or f"it did not start within {START_TIMEOUT_S:g} s"
                _tell(f"the ranks could not be started: {last}")
                continue
            held.is_serving, held.why = True, {}
            _tell(held.pending or "all ranks serve again")
            ranks.requests.router.ranks = set(range(len(ranks)))
            ranks.announce()
            return
        ranks.over(EngineDead(f"{reason}; it could not be started again: {last}"))

    async def _restore(self, status: dict[str, Any], reason: str) -> None:
        """After a start of all ranks: pause, tokenizer, and label; or no weights at all, where it had others."""
        ask_all, held = self._ranks.ask_all, self._held
        version = held.version
        held.pending = None
        if status["weights_id"] != version["weights_id"]:
            had = f"{version['version']!r} ({version['weights_id'][:12]})"
            held.pending = (
                f"pending_weights: the engine was started again ({reason}). It had weight version {had}, and the "
                "checkpoint is another: it serves after the next full update"
            )
            await ask_all("sleep", level=2, mode="abort")  # so that nothing can sample from the checkpoint
            await ask_all("wake_up")
        elif status["version"] != version["version"]:
            await ask_all("update_weight_version", new_version=version["version"])
        if held.tokenizer is not None:
            await ask_all("load_grammar_tokenizer", **held.tokenizer)
        if held.pause is not None:
            await ask_all("pause_generation", **held.pause)

    # -- one of them -----------------------------------------------------------------------------------------------

    def one(self, rank: Rank, reason: str) -> None:
        """Begin: one replica anew, while the others serve."""
        self._replacing[rank.index] = self._ranks.begin(self._one(rank, reason))

    async def _one(self, rank: Rank, reason: str) -> None:
        ranks, why, index = self._ranks, self._held.why, rank.index
        _tell(f"{reason}; it is started again")
        for _ in range(_TRIES):
            await rank.end(LEAVE_S)
            if ranks.head is not None:
                await ranks.head.wait_for_ranks([index])
            if not self._is_wanted(index):
                return
            try:
                rank = ranks.relaunch(index)
                await asyncio.wait_for(asyncio.shield(rank.ready), START_TIMEOUT_S)
                await self._join(rank, reason)
            except (MidstreamError, OSError) as error:
                last = str(error) or f"it did not start within {START_TIMEOUT_S:g} s"
                why[index] = "starting", f"{reason}; the last try failed: {last}"
                _tell(f"rank {index} could not be started: {last}")
                continue
            return
        _tell(f"rank {index} is given up")
        await rank.end(LEAVE_S)
        why[index] = "lost", why[index][1]

    def _is_wanted(self, index: int) -> bool:
        """Whether this task is still to bring that replica back. A cancellation alone can be lost in wait_for."""
        return not self._ranks.is_closing and self._replacing.get(index) is asyncio.current_task()

    async def _join(self, rank: Rank, reason: str) -> None:
        """Make ``rank`` as the others are, until they have not moved on meanwhile; then it takes part."""
        ranks, why = self._ranks, self._held.why
        coordinator = ranks.coordinator
        assert coordinator is not None
        while self._is_wanted(rank.index):
            position, ranks.moved = coordinator.quiet_at, asyncio.Event()
            if position is not None:
                other = ranks[min(coordinator.ranks)]
                try:
                    group_status = await ranks.ask(other, "status")
                    waits_for = await self._become(rank, other, group_status, position, reason)
                except MidstreamError:
                    if not other.is_over or rank.is_over:
                        raise
                    continue  # its model was lost: another one
                if waits_for is None and coordinator.join(rank.index, position):
                    why.pop(rank.index, None)
                    ranks.requests.router.ranks.add(rank.index)
                    _tell(f"rank {rank.index} serves again")
                    return
                if waits_for is not None:
                    why[rank.index] = "pending_weights", f"{reason}; it waits for {waits_for}"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ranks.moved.wait(), 0.2)

    async def _become(
        self, rank: Rank, other: Rank, group_status: dict[str, Any], position: int, reason: str
    ) -> str | None:
        """Weights, version, pause and place in the log of ``other``. Returns what stands in the way of that."""
        ask = self._ranks.ask
        if group_status["update"] is not None:
            return f"the end of weight update {group_status['update'].get('session_id')}"
        if group_status["sleep"]["status"] != "awake":
            return "the others to wake up"
        if not group_status["sleep"]["weights_loaded"]:
            return "the weights of the others"
        own = await ask(rank, "status")
        if own["max_model_len"] != group_status["max_model_len"]:
            return f"max_model_len {group_status['max_model_len']}; it has {own['max_model_len']}"
        if own["state"] != "running":
            await ask(rank, "resume_generation", force=True)
        if own["weights_id"] != group_status["weights_id"]:
            version = f"{group_status['version']!r} ({group_status['weights_id'][:12]})"
            self._held.why[rank.index] = "pending_weights", f"{reason}; it is getting weight version {version}"
            with tempfile.TemporaryDirectory(prefix="midstream-", ignore_cleanup_errors=True) as directory:
                await ask(other, "save_weights", directory=directory)
                await ask(rank, "update_weights", request={"weight_dir": directory})
            if (await ask(rank, "status"))["weights_id"] != group_status["weights_id"]:
                return f"weight version {version}, which the others have left meanwhile"
        if self._held.tokenizer is not None:
            await ask(rank, "load_grammar_tokenizer", **self._held.tokenizer)
        if group_status["state"] == "paused":
            pause = {key: group_status[key] for key in ("mode", "clear_cache", "owner")}
            await ask(rank, "pause_generation", **pause)
        version_ = {"number": group_status["number"], "version": group_status["version"]}
        await ask(rank, "adopt", position=position, **version_)
        return None


def _tell(what: str) -> None:
    """Whoever watches. A log that can not be written does not raise."""
    _log.warning("midstream: %s", what)
