"""A job and its readers, over an engine that says what the test wants; and the bytes of an event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from midstream.errors import InvalidInput
from midstream.metrics import ServerMetrics
from midstream.serving.answers import Cursor, pieces, to_json
from midstream.serving.jobs import Job, Jobs, Reader, Work
from midstream.serving.settings import ServerSettings
from midstream.types import CompletionOutput, RequestOutput, SamplingParams


class Engine:
    """AsyncLLM.follow as far as a job sees it."""

    def __init__(self) -> None:
        self.output = RequestOutput("r", None, [5], [CompletionOutput(0)])
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_news: Callable[[RequestOutput], None] = lambda _: None

    async def follow(self, on_news: Callable[[RequestOutput], None], *_: Any) -> None:
        self.on_news = on_news
        await self.over
        on_news(self.output)

    def say(self, *tokens: int) -> None:
        self.output.outputs[0].token_ids += tokens
        self.on_news(self.output)


def run(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, 20))


async def job() -> tuple[Engine, Job]:
    engine = Engine()
    made = Jobs(engine, ServerSettings(), ServerMetrics()).submit(Work([[5]], SamplingParams()), None)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return engine, made


async def read(job: Job, reader: Reader, cursors: list[Cursor]) -> list[list[int]]:
    """The tokens of each piece, to the job's end."""
    found = []
    while await reader.news() is not None:
        found += [piece.out.token_ids[piece.start : piece.end] for piece in pieces(job, cursors)]
    return found


def test_every_reader_sees_every_token_once_at_its_own_pace() -> None:
    async def body() -> None:
        engine, made = await job()
        with made.reading(20) as one, made.reading(20) as two:
            reading = asyncio.ensure_future(read(made, one, [Cursor(0)]))
            await asyncio.sleep(0)
            for token in (1, 2, 3):
                engine.say(token)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            engine.over.set_result(None)
            assert await reading == [[1], [2], [3]]
            assert await read(made, two, [Cursor(0)]) == [[1, 2, 3]]  # it was busy: all in one piece
            with made.reading(20) as late:
                assert await read(made, late, [Cursor(0)]) == [[1, 2, 3]]

    run(body())


def test_a_reader_hears_a_beat_when_nothing_comes_and_only_then() -> None:
    async def body() -> None:
        engine, made = await job()
        with made.reading(0.02) as reader, made.reading(20) as patient:
            assert [await reader.news() for _ in range(3)] == [False, False, False]
            waiting = asyncio.ensure_future(patient.news())
            engine.say(1)
            assert await reader.news() is True and await waiting is True
            assert await reader.news() is False
            engine.over.set_result(None)
            assert await read(made, reader, [Cursor(0)]) == [[1]]

    run(body())


def test_the_job_s_error_reaches_every_reader() -> None:
    async def body() -> None:
        engine, made = await job()
        with made.reading(20) as one, made.reading(20) as two:
            waiting = asyncio.ensure_future(one.news())
            await asyncio.sleep(0)
            engine.over.set_exception(InvalidInput("no"))
            for news in (waiting, two.news()):
                with pytest.raises(InvalidInput, match="no"):
                    while await news is not None:
                        news = two.news()

    run(body())


@pytest.mark.parametrize(
    "value",
    [
        {"text": "plain", "n": 1, "logprob": -1.2345678901234567, "none": None, "tuple": (1, 2.5e-7), "3": True},
        {"text": "half \ud83d of a smile"},
        {"text": "line\u2028separators\u0085split a client's lines", "\u00e4": "\u4e2d\U0001f600\x7f\x00"},
        {"seed": (1 << 63) - 1, "large": 1 << 80},
    ],
)
def test_an_event_is_ascii_and_says_what_json_says(value: Any) -> None:
    data = to_json(value)
    assert data.isascii() and data.count(b"\n") == 0 and len(data.decode().splitlines()) == 1
    assert json.loads(data) == json.loads(json.dumps(value))
