"""AsyncLLM: the engine core in its own process, driven from asyncio. Streams, pause, and the weight verbs.

With data_parallel_size over 1 there are several such processes. A request goes to one of them; what is asked of the
engine goes through the coordinator to all, and comes back as one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import signal
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import zmq
import zmq.asyncio

from midstream.config import EngineConfig
from midstream.engine import coordinator as group
from midstream.engine.process import (
    Abort,
    Add,
    Agreed,
    Call,
    EngineProcess,
    Failed,
    Lost,
    Outputs,
    Ready,
    Shutdown,
    StartWave,
    ToCore,
    Wake,
    encode,
    from_core_decoder,
)
from midstream.errors import EngineDead, InvalidInput, MidstreamError, TimedOut, from_wire, to_wire
from midstream.models.hub import located
from midstream.serving.outputs import OutputBuilder, Prompt, core_params, prompt_ids
from midstream.serving.router import Router
from midstream.serving.text import Text
from midstream.types import KVPolicy, PauseMode, RequestOutput, SamplingParams

_START_TIMEOUT_S = 600.0
_VERB_TIMEOUT_S = 120.0
_TRANSFER_TIMEOUT_S = 1800.0
"""For bytes on their way; the engine itself gives up much earlier on a trainer that has gone silent."""
_PAUSE_TIMEOUT_S = 15.0
"""For calls that end within 5 s plus the step in flight."""


class _Stream:
    """One request's place in the front end: its output so far, where it runs, and who hears of news."""

    __slots__ = ("builder", "error", "news", "on_news", "rank")

    def __init__(self, builder: OutputBuilder, rank: int) -> None:
        self.builder = builder
        self.rank = rank
        self.news = asyncio.Event()
        self.on_news: Callable[[RequestOutput], None] | None = None
        """Told instead of ``news`` of every change but the last."""
        self.error: MidstreamError | None = None

    def tell(self) -> None:
        """It has changed, or failed."""
        output = self.builder.output
        if self.on_news is None or output.finished or self.error is not None:
            self.news.set()
        else:
            self.on_news(output)

    async def wait(self) -> None:
        """Until there is news. Raises the request's error."""
        await self.news.wait()
        self.news.clear()
        if self.error is not None:
            raise self.error


class _Rank:
    """One engine process and the socket to it."""

    def __init__(self, process: EngineProcess, context: zmq.asyncio.Context) -> None:
        self.process = process
        self.socket: zmq.asyncio.Socket = context.socket(zmq.PAIR)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(process.address)
        process.launch()
        self.pidfd = os.pidfd_open(process.pid)
        self.reader: asyncio.Task[None] | None = None
        self.status: dict[str, Any] | None = None
        """Its first one, once it serves."""


class AsyncLLM:
    """``async with AsyncLLM(model=…) as llm`` or ``llm = AsyncLLM(…); await llm.start()``; close with ``aclose()``.

    Takes the fields of EngineConfig; a model of the Hub is fetched here and now. Belongs to one event loop. If the
    core dies, every open stream and call raises EngineDead, and so does every later one.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = located(EngineConfig.from_options({"model": model, **options}))
        self.text = Text(self.config.tokenizer or self.config.model)
        self._ranks: list[_Rank] = []
        self._router = Router(self.config.data_parallel_size)
        self._coordinator: group.Coordinator | None = None
        """Of several ranks."""
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._streams: dict[str, _Stream] = {}
        self._leaving: dict[str, _Stream] = {}
        """Streams whose reader has left, until the core has said the last word on them."""
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ops = itertools.count(1)
        self._core_has_tokenizer = False
        self._dead: MidstreamError | None = None
        self.ended = asyncio.Event()
        """Set once the engine is gone, closed or dead."""
        self._started: asyncio.Future[dict[str, Any]] | None = None
        self._context: zmq.asyncio.Context | None = None

    # -- life --------------------------------------------------------------------------------------------------

    async def start(self, timeout_s: float = _START_TIMEOUT_S) -> dict[str, Any]:
        """Start the core and wait until it serves; its first status. Raises what kept it from starting."""
        self._check_alive()
        if self._started is None:
            loop = asyncio.get_running_loop()
            self._started = loop.create_future()
            self._context = zmq.asyncio.Context()
            for rank, process in enumerate(self._processes()):
                self._ranks.append(_Rank(process, self._context))
                loop.add_reader(self._ranks[rank].pidfd, self._process_ended, rank)
                self._ranks[rank].reader = loop.create_task(self._read(rank))
                self._post(rank, process.start_message)
        try:
            return await asyncio.wait_for(asyncio.shield(self._started), timeout_s)
        except TimeoutError as error:
            await self.aclose()
            raise TimedOut(f"the engine did not start within {timeout_s} s") from error
        except MidstreamError:
            await self.aclose()
            raise

    def _processes(self) -> list[EngineProcess]:
        """One for each rank, not started."""
        config, size = self.config, self.config.data_parallel_size
        if size == 1:
            return [EngineProcess(config)]
        self._coordinator = group.Coordinator(size, lockstep=config.enable_expert_parallel)
        meeting = None
        if config.enable_expert_parallel:
            self._directory = tempfile.TemporaryDirectory(prefix="midstream-", ignore_cleanup_errors=True)
            meeting = f"file://{self._directory.name}/meeting"
        return [EngineProcess(config, rank, meeting) for rank in range(size)]

    async def aclose(self) -> None:
        """Shut the core down: every open stream ends with EngineDead. Bounded; may be called twice."""
        ranks, self._ranks = self._ranks, []
        if not ranks:
            return
        loop = asyncio.get_running_loop()
        for rank in ranks:
            loop.remove_reader(rank.pidfd)
            os.close(rank.pidfd)
        is_lockstep = self._coordinator is not None and self._coordinator.lockstep
        if is_lockstep and self._dead is None:  # they leave together: who left alone would be lost to the others
            assert self._coordinator is not None
            sends = self._coordinator.call(_SELF, None, "shutdown", {}, time.monotonic())
            frames = [(to, _frame(message)) for to, message in sends if isinstance(to, int)]
        else:
            frames = [(to, encode(Shutdown())) for to in range(len(ranks))]
        for to, frame in frames:
            _send(ranks[to].socket, frame)
        self._fail_all(EngineDead("the engine was closed"))
        await asyncio.gather(*(loop.run_in_executor(None, rank.process.end) for rank in ranks))
        readers = [rank.reader for rank in ranks if rank.reader is not None]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        for rank in ranks:
            rank.socket.close()
        if self._clock is not None:
            self._clock.cancel()
        if self._directory is not None:
            self._directory.cleanup()
        assert self._context is not None
        self._context.term()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- generation --------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        cache_salt: str = "",
        priority: int = 0,
        session: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the cumulative output after each step that changed it; the last one has ``finished``.

        The object is the same one each time and goes on growing: copy what must not change. Leaving the loop early
        aborts the request. ``priority``: a lower number is more urgent. ``session``: with several ranks, all
        requests of one go to the same. Raises EnginePaused (retry later), InvalidInput or EngineDead.
        """
        params = sampling_params or SamplingParams()
        async with self._stream(prompt, params, request_id, cache_salt, priority, session) as stream:
            output = stream.builder.output
            while not output.finished:
                await stream.wait()
                if output.finished or not params.final_only:
                    yield output

    async def follow(
        self,
        on_news: Callable[[RequestOutput], None],
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        cache_salt: str = "",
        priority: int = 0,
        session: str | None = None,
    ) -> None:
        """:meth:`generate` without a task that wakes for each token: ``on_news`` gets the output after each change of a
        sample, called by the reader of the engine's messages, so it must not raise. Returns when it has finished."""
        async with self._stream(prompt, params, request_id, cache_salt, priority, session) as stream:
            stream.on_news = (lambda _: None) if params.final_only else on_news
            await stream.wait()
            on_news(stream.builder.output)

    @contextlib.asynccontextmanager
    async def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        cache_salt: str,
        priority: int,
        session: str | None,
    ) -> AsyncIterator[_Stream]:
        """A request in the engine; aborted where the block is left before its output has finished."""
        if not isinstance(params, SamplingParams):
            raise InvalidInput(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        _check_text(request_id=request_id or "", cache_salt=cache_salt)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidInput(f"priority must be an integer, got {priority!r}")
        await self.start()
        self._check_alive()
        needs_text = params.detokenize or params.structured_outputs is not None or isinstance(prompt, (str, dict))
        if needs_text and self.text.exists and not self.text.is_loaded:
            await asyncio.to_thread(self.text.load)  # seconds where it imports transformers: not on this loop
        if params.structured_outputs is not None:
            await self.prepare_grammars()
        text, ids = prompt_ids(prompt, self.text)
        request_id = uuid.uuid4().hex if request_id is None else request_id
        while (left := self._leaving.get(request_id)) is not None:
            await left.news.wait()  # a step at most: its last words must not be taken for ours
            self._check_alive()
        if request_id in self._streams:
            raise InvalidInput(f"request id {request_id!r} is in use; choose another")
        builder = OutputBuilder(request_id, text, ids, params, self.text if self.text.exists else None)
        stream = _Stream(builder, self._router.pick(session))
        self._send(stream.rank, Add(request_id, ids, core_params(params), cache_salt, priority))
        self._streams[request_id] = stream
        self._router.begin(stream.rank, params.n)
        try:
            yield stream
        finally:
            self._streams.pop(request_id, None)
            self._router.end(stream.rank, params.n)
            if not stream.builder.is_over and stream.error is None and self._dead is None:
                stream.news.clear()
                self._leaving[request_id] = stream
                if not stream.builder.output.finished:  # else a stop text ended it, and it is aborted already
                    self._post(stream.rank, encode(Abort([request_id])))

    async def generate_one(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None
    ) -> RequestOutput:
        """The finished output alone: one message from the core per sample."""
        params = dataclasses.replace(params, final_only=True, detokenize=bool(params.stop))
        outputs: list[RequestOutput] = []
        await self.follow(outputs.append, prompt_token_ids, params, request_id)
        return outputs[-1]

    async def prepare_grammars(self) -> None:
        """Give the core its view of the tokenizer, for structured outputs. The first request that wants them does this
        too; with a large vocabulary it then holds up the others' next step for up to a second."""
        if not self._core_has_tokenizer:
            await self._call("load_grammar_tokenizer", text=await asyncio.to_thread(self.text.to_json))
            self._core_has_tokenizer = True

    def check_alive(self) -> None:
        """Raises EngineDead, or what else ended the engine, if it is gone."""
        self._check_alive()

    async def abort(self, request_id: str) -> None:
        _check_text(request_id=request_id)
        for rank in range(len(self._ranks)):
            self._send(rank, Abort([request_id]))

    # -- verbs -------------------------------------------------------------------------------------------------

    async def pause_generation(
        self,
        mode: PauseMode = "abort",
        clear_cache: bool = True,
        timeout_s: float | None = None,
        owner: str | None = None,
        lease_s: float | None = None,
    ) -> dict[str, Any]:
        """See EngineClient. ``owner``: only it, or force, changes or undoes this pause. ``lease_s``: resumes by
        itself after so long, unless it is taken again."""
        limit = _PAUSE_TIMEOUT_S if mode != "wait" else None if timeout_s is None else timeout_s + _PAUSE_TIMEOUT_S
        options = {"mode": mode, "clear_cache": clear_cache, "timeout_s": timeout_s}
        return await self._call("pause_generation", limit, **options, owner=owner, lease_s=lease_s)

    async def resume_generation(self, owner: str | None = None, force: bool = False) -> dict[str, Any]:
        return await self._call("resume_generation", _PAUSE_TIMEOUT_S, owner=owner, force=force)

    async def is_paused(self) -> bool:
        return bool((await self._call("is_paused", _PAUSE_TIMEOUT_S))["is_paused"])

    async def init_weight_transfer_engine(self, request: dict[str, Any]) -> dict[str, Any]:
        return await self._call("init_weight_transfer_engine", request=request)

    async def start_weight_update(
        self, manifest: dict[str, Any] | None = None, mode: str | None = None, cast: str | None = None
    ) -> dict[str, Any]:
        """``mode`` and ``cast`` are by default the engine's ``default_update_mode`` and ``default_cast``."""
        return await self._call("start_weight_update", manifest=manifest, mode=mode, cast=cast)

    async def update_weights(self, request: dict[str, Any]) -> dict[str, Any]:
        """One chunk: ``{"update_info": {…}}``, or ``{"weight_dir": path}``. Without a start it is a whole update."""
        return await self._call("update_weights", _TRANSFER_TIMEOUT_S, request=request)

    async def finish_weight_update(
        self, weight_version: str | None = None, kv_policy: KVPolicy | None = None
    ) -> dict[str, Any]:
        options = {"weight_version": weight_version, "kv_policy": kv_policy}
        return await self._call("finish_weight_update", _TRANSFER_TIMEOUT_S, **options)

    async def abort_weight_update(self) -> dict[str, Any]:
        return await self._call("abort_weight_update")

    async def shutdown_weight_transfer_engine(self) -> dict[str, Any]:
        return await self._call("shutdown_weight_transfer_engine")

    async def update_weight_version(self, new_version: str) -> dict[str, Any]:
        """The label alone; number and weights stay."""
        return await self._call("update_weight_version", new_version=new_version)

    async def weight_checker(self, action: str, baseline: dict[str, str] | None = None) -> dict[str, Any]:
        """checksum: digests of what is held. compare: against ``baseline``. reset: zeros, as a commit, while paused."""
        return await self._call("weight_checker", action=action, baseline=baseline)

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> dict[str, Any]:
        return await self._call("sleep", None if mode == "wait" else _VERB_TIMEOUT_S, level=level, mode=mode)

    async def wake_up(self, tags: list[str] | None = None) -> dict[str, Any]:
        return await self._call("wake_up", tags=tags)

    async def is_sleeping(self) -> bool:
        return bool((await self._call("is_sleeping", _PAUSE_TIMEOUT_S))["is_sleeping"])

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> dict[str, Any]:
        """``reset_running_requests``: also the KV of live requests, which they compute again."""
        return await self._call("reset_prefix_cache", reset_running_requests=reset_running_requests)

    async def abort_requests(self, request_ids: list[str] | None = None) -> dict[str, Any]:
        return await self._call("abort_requests", request_ids=request_ids)

    async def status(self) -> dict[str, Any]:
        """Of all ranks together; with several, ``ranks`` has what differs between them."""
        return await self._call("status", _PAUSE_TIMEOUT_S)

    async def weight_digests(self) -> dict[str, Any]:
        return await self._call("weight_digests")

    # -- inside ------------------------------------------------------------------------------------------------

    async def call(self, verb: str, arguments: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """A verb of the engine by its name."""
        return await self._call(verb, limit_s, **arguments)

    async def _call(self, verb: str, limit_s: float | None = _VERB_TIMEOUT_S, /, **arguments: Any) -> dict[str, Any]:
        await self.start()
        self._check_alive()
        op = next(self._ops)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[op] = future
        try:
            if self._coordinator is None:
                self._send(0, Call(op, verb, arguments))
            else:
                self._pass_on(self._coordinator.call(_SELF, op, verb.removesuffix("_generation"), arguments, time.monotonic()))
            return await asyncio.wait_for(future, limit_s)
        except TimeoutError as error:
            if isinstance(error, MidstreamError):
                raise
            raise TimedOut(f"the engine did not answer {verb} within {limit_s} s") from error
        finally:
            self._calls.pop(op, None)

    def _pass_on(self, sends: list[group.Send]) -> None:
        """What the coordinator says, to the ranks and to ourselves."""
        assert self._coordinator is not None
        for to, message in sends:
            match message:
                case group.Answer(call, result):
                    self._answered(call, result)
                case group.Lost(error) if isinstance(to, str):
                    self._fail_all(error)
                case _ if isinstance(to, int) and self._ranks:
                    self._post(to, _frame(message))
        due = self._coordinator.next_deadline
        if self._clock is not None:
            self._clock.cancel()
        self._clock = None
        if due is not None:
            left_s = max(due - time.monotonic(), 0.0)
            self._clock = asyncio.get_running_loop().call_later(left_s, self._tick)

    def _tick(self) -> None:
        assert self._coordinator is not None
        self._pass_on(self._coordinator.tick(time.monotonic()))

    def _answered(self, op: int, result: dict[str, Any] | MidstreamError) -> None:
        future = self._calls.get(op)
        if future is None or future.done():
            return
        if isinstance(result, MidstreamError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _send(self, rank: int, message: ToCore) -> None:
        """Post ``message``. Raises EngineDead, or InvalidInput for what can not be sent."""
        self._check_alive()
        try:
            frame = encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(f"a value can not be sent to the engine: {error}") from error
        self._post(rank, frame)

    def _post(self, rank: int, frame: bytes) -> None:
        _send(self._ranks[rank].socket, frame)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    async def _read(self, rank: int) -> None:
        socket = self._ranks[rank].socket
        try:
            while True:
                self._take(rank, await socket.recv())
        except Exception as error:  # nobody may wait for a reader that is gone
            self._fail_all(EngineDead(f"the front end failed: {type(error).__name__}: {error}"))
            raise

    def _take(self, rank: int, frame: bytes) -> None:
        message = from_core_decoder.decode(frame)
        match message:
            case Outputs():
                for increment in message.increments:
                    stream = self._streams.get(increment.parent_id)
                    if stream is not None:
                        try:
                            if (stopped := stream.builder.add(increment)) is not None:
                                self._post(rank, encode(Abort([stopped])))
                        except Exception as fault:  # a tokenizer that can not decode an id, say: this stream's alone
                            stream.error = MidstreamError(f"the output can not be shown: {fault}")
                            self._post(rank, encode(Abort([increment.parent_id])))
                        stream.tell()
                    elif (left := self._leaving.get(increment.parent_id)) is not None:
                        left.builder.add(increment)
                        if left.builder.is_over:
                            self._leaving.pop(increment.parent_id).news.set()
                for request_id, error in message.refused:
                    if request_id in self._streams:
                        self._streams[request_id].error = from_wire(error)
                        self._streams[request_id].tell()
                    elif request_id in self._leaving:
                        self._leaving.pop(request_id).news.set()
                for answer in message.answers:
                    result = (answer.value or {}) if answer.error is None else from_wire(answer.error)
                    if self._coordinator is None:
                        self._answered(answer.op, result)
                    else:
                        self._pass_on(self._coordinator.answered(rank, answer.op, result))
                if self._coordinator is not None:
                    for op in message.prepared:
                        self._pass_on(self._coordinator.prepared(rank, op))
                    if message.due is not None:
                        self._pass_on(self._coordinator.due(rank, message.due))
            case Wake(wave):
                assert self._coordinator is not None
                self._pass_on(self._coordinator.start_wave(rank, wave))
            case Ready():
                self._ranks[rank].status = message.status
                self._all_ready()
            case Failed():
                self._lost(rank, from_wire(message.error))

    def _all_ready(self) -> None:
        statuses = {rank: one.status for rank, one in enumerate(self._ranks) if one.status is not None}
        if self._started is None or self._started.done() or len(statuses) < len(self._ranks):
            return
        if len({status["weights_id"] for status in statuses.values()}) > 1:
            return self._fail_all(MidstreamError("the ranks loaded different weights: is the checkpoint being written?"))
        self._started.set_result(group.merge_status(list(statuses.values())) if self._coordinator else statuses[0])

    def _lost(self, rank: int, error: MidstreamError) -> None:
        """A rank is gone, or has said that it goes. The others do not stay behind alone."""
        if self._coordinator is not None and self._dead is None:
            for other, one in enumerate(self._ranks):
                if other != rank and one.process.exit_code is None:
                    os.kill(one.process.pid, signal.SIGUSR1)  # it says where it is
            self._pass_on(self._coordinator.rank_lost(rank, error.message))
        self._fail_all(error)

    def _process_ended(self, rank: int) -> None:
        """A core's process is gone: take what it still managed to say, then fail everything that waits."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._ranks[rank].pidfd)
        process = self._ranks[rank].process

        async def last_words() -> None:
            await asyncio.sleep(0.05)
            which = f" of rank {rank}" if self._coordinator else ""
            self._lost(rank, EngineDead(f"the engine process{which} ended (exit code {process.exit_code}); start a new one"))

        self._last_words = loop.create_task(last_words())

    def _fail_all(self, error: MidstreamError) -> None:
        self._dead = self._dead or error
        self.ended.set()
        for stream in [*self._streams.values(), *self._leaving.values()]:
            stream.error = self._dead
            stream.news.set()
        self._leaving.clear()
        for future in [*self._calls.values(), self._started]:
            if future is not None and not future.done():
                future.set_exception(self._dead)
                future.exception()  # seen: whoever waits gets it, and if nobody does there is nothing to warn of


_SELF = "front"
"""Our own name to the coordinator."""


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


def _send(socket: zmq.asyncio.Socket, frame: bytes) -> None:
    """Without waiting: the queue is unbounded, and to a core that is gone there is nothing to wait for."""
    future = socket.send(frame)
    if future is not None:
        asyncio.ensure_future(future).add_done_callback(lambda done: done.cancelled() or done.exception())


def _check_text(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, str):
            raise InvalidInput(f"{name} must be a text, got {value!r}")
