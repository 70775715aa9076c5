"""HTTPClient: the answers that AsyncLLM gives, over HTTP; time limits, error texts, and retries where they are safe."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import httpx
import pytest
import torch

from checkpoints import random_weights, write_checkpoint
from cores import TINY, digests_of
from fakes_weights import DictSource
from midstream.errors import (
    Conflict,
    EngineDead,
    EnginePaused,
    InvalidInput,
    MidstreamError,
    NotFound,
    PauseCancelled,
    TimedOut,
    Unauthorized,
    UpdateConflict,
    WeightUpdateError,
)
from midstream.rl.engine_thread import EngineThread
from midstream.rl.sync import SyncClient
from midstream.serving.app import ServerSettings, create_app
from midstream.serving.async_llm import AsyncLLM
from midstream.serving.client import HTTPClient
from midstream.types import SamplingParams
from midstream.weights.base import trainer_engines

torch.set_num_threads(1)

OPTIONS: dict[str, Any] = {"num_blocks": 64, "num_threads": 1, "max_num_seqs": 8}
W1 = random_weights("llama", 1, **TINY)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        write_checkpoint(root / f"w{seed}", "llama", seed, **TINY)
    return root


def run(coroutine: Coroutine[Any, Any, Any], limit_s: float = 90.0) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, limit_s))


@contextlib.asynccontextmanager
async def engine(model: pathlib.Path, client: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Any]:
    """(HTTPClient, the AsyncLLM behind it), without a socket between them."""
    llm = AsyncLLM(str(model), **OPTIONS)
    app = create_app(llm, ServerSettings(**settings))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        HTTPClient("http://engine/v1", transport=transport, **(client or {})) as http,
    ):
        yield http, llm


PARAMS = {
    "plain": SamplingParams(max_tokens=12, seed=3, ignore_eos=True, detokenize=False),
    "cut": SamplingParams(
        max_tokens=12, seed=4, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, ignore_eos=True, detokenize=False,
        logprobs=3, prompt_logprobs=2, return_sampling_mask=True, repetition_penalty=1.1,
    ),
    "processed": SamplingParams(
        n=3, max_tokens=12, seed=5, temperature=0.7, ignore_eos=True, detokenize=False, logprobs=0,
        logprobs_mode="processed_logprobs",
    ),
    "stop": SamplingParams(max_tokens=200, seed=6, stop_token_ids=tuple(range(40)), detokenize=False),
    "no limit": SamplingParams(max_tokens=None, seed=7, stop_token_ids=tuple(range(80)), detokenize=False),
}  # fmt: skip


def test_generation_gives_what_the_engine_gives(models: pathlib.Path) -> None:
    async def body() -> None:
        async with engine(models / "w0") as (http, llm):
            for name, params in PARAMS.items():
                theirs = await http.generate_one([5, 6, 7, 8], params, f"http-{name}")
                ours = await llm.generate_one([5, 6, 7, 8], params, f"http-{name}")
                for one, other in zip(theirs.outputs, ours.outputs, strict=True):
                    other.num_cached_tokens = one.num_cached_tokens  # the second one finds the first one's prefix
                    for entries in other.logprobs or ():
                        for entry in entries.values():
                            entry.decoded_token = None
                    if one.logprobs is not None and params.logprobs:
                        # the wire has the sampled token and the k best, and ranks only where the engine has them
                        for mine, entries in zip(one.logprobs, other.logprobs or (), strict=True):
                            assert next(iter(mine)) == next(iter(entries))
                            assert {t: e.logprob for t, e in entries.items()}.items() >= {
                                t: e.logprob for t, e in mine.items()
                            }.items()
                        one.logprobs = other.logprobs
                    assert one == other, name
                assert theirs.prompt_token_ids == [5, 6, 7, 8] and theirs.finished
                assert theirs.prompt_logprobs == ours.prompt_logprobs, name

    run(body())


def test_versions_and_kept_kv_come_over_the_wire(models: pathlib.Path) -> None:
    async def body() -> None:
        long = SamplingParams(max_tokens=300, seed=3, ignore_eos=True, detokenize=False)
        async with engine(models / "w0") as (http, _):
            for number, clear_cache in ((1, False), (2, True)):
                while True:  # until a pause comes in its middle: on a busy machine it may have ended before
                    before = (await http.status())["num_sampled_tokens"]
                    task = asyncio.create_task(http.generate_one([5, 6, 7], long))
                    while (await http.status())["num_sampled_tokens"] < before + 5:
                        pass
                    assert (await http.pause_generation("keep", clear_cache))["mode"] == "keep"
                    if (await http.status())["held"]:
                        break
                    await http.resume_generation()
                    await task
                assert await http.is_paused()
                found = await http.update_weights({"weight_dir": str(models / f"w{number % 2}")})
                assert found["number"] == number
                assert (await http.resume_generation())["was_paused"]
                out = (await task).outputs[0]
                assert [s.number for s in out.weight_versions] == [number - 1, number]
                assert (out.kv_versions is None) is clear_cache
                assert (out.num_reprefilled_tokens > 0) is clear_cache

    run(body())


def test_every_verb(models: pathlib.Path) -> None:
    async def body() -> None:
        async with engine(models / "w0") as (http, _):
            await http.health()
            assert (await http.weight_info())["weight_version"] == "0"
            session = await http.start_weight_update(mode="partial", cast="allow")
            assert (session["mode"], session["cast"]) == ("partial", "allow")
            assert (await http.abort_weight_update())["aborted"] == session["session_id"]
            await http.init_weight_transfer_engine({"init_info": {}})
            await http.shutdown_weight_transfer_engine()
            await http.start_weight_update()
            await http.update_weights({"weight_dir": str(models / "w1")})
            assert (await http.finish_weight_update("v1", "keep"))["version"] == "v1"
            assert (await http.weight_checker("checksum"))["checksums"] == digests_of(W1)
            assert (await http.weight_checker("compare", digests_of(W1)))["match"]
            assert (await http.update_weight_version("v2"))["new_version"] == "v2"
            assert (await http.reset_prefix_cache())["success"]
            assert (await http.reset_prefix_cache(reset_running_requests=True))["success"]
            assert (await http.sleep(1))["status"] == "sleeping" and await http.is_sleeping()
            assert (await http.wake_up(["weights"]))["status"] == "sleeping"
            assert (await http.wake_up())["status"] == "awake"
            assert (await http.abort_requests())["aborted"] == 0
            await http.pause_generation("keep", owner="me", lease_s=60)
            with pytest.raises(Conflict, match="belongs to 'me'"):
                await http.resume_generation()
            await http.resume_generation(owner="me")
            await http.pause_generation("wait", timeout_s=5, owner="me")
            assert (await http.resume_generation(force=True))["was_paused"]

    run(body())


def test_the_trainers_halves_work_through_it(models: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Over a real socket, as a trainer runs it: the blocking client, an event loop in a thread."""
    import threading

    started: Any = None
    ready, stop = threading.Event(), None

    def serve() -> None:
        async def body() -> None:
            nonlocal started, stop
            llm = AsyncLLM(str(models / "w0"), **OPTIONS, weight_transfer_backend="nccl")
            app = create_app(llm, ServerSettings(port=0))
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            async with app.router.lifespan_context(app):
                import uvicorn

                listening = socket.create_server(("127.0.0.1", 0))  # from now on who connects is served, soon or later
                server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
                serving = loop.create_task(server.serve([listening]))
                started = (listening.getsockname()[1], loop)
                ready.set()
                await stop.wait()
                server.should_exit = True
                await serving

        asyncio.run(body())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(60)
    port, loop = started
    client = HTTPClient(f"http://127.0.0.1:{port}")
    bridge = EngineThread()
    try:
        sync = SyncClient(client, bridge, 30.0)
        trainer = trainer_engines.lookup("nccl").trainer_init({}, client=sync, source=DictSource(W1))
        for number in (1, 2):
            assert trainer.send_weights(f"v{number}")["number"] == number
        trainer.source = DictSource({**W1, "nobody": torch.zeros(3)})
        with pytest.raises(WeightUpdateError, match="nobody") as wrong:
            trainer.send_weights(manifest=False)
        assert wrong.value.tensors == ["nobody"]
        info = bridge.run(client.weight_checker("compare", digests_of(W1)), 30, "compare")
        assert info["match"] and info["version"] == "v2"
        trainer.shutdown()
        bridge.run(client.aclose(), 10, "close")
    finally:
        bridge.close()
        assert stop is not None
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)


# -- errors ----------------------------------------------------------------------------------------------------------


def test_the_servers_errors_keep_their_class_and_their_text(models: pathlib.Path) -> None:
    async def body() -> None:
        async with engine(models / "w0") as (http, _):
            with pytest.raises(InvalidInput, match="no room in max_model_len"):
                await http.generate_one([5] * 512, PARAMS["plain"])
            with pytest.raises(UpdateConflict, match="call start_weight_update first") as conflict:
                await http.finish_weight_update()
            assert conflict.value.status == 409 and "http://engine/finish_weight_update" in conflict.value.__notes__[0]
            await http.pause_generation("abort")
            with pytest.raises(EnginePaused) as paused:
                await http.generate_one([5], PARAMS["plain"])
            assert paused.value.retryable and paused.value.details["mode"] == "abort"
            await http.resume_generation()
            with pytest.raises(InvalidInput, match="action"):
                await http.weight_checker("all")
        async with engine(models / "w0", api_key="a", control_token="b") as (http, _):
            for call in (http.generate_one([5], PARAMS["plain"]), http.resume_generation()):
                with pytest.raises(Unauthorized):
                    await call
        keys = {"api_key": "a", "control_token": "b"}
        async with engine(models / "w0", keys, **keys) as (http, _):
            assert len((await http.generate_one([5], PARAMS["plain"])).outputs[0].token_ids) == 12
            assert not (await http.resume_generation())["was_paused"]

    run(body())


@pytest.mark.parametrize(
    ("status", "content", "kind", "match"),
    [
        (409, b'{"error": {"type": "PauseCancelled", "message": "gone", "details": {"a": 1}}}', PauseCancelled, "gone"),
        (400, b'{"error": {"type": "BadRequestError", "message": "wrong", "code": 400}}', InvalidInput, "wrong"),
        (404, b'{"detail": "Not Found"}', NotFound, "Not Found"),
        (404, b'{"error": "no route"}', NotFound, "no route"),
        (502, b"<html>bad gateway</html>", MidstreamError, "bad gateway"),
        (500, b"", MidstreamError, "status 500"),
        (200, b"[1]", MidstreamError, "no JSON object"),
        (200, b"pong", MidstreamError, "no JSON object: 'pong'"),
        (400, b'{"error": {"type": "InvalidInput", "message": "m", "details": {"message": 1}}}', InvalidInput, "m"),
    ],
)
def test_whatever_answers_there_is_an_error_with_its_text(
    status: int, content: bytes, kind: type[MidstreamError], match: str
) -> None:
    async def body() -> None:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, content=content))
        async with HTTPClient("http://engine", transport=transport) as http:
            with pytest.raises(kind, match=match) as error:
                await http.resume_generation()
            assert type(error.value) is kind

    run(body())


def test_an_answer_that_is_not_midstreams_is_an_error() -> None:
    async def body() -> None:
        for found in ({}, {"choices": [{}]}, {"choices": 3, "request_id": "a"}):
            transport = httpx.MockTransport(lambda _, found=found: httpx.Response(200, json=found))
            async with HTTPClient("http://engine", transport=transport) as http:
                with pytest.raises(MidstreamError, match="not midstream's"):
                    await http.generate_one([5], PARAMS["plain"])

    run(body())


# -- time limits -------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def silent(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] | None = None,
) -> AsyncIterator[str]:
    """A server that takes connections and, unless ``answer`` does, never says a word."""
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is not None:
            await answer(reader, writer)
        else:
            await ended.wait()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ended.set()


def test_case_033_a_silent_server_fails_every_call_in_time() -> None:
    async def body() -> None:
        async with (
            silent() as url,
            HTTPClient(url, timeout_s=0.2, transfer_timeout_s=0.2, generate_timeout_s=0.2) as http,
        ):
            calls: dict[str, Callable[[], Awaitable[Any]]] = {
                "/pause": http.pause_generation,
                "/resume": http.resume_generation,
                "/is_paused": http.is_paused,
                "/status": http.status,
                "/health": http.health,
                "/init_weight_transfer_engine": lambda: http.init_weight_transfer_engine({"init_info": {}}),
                "/start_weight_update": http.start_weight_update,
                "/update_weights": lambda: http.update_weights({"update_info": {}}),
                "/finish_weight_update": http.finish_weight_update,
                "/abort_weight_update": http.abort_weight_update,
                "/sleep": http.sleep,
                "/wake_up": http.wake_up,
                "/abort_requests": http.abort_requests,
                "/inference/v1/generate": lambda: http.generate_one([5], PARAMS["plain"]),
            }
            for path, call in calls.items():
                start = time.monotonic()
                with pytest.raises(TimedOut, match=rf"{url}{path}: the engine did not answer within 0.2 s"):
                    await call()
                assert time.monotonic() - start < 2, path
            start = time.monotonic()
            with pytest.raises(TimedOut):
                await http.pause_generation("wait", timeout_s=0.1)
            assert 0.25 < time.monotonic() - start < 2

    run(body())


def test_case_033_no_connection_says_so() -> None:
    async def body() -> None:
        async with silent() as url:
            pass
        async with HTTPClient(url, timeout_s=5) as http:
            with pytest.raises(EngineDead, match=rf"{url}/resume: no engine answers there \(connecting\)"):
                await http.resume_generation()

        class NoWay(httpx.AsyncBaseTransport):
            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                raise httpx.ConnectTimeout("")

        async with HTTPClient("http://engine", connect_timeout_s=3, transport=NoWay()) as http:
            with pytest.raises(TimedOut, match=r"no connection within 3 s \(connecting\)"):
                await http.status()

    run(body())


def test_bad_limits_and_addresses_are_refused() -> None:
    for options in ({"timeout_s": 0}, {"connect_timeout_s": float("inf")}, {"generate_timeout_s": True}):
        with pytest.raises(InvalidInput, match=f"{next(iter(options))} must be a positive number"):
            HTTPClient("http://engine", **options)
    with pytest.raises(InvalidInput, match="starts with http"):
        HTTPClient("engine:8000")


# -- retries -----------------------------------------------------------------------------------------------------------


class Flaky(httpx.AsyncBaseTransport):
    """Fails as often as told, then answers."""

    def __init__(self, faults: list[Exception], answer: dict[str, Any]) -> None:
        self.faults, self.answer, self.requests = list(faults), answer, 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests += 1
        if self.faults:
            raise self.faults.pop(0)
        return httpx.Response(200, json=self.answer)


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.serving.client._RETRY_DELAY_S", 0.0)


def test_what_was_never_sent_is_tried_again_and_what_may_have_been_is_not() -> None:
    async def body() -> None:
        no, broken = httpx.ConnectError("refused"), httpx.RemoteProtocolError("broke")
        for faults, call, requests, done in (
            ([no, no, no], "resume_generation", 4, True),
            ([no, no, no, no], "resume_generation", 4, False),
            ([broken], "resume_generation", 1, False),
            ([no, broken], "pause_generation", 2, False),
            ([httpx.ReadError("")], "update_weights", 1, False),
            ([httpx.WriteError("")], "finish_weight_update", 1, False),
            ([broken, no, broken], "status", 4, True),
            ([broken], "is_paused", 2, True),
        ):
            transport = Flaky(list(faults), {"is_paused": True})
            async with HTTPClient("http://engine", transport=transport) as http:
                arguments = [{"weight_dir": "x"}] if call == "update_weights" else []
                if done:
                    await getattr(http, call)(*arguments)
                else:
                    with pytest.raises(EngineDead):
                        await getattr(http, call)(*arguments)
                assert transport.requests == requests, call

    run(body())


def test_a_broken_connection_is_taken_up_again_where_the_request_runs(models: pathlib.Path) -> None:
    class Breaking(httpx.AsyncBaseTransport):
        """Lets the first answers come, and loses them."""

        def __init__(self, inner: httpx.AsyncBaseTransport, losses: int) -> None:
            self.inner, self.losses = inner, losses

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            response = await self.inner.handle_async_request(request)
            if self.losses and request.url.path.endswith("generate"):
                self.losses -= 1
                raise httpx.ReadError("lost")
            return response

    async def body() -> None:
        llm = AsyncLLM(str(models / "w0"), **OPTIONS)
        app = create_app(llm, ServerSettings())
        async with app.router.lifespan_context(app):
            transport = Breaking(httpx.ASGITransport(app), 3)
            async with HTTPClient("http://engine", transport=transport) as http:
                unseeded = SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False)
                out = await http.generate_one([5, 6, 7], unseeded)
                assert len(out.outputs[0].token_ids) == 12 and transport.losses == 0
                status = await http.status()
                assert status["server"]["generations_started"] == 1 and status["num_sampled_tokens"] == 12

    run(body())


def test_a_call_that_is_cancelled_or_late_ends_its_request(models: pathlib.Path) -> None:
    async def body() -> None:
        long = SamplingParams(max_tokens=400, ignore_eos=True, detokenize=False)
        async with engine(models / "w0", {"generate_timeout_s": 0.5}) as (http, _):

            async def idle() -> bool:
                status = await http.status()
                return bool(status["running"] + status["waiting"] == 0)

            task = asyncio.create_task(http.generate_one([5, 6, 7], long))
            while await idle():
                pass
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await idle()
            await http.pause_generation("keep")
            with pytest.raises(TimedOut):
                await http.generate_one([5, 6, 7], long)
            assert await idle()
            await http.resume_generation()

    run(body())
