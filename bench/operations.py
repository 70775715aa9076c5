"""Pause and resume with 32 requests in flight, in process and through the HTTP server.

    python -m bench --only operations

Two engines in turn, one after the other: ``AsyncLLM`` (its core is a process of its own) and ``midstream serve``, over
bare connections: a client library's own time (httpx: 2 to 3 ms a call) is not the server's. 32 streams of different
prompts of 64 tokens, bf16, all cores. The unit of all references is one decode step: the median time from one step of
all 32 to the next, from the engine's step log of the same run.

**pause** is ``pause_generation("keep", clear_cache=False)`` at a random moment of a step, from the call to its answer;
the median of all is judged, the worst is a field. At most one step: the engine finishes the step in flight.

**resume to the next token** is from the call of ``resume_generation`` to the first new token of any stream, against
the steps just before and after it; of all such pairs the one with the median ratio counts. No token can come before a
whole step has run, and the step after a rest takes longer than others by itself: ``after_a_rest`` is the same quotient,
of the same requests after the same rest, for an engine in this very process, where neither call nor token has a way to
go. ``round_trip_ms`` is what a call takes that only asks.

**resume after clear_cache=True** is from the call to the first new token of every one of the 32 streams, whose KV must
be computed again. The reference is a prefill of as many tokens: 32 fresh prompts, as long as what the streams held,
sent while the engine is paused, and then the same call and the same wait. ``first_ratio`` is the same quotient for the
first new token of any stream. Of several such pairs the one with the median ratio counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from statistics import median
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch

from bench.load_server import serve
from bench.machine import figure, measured
from bench.step import decode_step_s
from midstream import LLM, SamplingParams
from midstream.serving.async_llm import AsyncLLM
from midstream.types import PauseMode

STREAMS, PROMPT_TOKENS, MODEL_LEN = 32, 64, 1024
STEPS_BETWEEN = 8
LIMIT_S = 60.0
_QUIET_S = 0.1
"""After a pause's answer, for tokens still on their way to us; and for fresh requests to arrive."""


class Client(Protocol):
    async def pause_generation(self, mode: PauseMode, clear_cache: bool) -> object: ...

    async def resume_generation(self) -> object: ...

    async def is_paused(self) -> object: ...


class Connection:
    """The control routes over one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def _call(self, call: str) -> bytes:
        self._writer.write(f"{call} HTTP/1.1\r\nHost: bench\r\nContent-Length: 0\r\n\r\n".encode())
        async with asyncio.timeout(LIMIT_S):
            head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
            body = await self._reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r")[0]))
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"{call}: {head!r} {body!r}")
        return body

    async def pause_generation(self, mode: PauseMode, clear_cache: bool) -> object:
        return await self._call(f"POST /pause?mode={mode}&clear_cache={str(clear_cache).lower()}")

    async def resume_generation(self) -> object:
        return await self._call("POST /resume")

    async def is_paused(self) -> object:
        return await self._call("GET /is_paused")


Stream = Callable[[list[int]], AsyncIterator[int]]
"""A prompt's tokens so far, whenever there are more."""


class Flow:
    """Streams in flight, and when their tokens came."""

    def __init__(self, stream: Stream, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.counts = [0] * len(prompts)
        self._times = [0.0] * len(prompts)
        self._news = asyncio.Event()
        self._tasks = [asyncio.ensure_future(self._read(i, stream(prompt))) for i, prompt in enumerate(prompts)]

    async def _read(self, i: int, stream: AsyncIterator[int]) -> None:
        async for count in stream:
            self.counts[i], self._times[i] = count, time.perf_counter()
            self._news.set()

    async def grown(self, since: list[int], by: int = 1) -> tuple[float, float]:
        """When the first and when the last of the streams had ``by`` tokens more than ``since``. Exact for the first
        only where nothing had come since then."""
        first: float | None = None
        async with asyncio.timeout(LIMIT_S):
            while True:
                times = [t for t, count, n in zip(self._times, self.counts, since, strict=True) if count > n]
                first = min(times, default=None) if first is None else first
                if first is not None and all(c >= n + by for c, n in zip(self.counts, since, strict=True)):
                    return first, max(times)
                for task in self._tasks:
                    if task.done():
                        task.result()
                        raise RuntimeError("a stream ended early: MODEL_LEN is too short for so many rounds")
                self._news.clear()
                await self._news.wait()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(_QUIET_S)


async def timed_resume(client: Client, flow: Flow) -> tuple[float, float]:
    """Seconds from the call to the first new token of any stream, and of every stream."""
    since = list(flow.counts)

    async def resume() -> float:
        start = time.perf_counter()
        await client.resume_generation()
        return start

    answer = asyncio.ensure_future(resume())
    first, last = await flow.grown(since)
    start = await answer
    return first - start, last - start


async def found_by(client: Client, stream: Stream, log: pathlib.Path, pauses: int, clears: int) -> dict[str, Any]:
    """All times in seconds: lists by name, and step."""
    rng = random.Random(0)

    def fresh(lengths: list[int]) -> list[list[int]]:
        return [[rng.randrange(10, 40_000) for _ in range(length)] for length in lengths]

    found: dict[str, list[float]] = {n: [] for n in ("pause", "resume", "ask", "again", "again_1", "fresh", "fresh_1")}
    resumed: list[float] = []
    flow = Flow(stream, fresh([PROMPT_TOKENS] * STREAMS))
    await flow.grown(flow.counts.copy(), STEPS_BETWEEN)
    step_s = decode_step_s(log, STREAMS)
    for _ in range(pauses):
        await flow.grown(list(flow.counts), STEPS_BETWEEN)
        await asyncio.sleep(rng.random() * step_s)
        start = time.perf_counter()
        await client.pause_generation("keep", clear_cache=False)
        found["pause"].append(time.perf_counter() - start)
        await asyncio.sleep(_QUIET_S)
        start = time.perf_counter()
        await client.is_paused()
        found["ask"].append(time.perf_counter() - start)
        resumed.append(time.monotonic())
        found["resume"].append((await timed_resume(client, flow))[0])
    await flow.grown(list(flow.counts), STEPS_BETWEEN)
    found["around"] = [decode_step_s(log, STREAMS, near) for near in resumed]
    await flow.end()
    flow = Flow(stream, fresh([PROMPT_TOKENS] * STREAMS))
    for _ in range(clears):
        await flow.grown(list(flow.counts), STEPS_BETWEEN)
        await client.pause_generation("keep", clear_cache=True)
        await asyncio.sleep(_QUIET_S)
        held = [len(prompt) + count for prompt, count in zip(flow.prompts, flow.counts, strict=True)]
        first, last = await timed_resume(client, flow)
        found["again_1"].append(first)
        found["again"].append(last)
        await flow.end()
        await client.pause_generation("keep", clear_cache=False)
        flow = Flow(stream, fresh(held))
        await asyncio.sleep(5 * _QUIET_S)
        first, last = await timed_resume(client, flow)
        found["fresh_1"].append(first)
        found["fresh"].append(last)
    await flow.end()
    return found | {"step": decode_step_s(log, STREAMS)}


async def offline(model: str, log: pathlib.Path, pauses: int, clears: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_model_len": MODEL_LEN, "max_num_seqs": STREAMS, "step_log": str(log)}
    options |= {"dtype": "bfloat16", "num_blocks": STREAMS * MODEL_LEN // 16}
    async with AsyncLLM(model, **options) as llm:

        async def stream(prompt: list[int]) -> AsyncIterator[int]:
            params = SamplingParams(max_tokens=MODEL_LEN - len(prompt), ignore_eos=True, logprobs=1)
            async with contextlib.aclosing(llm.generate(prompt, params)) as outputs:
                async for output in outputs:
                    yield len(output.outputs[0].token_ids)

        return await found_by(llm, stream, log, pauses, clears)


async def served(model: str, log: pathlib.Path, pauses: int, clears: int) -> dict[str, Any]:
    flags = ["--dtype", "bfloat16", "--max-model-len", str(MODEL_LEN), "--max-num-seqs", str(STREAMS)]
    flags += ["--num-gpu-blocks-override", str(STREAMS * MODEL_LEN // 16), "--step-log", str(log)]
    flags += ["--num-threads", str(torch.get_num_threads())]
    with serve(pathlib.Path(model), *flags) as (url, _):
        address = urlsplit(url)

        async def stream(prompt: list[int]) -> AsyncIterator[int]:
            body = {"prompt": prompt, "max_tokens": MODEL_LEN - len(prompt), "ignore_eos": True, "logprobs": 1}
            data = json.dumps(body | {"stream": True, "return_token_ids": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(data)}\r\n"
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            try:
                writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
                count = 0
                while line := await reader.readline():
                    if line.startswith(b"data: {"):
                        count += len(json.loads(line[6:])["choices"][0]["token_ids"])
                        yield count
            finally:
                writer.transport.abort()

        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            return await found_by(Connection(reader, writer), stream, log, pauses, clears)
        finally:
            writer.transport.abort()


def after_a_rest(model: str, times: int) -> float:
    """A decode step after a rest, as long as a pause is here, against the steps before it: the median quotient."""
    rng, ratios = random.Random(0), []
    params = SamplingParams(max_tokens=MODEL_LEN - PROMPT_TOKENS, ignore_eos=True, logprobs=1)
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": MODEL_LEN, "max_num_seqs": STREAMS}
    with LLM(model, num_blocks=STREAMS * MODEL_LEN // 16, **options) as llm:

        def step_s() -> float:
            start = time.perf_counter()
            llm.core.step()
            llm.core.take_outputs()
            return time.perf_counter() - start

        for i in range(STREAMS):
            llm.core.add(str(i), [rng.randrange(10, 40_000) for _ in range(PROMPT_TOKENS)], params)
        while any(request.num_output_tokens < STEPS_BETWEEN for request in llm.core.scheduler.live.values()):
            step_s()
        for _ in range(times):
            before = median(step_s() for _ in range(STEPS_BETWEEN))
            time.sleep(_QUIET_S)
            ratios.append(step_s() / before)
    return median(ratios)


def _median_pair(values: list[float], references: list[float]) -> tuple[float, float]:
    """Of pairs that were measured one after the other, the one with the median ratio; in ms."""
    pairs = sorted(zip(values, references, strict=True), key=lambda pair: pair[0] / pair[1])
    value, reference = pairs[len(pairs) // 2]
    return value * 1e3, reference * 1e3


def figures(model: str, pauses: int = 60, clears: int = 8) -> Iterator[dict[str, Any]]:
    rested, _ = measured(lambda _: after_a_rest(model, pauses))
    for where, run in (("offline", offline), ("server", served)):
        with tempfile.TemporaryDirectory() as folder:

            def turn(i: int, run: Any = run, folder: str = folder) -> dict[str, Any]:
                found: dict[str, Any] = asyncio.run(run(model, pathlib.Path(folder, f"{i}.jsonl"), pauses, clears))
                return found

            found, disturbed = measured(turn)
        ms = {name: median(times) * 1e3 for name, times in found.items() if name != "step"}
        step = found["step"] * 1e3
        again, fresh = _median_pair(found["again"], found["fresh"])
        resume, around = _median_pair(found["resume"], found["around"])
        name = f"pause(keep) with {STREAMS} in flight, {where}"
        worst = {n: round(max(found[n]) * 1e3, 3) for n in ("pause", "resume")}
        yield figure(
            name, ms["pause"], "ms", step, at_most=1.0, of="ratio", worst_ms=worst["pause"], disturbed=disturbed
        )
        yield figure(
            f"resume to the next token, {where}",
            resume,
            "ms",
            around,
            at_most=1.0,
            of="ratio",
            after_a_rest=round(rested, 3),
            worst_ms=worst["resume"],
            round_trip_ms=round(ms["ask"], 3),
            disturbed=disturbed,
        )
        yield figure(
            f"resume after clear_cache against a prefill, {where}",
            again,
            "ms",
            fresh,
            at_most=1.1,
            of="ratio",
            first_ratio=round(ms["again_1"] / ms["fresh_1"], 3),
            disturbed=disturbed,
        )
