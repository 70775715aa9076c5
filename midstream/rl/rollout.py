"""Where steps get their groups: generation and rewards, beside the optimizer. See ``trainer`` for the whole loop.

Two sources, one contract (``GroupSource``):

* ``RolloutWorker`` keeps the engine busy: it launches groups whenever the buffer has a free slot, scores each as soon
  as it is finished, and hands the trainer's thread the groups of its next step.
* ``SyncRollouts`` is the synchronous algorithm in ten lines: sample G groups, wait for all, refill the useless ones.
  It shares no logic with the buffer, so that "max_staleness 0 equals the synchronous algorithm" is a test and not a
  definition.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import threading
import time

from midstream.errors import Conflict, TimedOut
from midstream.rl.advantage import is_useless
from midstream.rl.buffer import RolloutBuffer
from midstream.rl.engine_thread import CLOSE_S, EngineThread, cancel
from midstream.rl.sampler import Sampler, gather
from midstream.rl.types import RolloutGroup, TakenGroups

_USELESS_WARNING = 64
_log = logging.getLogger(__name__)


class GroupSource(abc.ABC):
    """Where the trainer's steps get their groups. All public methods are called from outside the engine thread."""

    def __init__(self, sampler: Sampler, engine: EngineThread) -> None:
        self._sampler = sampler
        self._engine = engine
        self._num_useless = 0

    @abc.abstractmethod
    def take(self, timeout_s: float) -> TakenGroups:
        """The next step's groups; generation begins with the first call. Raises ``TimedOut``, or the first error of
        generation, rewards or ``fail``."""

    def release(self, step: int) -> None:  # noqa: B027  (nothing to do where nothing is in flight)
        """The engine holds the weights that ``step`` produced."""

    def fail(self, error: BaseException) -> None:  # noqa: B027
        """Something else went wrong: whoever waits in ``take`` shall hear of it."""

    def close(self) -> list[RolloutGroup]:
        """End what is in flight, within some seconds; returns the finished groups that no step took."""
        return []

    def _count(self, group: RolloutGroup, useful: bool) -> None:
        """After 64, 128, 256, … useless groups in a row it says so: a run must not spin in silence."""
        self._num_useless = 0 if useful else self._num_useless + 1
        if self._num_useless >= _USELESS_WARNING and self._num_useless.bit_count() == 1:
            _log.warning(
                "%d groups in a row have nothing to teach: within each, all rewards are equal (last: %g). Look at the "
                "reward function and at rollouts (is max_tokens long enough?), take easier problems, or raise "
                "samples_per_group or temperature; dynamic_sampling=false trains on such groups too",
                self._num_useless,
                group.rewards[0],
            )


class RolloutWorker(GroupSource):
    """The asynchronous source. See the module docstring; the rules are the buffer's."""

    def __init__(self, sampler: Sampler, engine: EngineThread, next_group: int = 0, next_step: int = 0) -> None:
        """``next_group`` and ``next_step``: where a resumed run goes on."""
        super().__init__(sampler, engine)
        config = sampler.config
        self._buffer = RolloutBuffer(
            config.groups_per_step, config.max_staleness, config.dynamic_sampling, next_group, next_step, config.steps
        )
        self._changed = threading.Condition()  # guards the buffer and the error
        self._error: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # touched on the engine thread only

    def take(self, timeout_s: float) -> TakenGroups:
        self._engine.loop.call_soon_threadsafe(self._pump)
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                taken = self._buffer.take()
                if taken is not None:
                    return taken
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimedOut(f"no batch within {timeout_s:g} s: {self._buffer.describe()}")
                self._changed.wait(left)

    def release(self, step: int) -> None:
        with self._changed:
            self._buffer.release(step)
            self._changed.notify_all()
        self._engine.loop.call_soon_threadsafe(self._pump)

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> list[RolloutGroup]:
        self.fail(Conflict("the rollouts are closed"))
        self._engine.run(self._cancel(), CLOSE_S, "closing the rollout worker")
        with self._changed:
            return self._buffer.leftovers()

    # -- on the engine thread ----------------------------------------------------------------------------------------

    def _pump(self) -> None:
        with self._changed:
            if self._error is not None:
                return
            launched = []
            while self._buffer.can_launch:
                launched.append(self._buffer.launch())
        for g in launched:
            task = self._engine.loop.create_task(self._group(g), name=f"group-{g}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _group(self, g: int) -> None:
        try:
            group = await self._sampler.group(g)
            with self._changed:
                self._count(group, self._buffer.resolve(group))
                self._changed.notify_all()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.fail(error)
            return
        self._pump()

    async def _cancel(self) -> None:
        await cancel(list(self._tasks))


class SyncRollouts(GroupSource):
    """The synchronous source: generation happens inside ``take``, and nothing is in flight outside of it. Before it
    takes again the caller waits until the engine holds the weights of the step before."""

    def __init__(self, sampler: Sampler, engine: EngineThread, next_group: int = 0, next_step: int = 0) -> None:
        super().__init__(sampler, engine)
        self._next_group, self._next_step = next_group, next_step

    def take(self, timeout_s: float) -> TakenGroups:
        deadline = time.monotonic() + timeout_s
        config = self._sampler.config
        useful: list[RolloutGroup] = []
        useless: list[RolloutGroup] = []
        while len(useful) < config.groups_per_step:
            first = self._next_group
            self._next_group += config.groups_per_step - len(useful)
            left = max(deadline - time.monotonic(), 0.0)
            try:
                groups = self._engine.run(self._all(first), left, f"sampling groups {first} to {self._next_group - 1}")
            except TimedOut as error:
                raise TimedOut(
                    f"{error}: step {self._next_step} has {len(useful)} of {config.groups_per_step} useful groups, "
                    f"{len(useless)} useless (all rewards equal), and {timeout_s:g} s for a batch"
                ) from error
            for group in groups:
                is_useful = not (config.dynamic_sampling and is_useless(group.rewards))
                (useful if is_useful else useless).append(group)
                self._count(group, is_useful)
        self._next_step += 1
        return TakenGroups(self._next_step - 1, useful, useless)

    async def _all(self, first: int) -> list[RolloutGroup]:
        return await gather([self._sampler.group(g) for g in range(first, self._next_group)])
