"""AsyncLLM: the engine core in its own process, driven from asyncio. Streams, pause, and the weight verbs.

With data_parallel_size over 1 there are several such processes. A request goes to one of them; what is asked of the
engine goes through the coordinator to all, and comes back as one answer. With data_parallel_address the engine may be
another node's, and this one of its front ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

from midstream.config import EngineConfig
from midstream.engine.process import Add
from midstream.errors import EngineDead, InvalidInput, MidstreamError, TimedOut, from_wire
from midstream.models.hub import located
from midstream.serving.head import Front
from midstream.serving.node import Node
from midstream.serving.outputs import OutputBuilder, Prompt, core_params, prompt_ids
from midstream.serving.ranks import Ranks
from midstream.serving.restart import START_TIMEOUT_S
from midstream.serving.text import Text
from midstream.types import KVPolicy, PauseMode, RequestIncrement, RequestOutput, SamplingParams

_log = logging.getLogger(__name__)
_VERB_TIMEOUT_S = 120.0
_TRANSFER_TIMEOUT_S = 1800.0
"""For bytes on their way; the engine itself gives up much earlier on a trainer that has gone silent."""
_PAUSE_TIMEOUT_S = 15.0
"""For calls that end within 5 s plus the step in flight."""
_AT_ONCE = 4
"""Increments between two looks at what else is to be done."""


class _Stream:
    """One request's place in the front end: its output so far, and who hears of news."""

    __slots__ = ("builder", "error", "news", "on_news")

    def __init__(self, builder: OutputBuilder) -> None:
        self.builder = builder
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


class AsyncLLM:
    """``async with AsyncLLM(model=…) as llm`` or ``llm = AsyncLLM(…); await llm.start()``; close with ``aclose()``.

    Takes the fields of EngineConfig; a model of the Hub is fetched here and now. Belongs to one event loop. If the
    core dies, every open stream and call raises EngineDead, and so does every later one.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = located(EngineConfig.from_options({"model": model, **options}))
        self.text = Text(self.config.tokenizer or self.config.model)
        self._ranks: Ranks | Node | None = None
        self._front = Front(
            self._take,
            lambda op, result: self._in_order(partial(self._answered, op, result)),
            lambda error: self._in_order(partial(self._fail_all, error)),
        )
        self._unheard: deque[Callable[[], None]] = deque()
        """What the engine has said, and nobody here has heard."""
        self._streams: dict[str, _Stream] = {}
        self._leaving: dict[str, _Stream] = {}
        """Streams whose reader has left, until the core has said the last word on them."""
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ops = itertools.count(1)
        self._core_has_tokenizer = False
        self._dead: MidstreamError | None = None
        self.ended = asyncio.Event()
        """Set once the engine is gone, closed or dead."""
        self._started: asyncio.Task[dict[str, Any]] | None = None

    # -- life --------------------------------------------------------------------------------------------------

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """Start the core and wait until it serves; its first status. Raises what kept it from starting."""
        self._check_alive()
        if self._started is None:
            self._ranks = (Ranks if self.config.owns_engine else Node)(self.config, self._front)
            self._started = asyncio.get_running_loop().create_task(self._ranks.start())
        elif self._is_started:
            return self._started.result()
        try:
            return await asyncio.wait_for(asyncio.shield(self._started), timeout_s)
        except MidstreamError as error:
            self._fail_all(error)
            await self.aclose()
            raise
        except asyncio.CancelledError:
            if self._dead is not None and self._started.cancelled():  # it was closed while it started
                raise self._dead from None
            raise
        except TimeoutError as error:
            await self.aclose()
            raise TimedOut(f"the engine did not start within {timeout_s} s") from error

    @property
    def _is_started(self) -> bool:
        task = self._started
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    async def aclose(self) -> None:
        """Shut the core down: every open stream ends with EngineDead. Bounded; may be called twice."""
        if self._ranks is None:
            return
        self._fail_all(EngineDead("the engine was closed"))
        assert self._dead is not None
        if self._started is not None:
            self._started.cancel()  # it may wait for other nodes, which may never come
            await asyncio.gather(self._started, return_exceptions=True)
        await self._ranks.close(self._dead)

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
        self.check_alive()
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
        self.check_alive()
        stream = _Stream(OutputBuilder(request_id, text, ids, params, self.text if self.text.exists else None))
        with _sending():
            self._engine.add(self._front, Add(request_id, ids, core_params(params), cache_salt, priority), session)
        self._streams[request_id] = stream
        try:
            yield stream
        finally:
            self._streams.pop(request_id, None)
            if stream.builder.is_over or stream.error is not None or self._dead is not None:
                self._engine.forget(self._front, request_id)
            else:
                stream.news.clear()
                self._leaving[request_id] = stream
                if not stream.builder.output.finished:  # else a stop text ended it, and it is aborted already
                    self._engine.abort(self._front, request_id)

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
        """Raises EngineDead, or what else ended the engine, if it is gone; NotReady while it takes no requests,
        because it was started again."""
        self._check_alive()
        if self._ranks is not None:
            self._ranks.check_serving()

    async def abort(self, request_id: str) -> None:
        _check_text(request_id=request_id)
        self._check_alive()
        if self._ranks is not None:
            self._ranks.abort(self._front, request_id)

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

    async def end_requests(self) -> None:
        """Before a close: end the requests that would end with it, all of the engine's or this front end's own."""
        await self.abort_requests(None if self.config.owns_engine else list(self._streams))

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
            with _sending():
                self._engine.call(self._front, op, verb, arguments)
            return await asyncio.wait_for(future, limit_s)
        except TimeoutError as error:
            if isinstance(error, MidstreamError):
                raise
            raise TimedOut(f"the engine did not answer {verb} within {limit_s} s") from error
        finally:
            self._calls.pop(op, None)

    def _answered(self, op: int, result: dict[str, Any] | MidstreamError) -> None:
        future = self._calls.get(op)
        if future is None or future.done():
            return
        if isinstance(result, MidstreamError):
            future.set_exception(result)
        else:
            future.set_result(result)

    @property
    def _engine(self) -> Ranks | Node:
        """Once it was started."""
        assert self._ranks is not None
        return self._ranks

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _take(self, increments: list[RequestIncrement], refused: list[tuple[str, dict[str, Any]]]) -> None:
        """What is new of our requests, and which of them are over with an error. In parts: whoever waits for the first
        has its token before the texts of the others are made."""
        ends = range(1, len(increments) + _AT_ONCE, _AT_ONCE) if increments else ()
        parts = [partial(self._grow, increments[max(end - _AT_ONCE, 0) : end]) for end in ends]
        self._in_order(*parts, *([partial(self._refuse, refused)] if refused else []))

    def _in_order(self, *news: Callable[[], None]) -> None:
        """All that the engine says takes effect in the order in which it said it; the first at once."""
        is_under_way = bool(self._unheard)
        self._unheard += news
        if self._unheard and not is_under_way:
            self._hear()

    def _hear(self) -> None:
        try:
            self._unheard[0]()
        except Exception as error:  # nobody may wait for what was not understood
            _log.exception("midstream: what the engine said was not understood")
            self._engine.over(EngineDead(f"the front end failed: {type(error).__name__}: {error}"))
        finally:  # also where the reader of a stream is interrupted: the loop may be run again
            self._unheard.popleft()
            if self._unheard:
                asyncio.get_running_loop().call_soon(self._hear)

    def _grow(self, increments: list[RequestIncrement]) -> None:
        for increment in increments:
            name = increment.parent_id
            stream = self._streams.get(name)
            if stream is not None:
                try:
                    if (stopped := stream.builder.add(increment)) is not None:
                        self._engine.abort(self._front, name, stopped)
                except Exception as fault:  # a tokenizer that can not decode an id, say: this stream's alone
                    stream.error = MidstreamError(f"the output can not be shown: {fault}")
                    self._engine.abort(self._front, name)
                stream.tell()
            elif (left := self._leaving.get(name)) is not None:
                left.builder.add(increment)
                if left.builder.is_over:
                    self._forget(name)

    def _refuse(self, refused: list[tuple[str, dict[str, Any]]]) -> None:
        for name, error in refused:
            if (stream := self._streams.get(name)) is not None and not stream.builder.is_over:
                stream.error = from_wire(error)
                stream.tell()
            elif name in self._leaving:
                self._forget(name)

    def _forget(self, request_id: str) -> None:
        """The last word on a request whose reader has left."""
        self._leaving.pop(request_id).news.set()
        self._engine.forget(self._front, request_id)

    def _fail_all(self, error: MidstreamError) -> None:
        self._dead = self._dead or error
        self.ended.set()
        for stream in [*self._streams.values(), *self._leaving.values()]:
            stream.error = self._dead
            stream.news.set()
        self._leaving.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._dead)
                future.exception()  # seen: whoever waits gets it, and if nobody does there is nothing to warn of


@contextlib.contextmanager
def _sending() -> Iterator[None]:
    """Raises InvalidInput for what can not be sent."""
    try:
        yield
    except MidstreamError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"a value can not be sent to the engine: {error}") from error


def _check_text(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, str):
            raise InvalidInput(f"{name} must be a text, got {value!r}")
