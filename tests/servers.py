"""A real server on a free loopback port, for tests: uvicorn in a thread, the engine in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import httpx

import midstream
from midstream.serving.async_llm import AsyncLLM
from midstream.serving.server import HTTPServer
from midstream.serving.settings import ServerSettings

MODEL = pathlib.Path(midstream.__file__).parent / "rl" / "models" / "reverse"
"""0.8 M parameters, 512 tokens, 44 ids, with a tokenizer of single letters and no chat template."""
OPTIONS: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 16, "num_blocks": 1024}
LIMIT_S = 30.0


class Served:
    """A server that runs, and how a test talks to it."""

    def __init__(self, server: HTTPServer) -> None:
        self.server = server
        self.url = server.url
        self.http = httpx.Client(base_url=server.url, timeout=LIMIT_S)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def status(self) -> dict[str, Any]:
        return self.get("/status").json()  # type: ignore[no-any-return]

    def metric(self, name: str) -> float:
        """The value of one sample of ``/metrics``; 0 where it is not there yet."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.split()[-1])
        return 0.0

    def wait(self, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Ask for the status until it fits."""
        deadline = time.monotonic() + LIMIT_S
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, f"the status never came to fit: {status}"
        return status

    def idle(self) -> dict[str, Any]:
        """Until nothing runs and every block is free."""
        status = self.wait(lambda s: not s["running"] + s["waiting"] + s["held"] + s["server"]["requests"])
        assert status["num_free_blocks"] == status["num_blocks"]
        return status

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run ``work`` on the server's loop: how a test reaches the engine beside HTTP."""
        loop = self.server._loop
        assert loop is not None
        return asyncio.run_coroutine_threadsafe(work, loop).result(LIMIT_S)


@contextlib.contextmanager
def served(model: pathlib.Path = MODEL, engine: dict[str, Any] | None = None, **settings: Any) -> Iterator[Served]:
    """A server over ``model``; closed at the end, and an error of its thread raised."""
    llm = AsyncLLM(str(model), **{**OPTIONS, **(engine or {})})
    server = HTTPServer(llm, ServerSettings(port=0, **{"heartbeat_s": 0.1, **settings}))
    ready = threading.Event()
    fault: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(server.run(lambda _: ready.set()))
        except BaseException as error:
            fault.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        if fault:
            raise fault[0]
        found = Served(server)
        yield found
        found.http.close()
    finally:
        server.stop()
        thread.join(LIMIT_S)
    assert not thread.is_alive()
    if fault:
        raise fault[0]


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of every ``data:`` line; the stream must end with [DONE]."""
    import json

    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", text[-500:]
    return [json.loads(line) for line in lines[:-1]]


async def lines_of(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line:
            yield line
