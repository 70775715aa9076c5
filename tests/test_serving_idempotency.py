"""Idempotency keys: the same key and body is the same generation, whoever reads it and however often they leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import httpx
import pytest

from midstream.metrics import ServerMetrics
from midstream.serving.async_llm import AsyncLLM
from midstream.serving.jobs import Jobs
from midstream.serving.settings import ServerSettings
from servers import LIMIT_S, Served, events, lines_of, served

LONG = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "temperature": 1.0, "return_token_ids": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as found:
        yield found


@contextlib.asynccontextmanager
async def client(server: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as found:
        yield found


async def until(http: httpx.AsyncClient, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    while not condition(status := (await http.get("/status")).json()):
        pass
    return status  # type: ignore[no-any-return]


def started(server: Served) -> int:
    return int(server.status()["server"]["generations_started"])


def ids_of(chunks: list[dict[str, Any]]) -> list[int]:
    return [t for e in chunks for c in e["choices"] for t in c["token_ids"]]


async def leave_after(http: httpx.AsyncClient, body: dict[str, Any], number: int, **options: Any) -> list[str]:
    """Read ``number`` events of a stream, then close the connection; what was read."""
    seen: list[str] = []
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}, **options) as response:
        assert response.status_code == 200
        async for line in lines_of(response):
            if line.startswith("data: "):
                seen.append(line)
            if len(seen) == number:
                break
    return seen


@pytest.mark.parametrize("by_header", [True, False])
def test_a_stream_that_was_left_is_taken_up_from_its_first_token(server: Served, by_header: bool) -> None:
    name = f"stream-{by_header}"
    options: dict[str, Any] = {"headers": {"Idempotency-Key": name}} if by_header else {}
    body = LONG if by_header else {**LONG, "request_id": name}
    before, vanished = started(server), server.metric("midstream_requests_vanished_total")

    async def run() -> None:
        async with client(server) as http:
            seen = await leave_after(http, body, 5, **options)
            again = await http.post("/v1/completions", json={**body, "stream": True}, **options)
            chunks = events(again.text)
            assert len(ids_of(chunks)) == 300
            first = [t for line in seen for t in ids_of(events(line + "\ndata: [DONE]"))]
            assert ids_of(chunks)[: len(first)] == first
            stored = events((await http.post("/v1/completions", json={**body, "stream": True}, **options)).text)
            assert ids_of(stored) == ids_of(chunks) and stored[0]["id"] == chunks[0]["id"]

    asyncio.run(run())
    assert started(server) == before + 1
    assert server.metric("midstream_requests_vanished_total") == vanished


def test_documents_are_stored_and_another_body_under_the_key_is_a_conflict(server: Served) -> None:
    headers = {"Idempotency-Key": "document"}
    body = {**LONG, "max_tokens": 8, "n": 2}
    before = started(server)
    first = server.post("/v1/completions", body, headers=headers)
    again = server.post("/v1/completions", dict(reversed(body.items())), headers=headers)
    assert first.status_code == again.status_code == 200 and first.json() == again.json()
    assert started(server) == before + 1
    others: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {**body, "n": 1}),
        ("/v1/completions", {**body, "stream": True}),
        ("/v1/completions", {**body, "some_new_key": 1}),
        ("/inference/v1/generate", {"token_ids": [4]}),
    ]
    for path, other in others:
        refused = server.post(path, other, headers=headers)
        assert refused.status_code == 409 and "'document'" in refused.json()["error"]["message"]
    assert server.post("/v1/completions", body).json()["id"] != first.json()["id"]
    for name in ("Idempotency-Key", "X-Session-ID"):
        assert server.post("/v1/completions", body, headers={name: "k" * 513}).status_code == 400


def test_many_readers_of_one_generation(server: Served) -> None:
    before = started(server)
    joined = server.metric("midstream_requests_reattached_total") + 4

    async def run() -> None:
        async with client(server) as http:
            await http.post("/pause?mode=keep")
            asked = {**LONG, "max_tokens": 40, "request_id": "shared"}
            readers = [asyncio.create_task(http.post("/v1/completions", json=asked)) for _ in range(5)]
            await until(http, lambda s: s["held"] == 1)
            while f"midstream_requests_reattached_total {joined}" not in (await http.get("/metrics")).text:
                pass
            readers[0].cancel()
            readers[1].cancel()
            await asyncio.gather(*readers[:2], return_exceptions=True)
            await http.post("/resume")
            found = [r.json() for r in await asyncio.gather(*readers[2:])]
            assert found[0] == found[1] == found[2] and len(found[0]["choices"][0]["token_ids"]) == 40

    asyncio.run(run())
    assert started(server) == before + 1


def test_a_keyed_request_that_nobody_takes_up_ends_after_its_time_and_an_unkeyed_one_at_once() -> None:
    with served(reattach_s=0.3) as server:

        async def run() -> None:
            async with client(server) as http:
                await http.post("/pause?mode=keep")
                tasks = [
                    asyncio.create_task(http.post("/v1/completions", json={**LONG, "request_id": "left"})),
                    asyncio.create_task(http.post("/v1/completions", json=LONG)),
                ]
                await until(http, lambda s: s["held"] == 2)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                status = await until(http, lambda s: s["held"] == 1)
                assert status["server"]["unread"] == 1 and status["server"]["requests"] == 1
                await until(
                    http, lambda s: s["held"] == 0 and not s["server"]["unread"] and not s["server"]["requests"]
                )
                await http.post("/resume")
                # it is forgotten: the key begins anew, and its answer is forgotten in turn
                again = await http.post("/v1/completions", json={**LONG, "max_tokens": 3, "request_id": "left"})
                assert again.status_code == 200
                await until(http, lambda s: not s["server"]["unread"])
                other = await http.post("/v1/completions", json={**LONG, "max_tokens": 4, "request_id": "left"})
                assert other.status_code == 200

        asyncio.run(run())
        assert server.metric("midstream_requests_vanished_total") == 2
        server.idle()


def test_a_keyed_request_runs_on_while_nobody_reads(server: Served) -> None:
    async def run() -> None:
        async with client(server) as http:
            asked = {**LONG, "request_id": "runs-on"}
            task = asyncio.create_task(http.post("/v1/completions", json=asked))
            await until(http, lambda s: s["running"] == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            status = await until(http, lambda s: not s["running"] and not s["server"]["requests"])
            assert status["server"]["unread"] >= 1
            before = status["num_sampled_tokens"]
            answer = (await http.post("/v1/completions", json=asked)).json()
            assert len(answer["choices"][0]["token_ids"]) == 300 and answer["choices"][0]["finish_reason"] == "length"
            assert (await http.get("/status")).json()["num_sampled_tokens"] == before

    asyncio.run(run())


def test_what_was_aborted_is_not_kept() -> None:
    """Who reads while it runs gets what there is; who asks again later, the whole, also if nobody read it."""
    with served(reattach_s=600.0) as server:

        async def run(path: str) -> None:
            joined = server.metric("midstream_requests_reattached_total") + 2
            unread = server.status()["server"]["unread"]
            async with client(server) as http:
                await http.post("/pause?mode=keep")
                asked = {**LONG, "prompt": ["abc", "d"], "n": 2, "max_tokens": 20, "request_id": f"cut-{path}"}
                alone = {**LONG, "max_tokens": 20, "request_id": f"unread-{path}"}
                readers = [asyncio.create_task(http.post("/v1/completions", json=asked)) for _ in range(3)]
                leaver = asyncio.create_task(http.post("/v1/completions", json=alone))
                await until(http, lambda s: s["held"] == 5 and s["server"]["requests"] == 2)
                while f"midstream_requests_reattached_total {joined}" not in (await http.get("/metrics")).text:
                    pass
                leaver.cancel()
                await asyncio.gather(leaver, return_exceptions=True)
                await until(http, lambda s: s["server"]["unread"] == unread + 1)
                await http.post(path)
                found = [r.json() for r in await asyncio.gather(*readers)]
                assert found[0] == found[1] == found[2]
                assert {c["finish_reason"] for c in found[0]["choices"]} == {"abort"}
                status = await until(http, lambda s: not s["server"]["requests"])
                assert status["server"]["unread"] == unread
                await http.post("/resume")
                for body in (asked, alone):
                    whole = (await http.post("/v1/completions", json=body)).json()
                    assert {c["finish_reason"] for c in whole["choices"]} == {"length"}
                    assert (await http.post("/v1/completions", json=body)).json() == whole  # which is kept

        for path in ("/pause?mode=abort", "/abort_requests"):
            asyncio.run(run(path))


def test_closing_over_an_engine_that_does_not_answer_ends_in_time() -> None:
    class Stuck:
        async def end_requests(self) -> None:
            await asyncio.Event().wait()

    jobs = Jobs(cast(AsyncLLM, Stuck()), ServerSettings(shutdown_s=0.01), ServerMetrics())
    asyncio.run(asyncio.wait_for(jobs.close(), LIMIT_S))
    assert jobs.is_closing


def test_what_failed_is_not_kept(server: Served) -> None:
    headers = {"Idempotency-Key": "retry"}
    body = {**LONG, "max_tokens": 3}
    server.post("/pause?mode=abort")
    assert server.post("/v1/completions", body, headers=headers).status_code == 503
    server.post("/resume")
    assert server.post("/v1/completions", body, headers=headers).status_code == 200
    bad = {**body, "prompt": [[4, 5], [1 << 30]]}
    for _ in range(2):
        assert server.post("/v1/completions", bad, headers={"Idempotency-Key": "bad"}).status_code == 400
    server.idle()
