"""The engine's processes: started, told and heard, watched, ended, and with ``elastic`` started again.

::

             its process ends, it says Failed, or it is silent for dp_timeout_s
    serving ──────────────────────────────────────────────────────────────────► lost: whoever waits for it is told
       ▲ ▲                                          not elastic: the engine is over, every process ends
       │ │ join: no call is open, and it is as the others are       replica, elastic │   │ lockstep, elastic
       │ └── pending ◄── starting ◄──────────────────────────────────────────────────┘   │ (or the last replica)
       │     the others' weights, by their id, then their pause                          │
       └──── pending ◄── starting, all ranks ◄───────────────────────────────────────────┘
             the next full update, if an update had been committed before

A rank that says nothing is asked each second at most, and where all ranks are when it has been silent for half the time
limit (SIGUSR1: a dump on its standard error). Ends are bounded: who does not leave when told is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass
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
from midstream.errors import Conflict, EngineDead, InvalidInput, MidstreamError, NotReady, RankLost, from_wire, to_wire
from midstream.serving.head import Front, Head, RemoteRank, Result
from midstream.serving.rank import CLOSE_S, Context, LocalRank, Rank
from midstream.serving.router import Router
from midstream.types import RequestIncrement

START_TIMEOUT_S = 600.0
_ASK_TIMEOUT_S = 1800.0
"""For what a rank that was started again is told: the longest of it is reading weights."""
_LEAVE_S = 2.0
"""For a rank that was told that its group is over."""
_TRIES = 3
"""Starts, one after another, that may fail before a rank is given up."""
_SELF = "front"
"""Our own name to the coordinator."""

@dataclass(slots=True)
class _Place:
    """Of a request: who asked for it, and where it runs."""

    front: Front | None
    """None: it has left, and the rank has not said its last word so far."""
    rank: int
    num_samples: int
    num_left: int
    """Samples that have not ended, of a guest's request."""


class Ranks:
    """All processes of one engine, and the coordinator between them if they are several.

    ``front``: of this process. Others, at the other end of a link, are ``guests``.
    """

    def __init__(self, config: EngineConfig, front: Front) -> None:
        self.config = config
        self.router = Router(config.data_parallel_size)
        """Only to ranks that serve."""
        self.guests: set[Front] = set()
        self._front = front
        self._head = None if config.data_parallel_address is None else Head(self)
        self._ranks: list[Rank] = []
        self._coordinator: group.Coordinator | None = None
        """Of several ranks."""
        self._context = Context()
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._meeting: Any = None
        """Where ranks of several nodes meet."""
        self._clock: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._replacing: dict[int, asyncio.Task[None]] = {}
        self._is_serving = False
        """All ranks have started; some may be lost since."""
        self._is_closing = False
        self._why: dict[int, tuple[str, str]] = {}
        """Of ranks that take no requests: the state, and the reason."""
        self._pending: str | None = None
        """Why no rank takes requests though they run."""
        self._requests: dict[str, _Place] = {}
        self._num_foreign = 0
        """Of them, those that are not of this process's own front end."""
        self._calls: dict[int, tuple[Front, int, str, dict[str, Any]]] = {}
        """By a number of our own: who asked it, under which number, and what."""
        self._ops = itertools.count(1)
        self._asks = itertools.count(1)
        self._moved = asyncio.Event()
        """A call was answered."""
        # What the engine is to be again after all of it was started again.
        self._status: dict[str, Any] = {}
        self._version: dict[str, Any] = {}
        self._pause: dict[str, Any] | None = None
        self._tokenizer: dict[str, Any] | None = None

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
        if self._head is not None:
            await self._head.open()
        self._status = await self._start_all(0)
        self._is_serving = True
        self._version = {key: self._status[key] for key in ("number", "version", "weights_id")}
        if len(self._ranks) > 1:
            self._begin(self._watch())
        if self._head is not None:
            self._head.welcome()
        return self._status

    async def _start_all(self, number: int) -> dict[str, Any]:
        config, size = self.config, self.config.data_parallel_size
        if self._head is not None:
            await self._head.wait_for_ranks()
        if size > 1:
            self._coordinator = group.Coordinator(size, config.enable_expert_parallel, config.update_lease_s)
        meeting = self._meet() if config.enable_expert_parallel and size > 1 else None
        self._ranks = []
        for rank in range(size):
            self._ranks.append(self._launch(rank, meeting, number))
        statuses = await asyncio.gather(*(rank.ready for rank in self._ranks))
        for one in self._ranks:
            if one.error is not None:  # it was ready, and lost before the others were
                raise one.error
        self._check_alike(statuses)
        return merge_status(dict(enumerate(statuses))) if self._coordinator else statuses[0]

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

    def _launch(self, index: int, meeting: str | None = None, number: int = 0) -> Rank:
        if index not in self.config.local_ranks:
            assert self._head is not None
            return self._head.launch(index, meeting, number)
        process = EngineProcess(self.config, index, meeting, number, self.config.node_host)
        return LocalRank(index, self, process, self._context)

    async def close(self, error: MidstreamError) -> None:
        """End every process; ``error`` is why, for who waits. Bounded; may be called twice."""
        if self._is_closing:
            return
        self._is_closing, was_serving = True, self._is_serving
        for task in self._tasks:
            task.cancel()
        for rank in self._ranks:
            rank.fail(error)
        coordinator = self._coordinator
        if coordinator is not None and coordinator.lockstep and was_serving:
            # they leave together: who left alone would be lost to the others
            self._pass_on(coordinator.call(_SELF, None, "shutdown", {}, time.monotonic()))
        else:
            for rank in self._ranks:
                rank.post(encode(Shutdown()))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end_all(CLOSE_S)
        if self._clock is not None:
            self._clock.cancel()
        self._context.destroy(linger=0)
        if self._head is not None:
            await self._head.close(error)

    async def _end_all(self, grace_s: float) -> None:
        await asyncio.gather(*(rank.end(grace_s) for rank in self._ranks))
        self._meeting = None
        if self._directory is not None:
            self._directory.cleanup()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:  # nobody else hears of it
                self._over(EngineDead(f"the front end failed: {type(error).__name__}: {error}"))

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(done)
        return task

    # -- what is asked of the engine -------------------------------------------------------------------------------

    def check_serving(self) -> None:
        """Raises NotReady while no rank takes requests."""
        self.check_started()
        if self._pending is not None:
            raise NotReady(self._pending)

    def check_started(self) -> None:
        """Raises NotReady while all ranks are started again."""
        if not self._is_serving and self._why:
            raise NotReady(f"the engine is started again: {next(iter(self._why.values()))[1]}; try again later")

    def _announce(self) -> None:
        """To nodes, whether requests are taken."""
        if self._head is not None:
            try:
                self.check_serving()
                self._head.announce(None)
            except NotReady as error:
                self._head.announce(error)

    def call(self, front: Front, op: int, verb: str, arguments: dict[str, Any]) -> None:
        """``front.answered`` gets the result. Raises NotReady, InvalidInput; what can not be encoded raises, and
        nothing was sent."""
        if not self._is_serving and verb == "status" and self._why:
            return front.answered(op, self.held_status())
        self.check_started()
        if self._pending is not None and verb == "update_weight_version":
            raise Conflict(f"there are no weights that could have a label: {self._pending}")
        number = next(self._ops)
        frame = encode(Call(number, verb, arguments))  # a coordinator that has it in its log must be able to send it
        if self._coordinator is None:
            self._calls[number] = front, op, verb, arguments
            self._ranks[0].post(frame)
        else:
            sends = self._coordinator.call(_SELF, number, verb, arguments, time.monotonic())
            self._calls[number] = front, op, verb, arguments
            self._pass_on(sends)

    def add(self, front: Front, message: Add, session: str | None) -> None:
        """A request, to the rank that the router picks; ``front.take`` gets what comes of it, until it is forgotten.
        Raises NotReady, InvalidInput; what can not be encoded raises, and nothing was sent."""
        self.check_serving()
        name = message.request_id
        if name in self._requests:
            raise InvalidInput(f"request id {name!r} is in use; choose another")
        frame = encode(message)
        rank = self.router.pick(session)
        self._requests[name] = _Place(front, rank, message.params.n, message.params.n)
        self._num_foreign += front is not self._front
        self.router.begin(rank, message.params.n)
        self._ranks[rank].post(frame)

    def abort(self, front: Front, request_id: str, sample: str | None = None) -> None:
        """End a request of this front end, or one ``sample`` of it; nothing if it is not known, or another one's."""
        if (place := self._requests.get(request_id)) is not None and place.front is front:
            self._ranks[place.rank].post(encode(Abort([sample or request_id])))

    def forget(self, front: Front, request_id: str) -> None:
        """It is over, for its front end too."""
        place = self._requests.get(request_id)
        if place is None or place.front is not front:
            return  # it was refused, because it is another one's
        if front is self._front or place.num_left == 0:
            self._remove(request_id)
        else:  # its name is free once the rank has said the last word: nobody else may take that for theirs
            self.abort(front, request_id)
            place.front = None

    def leave(self, guest: Front) -> None:
        """It is gone: its requests end. What it has called goes on; a pause that it holds, for as long as its lease."""
        self.guests.discard(guest)
        for name, place in list(self._requests.items()):
            if place.front is guest:
                self.forget(guest, name)

    def _remove(self, request_id: str) -> None:
        place = self._requests.pop(request_id)
        self._num_foreign -= place.front is not self._front
        self.router.end(place.rank, place.num_samples)

    def _tell(self, increments: list[RequestIncrement], refused: list[tuple[str, dict[str, Any]]]) -> None:
        """Each front end of its own requests."""
        if not self._num_foreign:
            return self._front.take(increments, refused)
        parts: dict[Front, Any] = {}
        for increment in increments:
            if (place := self._requests.get(increment.parent_id)) is not None:
                place.num_left -= increment.finish_reason is not None
                if place.front is not None:
                    parts.setdefault(place.front, ([], []))[0].append(increment)
                elif place.num_left == 0:
                    self._remove(increment.parent_id)
        for name, error in refused:
            if (place := self._requests.get(name)) is not None:
                place.num_left = 0
                if place.front is not None:
                    parts.setdefault(place.front, ([], []))[1].append((name, error))
                else:
                    self._remove(name)
        for front, part in parts.items():
            front.take(*part)

    def _end_requests(self, rank: int | None, error: MidstreamError) -> None:
        """Those of a rank (None: of all) are over."""
        wire = to_wire(error)
        self._tell([], [(name, wire) for name, place in self._requests.items() if rank in (None, place.rank)])

    def _pass_on(self, sends: list[group.Send]) -> None:
        """What the coordinator says, to the ranks and to ourselves."""
        assert self._coordinator is not None
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
        due = self._coordinator.next_deadline
        if self._clock is not None:
            self._clock.cancel()
        self._clock = None
        if due is not None and not self._is_closing:
            left_s = max(due - time.monotonic(), 0.0)
            self._clock = asyncio.get_running_loop().call_later(left_s, self._tick)

    def _tick(self) -> None:
        assert self._coordinator is not None
        sends = self._coordinator.tick(time.monotonic())
        if any(isinstance(message, group.Command) and message.verb == "resume_generation" for _, message in sends):
            self._pause = None  # its lease has ended
        self._pass_on(sends)

    def _answered(self, op: int, result: Result) -> None:
        front, number, verb, arguments = self._calls.pop(op, (self._front, 0, "", {}))
        if isinstance(result, dict):
            self._remember(verb, arguments, result)
            if verb == "status":
                result = self._described(result)
        self._moved.set()
        self._announce()
        front.answered(number, result)

    def _remember(self, verb: str, arguments: dict[str, Any], result: dict[str, Any]) -> None:
        """What holds for the engine after this call, for the case that it has to be started again."""
        if verb == "status":
            self._status = result
        elif verb == "pause_generation":
            self._pause = {name: value for name, value in arguments.items() if name != "timeout_s"}
        elif verb == "resume_generation":
            self._pause = None
        elif verb == "load_grammar_tokenizer":
            self._tokenizer = arguments
        if self._version.keys() <= result.keys():
            is_commit = result["number"] > self._version["number"]
            if is_commit:
                self._pending = None
            if is_commit or verb in ("finish_weight_update", "update_weights"):
                self._version = {key: result[key] for key in self._version}
            elif verb == "update_weight_version":
                self._version["version"] = result["version"]

    def held_status(self) -> dict[str, Any]:
        """The last status that is known, with what holds since; while the ranks can not be asked."""
        held = {} if self._is_serving else {"state": "starting", **(self._pause or {})}
        return self._described({**self._status, **held, **self._version})

    def _described(self, status: dict[str, Any]) -> dict[str, Any]:
        """``status`` with the ranks that do not serve, and why."""
        if self._coordinator is None:
            return status
        is_pending = self._pending is not None and self._is_serving
        if is_pending:
            status = {**status, "state": "pending_weights", "why": self._pending, **self._version}
        status = {**status, "lease_left_s": self._coordinator.lease_left_s(time.monotonic())}
        by_rank = {rank: {"rank": rank, "state": "starting", "why": "it joins"} for rank in range(len(self._ranks))}
        by_rank |= {entry["rank"]: entry for entry in status["ranks"]}
        if is_pending:
            waits = {"state": "pending_weights", "why": self._pending}
            by_rank = {rank: {**entry, **waits} for rank, entry in by_rank.items()}
        by_rank |= {rank: {"rank": rank, "state": state, "why": why} for rank, (state, why) in self._why.items()}
        return {**status, "ranks": [by_rank[rank] for rank in sorted(by_rank)]}

    # -- what the ranks say ----------------------------------------------------------------------------------------

    def heard(self, rank: Rank, frame: bytes) -> None:
        if rank.is_over:
            return
        try:
            self._take(rank, from_core_decoder.decode(frame))
        except Exception as error:  # nobody may wait for what was not understood
            traceback.print_exc()
            self._over(EngineDead(f"the front end failed: {type(error).__name__}: {error}"))

    def _take(self, rank: Rank, message: FromCore) -> None:
        rank.num_silent = 0
        coordinator = self._coordinator
        match message:
            case Outputs():
                if coordinator is not None:
                    self._note_numbers(message)
                self._tell(message.increments, message.refused)
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

    def _note_numbers(self, message: Outputs) -> None:
        """A number that clients have seen is never used again, also where the answer of its commit was lost."""
        for increment in message.increments:
            last = increment.weight_versions[-1] if increment.weight_versions else None
            if last is not None and last.number > self._version.get("number", last.number):
                self._version = {"number": last.number, "version": last.version, "weights_id": ""}

    def _take_answer(self, rank: Rank, answer: Answer) -> None:
        result: Result = (answer.value or {}) if answer.error is None else from_wire(answer.error)
        if answer.op < 0:
            if (asked := rank.asks.pop(answer.op, None)) is not None:
                _settle(asked, result)
        elif self._coordinator is None:
            self._answered(answer.op, result)
        else:
            self._pass_on(self._coordinator.answered(rank.index, answer.op, result, time.monotonic()))

    async def _ask(self, rank: Rank, verb: str, **arguments: Any) -> dict[str, Any]:
        """Of one rank, beside the log. Raises its error, also that it was lost."""
        op = -next(self._asks)
        asked = rank.asks[op] = asyncio.get_running_loop().create_future()
        if rank.is_over:
            rank.fail(EngineDead(f"rank {rank.index} is gone"))
        rank.post(encode(Call(op, verb, arguments)))
        return await asyncio.wait_for(asked, _ASK_TIMEOUT_S)

    async def _ask_all(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Of all ranks, through the log."""
        assert self._coordinator is not None
        asked = asyncio.get_running_loop().create_future()
        for rank in self._ranks:
            rank.asks[verb] = asked
        try:
            self._pass_on(self._coordinator.call(_SELF, asked, verb, arguments, time.monotonic()))
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
            print(f"midstream: rank {rank.index} ({which}) is here:", file=sys.stderr, flush=True)
            rank.say_where()
            await asyncio.sleep(0.05)  # one after another

    def gone(self, rank: Rank) -> None:
        """Take what it still managed to say, then it is lost."""

        async def last_words() -> None:
            await asyncio.sleep(0.05)
            how = "its node is gone" if rank.exit_code is None else f"its process ended (exit code {rank.exit_code})"
            self._lost(rank, EngineDead(how))

        if not rank.is_over:
            self._begin(last_words())

    def _lost(self, rank: Rank, error: MidstreamError) -> None:
        """A rank is gone, is silent, or has said that it goes."""
        if rank.is_over or self._is_closing:
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
                if self._coordinator
                else f"the engine is gone: {error.message}"
            )
            lost = EngineDead(f"{what}; start a new one" if not self.config.elastic else what, rank=rank.index)
        else:
            lost = error
        for one in (told_by, rank):
            one.is_over = True
            one.fail(lost)
        coordinator = self._coordinator
        if not self._is_serving:
            return  # whoever starts it has heard it
        if coordinator is None or not self.config.elastic:
            if coordinator is not None:
                self._pass_on(coordinator.rank_lost(rank.index, error.message))
            self._over(lost)
        elif coordinator.lockstep or coordinator.ranks == {rank.index}:
            self._is_serving = False
            self._why = {one.index: ("starting", lost.message) for one in self._ranks}
            self._announce()
            self._pass_on(coordinator.rank_lost(rank.index, error.message))
            self._end_requests(None, lost)
            self._begin(self._start_all_again(lost.message))
        elif rank.index in coordinator.ranks:
            self.router.ranks.discard(rank.index)
            self._why[rank.index] = "starting", lost.message
            self._pass_on(coordinator.rank_lost(rank.index, error.message))
            self._end_requests(rank.index, lost)
            self._replacing[rank.index] = self._begin(self._start_again(rank, lost.message))

    def _over(self, error: MidstreamError) -> None:
        """The engine is gone: whoever waits is told, and no process stays behind."""
        for front in (self._front, *self.guests):
            front.over(error)
        if self._is_closing:
            return
        self._is_serving = False
        if self._coordinator is None or not self._coordinator.lockstep:  # else they have been told
            for rank in self._ranks:
                rank.post(encode(Shutdown()))
        self._begin(self._end_all(_LEAVE_S))

    # -- starting again --------------------------------------------------------------------------------------------

    async def _start_all_again(self, reason: str) -> None:
        """Every rank anew, with what held for the engine, but for its weights: nobody has those any more."""
        for task in self._replacing.values():
            task.cancel()
        self._replacing.clear()
        self._status = {**self._status, "state": "starting", "why": reason}
        last = ""
        for _ in range(_TRIES):
            await self._end_all(_LEAVE_S)
            if self._head is not None:
                await self._head.wait_for_ranks()
            if self._is_closing:
                return
            try:
                status = await asyncio.wait_for(self._start_all(int(self._version["number"])), START_TIMEOUT_S)
                await self._restore(status, reason)
            except (MidstreamError, OSError) as error:
                last = str(error) or f"it did not start within {START_TIMEOUT_S:g} s"
                continue
            self._is_serving, self._why = True, {}
            self.router.ranks = set(range(len(self._ranks)))
            self._announce()
            return
        self._over(EngineDead(f"{reason}; it could not be started again: {last}"))

    async def _restore(self, status: dict[str, Any], reason: str) -> None:
        """After a start of all ranks: pause, tokenizer, and label; or no weights at all, where it had others."""
        held = self._version
        self._pending = None
        if status["weights_id"] != held["weights_id"]:
            self._pending = (
                f"pending_weights: the engine was started again ({reason}). It had weight version {held['version']!r} "
                f"({held['weights_id'][:12]}), and the checkpoint is another: it serves after the next full update"
            )
            await self._ask_all("sleep", level=2, mode="abort")  # so that nothing can sample from the checkpoint
            await self._ask_all("wake_up")
        elif status["version"] != held["version"]:
            await self._ask_all("update_weight_version", new_version=held["version"])
        if self._tokenizer is not None:
            await self._ask_all("load_grammar_tokenizer", **self._tokenizer)
        if self._pause is not None:
            await self._ask_all("pause_generation", **self._pause)

    async def _start_again(self, rank: Rank, reason: str) -> None:
        """One replica anew, while the others serve."""
        index = rank.index
        for _ in range(_TRIES):
            await rank.end(_LEAVE_S)
            if self._head is not None:
                await self._head.wait_for_ranks([index])
            if not self._is_wanted(index):
                return
            try:
                rank = self._ranks[index] = self._launch(index)
                await asyncio.wait_for(asyncio.shield(rank.ready), START_TIMEOUT_S)
                await self._join(rank, reason)
            except (MidstreamError, OSError) as error:
                last = str(error) or f"it did not start within {START_TIMEOUT_S:g} s"
                self._why[index] = "starting", f"{reason}; the last try failed: {last}"
                continue
            return
        await rank.end(_LEAVE_S)
        self._why[index] = "lost", self._why[index][1]

    def _is_wanted(self, index: int) -> bool:
        """Whether this task is still to bring that replica back. A cancellation alone can be lost in wait_for."""
        return not self._is_closing and self._replacing.get(index) is asyncio.current_task()

    async def _join(self, rank: Rank, reason: str) -> None:
        """Make ``rank`` as the others are, until they have not moved on meanwhile; then it takes part."""
        coordinator = self._coordinator
        assert coordinator is not None
        while self._is_wanted(rank.index):
            position, self._moved = coordinator.quiet_at, asyncio.Event()
            if position is not None:
                other = self._ranks[min(coordinator.ranks)]
                try:
                    group_status = await self._ask(other, "status")
                    waits_for = await self._become(rank, other, group_status, position, reason)
                except MidstreamError:
                    if not other.is_over or rank.is_over:
                        raise
                    continue  # its model was lost: another one
                if waits_for is None and coordinator.join(rank.index, position):
                    self._why.pop(rank.index, None)
                    self.router.ranks.add(rank.index)
                    return
                if waits_for is not None:
                    self._why[rank.index] = "pending_weights", f"{reason}; it waits for {waits_for}"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), 0.2)

    async def _become(
        self, rank: Rank, other: Rank, group_status: dict[str, Any], position: int, reason: str
    ) -> str | None:
        """Weights, version, pause and place in the log of ``other``. Returns what stands in the way of that."""
        if group_status["update"] is not None:
            return f"the end of weight update {group_status['update'].get('session_id')}"
        if group_status["sleep"]["status"] != "awake":
            return "the others to wake up"
        if not group_status["sleep"]["weights_loaded"]:
            return "the weights of the others"
        own = await self._ask(rank, "status")
        if own["max_model_len"] != group_status["max_model_len"]:
            return f"max_model_len {group_status['max_model_len']}; it has {own['max_model_len']}"
        if own["state"] != "running":
            await self._ask(rank, "resume_generation", force=True)
        if own["weights_id"] != group_status["weights_id"]:
            version = f"{group_status['version']!r} ({group_status['weights_id'][:12]})"
            self._why[rank.index] = "pending_weights", f"{reason}; it is getting weight version {version}"
            with tempfile.TemporaryDirectory(prefix="midstream-", ignore_cleanup_errors=True) as directory:
                await self._ask(other, "save_weights", directory=directory)
                await self._ask(rank, "update_weights", request={"weight_dir": directory})
            if (await self._ask(rank, "status"))["weights_id"] != group_status["weights_id"]:
                return f"weight version {version}, which the others have left meanwhile"
        if self._tokenizer is not None:
            await self._ask(rank, "load_grammar_tokenizer", **self._tokenizer)
        if group_status["state"] == "paused":
            pause = {key: group_status[key] for key in ("mode", "clear_cache", "owner")}
            await self._ask(rank, "pause_generation", **pause)
        version_ = {"number": group_status["number"], "version": group_status["version"]}
        await self._ask(rank, "adopt", position=position, **version_)
        return None


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
