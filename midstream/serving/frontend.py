"""What the generation routes share: the model's names, text to ids beside the event loop, and the way to a job."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from midstream.errors import InvalidInput, MidstreamError, NotFound
from midstream.metrics import ServerMetrics
from midstream.serving.answers import JobResponse, Shape
from midstream.serving.async_llm import AsyncLLM
from midstream.serving.bodies import RequestFields
from midstream.serving.jobs import Jobs, Work
from midstream.serving.settings import ServerSettings
from midstream.types import SamplingParams

T = TypeVar("T")
_MAX_KEY = 512
_TEMPLATE_S = 2.0
"""For one rendering of a chat template that came with a request; everyone else's text waits."""


class Frontend:
    """One server's view of its engine. Belongs to the engine's event loop."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.metrics = ServerMetrics()
        if llm.config.tokenizer is not None and not self.has_text:
            raise InvalidInput(f"there is no tokenizer at {llm.config.tokenizer}: give a directory with tokenizer.json")
        self.jobs = Jobs(llm, settings, self.metrics)
        given = llm.config.model_name or llm.config.model
        self.names = settings.served_model_name or (given,)
        self._known = {*self.names, given, os.path.abspath(os.path.expanduser(given))}
        self.started: dict[str, Any] = {}
        """The engine's first status."""
        # One thread: the tokenizer loads once, and prompts are encoded in the order of arrival.
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="text")

    @property
    def max_model_len(self) -> int:
        return int(self.started["max_model_len"])

    async def start(self) -> None:
        self.started = await self.llm.start()
        if self.llm.text.is_quick:  # now, while no request can be held up by it
            with contextlib.suppress(Exception):  # whoever asks for text or structured outputs is told
                await self.llm.prepare_grammars()

    async def close(self) -> None:
        await self.jobs.close()
        self._text_thread.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises NotFound for a model that is not here; a missing name is this one."""
        if name is None:
            return self.names[0]
        if name in self._known or os.path.abspath(name) in self._known:
            return name
        raise NotFound(f"the model {name!r} is not here: this server has {', '.join(map(repr, self.names))}")

    # -- text --------------------------------------------------------------------------------------------------

    @property
    def has_text(self) -> bool:
        return self.llm.text.exists

    async def beside(self, work: Callable[[], T]) -> T:
        """``work`` in the text thread. What a tokenizer or a template raises there is the request's fault."""
        if not self.has_text:
            raise InvalidInput(f"there is no tokenizer beside {self.llm.config.model}: speak token ids")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._text_thread, work)
        except MidstreamError:
            raise
        except Exception as error:
            raise InvalidInput(f"the text can not be made into tokens: {type(error).__name__}: {error}") from error

    async def encode(self, texts: list[str], add_special_tokens: bool = True, at_least: int = 0) -> list[list[int]]:
        """Each text's ids. Raises InvalidInput, before encoding it, for a text that can not fit into max_model_len and
        has more than ``at_least`` characters."""
        max_chars = await self._max_chars(at_least)
        encode = self.llm.text.encode
        # One by one: other requests' texts come in between.
        return [await self.beside(partial(encode, text, add_special_tokens, max_chars)) for text in texts]

    async def chat_ids(self, messages: list[dict[str, Any]], arguments: dict[str, Any], at_least: int = 0) -> list[int]:
        """The ids of ``messages`` under the chat template. Raises InvalidInput as :meth:`encode` does."""
        limit_s = _TEMPLATE_S if arguments.get("chat_template") else None
        max_chars = await self._max_chars(at_least)
        return await self.beside(lambda: self.llm.text.apply_chat_template(messages, limit_s, max_chars, **arguments))

    async def _max_chars(self, at_least: int) -> int:
        fits = await self.beside(lambda: self.llm.text.max_chars(self.max_model_len))
        return min(max(fits, at_least), self.settings.max_body_bytes)

    # -- jobs --------------------------------------------------------------------------------------------------

    def answer(self, request: Request, body: RequestFields, work: Work, shape: Shape, prefix: str) -> JobResponse:
        """Hand ``work`` to the engine, or find it there by its idempotency key, and answer from it."""
        key = request.headers.get("idempotency-key") or body.request_id
        session = request.headers.get("x-session-id")
        for what, name in (("an idempotency key", key), ("a session id", session)):
            if name is not None and len(name) > _MAX_KEY:
                raise InvalidInput(f"{what} has at most {_MAX_KEY} characters, got {len(name)}")
        work = dataclasses.replace(work, session=session)
        asked = None if key is None else [request.url.path, body.model_dump(mode="json")]
        job = self.jobs.submit(work, asked, prefix, body.request_id, key)
        return JobResponse(job, shape, is_stream=bool(body.stream), heartbeat_s=self.settings.heartbeat_s)

    def work(self, prompts: list[list[int]], body: RequestFields, params: SamplingParams) -> Work:
        """Raises InvalidInput for what needs text where there is no tokenizer."""
        if params.detokenize and not self.has_text:
            raise InvalidInput(f"there is no tokenizer beside {self.llm.config.model}: stop texts and text need one")
        return Work(prompts, params, body.cache_salt or "", body.priority or 0)
