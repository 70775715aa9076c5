"""The server around its routes: who may call what, limits, errors, clients that leave, pauses over HTTP, the end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import httpx
import pytest

import midstream
from midstream.cli import main
from midstream.errors import InvalidInput
from midstream.serving import command
from midstream.serving.settings import ServerSettings, is_loopback, is_private
from servers import LIMIT_S, MODEL, Served, events, lines_of, served

LONG = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as found:
        yield found


@pytest.fixture(autouse=True)
def resumed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        found: Served = request.getfixturevalue("server")
        found.post("/resume?force=true")
        found.idle()


def run(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, 60))


@contextlib.asynccontextmanager
async def client(server: Served, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=server.url, **{"timeout": LIMIT_S, "limits": limits, **options}) as found:
        yield found


async def until(http: httpx.AsyncClient, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    while not condition(status := (await http.get("/status")).json()):
        pass
    return status  # type: ignore[no-any-return]


# -- what one can see --------------------------------------------------------------------------------------------------


def test_health_status_info_and_metrics(server: Served) -> None:
    assert server.get("/health").status_code == server.get("/liveness").status_code == 200
    status = server.status()
    assert status["state"] == "running" and status["version"] == "0" and status["weights_id"]
    config = server.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.float32" and config["lora_config"] is None
    assert (
        config["weight_transfer_config"] == {"backend": "ipc"} and config["parallel_config"]["data_parallel_size"] == 1
    )
    assert isinstance(server.get("/server_info").json()["vllm_config"], str)
    world = server.http.request("GET", "/get_world_size", json={})  # SkyRL sends a body, and reads nothing chunked
    assert world.json()["world_size"] == 1 and int(world.headers["content-length"]) > 0
    tokens = server.metric("midstream_output_tokens_total")
    server.post("/v1/completions", {**LONG, "max_tokens": 7, "n": 2})
    assert server.metric("midstream_output_tokens_total") == tokens + 14
    assert server.metric("midstream_engine_up") == 1 and server.metric("midstream_engine_paused") == 0
    assert server.metric("process_resident_memory_bytes") > 0
    assert server.metric("midstream_engine_num_free_blocks") == status["num_blocks"]


def test_errors_have_one_shape_and_no_traceback(server: Served) -> None:
    for method, path, code in (
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/pause?mode=sideways", 400),
        ("GET", "/server_info?config_format=xml", 400),
    ):
        response = server.http.request(method, path)
        assert response.status_code == code, response.text
        error = response.json()["error"]
        assert error["code"] == code and isinstance(error["message"], str) and isinstance(error["type"], str)
        assert "Traceback" not in response.text
    document = server.get("/openapi.json").json()
    assert "/v1/completions" in document["paths"] and "/pause" in document["paths"]
    responses = document["paths"]["/v1/completions"]["post"]["responses"]
    assert set(responses) == {"200", "4XX", "503", "504"}, "422 and 500 are never answered"


def test_errors_have_telling_types(server: Served) -> None:
    wrong = server.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["type"] == "MethodNotAllowed"
    broken = server.http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400 and "application/json" not in broken.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_body_of_another_content_type_is_told_so(server: Served, kind: str | None, path: str) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = server.http.post(path, content=b'{"prompt": "abc"}', headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == 400 and "content type has to be application/json" in error["message"], answer.text
    assert error["type"] == "InvalidInput" and (kind or "missing") in error["message"]
    fine = {"content-type": "application/json; charset=utf-8"}
    assert server.http.post("/tokenize", content=b'{"prompt": "abc"}', headers=fine).status_code == 200
    told = server.http.post("/tokenize", content=b"3", headers=fine).json()["error"]["message"]
    assert "content type" not in told


@pytest.mark.parametrize("path", ["/health", "/liveness"])
def test_health_answers_those_who_ask_for_no_body(server: Served, path: str) -> None:
    answer = server.http.head(path)
    assert answer.status_code == 200 and answer.content == b""
    assert "head" not in server.get("/openapi.json").json()["paths"][path]


def test_the_document_says_what_is_taken(server: Served) -> None:
    document = server.get("/openapi.json").json()
    schemas = {name: schema["properties"] for name, schema in document["components"]["schemas"].items()}
    whole = schemas["CompletionBody"]["n"]["anyOf"][0]
    assert (whole["minimum"], whole["maximum"]) == (1, server.status()["max_num_seqs"])
    assert schemas["CompletionBody"]["seed"]["anyOf"][0]["maximum"] == (1 << 63) - 1
    assert schemas["DetokenizeBody"]["tokens"]["items"] == {"type": "integer", "minimum": 0, "maximum": 43}
    assert "skyrl_sleep_for_weight_sync" in schemas["RpcBody"]["method"]["enum"]
    assert schemas["InitBody"]["init_info"]["properties"].keys() == {"packed_buffer_size_bytes", "shared"}
    names = next(p["schema"] for p in document["paths"]["/v1/models/{name}"]["get"]["parameters"])
    assert server.get(f"/v1/models/{names['enum'][0]}").status_code == 200
    for path, body in (  # in JSON 4.0 is an integer
        ("/v1/completions", {"prompt": [4.0, 5], "n": 2.0, "seed": 1.0, "stop_token_ids": [6.0], "logprobs": 1.0}),
        ("/v1/completions", {"prompt": [[4.0, 5], [6]], "max_tokens": 1.0, "priority": 0.0}),
        ("/inference/v1/generate", {"token_ids": [4.0], "sampling_params": {"top_k": 3.0, "max_tokens": 1}}),
        ("/detokenize", {"tokens": [4.0, 5]}),
    ):
        assert server.post(path, body).status_code == 200, body
    for path, body in (
        ("/v1/completions", {"prompt": [4.5]}),
        ("/v1/completions", {"prompt": [True]}),
        ("/v1/completions", {"prompt": "a", "n": 1.5}),
        ("/v1/completions", {"prompt": "a", "repetition_penalty": 0.001}),
        ("/v1/completions", {"prompt": "a", "stop": [""]}),
        ("/detokenize", {"tokens": ["4"]}),
        ("/tokenize", {"messages": []}),
    ):
        assert server.post(path, body).status_code == 400, body


# -- who may call what -------------------------------------------------------------------------------------------------


def test_which_addresses_are_safe() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("localhost") and is_loopback("::1") and is_loopback("127.9.9.9")
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "example.org", "::")))
    assert is_private("10.1.2.3") and is_private("192.168.0.1") and is_private("127.0.0.1")
    assert not any(map(is_private, ("0.0.0.0", "::", "8.8.8.8", "example.org")))
    assert ServerSettings().control_off is None
    assert "--control-token" in (ServerSettings(host="0.0.0.0").control_off or "")
    assert ServerSettings(host="0.0.0.0", control_token="t").control_off is None
    assert ServerSettings(host="0.0.0.0", insecure_control=True).control_off is None
    assert ServerSettings(host="0.0.0.0", control_host="10.0.0.1").control_off is not None
    for wrong in (
        {"control_host": "0.0.0.0"},
        {"host": "0.0.0.0", "control_port": 1},
        {"control_host": "8.8.8.8"},
        {"api_key": " "},
        {"port": 70000},
        {"reattach_s": -1.0},
        {"heartbeat_s": 0.0},
        {"max_concurrency": 0},
    ):
        with pytest.raises(InvalidInput):
            ServerSettings(**wrong)
    assert ServerSettings().allows_request_chat_template
    assert not ServerSettings(host="0.0.0.0").allows_request_chat_template
    assert ServerSettings(host="0.0.0.0", trust_request_chat_template=True).allows_request_chat_template


def test_case_044_keys_and_tokens_guard_their_routes(tmp_path: pathlib.Path) -> None:
    with served(api_key="key", control_token="tok") as server:
        key, token = {"Authorization": "Bearer key"}, {"authorization": "bearer tok"}
        for path in ("/v1/models", "/v1/nothing"):
            assert server.get(path).status_code == server.get(path, headers=token).status_code == 401
        assert server.get("/v1/models", headers=key).status_code == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/tokenize", "/detokenize"):
            refused = server.post(path, {"prompt": "abc"})
            assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        control = [
            "/pause",
            "/resume",
            "/abort_requests",
            "/update_weights",
            "/collective_rpc",
            "/sleep",
            "/nothing",
            "//pause",
            "/pause/",
        ]
        for path in control:
            for headers in ({}, key, {"Authorization": "tok"}, {"Authorization": "Bearer tok2"}):
                assert server.post(path, {}, headers=headers).status_code == 401, path
        assert server.get("/is_paused").status_code == 401
        assert server.get("/is_paused", headers=token).json() == {"is_paused": False}
        for path in ("/health", "/metrics", "/status", "/server_info", "/openapi.json"):
            text = server.get(path).text
            assert "tok" not in re.sub("token", "", text) and '"key"' not in text

        # bytes that would make a file if anybody unpickled them
        made = tmp_path / "made"
        code = b"cposix\nsystem\n(Vtouch " + str(made).encode() + b"\ntR."
        for path in ("/update_weights", "/collective_rpc", "/init_weight_transfer_engine", "/finish_weight_update"):
            for kind in ("application/octet-stream", "application/json", "application/x-pickle"):
                response = server.http.post(path, content=code, headers={**token, "content-type": kind})
                assert response.status_code == 400, (path, kind, response.text)
        assert not made.exists()


def test_control_has_its_own_address_and_is_absent_from_the_other() -> None:
    with served(control_port=0) as server:
        assert server.server.control_url not in (None, server.url)
        refused = server.post("/pause")
        assert refused.status_code == 404 and server.get("/is_paused").status_code == 404
        assert "/pause" not in server.get("/openapi.json").json()["paths"]
        with httpx.Client(base_url=str(server.server.control_url), timeout=LIMIT_S) as control:
            assert control.post("/pause?mode=keep").status_code == 200
            assert server.status()["state"] == control.get("/status").json()["state"] == "paused"
            assert control.post("/v1/completions", json={"prompt": "abc"}).status_code == 404
            assert control.post("/resume").status_code == 200 and control.get("/health").status_code == 200
        assert server.post("/v1/completions", {"prompt": "abc", "max_tokens": 2}).status_code == 200


def test_an_open_address_has_no_control_and_says_what_to_do() -> None:
    with served(host="0.0.0.0") as server:
        http = httpx.Client(base_url=server.url.replace("0.0.0.0", "127.0.0.1"))
        refused = http.post("/pause")
        assert refused.status_code == 404 and "--control-token" in refused.json()["error"]["message"]
        assert http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}).status_code == 200


def test_a_web_page_can_not_pause_a_loopback_server(server: Served) -> None:
    page = {"Origin": "http://example.org"}
    assert server.post("/pause", headers=page).status_code == 403
    assert server.get("/is_paused").json() == {"is_paused": False}


def test_limits_on_body_tokens_sequences_and_concurrency() -> None:
    with served(max_body_bytes=4096, max_concurrency=2, max_request_tokens=64, max_request_sequences=8) as server:
        assert server.post("/v1/completions", {"prompt": "a" * 5000}).status_code == 413

        def chunks() -> Iterator[bytes]:
            yield b'{"prompt": "'
            for _ in range(100):
                yield b"a" * 100

        chunked = server.http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
        assert chunked.status_code == 413 and chunked.json()["error"]["type"] == "TooLarge", chunked.text
        for body in (
            {"prompt": [4] * 65},
            {"prompt": [[4] * 30] * 3},
            {"prompt": "a", "n": 9},
            {"prompt": ["a"] * 5, "n": 2},
        ):
            refused = server.post("/v1/completions", body)
            assert refused.status_code == 400 and "limit" in refused.json()["error"]["message"]
        server.post("/pause?mode=keep")

        async def body() -> None:
            async with client(server) as http:
                held = [
                    asyncio.create_task(http.post("/v1/completions", json={**LONG, "max_tokens": 3})) for _ in range(2)
                ]
                await until(http, lambda s: s["server"]["requests"] == 2)
                third = await http.post("/v1/completions", json=LONG)
                assert third.status_code == 503 and third.headers["retry-after"] == "1"
                assert third.json()["error"]["type"] == "Overloaded"
                await http.post("/resume")
                assert [r.status_code for r in await asyncio.gather(*held)] == [200, 200]
                assert (await http.post("/v1/completions", json={"prompt": "abc"})).status_code == 200

        run(body())


# -- clients that leave ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stream", "document", "group", "paused stream", "paused document"])
def test_case_061_a_client_that_leaves_ends_its_request(server: Served, kind: str) -> None:
    vanished = server.metric("midstream_requests_vanished_total")
    before = server.status()["num_sampled_tokens"]
    body = {**LONG, "stream": "stream" in kind, "n": 4 if kind == "group" else 1}
    if "paused" in kind:
        server.post("/pause?mode=keep")

    async def leave() -> None:
        async with client(server) as http:

            async def ask() -> None:
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    seen = 0
                    async for line in lines_of(response):
                        seen += line.startswith("data: ")
                        if seen == 5:
                            return

            asking = asyncio.create_task(ask())
            if "paused" in kind:
                await until(http, lambda s: s["held"] == 1)
                asking.cancel()
            elif kind != "stream":
                await until(http, lambda s: s["running"])
                asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    run(leave())
    start = time.monotonic()
    status = server.wait(lambda s: not s["running"] + s["waiting"] + s["held"])  # while it is paused still
    assert time.monotonic() - start < 2.0
    assert status["num_free_blocks"] == status["num_blocks"]
    assert status["num_sampled_tokens"] - before < 500 * body["n"]
    assert server.metric("midstream_requests_vanished_total") == vanished + 1


def test_case_061_a_normal_end_aborts_nothing(server: Served) -> None:
    vanished = server.metric("midstream_requests_vanished_total")
    for stream in (False, True):
        assert server.post("/v1/completions", {**LONG, "max_tokens": 5, "stream": stream}).status_code == 200
    server.idle()
    assert server.metric("midstream_requests_vanished_total") == vanished


# -- pauses over HTTP --------------------------------------------------------------------------------------------------


def test_case_051_held_requests_are_seen_kept_alive_and_run_once(server: Served) -> None:
    started = server.status()["server"]["generations_started"]

    async def body() -> None:
        async with client(server, timeout=httpx.Timeout(LIMIT_S, read=1.0)) as http:  # ten heartbeats
            beats = [0] * 7
            moved = asyncio.Event()

            async def ask(i: int) -> list[dict[str, Any]]:
                text = ""
                asked = {**LONG, "max_tokens": 400, "stream": True, "return_token_ids": True}
                headers = {"Idempotency-Key": f"held-{i}"}
                async with http.stream("POST", "/v1/completions", json=asked, headers=headers) as response:
                    assert response.status_code == 200
                    async for line in lines_of(response):
                        text += line + "\n"
                        beats[i] += line.startswith(":")
                        moved.set()
                return events(text)

            async def beaten(number: int) -> None:
                while min(beats) < number:
                    moved.clear()
                    await moved.wait()

            tasks = [asyncio.create_task(ask(i)) for i in range(4)]
            await until(http, lambda s: s["running"] == 4)
            assert (await http.post("/pause?mode=keep&clear_cache=false")).json()["status"] == "paused"
            tasks += [asyncio.create_task(ask(i)) for i in range(4, 7)]
            status = await until(http, lambda s: s["held"] == 7)
            assert status["state"] == "paused" and status["mode"] == "keep"
            await beaten(15)  # half as long again as the read timeout
            # a retry of one of them attaches to it
            again = asyncio.create_task(ask(5))
            await until(http, lambda s: s["server"]["generations_started"] == started + 7)
            assert (await http.post("/resume")).json()["status"] == "resumed"
            found = await asyncio.gather(*tasks, again)
            for chunks in found:
                choices = [c for e in chunks for c in e["choices"]]
                assert sum(len(c["token_ids"]) for c in choices) == 400
                assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
            ids = [[t for e in chunks for c in e["choices"] for t in c["token_ids"]] for chunks in found]
            assert ids[5] == ids[7] and found[5][0]["id"] == found[7][0]["id"]
            assert (await http.get("/status")).json()["server"]["generations_started"] == started + 7

    run(body())
    for mode in ("abort", "wait"):
        server.post(f"/pause?mode={mode}")
        for stream in (False, True):
            refused = server.post("/v1/completions", {**LONG, "stream": stream})
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "EnginePaused" and "paused" in refused.json()["error"]["message"]
        server.post("/resume")


def test_case_058_each_pause_mode_has_its_own_result_over_http(server: Served) -> None:
    asked = {**LONG, "max_tokens": 300, "return_token_ids": True, "seed": 1}

    async def body(mode: str) -> tuple[dict[str, Any], bool]:
        async with client(server) as http:
            task = asyncio.create_task(http.post("/v1/completions", json={**asked, "logprobs": 0}))
            await until(http, lambda s: s["running"])
            paused = await http.post(f"/pause?mode={mode}")
            assert paused.status_code == 200, paused.text
            assert (await http.get("/is_paused")).json() == {"is_paused": True}
            status = (await http.get("/status")).json()
            was_held = status["held"] == 1
            assert status["mode"] == mode
            await http.post("/resume")
            answer = (await task).json()
            return answer["choices"][0], was_held

    whole = server.post("/v1/completions", asked).json()["choices"][0]["token_ids"]
    for mode, reason, held in (("keep", "length", True), ("wait", "length", False), ("abort", "abort", False)):
        choice, was_held = run(body(mode))
        assert (choice["finish_reason"], was_held) == (reason, held), mode
        assert choice["token_ids"] == whole[: len(choice["token_ids"])]
        assert len(choice["token_ids"]) == 300 if mode != "abort" else len(choice["token_ids"]) < 300
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    unknown = server.post("/pause?mode=sideways")
    assert unknown.status_code == 400 and server.get("/is_paused").json() == {"is_paused": False}


def test_abort_by_the_ids_that_clients_know(server: Served) -> None:
    async def body() -> None:
        async with client(server) as http:
            named = asyncio.create_task(
                http.post(
                    "/inference/v1/generate",
                    json={"token_ids": [4], "request_id": "mine", "sampling_params": {"ignore_eos": True}},
                )
            )
            two = asyncio.create_task(
                http.post("/v1/completions", json={**LONG, "prompt": ["a", "b"], "request_id": "two"})
            )
            await http.post("/pause?mode=keep")
            await until(http, lambda s: s["held"] == 3)
            assert (await http.post("/abort_requests", json={"request_ids": ["mine", "cmpl-two", "nobody"]})).json()[
                "aborted"
            ] == 3
            assert (await named).json()["choices"][0]["finish_reason"] == "abort"
            assert [c["finish_reason"] for c in (await two).json()["choices"]] == ["abort", "abort"]
            assert (await two).json()["id"] == "cmpl-two" and (await named).json()["request_id"] == "mine"

    run(body())


# -- the end -----------------------------------------------------------------------------------------------------------


class Command:
    """``midstream serve`` as a process of its own."""

    def __init__(self, *flags: str, **variables: str) -> None:
        root = pathlib.Path(midstream.__file__).parents[1]
        command = [sys.executable, "-m", "midstream", "serve", str(MODEL), "--port", "0", "--num-threads", "1", *flags]
        self.process = subprocess.Popen(
            command,
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
        )
        self.lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if "Ctrl-C" in line:
                break
        found = re.search(r"on (http://\S+)", "".join(self.lines))
        assert found, self.lines
        self.url = found.group(1)

    def children(self) -> list[int]:
        text = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second_after_s", [0.0, 1.0])
def test_case_064_a_signal_in_a_pause_answers_everybody_and_ends(
    first: signal.Signals, second_after_s: float, tmp_path: pathlib.Path
) -> None:
    server = Command("--heartbeat-s", "0.1", TMPDIR=str(tmp_path))
    try:
        shown = "".join(server.lines)
        for wanted in ("serving", "memory", "KV cache", "routes", "control open"):
            assert wanted in shown
        answers: list[httpx.Response] = []
        with httpx.Client(base_url=server.url, timeout=LIMIT_S) as http:
            assert http.post("/init_weight_transfer_engine", json={"init_info": {}}).status_code == 200
            assert http.post("/start_weight_update").status_code == 200
            assert http.post("/pause?mode=keep").status_code == 200
            asked = [{**LONG, "stream": i % 2 == 1} for i in range(4)]
            threads = [
                threading.Thread(
                    target=lambda b=b: answers.append(
                        httpx.post(f"{server.url}/v1/completions", json=b, timeout=LIMIT_S)
                    )
                )
                for b in asked
            ]
            for thread in threads:
                thread.start()
            while http.get("/status").json()["held"] != 4:
                pass
        children = server.children()
        assert children
        start = time.monotonic()
        server.process.send_signal(first)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(second_after_s)
        with contextlib.suppress(ProcessLookupError):
            server.process.send_signal(first)  # once more: changes nothing
        assert server.process.wait(LIMIT_S) == 0
        assert time.monotonic() - start <= 5.0
        for thread in threads:
            thread.join(LIMIT_S)
        assert len(answers) == 4
        for answer in answers:
            assert answer.status_code in (200, 503)
            if answer.status_code == 200:
                streamed = answer.headers["content-type"].startswith("text/event-stream")
                choices = (
                    [c for e in events(answer.text) for c in e["choices"]] if streamed else answer.json()["choices"]
                )
                assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["abort"]
        assert not [pid for pid in children if pathlib.Path(f"/proc/{pid}").exists()]
        assert not list(tmp_path.iterdir())
        names = os.listdir("/dev/shm")
        assert not [name for name in names for pid in (server.process.pid, *children) if str(pid) in name]
    finally:
        server.close()


def test_an_engine_that_dies_ends_the_server_with_an_error_and_answers() -> None:
    server = Command()
    try:
        answers: list[httpx.Response] = []
        with httpx.Client(base_url=server.url, timeout=LIMIT_S) as http:
            http.post("/pause?mode=keep")
            asking = threading.Thread(
                target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=LIMIT_S))
            )
            asking.start()
            while http.get("/status").json()["held"] != 1:
                pass
        os.kill(server.children()[0], signal.SIGKILL)
        assert server.process.wait(LIMIT_S) == 1
        asking.join(LIMIT_S)
        assert answers[0].status_code == 503 and answers[0].json()["error"]["type"] == "EngineDead"
    finally:
        server.close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--weight-transfer-config", "nccl"], "JSON"),
        (["--weight-transfer-config", '{"backend": "nothing"}'], "nothing"),
        (["--control-host", "0.0.0.0"], "--control-token"),
        (["--host", "203.0.113.1"], "can not listen"),
        (["--max-model-len", "100000"], "max_model_len"),
        (["--tokenizer", "/nonexistent/of/it"], "no tokenizer at /nonexistent/of/it"),
        (["--control-token", ""], "MIDSTREAM_CONTROL_TOKEN"),
    ],
)
def test_a_wrong_start_is_said_in_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    assert main(["serve", str(MODEL), "--port", "0", *flags]) == 1
    said = capsys.readouterr().err
    assert words in said and said.startswith("midstream: ") and said.count("\n") == 1


def test_every_flag_of_the_help_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for flag in (
        "--host",
        "--port",
        "--dtype",
        "--max-model-len",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--block-size",
        "--served-model-name",
        "--api-key",
        "--logprobs-mode",
        "--weight-transfer-config",
        "--control-token",
        "--reattach-s",
    ):
        assert flag in text
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert not [a.option_strings for a in parser._actions if not a.help]
    flags = [
        "DIR",
        "--weight-transfer-config",
        '{"backend": "nccl", "default_mode": "partial", "mine": 1}',
        "--max-num-seqs",
        "4",
    ]
    options = command.engine_options(parser.parse_args(flags))
    assert options == {
        "model": "DIR",
        "weight_transfer_backend": "nccl",
        "default_update_mode": "partial",
        "extra": {"mine": 1},
        "max_num_seqs": 4,
    }


def test_secrets_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_API_KEY", "k")
    monkeypatch.setenv("MIDSTREAM_CONTROL_TOKEN", "t")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    settings = command.server_settings(parser.parse_args(["DIR", "--api-key", "other"]))
    assert (settings.api_key, settings.control_token, settings.host) == ("other", "t", "127.0.0.1")


@pytest.mark.parametrize("variable", ["MIDSTREAM_API_KEY", "MIDSTREAM_CONTROL_TOKEN"])
def test_an_empty_secret_in_the_environment_does_not_leave_the_routes_open(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    monkeypatch.setenv(variable, "")
    with pytest.raises(InvalidInput, match=f"is empty.*{variable}"):
        command.server_settings(parser.parse_args(["DIR"]))


def test_the_banner_says_once_where_control_is() -> None:
    for settings, said in (
        (ServerSettings(), "open"),
        (ServerSettings(control_token="t"), "behind --control-token"),
        (ServerSettings(control_port=1), "on http://u, open"),
        (ServerSettings(host="0.0.0.0", control_token="t", control_port=1), "on http://u, behind --control-token"),
    ):
        assert command.control_routes(settings, "http://u") == said
    off = command.control_routes(ServerSettings(host="0.0.0.0"), None)
    assert off.startswith("off, because 0.0.0.0 can be reached")


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /health?",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: ",
        b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: ",
    ],
)
def test_a_request_whose_head_has_no_end_is_refused(server: Served, begin: bytes) -> None:
    address = httpx.URL(server.url)
    with (
        socket.create_connection((address.host, address.port), timeout=LIMIT_S) as connection,
        contextlib.suppress(ConnectionError),  # it closes while we still send
    ):
        connection.sendall(begin)
        for _ in range(64):
            connection.sendall(b"a" * (1 << 16))
        pytest.fail("the server took 4 MiB of it")
    assert server.get("/health").status_code == 200


def test_a_long_head_and_a_long_body_in_one_piece_are_fine(server: Served) -> None:
    headers = {f"X-{i}": "a" * 1000 for i in range(50)}
    asked = {"prompt": [5, 6], "max_tokens": 1, "user": "a" * 200_000}
    assert server.post("/v1/completions", asked, headers=headers).status_code == 200


@pytest.mark.parametrize("pause", [False, True], ids=["one piece", "two"])
def test_the_body_of_a_request_that_wants_another_protocol_is_its_body(server: Served, pause: bool) -> None:
    """Upgrade is ignored (RFC 9110, 7.8), as curl --http2 expects; what follows the head is no second request."""
    address, body = httpx.URL(server.url), b'{"prompt": [5], "max_tokens": 1}  GET /v1/models HTTP/1.1'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection((address.host, address.port), timeout=LIMIT_S) as connection:
        connection.sendall(head + (b"" if pause else body))
        if pause:
            assert server.get("/health").status_code == 200  # the head is there
            connection.sendall(body)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1  # the body is no JSON, and all of it


def test_no_part_of_an_answer_waits_for_an_acknowledgement(server: Served) -> None:
    listening = [bound for _, bound in server.server._listeners]
    assert listening and all(bound.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for bound in listening)
