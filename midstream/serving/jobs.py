"""The one way in for generation: an HTTP request's prompts as a job that runs whether or not somebody reads it.

    submit ─▶ Job: one AsyncLLM stream per prompt ─▶ outputs, cumulative      readers: each with cursors of its own
                 │ no key: its last reader leaves ─▶ aborted at once, also while a pause holds it
                 └ a key:  its last reader leaves ─▶ runs on, or keeps its answer, for reattach_s; then forgotten

A second request with the same key and the same body is one more reader, from the first token on; another body with
that key is a Conflict. What failed or was aborted is not kept, so a retry runs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from midstream.errors import Conflict, EngineDead, InvalidInput, MidstreamError, Overloaded
from midstream.metrics import ServerMetrics
from midstream.serving.async_llm import AsyncLLM
from midstream.serving.settings import ServerSettings
from midstream.types import RequestOutput, SamplingParams

_log = logging.getLogger(__name__)
ID_PREFIXES = ("", "cmpl-", "chatcmpl-")
"""What the routes put before a client's request id to make the id in their answer."""
_MAX_KEPT = 4096
"""Most jobs kept for nobody but a possible retry; the oldest goes first."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks for, parsed: the ids of each prompt, and how to sample all of them."""

    prompts: Sequence[list[int]]
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    session: str | None = None
    """Requests of one session go to one data-parallel rank, where their prefix may be cached."""


class Job:
    """A request at work. ``outputs[i]`` is prompt i's RequestOutput, growing, None before its first news."""

    def __init__(self, jobs: Jobs, job_id: str, work: Work, key: str | None, digest: str) -> None:
        self.id = job_id
        self.created = int(time.time())
        self.work = work
        self.key = key
        self.digest = digest
        self.outputs: list[RequestOutput | None] = [None] * len(work.prompts)
        self.error: MidstreamError | None = None
        self.is_done = False
        self.num_changes = 0
        self.forget: asyncio.TimerHandle | None = None
        self._readers: set[Reader] = set()
        self._jobs = jobs
        self.task = asyncio.get_running_loop().create_task(self._run())

    @property
    def engine_ids(self) -> list[str]:
        """The ids by which the engine knows this job's requests."""
        if len(self.work.prompts) == 1:
            return [self.id]
        return [f"{self.id}-{i}" for i in range(len(self.work.prompts))]

    @contextlib.contextmanager
    def reading(self, heartbeat_s: float) -> Iterator[Reader]:
        """Somebody reads. What happens to a job that nobody reads any more: see the module."""
        reader = Reader(self, heartbeat_s)
        self._readers.add(reader)
        self._jobs.taken_up(self)
        try:
            yield reader
        finally:
            reader.close()
            self._readers.remove(reader)
            if not self._readers:
                self._jobs.left_alone(self)

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, engine_id in enumerate(self.engine_ids):
                    group.create_task(self._follow(index, engine_id))
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            if not isinstance(first, MidstreamError):
                _log.error("a request failed", exc_info=first)
                first = MidstreamError(f"the request failed: {type(first).__name__}: {first}")
            self.error = first
        except asyncio.CancelledError:
            self.error = EngineDead("the request was abandoned")
            raise
        finally:
            self.is_done = True
            self._jobs.ended(self)
            self._tell()

    async def _follow(self, index: int, engine_id: str) -> None:
        def on_news(output: RequestOutput) -> None:
            self.outputs[index] = output
            self._tell()

        work = self.work
        follow = self._jobs.llm.follow
        await follow(on_news, work.prompts[index], work.params, engine_id, work.cache_salt, work.priority, work.session)

    def _tell(self) -> None:
        self.num_changes += 1
        for reader in self._readers:
            reader.wake()


class Reader:
    """One reader of a job, from its first output on. One task waits at a time."""

    def __init__(self, job: Job, heartbeat_s: float) -> None:
        self._job = job
        self._num_seen = 0
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[bool] = self._loop.create_future()
        self._heartbeat_s = heartbeat_s
        self._since = self._loop.time()
        # One timer for all waits, which looks whether the one it finds has lasted long enough.
        self._timer = self._loop.call_later(heartbeat_s, self._beat)

    async def news(self) -> bool | None:
        """True when there is something to read, False after ``heartbeat_s`` without, None once all has been read.

        Raises the job's error.
        """
        job = self._job
        if self._num_seen == job.num_changes and not job.is_done:
            self._since = self._loop.time()
            self._waiter = self._loop.create_future()
            if not await self._waiter:
                return False
        if job.error is not None:
            raise job.error
        if self._num_seen == job.num_changes:
            return None
        self._num_seen = job.num_changes
        return True

    def wake(self) -> None:
        if not self._waiter.done():
            self._waiter.set_result(True)

    def _beat(self) -> None:
        now = self._loop.time()
        if now < (due := self._since + self._heartbeat_s):
            self._timer = self._loop.call_at(due, self._beat)
            return
        if not self._waiter.done():
            self._waiter.set_result(False)
        self._timer = self._loop.call_at(now + self._heartbeat_s, self._beat)

    def close(self) -> None:
        self._timer.cancel()


class Jobs:
    """All requests of one server, by id and by idempotency key."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self.llm = llm
        self.settings = settings
        self.metrics = metrics
        self.num_started = 0
        self.is_closing = False
        self._running: dict[str, Job] = {}
        self._keyed: dict[str, Job] = {}
        self._waiting: dict[str, Job] = {}
        """Keyed jobs that nobody reads, in the order in which they were left."""
        self._max_model_len = 0

    def submit(
        self, work: Work, body: Any, prefix: str = "", request_id: str | None = None, key: str | None = None
    ) -> Job:
        """The job of this request: a new one, or the one that ``key`` names already.

        ``body``: what was asked, as plain data, to be compared under the same key. ``prefix`` and ``request_id`` make
        the id of a new job. Raises Conflict for another body, Overloaded, InvalidInput; what the engine refuses comes
        from the job.
        """
        digest = "" if key is None else hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        if key is not None and (known := self._keyed.get(key)) is not None:
            if known.digest != digest:
                raise Conflict(
                    f"idempotency key {key!r} belongs to another request body: use a new key for a new request"
                )
            self.metrics.reattached.inc()
            return known
        self._check_limits(work)
        job_id = prefix + (request_id or uuid.uuid4().hex)
        if job_id in self._running:  # the same id under another key
            raise Conflict(f"request id {job_id!r} is in use: choose another")
        job = Job(self, job_id, work, key, digest)
        self._running[job_id] = job
        if key is not None:
            self._keyed[key] = job
        self.num_started += len(work.prompts)
        self.metrics.started.inc(len(work.prompts))
        return job

    def _check_limits(self, work: Work) -> None:
        limits = self.settings
        if self.is_closing:
            raise Overloaded("the server is shutting down")
        if len(self._running) >= limits.max_concurrency:
            raise Overloaded(f"{len(self._running)} requests are at work, the most this server takes: try again later")
        if not work.prompts:
            raise InvalidInput("there is no prompt: give at least one")
        sequences = len(work.prompts) * work.params.n
        if sequences > limits.max_request_sequences:
            raise InvalidInput(
                f"{len(work.prompts)} prompts times n {work.params.n} are {sequences} sequences, over the limit of "
                f"{limits.max_request_sequences}: send several requests"
            )
        tokens = sum(len(prompt) for prompt in work.prompts)
        if tokens > limits.max_request_tokens:
            raise InvalidInput(
                f"{tokens} prompt tokens are over the limit of {limits.max_request_tokens}: send several requests"
            )

    def taken_up(self, job: Job) -> None:
        """``job`` has a reader."""
        if job.forget is not None:
            job.forget.cancel()
            job.forget = None
        if job.key is not None:
            self._waiting.pop(job.key, None)

    def left_alone(self, job: Job) -> None:
        """The last reader has left ``job``."""
        if job.key is None:
            if not job.is_done:
                self.metrics.vanished.inc()
                job.task.cancel()
            return
        if self._keyed.get(job.key) is not job:
            return  # it failed or was aborted, and is forgotten already
        self._waiting[job.key] = job
        job.forget = asyncio.get_running_loop().call_later(self.settings.reattach_s, self._forget, job)
        for oldest in list(itertools.islice(self._waiting.values(), max(len(self._waiting) - _MAX_KEPT, 0))):
            self._forget(oldest)

    def _forget(self, job: Job) -> None:
        assert job.key is not None
        if job.forget is not None:
            job.forget.cancel()
        self._waiting.pop(job.key, None)
        if self._keyed.get(job.key) is job:
            del self._keyed[job.key]
        if not job.is_done:
            self.metrics.vanished.inc()
            job.task.cancel()

    def ended(self, job: Job) -> None:
        """``job`` makes no more outputs."""
        self._running.pop(job.id, None)
        cut = any(c.finish_reason in ("abort", "error") for output in job.outputs if output for c in output.outputs)
        if (job.error is not None or cut) and job.key is not None and self._keyed.get(job.key) is job:
            self._forget(job)
        if job.error is not None:
            return
        for output in job.outputs:
            assert output is not None
            self.metrics.prompt_tokens.inc(len(output.prompt_token_ids))
            for completion in output.outputs:
                self.metrics.output_tokens.inc(len(completion.token_ids))
                self.metrics.finished.labels(completion.finish_reason or "none").inc()

    def engine_ids(self, request_ids: Iterable[str]) -> list[str]:
        """The engine's ids of requests by the ids that clients know: those they sent, or got in an answer."""
        found: list[str] = []
        for name in request_ids:
            jobs = [job for prefix in ID_PREFIXES if (job := self._running.get(prefix + name))]
            # what is not known here may have come to another front end, whose prefixes are the same
            found += [engine_id for job in jobs for engine_id in job.engine_ids] or [p + name for p in ID_PREFIXES]
        return found

    def status(self) -> dict[str, int]:
        """What the server adds to the engine's status."""
        return {
            "requests": len(self._running),
            "unread": len(self._waiting),
            "generations_started": self.num_started,
        }

    async def close(self) -> None:
        """Take no more; end everything with what it has, so that whoever waits gets an answer. Bounded."""
        self.is_closing = True
        jobs = list(self._running.values())
        with contextlib.suppress(MidstreamError, TimeoutError):
            async with asyncio.timeout(self.settings.shutdown_s):
                await self.llm.end_requests()
        if jobs:
            await asyncio.wait([job.task for job in jobs], timeout=self.settings.shutdown_s)
        for job in [*self._running.values(), *self._waiting.values()]:
            if job.forget is not None:
                job.forget.cancel()
            job.task.cancel()
