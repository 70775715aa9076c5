"""How a job's outputs leave: one JSON document, or server-sent events; and what happens when the client leaves first.

Both look for the client's departure while they wait, so a request that a pause holds ends with its client too. A
stream that has nothing to say sends comment lines, so that nobody's read timeout ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from midstream.errors import MidstreamError, to_wire
from midstream.serving import shapes
from midstream.serving.jobs import Job, Reader
from midstream.types import CompletionOutput, RequestOutput

_log = logging.getLogger(__name__)
_HEARTBEAT = b": held\n\n"
_DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    """Compact JSON in ASCII: clients split a stream's lines at characters beyond it, and lone surrogates must be
    escaped. No number in it may be infinite or undefined."""
    with contextlib.suppress(ValueError, TypeError):  # a lone surrogate, a key that is no text
        if (data := msgspec.json.encode(value)).isascii():
            return data
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def error_body(error: MidstreamError) -> dict[str, Any]:
    """OpenAI's error shape; ``type`` and ``details`` are what :func:`midstream.errors.from_wire` reads."""
    wire = to_wire(error)
    return {"error": {**wire, "param": None, "code": error.status}}


def error_response(error: MidstreamError, headers: dict[str, str] | None = None) -> Response:
    wanted = {**({"Retry-After": "1"} if error.retryable else {}), **(headers or {})}
    return Response(to_json(error_body(error)), error.status, wanted, "application/json")


@dataclass(slots=True)
class Cursor:
    """How much of one choice a stream has sent."""

    index: int
    """Of the choice in the answer: prompt-major."""
    num_tokens: int = 0
    num_chars: int = 0
    num_spans: int = 0
    is_started: bool = False
    is_finished: bool = False


@dataclass(slots=True)
class Piece:
    """The part of a choice that one event carries: output tokens [start, end) and the text that came with them."""

    cursor: Cursor
    output: RequestOutput
    out: CompletionOutput
    start: int
    end: int
    text: str
    text_start: int
    is_first: bool
    is_last: bool
    has_new_version: bool


class Shape(Protocol):
    """What a route's answers look like."""

    def whole(self, job: Job, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The one document."""
        ...

    def event(self, job: Job, piece: Piece) -> list[dict[str, Any]]:
        """The events for one piece of one choice."""
        ...

    def last_event(self, job: Job, outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
        """After all pieces: usage, where it was asked for."""
        ...


class JobResponse(Response):
    """Answers one HTTP request from a job, whose reader it is from the first byte to the last."""

    def __init__(self, job: Job, shape: Shape, *, is_stream: bool, heartbeat_s: float) -> None:
        super().__init__()
        self._job = job
        self._shape = shape
        self._is_stream = is_stream
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._job.reading(self._heartbeat_s) as reader:
            answer = self._stream(reader, send) if self._is_stream else self._document(reader, scope, receive, send)
            answering = asyncio.ensure_future(answer)
            leaving = asyncio.ensure_future(_disconnected(receive))
            try:
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                if not answering.done():
                    answering.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)
            if not answering.cancelled():
                answering.result()

    async def _document(self, reader: Reader, scope: Scope, receive: Receive, send: Send) -> None:
        while await reader.news() is not None:
            pass
        outputs = [output for output in self._job.outputs if output is not None]
        response = Response(to_json(self._shape.whole(self._job, outputs)), media_type="application/json")
        await response(scope, receive, send)

    async def _stream(self, reader: Reader, send: Send) -> None:
        job, shape = self._job, self._shape
        cursors = [Cursor(i) for i in range(len(job.outputs) * job.work.params.n)]
        is_started = False
        try:
            while (has_news := await reader.news()) is not None:
                if not is_started:  # until here an error has a status of its own
                    await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
                    is_started = True
                data = _HEARTBEAT
                if has_news:
                    data = b"".join(_event(e) for piece in pieces(job, cursors) for e in shape.event(job, piece))
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            outputs = [output for output in job.outputs if output is not None]
            last = shape.last_event(job, outputs)
            tail = (_event(last) if last else b"") + _DONE
        except MidstreamError as error:
            if not is_started:
                raise
            _log.warning("request %s failed in its stream: %s", job.id, error.message)
            tail = _event(error_body(error)) + _DONE
        await send({"type": "http.response.body", "body": tail, "more_body": False})


_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def pieces(job: Job, cursors: Sequence[Cursor]) -> list[Piece]:
    """What each choice has that its cursor has not sent; moves the cursors."""
    found: list[Piece] = []
    for prompt, output in enumerate(job.outputs):
        if output is None:
            continue
        for out in output.outputs:
            cursor = cursors[prompt * job.work.params.n + out.index]
            end, chars, spans = len(out.token_ids), len(out.text), len(out.weight_versions)
            is_last = out.finish_reason is not None
            if cursor.is_finished or ((end, chars) == (cursor.num_tokens, cursor.num_chars) and not is_last):
                continue
            found.append(
                Piece(
                    cursor=cursor,
                    output=output,
                    out=out,
                    start=cursor.num_tokens,
                    end=end,
                    text=out.text[cursor.num_chars :],
                    text_start=cursor.num_chars,
                    is_first=not cursor.is_started,
                    is_last=is_last,
                    has_new_version=spans > cursor.num_spans,
                )
            )
            cursor.num_tokens, cursor.num_chars, cursor.num_spans = end, chars, spans
            cursor.is_started, cursor.is_finished = True, is_last
    return found


def choice_record(out: CompletionOutput, *, is_last: bool, weight_versions: bool) -> dict[str, Any]:
    """The end of a choice's event, for a trainer: version spans where they are wanted, the rest once it is over."""
    found: dict[str, Any] = shapes.record(out) if is_last else {"finish_reason": None, "stop_reason": None}
    if weight_versions:
        found["weight_versions"] = shapes.version_spans(out.weight_versions)
    return found


def _event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
