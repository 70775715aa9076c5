"""The engine's processes: started, told and heard, watched, ended.

::

             its process ends, it says Failed, or it is silent for dp_timeout_s
    serving ──────────────────────────────────────────────────────────────────► lost: whoever waits for it is told
                                                 not elastic: the engine is over, every process ends
                                                 elastic: :mod:`midstream.serving.restart`

A rank that says nothing is asked each second at most, and where all ranks are when it has been silent for half the time
limit (SIGUSR1: a dump on its standard error). Ends are bounded: who does not leave when told is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
import tempfile
import time
from collections.abc import Coroutine
from typing import Any

from midstream.config import EngineConfig
from midstream.engine import coordinator as group
from midstream.engine.merge import merge_status
from midstream.engine.process import (
    Abort,
    Add,
    Agreed,
    Answer,
    Call,
    EngineProcess,
    Failed,
    FromCore,
    Lost,
    Outputs,
    Ready,
    Shutdown,
    StartWave,
    Wake,
    encode,
    from_core_decoder,
)
from midstream.errors import EngineDead, MidstreamError, NotReady, RankLost, from_wire, to_wire
from midstream.serving.head import Front, Head, RemoteRank, Result
from midstream.serving.held import Held
from midstream.serving.rank import CLOSE_S, LocalRank, Rank
from midstream.serving.request_table import RequestTable
from midstream.serving.restart import LEAVE_S, START_TIMEOUT_S, Restart

_log = logging.getLogger(__name__)
_ASK_TIMEOUT_S = 1800.0
"""For what a rank that was started again is told: the longest of it is reading weights."""
_SELF = "front"
"""Our own name to the coordinator."""


class Ranks:
    """All processes of one engine, and the coordinator between them if they are several.

    ``front``: of this process. Others, at the other end of a link, are ``guests``.
    """

    def __init__(self, config: EngineConfig, front: Front) -> None:
        self.config = config
        self.held = Held()
        self.requests = RequestTable(front, config.data_parallel_size)
        self.guests: set[Front] = set()
        self._front = front
        self.head = None if config.data_parallel_address is None else Head(self)
        self._ranks: list[Rank] = []
        self.coordinator: group.Coordinator | None = None
        """Of several ranks."""
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._meeting: Any = None
        """Where ranks of several nodes meet."""
        self._clock: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_closing = False
        self._calls: dict[int, tuple[Front, int, str, dict[str, Any]]] = {}
        """By a number of our own: who asked it, under which number, and what."""
        self._ops = itertools.count(1)
        self._asks = itertools.count(1)
        self.moved = asyncio.Event()
        """A call was answered."""
        self._restart = Restart(self)

    def __getitem__(self, index: int) -> Rank:
        return self._ranks[index]

    def __len__(self) -> int:
        return len(self._ranks)

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> dict[str, Any]:
        """Returns the first status of all. Raises what kept one from starting; then :meth:`close`."""
        if self.config.enable_expert_parallel and self.config.data_parallel_size > 1:
            from midstream.models.loader import open_checkpoint  # with them comes torch
            from midstream.parallel.expert import check_experts

            # else each of them would find out, once all had started
            check_experts(open_checkpoint(self.config.model).config.num_experts, self.config.data_parallel_size)
        if self.head is not None:
            await self.head.open()
        status = await self.start_all(0)
        self.held.start(status)
        if len(self._ranks) > 1:
            self.begin(self._watch())
        if self.head is not None:
            self.head.welcome()
        return status

    async def start_all(self, number: int) -> dict[str, Any]:
        config, size = self.config, self.config.data_parallel_size
        if self.head is not None:
            await self.head.wait_for_ranks()
        if size > 1:
            self.coordinator = group.Coordinator(size, config.enable_expert_parallel, config.update_lease_s)
        meeting = self._meet() if config.enable_expert_parallel and size > 1 else None
        self._ranks = []
        for rank in range(size):
            self._ranks.append(self._launch(rank, meeting, number))
        statuses = await asyncio.gather(*(rank.ready for rank in self._ranks))
        for one in self._ranks:
            if one.error is not None:  # it was ready, and lost before the others were
                raise one.error
        self._check_alike(statuses)
        return merge_status(dict(enumerate(statuses))) if self.coordinator else statuses[0]

    def _check_alike(self, statuses: list[dict[str, Any]]) -> None:
        """Raises MidstreamError where a rank is not as the first one is; its node is told too, and leaves."""
        for key, why in (
            ("weights_id", "the ranks loaded different weights: is it the same checkpoint, is it being written?"),
            ("max_model_len", "the ranks hold prompts of different lengths: give max_model_len, or the same KV memory"),
        ):
            error = MidstreamError(f"{why} ({', '.join(str(status[key])[:12] for status in statuses)} by rank)")
            others = [i for i, status in enumerate(statuses) if status[key] != statuses[0][key]]
            for rank in (self._ranks[i] for i in others):
                if isinstance(rank, RemoteRank):
                    rank.refuse(error)
            if others:
                raise error

    def _meet(self) -> str:
        """Address at which the ranks of a lockstep group meet."""
        if len(self.config.local_ranks) < self.config.data_parallel_size:
            from midstream.parallel.groups import Meeting

            self._meeting = Meeting(self.config.node_host, timeout_s=START_TIMEOUT_S)
            return str(self._meeting.address)
        self._directory = tempfile.TemporaryDirectory(prefix="midstream-", ignore_cleanup_errors=True)
        return f"file://{self._directory.name}/meeting"

    def relaunch(self, index: int) -> Rank:
        """A replica that was lost, anew."""
        rank = self._ranks[index] = self._launch(index)
        return rank

    def _launch(self, index: int, meeting: str | None = None, number: int = 0) -> Rank:
        if index not in self.config.local_ranks:
            assert self.head is not None
            return self.head.launch(index, meeting, number)
        process = EngineProcess(self.config, index, meeting, number, self.config.node_host)
        return LocalRank(index, self, process)

    async def close(self, error: MidstreamError) -> None:
        """End every process; ``error`` is why, for who waits. Bounded; may be called twice."""
        if self.is_closing:
            return
        self.is_closing, was_serving = True, self.held.is_serving
        for task in self._tasks:
            task.cancel()
        for rank in self._ranks:
            rank.fail(error)
        coordinator = self.coordinator
        if coordinator is not None and coordinator.lockstep and was_serving:
            # they leave together: who left alone would be lost to the others
            self._pass_on(coordinator.call(_SELF, None, "shutdown", {}, time.monotonic()))
        else:
            for rank in self._ranks:
                rank.post(encode(Shutdown()))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.end_all(CLOSE_S)
        if self._clock is not None:
            self._clock.cancel()
        if self.head is not None:
            await self.head.close(error)

    async def end_all(self, grace_s: float) -> None:
        await asyncio.gather(*(rank.end(grace_s) for rank in self._ranks))
        self._meeting = None
        if self._directory is not None:
            self._directory.cleanup()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:  # nobody else hears of it
                self.over(EngineDead(f"the front end failed: {type(error).__name__}: {error}"))

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(done)
        return task

    # -- what is asked of the engine -------------------------------------------------------------------------------

    def check_serving(self) -> None:
        """Raises NotReady while no rank takes requests."""
        self.held.check_serving()

    def announce(self) -> None:
        """To nodes, whether requests are taken."""
        if self.head is not None:
            try:
                self.held.check_serving()
                self.head.announce(None)
            except NotReady as error:
                self.head.announce(error)

    def call(self, front: Front, op: int, verb: str, arguments: dict[str, Any]) -> None:
        """``front.answered`` gets the result. Raises NotReady, InvalidInput; what can not be encoded raises, and
        nothing was sent."""
        if not self.held.is_serving and verb == "status" and self.held.why:
            return front.answered(op, self.held_status())
        self.held.check_call(verb)
        number = next(self._ops)
        frame = encode(Call(number, verb, arguments))  # a coordinator that has it in its log must be able to send it
        if self.coordinator is None:
            self._calls[number] = front, op, verb, arguments
            self._ranks[0].post(frame)
        else:
            sends = self.coordinator.call(_SELF, number, verb, arguments, time.monotonic())
            self._calls[number] = front, op, verb, arguments
            self._pass_on(sends)

    def add(self, front: Front, message: Add, session: str | None) -> None:
        """A request, to the rank that the router picks; ``front.take`` gets what comes of it, until it is forgotten.
        Raises NotReady, InvalidInput; what can not be encoded raises, and nothing was sent."""
        self.held.check_serving()
        frame = encode(message)
        rank = self.requests.add(front, message.request_id, message.params.n, session)
        self._ranks[rank].post(frame)

    def abort(self, front: Front, request_id: str, sample: str | None = None) -> None:
        """End a request of this front end, or one ``sample`` of it; nothing if it is not known, or another one's."""
        if (rank := self.requests.rank_of(request_id, front)) is not None:
            self._ranks[rank].post(encode(Abort([sample or request_id])))

    def forget(self, front: Front, request_id: str) -> None:
        """It is over, for its front end too."""
        if (rank := self.requests.forget(request_id, front)) is not None:
            self._ranks[rank].post(encode(Abort([request_id])))

    def leave(self, guest: Front) -> None:
        """It is gone: its requests end. What it has called goes on; a pause that it holds, for as long as its lease."""
        self.guests.discard(guest)
        for name in self.requests.names_of(guest):
            self.forget(guest, name)

    def _pass_on(self, sends: list[group.Send]) -> None:
        """What the coordinator says, to the ranks and to ourselves."""
        assert self.coordinator is not None
        for to, message in sends:
            match message:
                case group.Answer(None, _) | group.Lost() if isinstance(to, str):
                    pass  # nobody asked; who is told of a loss: see _lost
                case group.Answer(asyncio.Future() as asked, result):
                    _settle(asked, result)
                case group.Answer(op, result):
                    self._answered(op, result)
                case _ if isinstance(to, int):
                    self._ranks[to].post(_frame(message))
        due = self.coordinator.next_deadline
        if self._clock is not None:
            self._clock.cancel()
        self._clock = None
        if due is not None and not self.is_closing:
            left_s = max(due - time.monotonic(), 0.0)
            self._clock = asyncio.get_running_loop().call_later(left_s, self._tick)

    def _tick(self) -> None:
        assert self.coordinator is not None
        sends = self.coordinator.tick(time.monotonic())
        if any(isinstance(message, group.Command) and message.verb == "resume_generation" for _, message in sends):
            self.held.pause = None  # its lease has ended
        self._pass_on(sends)

    def _answered(self, op: int, result: Result) -> None:
        front, number, verb, arguments = self._calls.pop(op, (self._front, 0, "", {}))
        if isinstance(result, dict):
            self.held.remember(verb, arguments, result)
            if verb == "status":
                result = self._described(result)
        self.moved.set()
        self.announce()
        front.answered(number, result)

    def held_status(self) -> dict[str, Any]:
        """The last status that is known, with what holds since; while the ranks can not be asked."""
        return self._described(self.held.last_status)

    def _described(self, status: dict[str, Any]) -> dict[str, Any]:
        if self.coordinator is None:
            return status
        lease_left_s = self.coordinator.lease_left_s(time.monotonic())
        return {**self.held.described(status, len(self._ranks)), "lease_left_s": lease_left_s}

    # -- what the ranks say ----------------------------------------------------------------------------------------

    def heard(self, rank: Rank, frame: bytes) -> None:
        if rank.is_over:
            return
        try:
            self._take(rank, from_core_decoder.decode(frame))
        except Exception as error:  # nobody may wait for what was not understood
            _log.exception("midstream: a message of rank %d was not understood", rank.index)
            self.over(EngineDead(f"the front end failed: {type(error).__name__}: {error}"))

    def _take(self, rank: Rank, message: FromCore) -> None:
        rank.num_silent = 0
        coordinator = self.coordinator
        match message:
            case Outputs():
                if coordinator is not None:
                    self.held.note_numbers(message.increments)
                self.requests.tell(message.increments, message.refused)
                for answer in message.answers:
                    self._take_answer(rank, answer)
                if coordinator is None:
                    return
                joined = rank.index in coordinator.ranks
                for op in message.prepared:
                    if joined:
                        self._pass_on(coordinator.prepared(rank.index, op))
                    else:  # a group of its own
                        rank.post(encode(Call(op, "finish", {})))
                if message.due is not None:
                    if joined:
                        self._pass_on(coordinator.due(rank.index, message.due))
                    else:
                        rank.post(encode(Agreed(message.due)))
            case Wake(wave):
                assert coordinator is not None
                self._pass_on(coordinator.start_wave(rank.index, wave))
            case Ready():
                rank.ready.set_result(message.status)
            case Failed():
                self._lost(rank, from_wire(message.error))

    def _take_answer(self, rank: Rank, answer: Answer) -> None:
        result: Result = (answer.value or {}) if answer.error is None else from_wire(answer.error)
        if answer.op < 0:
            if (asked := rank.asks.pop(answer.op, None)) is not None:
                _settle(asked, result)
        elif self.coordinator is None:
            self._answered(answer.op, result)
        else:
            self._pass_on(self.coordinator.answered(rank.index, answer.op, result, time.monotonic()))

    async def ask(self, rank: Rank, verb: str, **arguments: Any) -> dict[str, Any]:
        """Of one rank, beside the log. Raises its error, also that it was lost."""
        op = -next(self._asks)
        asked = rank.asks[op] = asyncio.get_running_loop().create_future()
        if rank.is_over:
            rank.fail(EngineDead(f"rank {rank.index} is gone"))
        rank.post(encode(Call(op, verb, arguments)))
        return await asyncio.wait_for(asked, _ASK_TIMEOUT_S)

    async def ask_all(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Of all ranks, through the log."""
        assert self.coordinator is not None
        asked = asyncio.get_running_loop().create_future()
        for rank in self._ranks:
            rank.asks[verb] = asked
        try:
            self._pass_on(self.coordinator.call(_SELF, asked, verb, arguments, time.monotonic()))
            return await asyncio.wait_for(asked, _ASK_TIMEOUT_S)
        finally:
            for rank in self._ranks:
                rank.asks.pop(verb, None)

    # -- loss ------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Ask ranks that say nothing for a sign of life; one that gives none for the time limit is lost."""
        limit_s = self.config.dp_timeout_s
        each_s = min(limit_s / 4, 1.0)
        has_asked_where = False
        while True:
            await asyncio.sleep(each_s)
            for rank in [rank for rank in self._ranks if rank.ready.done() and not rank.is_over]:
                # A rank that waits for another in what all do together says so itself at the limit: before we do.
                if rank.num_silent * each_s > limit_s + 1.0:
                    self._lost(rank, EngineDead(f"it was silent for {limit_s:g} s"))
                    continue
                rank.num_silent += 1
                rank.post(encode(Call(-next(self._asks), "is_paused", {})))
            silent = [
                rank.index for rank in self._ranks if rank.num_silent * each_s >= limit_s / 2 and not rank.is_over
            ]
            if silent and not has_asked_where:
                await self._ask_where(silent)
            has_asked_where = bool(silent)

    async def _ask_where(self, silent: list[int]) -> None:
        """Each rank writes on its standard error what its threads are doing: also those in whom nothing is wrong."""
        for rank in self._ranks:
            if rank.is_over or rank.exit_code is not None or not rank.ready.done():
                continue
            which = "silent" if rank.index in silent else "answers"
            with contextlib.suppress(OSError):  # not a log: it stands above what that rank writes
                print(f"midstream: rank {rank.index} ({which}) is here:", file=sys.stderr, flush=True)
            rank.say_where()
            await asyncio.sleep(0.05)  # one after another

    def gone(self, rank: Rank) -> None:
        how = "its node is gone" if rank.exit_code is None else f"its process ended (exit code {rank.exit_code})"
        self._lost(rank, EngineDead(how))

    def _lost(self, rank: Rank, error: MidstreamError) -> None:
        """A rank is gone, is silent, or has said that it goes."""
        if rank.is_over or self.is_closing:
            return
        told_by = rank
        if isinstance(error, RankLost):  # it lost another one
            gone = max(self._ranks, key=lambda one: (one.exit_code is not None, one.num_silent))
            is_known = gone is not rank and (gone.exit_code is not None or gone.num_silent > 0)
            if not is_known:
                lost: MidstreamError = EngineDead(f"a rank was lost: {error.message}")
            else:
                code = gone.exit_code
                how = error.message if code is None else f"its process ended (exit code {code})"
                lost = EngineDead(f"rank {gone.index} was lost: {how}", rank=gone.index)
                rank, error = gone, EngineDead(how)
        elif isinstance(error, EngineDead):
            what = (
                f"rank {rank.index} was lost: {error.message}"
                if self.coordinator
                else f"the engine is gone: {error.message}"
            )
            lost = EngineDead(f"{what}; start a new one" if not self.config.elastic else what, rank=rank.index)
        else:
            lost = error
        for one in (told_by, rank):
            one.is_over = True
            one.fail(lost)
        coordinator = self.coordinator
        if not self.held.is_serving:
            return  # whoever starts it has heard it
        if coordinator is None or not self.config.elastic:
            if coordinator is not None:
                self._pass_on(coordinator.rank_lost(rank.index, error.message))
            self.over(lost)
        elif coordinator.lockstep or coordinator.ranks == {rank.index}:
            self.held.is_serving = False
            self.held.why = {one.index: ("starting", lost.message) for one in self._ranks}
            self.announce()
            self._pass_on(coordinator.rank_lost(rank.index, error.message))
            self.requests.end(None, lost)
            self._restart.all(lost.message)
        elif rank.index in coordinator.ranks:
            self.requests.router.ranks.discard(rank.index)
            self.held.why[rank.index] = "starting", lost.message
            self._pass_on(coordinator.rank_lost(rank.index, error.message))
            self.requests.end(rank.index, lost)
            self._restart.one(rank, lost.message)

    def over(self, error: MidstreamError) -> None:
        """The engine is gone: whoever waits is told, and no process stays behind."""
        for front in (self._front, *self.guests):
            front.over(error)
        if self.is_closing:
            return
        self.held.is_serving = False
        if self.coordinator is None or not self.coordinator.lockstep:  # else they have been told
            for rank in self._ranks:
                rank.post(encode(Shutdown()))
        self.begin(self.end_all(LEAVE_S))


def _settle(asked: asyncio.Future[dict[str, Any]], result: Result) -> None:
    if asked.done():
        return
    if isinstance(result, MidstreamError):
        asked.set_exception(result)
    else:
        asked.set_result(result)


def _frame(message: object) -> bytes:
    """For a rank, of what the coordinator says."""
    match message:
        case group.Command(op, verb, arguments, position):
            return encode(Call(op, verb, arguments, position))
        case group.StartWave(wave):
            return encode(StartWave(wave))
        case group.Agreed(position):
            return encode(Agreed(position))
        case group.Lost(error):
            return encode(Lost(to_wire(error)))
    raise AssertionError(message)
