"""The control routes over a real engine: what a client sends, what it gets back, and what the engine then does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import pickle
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from checkpoints import random_weights, write_checkpoint
from cores import LIMIT_S, TINY, Driver, digests_of
from midstream.engine.protocol import Fail
from midstream.errors import Conflict, EnginePaused, InvalidInput
from midstream.metrics import ServerMetrics
from midstream.models.weights import EMBEDDING, HEAD
from midstream.serving.app import ServerSettings, create_app, create_control_app
from midstream.serving.async_llm import AsyncLLM
from midstream.serving.llm import LLM
from midstream.types import SamplingParams
from midstream.weights.manifest import digest, weights_id

torch.set_num_threads(1)

OPTIONS: dict[str, Any] = {"num_blocks": 64, "num_threads": 1, "max_num_seqs": 8}
LONG = SamplingParams(max_tokens=400, seed=3, ignore_eos=True, detokenize=False)
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True, detokenize=False)
W0, W1 = (random_weights("llama", seed, **TINY) for seed in range(2))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        write_checkpoint(root / f"w{seed}", "llama", seed, **TINY)
        write_checkpoint(root / f"tied{seed}", "qwen3", seed, **TINY)
    return root


def run(coroutine: Coroutine[Any, Any, Any], limit_s: float = 90.0) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, limit_s))


class Client:
    """Calls that must succeed, or must fail with a status and an error text."""

    def __init__(self, http: httpx.AsyncClient, llm: AsyncLLM, app: Any) -> None:
        self.http, self.llm, self.app = http, llm, app

    async def post(self, path: str, body: Any = None, **query: Any) -> Any:
        response = await self.http.post(path, json=body, params=query) if body is not None else await self.http.post(
            path, params=query
        )
        assert response.status_code == 200, (path, response.status_code, response.text)
        assert "content-length" in response.headers
        return response.json()

    async def get(self, path: str, **query: Any) -> Any:
        response = await self.http.get(path, params=query)
        assert response.status_code == 200, (path, response.text)
        return response.json()

    async def refused(self, status: int, path: str, body: Any = None, **query: Any) -> str:
        response = await self.http.post(path, json=body, params=query)
        assert response.status_code == status, (path, response.status_code, response.text)
        error = response.json()["error"]
        assert set(error) >= {"message", "type", "code"} and error["code"] == status
        return str(error["message"])

    async def generate(self, max_tokens: int = 16, **more: Any) -> list[int]:
        params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
        body = {"token_ids": [5, 6, 7], "sampling_params": params, **more}
        return (await self.post("/inference/v1/generate", body))["choices"][0]["token_ids"]  # type: ignore[no-any-return]

    def held(self, count: int = 1) -> list[asyncio.Task[list[int]]]:
        return [asyncio.create_task(self.generate(400)) for _ in range(count)]

    async def until_running(self, count: int) -> None:
        while (status := await self.llm.status())["running"] < count or status["num_sampled_tokens"] < 5 * count:
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def server(model: pathlib.Path, settings: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Client]:
    llm = AsyncLLM(str(model), **{**OPTIONS, **options})
    app = create_app(llm, ServerSettings(**(settings or {})))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60) as http:
            yield Client(http, llm, app)


class Trainer:
    """The trainer's end of the nccl wire, by hand: listens, and sends raw bytes."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.info = {
            "master_address": "127.0.0.1",
            "master_port": self.listener.getsockname()[1],
            "rank_offset": 1,
            "world_size": 2,
        }
        self.connection: socket.socket | None = None

    async def send(self, tensors: dict[str, torch.Tensor]) -> None:
        if self.connection is None:
            self.connection = (await asyncio.to_thread(self.listener.accept))[0]
        for tensor in tensors.values():
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            await asyncio.to_thread(self.connection.sendall, data)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        if self.connection:
            self.connection.close()


def info_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
    }


def reference(model: pathlib.Path, max_tokens: int = 16) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    with LLM(str(model), num_blocks=64) as llm:
        return llm.generate([5, 6, 7], params)[0].outputs[0].token_ids


# -- pause ---------------------------------------------------------------------------------------------------------


def test_case_058_each_mode_through_http_has_its_own_result(models: pathlib.Path) -> None:
    straight = reference(models / "w0", 400)

    async def body() -> None:
        async with server(models / "w0") as c:
            assert await c.get("/is_paused") == {"is_paused": False}
            # abort is the default: partial tokens, HTTP 200
            held = c.held(2)
            await c.until_running(2)
            assert (await c.post("/pause"))["mode"] == "abort"
            for task in held:
                tokens = await task
                assert 0 < len(tokens) < 400 and tokens == straight[: len(tokens)]
            assert await c.get("/is_paused") == {"is_paused": True}
            refused = await c.http.post("/inference/v1/generate", json={"token_ids": [5]})
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert await c.post("/resume") == {"status": "resumed", "was_paused": True}
            assert await c.post("/resume") == {"status": "resumed", "was_paused": False}
            # keep: one uninterrupted answer; both kinds of KV handling
            for clear_cache in ("true", "false"):
                held = c.held(2)
                await c.until_running(2)
                found = await c.post("/pause", mode="keep", clear_cache=clear_cache)
                assert (found["status"], found["mode"]) == ("paused", "keep")
                assert found["clear_cache"] is (clear_cache == "true")
                late = c.held(1)
                status = await c.get("/status")
                while status["held"] < 3:
                    status = await c.get("/status")
                assert status["state"] == "paused" and status["device_idle"] and not any(t.done() for t in held + late)
                await c.post("/resume")
                assert await asyncio.gather(*held, *late) == [straight] * 3
            # wait: bounded, undone by its time limit; then complete
            held = c.held(1)
            await c.until_running(1)
            assert "requests still run" in await c.refused(504, "/pause", mode="wait", timeout_s=0.001)
            waiting = asyncio.create_task(c.post("/pause", mode="wait"))
            while not (await c.get("/is_paused"))["is_paused"]:
                pass
            assert (await c.get("/status"))["state"] in ("pausing", "paused")
            assert (await waiting)["mode"] == "wait" and (await held[0]) == straight
            # a body says the same as a query
            found = await c.post("/pause", {"mode": "keep", "clear_cache": False, "owner": "t", "lease_s": 60})
            assert (found["mode"], found["clear_cache"], found["owner"], found["lease_s"]) == ("keep", False, "t", 60)
            await c.refused(409, "/resume")
            assert (await c.post("/resume", {"owner": "t"}))["was_paused"]
            await c.post("/pause", {"mode": "keep", "owner": "t"})
            assert (await c.post("/resume", {"force": True}))["was_paused"]
            assert (await c.post("/sleep", {"level": 2, "mode": "keep"}))["level"] == 2
            await c.post("/wake_up", {"tags": ["kv_cache"]})
            assert (await c.get("/is_sleeping"))["is_sleeping"]
            await c.post("/wake_up")
            await c.post("/update_weights", {"weight_dir": str(models / "w0")})
            await c.post("/pause", mode="wait")
            # what is wrong changes nothing
            before = await c.get("/status")
            bad = [{"mode": "sleep"}, {"clear_cache": "maybe"}, {"timeout_s": -1}, {"lease_s": 0}, {"owner": ""}]
            for query in bad:
                await c.refused(400, "/pause", **query)
            after = await c.get("/status")
            assert (before["state"], before["mode"]) == (after["state"], after["mode"]) == ("paused", "wait")
            await c.post("/resume")

    run(body())


def test_a_pause_with_an_owner_is_undone_by_it_or_by_force(models: pathlib.Path) -> None:
    async def body() -> None:
        async with server(models / "w0") as c:
            await c.post("/pause", mode="keep", owner="trainer-1")
            assert (await c.get("/status"))["owner"] == "trainer-1"
            for path, query in (
                ("/resume", {}),
                ("/resume", {"owner": "other"}),
                ("/pause", {"mode": "abort"}),
                ("/pause", {"mode": "keep", "owner": "other"}),
            ):
                assert "'trainer-1'" in await c.refused(409, path, **query)
            assert (await c.get("/status"))["mode"] == "keep"
            await c.post("/pause", mode="keep", owner="trainer-1")  # taken again by the same one
            await c.post("/resume", owner="trainer-1")
            await c.post("/pause", mode="keep", owner="trainer-1")
            assert (await c.post("/resume", force="true"))["was_paused"]
            status = await c.get("/status")
            assert (status["state"], status["owner"], status["paused_since"]) == ("running", None, None)
            await c.post("/pause", mode="keep")  # nobody's: anybody may take it over
            await c.post("/pause", mode="keep", owner="a")
            await c.refused(409, "/resume")
            await c.post("/resume", owner="a")

    run(body())


def test_a_lease_ends_an_abandoned_pause(models: pathlib.Path) -> None:
    async def body() -> None:
        async with server(models / "w0") as c:
            held = c.held(1)
            await c.until_running(1)
            found = await c.post("/pause", mode="keep", owner="gone", lease_s=0.3)
            assert (found["owner"], found["lease_s"]) == ("gone", 0.3)
            assert 0 <= (await c.get("/status"))["lease_left_s"] <= 0.3
            await c.post("/pause", mode="keep", owner="gone", lease_s=60)  # renewed
            assert (await c.get("/status"))["lease_left_s"] > 50
            await c.post("/pause", mode="keep", owner="gone", lease_s=0.2)
            assert len(await asyncio.wait_for(held[0], LIMIT_S)) == 400
            status = await c.get("/status")
            assert (status["state"], status["owner"], status["lease_left_s"]) == ("running", None, None)

    run(body())


def test_abort_requests_by_id_and_all(models: pathlib.Path) -> None:
    async def body() -> None:
        async with server(models / "w0") as c:
            named = asyncio.create_task(c.generate(400, request_id="mine"))
            others = c.held(2)
            await c.until_running(3)
            assert await c.post("/abort_requests", {"request_ids": ["mine", "nobody"]}) == {
                "status": "aborted",
                "aborted": 1,
            }
            assert 0 < len(await named) < 400 and not any(task.done() for task in others)
            assert (await c.post("/abort_requests", {}))["aborted"] == 2
            assert all(0 < len(tokens) < 400 for tokens in await asyncio.gather(*others))
            assert (await c.post("/abort_requests"))["aborted"] == 0
            await c.refused(400, "/abort_requests", {"request_ids": "mine"})
            await c.refused(400, "/abort_requests", {"request_ids": [1]})

    run(body())


# -- weights -------------------------------------------------------------------------------------------------------


def test_the_four_phases_as_unmodified_clients_send_them(models: pathlib.Path) -> None:
    """TRL's order and bodies; a tied head is not sent."""
    tied = [random_weights("qwen3", seed, **TINY) for seed in range(2)]
    assert HEAD not in tied[0]

    async def body() -> None:
        expected = [reference(models / f"tied{seed}") for seed in range(2)]
        async with server(models / "tied0", weight_transfer_backend="nccl", extra={"timeout_s": 5}) as c:
            with Trainer() as trainer:
                assert await c.get("/get_world_size") == {"world_size": 1}
                found = await c.post("/init_weight_transfer_engine", {"init_info": {**trainer.info, "packed": True}})
                assert found["message"] == "Weight transfer initialized" and found["fingerprint"]
                starts: list[Any] = [None, {"is_checkpoint_format": True}, {}]
                for number, start in enumerate(starts, 1):
                    new = tied[number % 2]
                    await c.post("/pause", mode="keep")
                    found = await c.post("/start_weight_update", start)
                    assert found["message"] == "Weight update started" and found["mode"] == "full"
                    open_one = (await c.get("/status"))["update"]
                    assert open_one["session_id"] == found["session_id"] and open_one["age_s"] >= 0
                    sent = asyncio.create_task(trainer.send(new))
                    found = await c.post("/update_weights", {"update_info": info_of(new)})
                    await sent
                    assert found["message"] == "Weights updated" and found["received"] == len(new)
                    assert (await c.get("/status"))["update"]["bytes"] == found["bytes"]
                    label = None if number == 1 else {"weight_version": f"v{number}"}
                    found = await c.post("/finish_weight_update", label)
                    assert found["message"] == "Weight update finished" and found["updated"] == found["of"] == len(new)
                    assert found["number"] == number
                    await c.post("/resume")
                    assert await c.generate() == expected[number % 2]
                    info = await c.get("/weight_info")
                    assert info["weight_version"] == ("1" if number == 1 else f"v{number}")
                    assert info["weights_id"] == weights_id(digests_of(new))
                assert (await c.get("/status"))["exact"] == "no (trainer numerics unknown)"
                message = await c.post("/shutdown_weight_transfer_engine")
                assert message == {"message": "Weight transfer shut down"}

    run(body())


def test_an_update_without_start_and_skyrl_s_aliases(models: pathlib.Path) -> None:
    async def body() -> None:
        async with server(models / "w0", weight_transfer_backend="nccl", extra={"timeout_s": 5}) as c:
            with Trainer() as trainer:
                await c.post("/init_weight_transfer_engine", {"init_info": trainer.info})
                for number, (new, call) in enumerate(((W1, "list"), (W0, "plain"), (W1, "rpc"), (W0, "args")), 1):
                    info: Any = {**info_of(new), "packed": True}
                    sent = asyncio.create_task(trainer.send(new))
                    if call in ("list", "plain"):
                        info = [info] if call == "list" else info
                        found = await c.post("/update_weights", {"update_info": info, "weight_version": f"v{number}"})
                        assert found["version"] == f"v{number}"
                    else:
                        await c.post(
                            "/collective_rpc",
                            {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}},
                        )
                        given = {"kwargs": {"update_info": info}} if call == "rpc" else {"args": [info], "timeout": 30}
                        found = await c.post("/collective_rpc", {"method": "update_weights_nccl", **given})
                        assert found["results"][0]["received"] == 12
                        found = await c.post("/collective_rpc", {"method": "skyrl_finish_weight_update"})
                        found = found["results"][0]
                    await sent
                    assert found["number"] == number and found["updated"] == 12
                    assert (await c.get("/weight_info"))["weights_id"] == weights_id(digests_of(new))
                assert "one for each worker" in await c.refused(400, "/update_weights", {"update_info": [{}, {}]})

    run(body())


def test_a_directory_by_both_its_names(models: pathlib.Path) -> None:
    """prime-rl's admin sequence, with requests in flight that lose and repeat nothing."""

    async def body() -> None:
        expected = reference(models / "w1")
        async with server(models / "w0", max_num_seqs=32, num_blocks=1024) as c:
            held = c.held(8)
            await c.until_running(8)
            await c.post("/pause", mode="keep", clear_cache="false")
            found = await c.post("/update_weights", {"weight_dir": str(models / "w1")})
            assert (found["updated"], found["kv_policy"]) == (12, "keep")
            await c.post("/resume")
            assert [len(tokens) for tokens in await asyncio.gather(*held)] == [400] * 8
            await c.post("/reset_prefix_cache")
            assert await c.generate() == expected
            ways = [{"args": [str(models / "w0")]}, {"kwargs": {"weight_dir": str(models / "w1")}}]
            for number, given in enumerate(ways, 2):
                found = await c.post("/collective_rpc", {"method": "update_weights_from_path", **given})
                assert found["results"][0]["number"] == number
            assert await c.generate() == expected
            for bad in ({}, {"update_info": None}, {"update_info": {}, "weight_dir": "x"}, {"weight_dir": 3}, []):
                await c.refused(400, "/update_weights", bad)
            await c.refused(400, "/update_weights", {"weight_dir": "/nowhere"})

    run(body())


def test_subsets_by_the_configuration_and_an_empty_finish(models: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from safetensors.torch import save_file

    save_file({EMBEDDING: W1[EMBEDDING]}, tmp_path / "model.safetensors")

    async def body() -> None:
        async with server(models / "w0", default_update_mode="partial") as c:
            assert (await c.post("/update_weights", {"weight_dir": str(tmp_path)}))["updated"] == 1
            assert (await c.post("/start_weight_update"))["mode"] == "partial"
            assert "no tensor was received" in await c.refused(400, "/finish_weight_update")
            assert (await c.post("/start_weight_update", {"mode": "full", "cast": "allow"}))["cast"] == "allow"
            assert "update-3" in await c.refused(409, "/start_weight_update")
            await c.post("/update_weights", {"weight_dir": str(tmp_path)})
            await c.refused(400, "/finish_weight_update")
            assert "start_weight_update first" in await c.refused(409, "/finish_weight_update")
            assert (await c.get("/weight_info"))["number"] == 1
            await c.refused(400, "/start_weight_update", {"is_checkpoint_format": False})
            await c.refused(400, "/start_weight_update", {"mode": "some"})

    run(body())


def test_the_route_that_aborts_an_open_update(models: pathlib.Path) -> None:
    async def body() -> None:
        async with server(models / "w0") as c:
            session = (await c.post("/start_weight_update"))["session_id"]
            found = await c.post("/abort_weight_update")
            assert (found["aborted"], found["number"]) == (session, 0)
            assert (await c.post("/abort_weight_update"))["aborted"] is None
            await c.post("/start_weight_update")
            await c.post("/abort_weight_update")
            assert (await c.get("/status"))["update"] is None

    run(body())


def test_the_label_alone_changes_and_spans_say_which_it_was(models: pathlib.Path) -> None:
    async def body() -> None:
        async with server(models / "w0") as c:
            held = asyncio.create_task(c.llm.generate_one([5, 6, 7], LONG))
            await c.until_running(1)
            found = await c.post("/update_weight_version", {"new_version": "v7"})
            assert (found["success"], found["new_version"], found["number"]) == (True, "v7", 0)
            assert (await c.get("/weight_info"))["weight_version"] == "v7"
            spans = (await held).outputs[0].weight_versions
            assert [(s.version, s.number) for s in spans] == [("0", 0), ("v7", 0)]
            assert spans[0].start == 0 and spans[0].end == spans[1].start and spans[1].end == 400
            await c.refused(400, "/update_weight_version", {})
            await c.refused(400, "/update_weight_version", {"new_version": ""})
            await c.post("/update_weights", {"weight_dir": str(models / "w1")})
            assert (await c.get("/weight_info"))["weight_version"] == "1"

    run(body())


def test_case_024_the_checker_sees_one_changed_element(models: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from safetensors.torch import save_file

    async def body() -> None:
        async with server(models / "w0") as c:
            found = await c.post("/weight_checker", {"action": "checksum"})
            assert found["checksums"] == digests_of(W0)
            compare = {"action": "compare", "baseline": found["checksums"]}
            assert (await c.post("/weight_checker", compare))["match"] is True
            await c.post("/update_weights", {"weight_dir": str(models / "w1")})
            checked = await c.post("/weight_checker", {"action": "compare", "baseline": digests_of(W1)})
            assert (checked["match"], checked["mismatches"]) == (True, [])
            name = "model.layers.0.self_attn.k_proj.weight"
            flipped = {**W1, name: W1[name].clone()}
            flipped[name][3, 5] += 1
            save_file(flipped, tmp_path / "model.safetensors")
            await c.post("/update_weights", {"weight_dir": str(tmp_path)})
            checked = await c.post("/weight_checker", {"action": "compare", "baseline": digests_of(W1)})
            assert (checked["match"], checked["mismatches"]) == (False, [name])
            less = {n: d for n, d in digests_of(flipped).items() if n != EMBEDDING}
            checked = await c.post("/weight_checker", {"action": "compare", "baseline": {**less, "nobody": "00"}})
            assert checked["mismatches"] == [EMBEDDING, "nobody"]
            for bad in ({"action": "compare"}, {"action": "compare", "baseline": {}}, {"action": "all"}, {}):
                await c.refused(400, "/weight_checker", bad)

    run(body())


def test_case_024_the_checker_in_checkpoint_names_for_tied_and_cast_weights(models: pathlib.Path) -> None:
    async def body(model: str, sent: str, weights: dict[str, torch.Tensor], **options: Any) -> None:
        async with server(models / model, **options) as c:
            await c.post("/update_weights", {"weight_dir": str(models / sent)})
            found = (await c.post("/weight_checker", {"action": "checksum"}))["checksums"]
            assert found == digests_of(weights)
            assert (await c.get("/weight_info"))["weights_id"] == weights_id(found)
            changed = {**found, EMBEDDING: digest(weights[EMBEDDING] + 1)}
            checked = await c.post("/weight_checker", {"action": "compare", "baseline": changed})
            assert (checked["match"], checked["mismatches"]) == (False, [EMBEDDING])

    tied = random_weights("qwen3", 1, **TINY)
    run(body("tied0", "tied1", {name: tensor for name, tensor in tied.items() if name != HEAD}))
    cast = {name: tensor.bfloat16() for name, tensor in W1.items()}
    run(body("w0", "w1", cast, dtype="bfloat16", default_cast="allow"))


def test_the_checker_resets_only_while_paused_as_a_commit(models: pathlib.Path) -> None:
    async def body() -> None:
        expected = reference(models / "w0")
        async with server(models / "w0") as c:
            assert "pause" in await c.refused(409, "/weight_checker", {"action": "reset"})
            await c.post("/pause", mode="keep")
            found = await c.post("/weight_checker", {"action": "reset"})
            assert (found["status"], found["number"], found["version"]) == ("reset", 1, "reset")
            zeros = digests_of({n: torch.zeros_like(t) for n, t in W0.items()})
            assert (await c.post("/weight_checker", {"action": "checksum"}))["checksums"] == zeros
            assert (await c.get("/weight_info"))["weights_id"] == weights_id(zeros)
            await c.post("/start_weight_update")
            await c.refused(409, "/weight_checker", {"action": "reset"})
            await c.post("/abort_weight_update")
            await c.post("/resume")
            assert await c.generate() != expected
            assert "late chunk" in await c.refused(409, "/update_weights", {"weight_dir": str(models / "w0")})
            assert (await c.post("/abort_weight_update"))["aborted"] is None
            await c.post("/update_weights", {"weight_dir": str(models / "w0")})
            assert await c.generate() == expected

    run(body())


MORTAL = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
connection = listener.accept()[0]
sys.stdin.readline()
connection.sendall(bytes(int(sys.argv[1])))
print("sent", flush=True)
sys.stdin.read()
"""


NUM_HELPERS = 6


def test_case_026_a_trainer_that_was_killed_is_followed_by_another(models: pathlib.Path) -> None:
    def size_of(pid: int | str) -> tuple[int, int]:
        return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))

    async def body() -> None:
        expected = [reference(models / f"w{seed}") for seed in range(2)]
        # All of this loop's helper threads exist before the first look: how many it would start depends on the machine.
        together = threading.Barrier(NUM_HELPERS)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_HELPERS))
        await asyncio.gather(*(asyncio.to_thread(together.wait, 10) for _ in range(NUM_HELPERS)))
        async with server(models / "w0", weight_transfer_backend="nccl", extra={"timeout_s": 10}) as c:
            sizes = []
            for round_ in range(20):
                death = ("idle", "update open", "in a tensor")[round_ % 3]
                num_sent = next(iter(W0.values())).nbytes + 10 if death == "in a tensor" else 0
                command = [sys.executable, "-c", MORTAL, str(num_sent)]
                with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as mortal:
                    assert mortal.stdin is not None and mortal.stdout is not None
                    try:
                        port = int(mortal.stdout.readline())
                        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
                        await c.post("/init_weight_transfer_engine", {"init_info": info})
                        if death != "idle":
                            await c.post("/start_weight_update")
                        if num_sent:
                            chunk = {"update_info": info_of(W0)}
                            cut_off = asyncio.create_task(c.http.post("/update_weights", json=chunk))
                            mortal.stdin.write(b"\n")
                            mortal.stdin.flush()
                            assert await asyncio.to_thread(mortal.stdout.readline) == b"sent\n"
                    finally:
                        mortal.kill()
                if num_sent:
                    assert (await cut_off).status_code == 400
                with Trainer() as trainer:
                    start = time.monotonic()
                    await c.post("/init_weight_transfer_engine", {"init_info": trainer.info})
                    assert time.monotonic() - start < 10
                    weights = (W1, W0)[round_ % 2]
                    await c.post("/start_weight_update")
                    update = asyncio.create_task(c.post("/update_weights", {"update_info": info_of(weights)}))
                    await trainer.send(weights)
                    await update
                    await c.post("/finish_weight_update")
                assert await c.generate() == expected[(round_ + 1) % 2]
                sizes.append((size_of(c.llm._ranks[0].process.pid), size_of("self")))
            assert len(set(sizes[3:])) == 1, sizes

    run(body())


def test_case_037_control_answers_while_weights_come_in(models: pathlib.Path) -> None:
    """A transfer that takes its time: health and status answer meanwhile, and generation goes on."""

    async def body() -> None:
        async with server(models / "w0", weight_transfer_backend="nccl", extra={"timeout_s": 10}) as c:
            with Trainer() as trainer:
                await c.post("/init_weight_transfer_engine", {"init_info": trainer.info})
                names = list(W1)
                await c.post("/start_weight_update")
                update = asyncio.create_task(c.post("/update_weights", {"update_info": info_of(W1)}))
                took = []
                for name in names[:-1]:
                    await trainer.send({name: W1[name]})
                    for path in ("/health", "/status", "/is_paused"):
                        start = time.monotonic()
                        await c.get(path)
                        took.append(time.monotonic() - start)
                    assert not update.done() and len(await c.generate()) == 16
                assert (await c.get("/status"))["update"]["state"] == "open"
                await trainer.send({names[-1]: W1[names[-1]]})
                assert (await update)["received"] == 12
                took.sort()
                assert took[int(len(took) * 0.99)] < 0.2, took

    run(body())


# -- memory --------------------------------------------------------------------------------------------------------


def test_the_prefix_cache_is_reset_or_the_call_fails(models: pathlib.Path) -> None:
    async def body() -> None:
        straight = reference(models / "w0", 400)
        async with server(models / "w0") as c:
            assert (await c.post("/reset_prefix_cache"))["success"] is True
            assert (await c.post("/reset_prefix_cache", {"reset_running_requests": False}))["success"] is True
            held = c.held(1)
            await c.until_running(1)
            assert "1 requests hold" in await c.refused(409, "/reset_prefix_cache")
            found = await c.post("/reset_prefix_cache", reset_running_requests="true", reset_external="true")
            assert found == {"success": True, "reset_requests": 1}
            assert (await held[0]) == straight
            assert (await c.get("/status"))["num_reprefilled_tokens"] > 0

    run(body())


def test_case_067_deep_sleep_needs_weights_before_it_works_again(models: pathlib.Path) -> None:
    async def body() -> None:
        expected = [reference(models / f"w{seed}") for seed in range(2)]
        async with server(models / "w0") as c:
            for round_ in range(5):
                found = await c.post("/sleep", level=2)
                assert (found["status"], found["level"]) == ("sleeping", 2)
                assert await c.get("/is_sleeping") == {"is_sleeping": True}
                await c.refused(409, "/update_weights", {"weight_dir": str(models / "w1")})
                found = await c.post("/wake_up", tags="weights")
                assert found["status"] == "sleeping" and found["asleep"] == ["kv_cache", "scheduling"]
                found = await c.post("/wake_up", tags=["kv_cache"])
                assert (found["status"], found["paused"], found["weights_loaded"]) == ("awake", False, False)
                assert await c.get("/is_sleeping") == {"is_sleeping": False}
                assert "weights not loaded" in await c.refused(409, "/inference/v1/generate", {"token_ids": [5]})
                assert "weights not loaded" in await c.refused(409, "/weight_checker", {"action": "checksum"})
                which = (round_ + 1) % 2
                await c.post("/update_weights", {"weight_dir": str(models / f"w{which}")})
                assert await c.generate() == expected[which]

    run(body())


def test_deep_sleep_takes_no_partial_update(models: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from safetensors.torch import save_file

    save_file({EMBEDDING: W1[EMBEDDING]}, tmp_path / "model.safetensors")

    async def body() -> None:
        async with server(models / "w0", default_update_mode="partial") as c:
            await c.post("/sleep", level=2)
            await c.post("/wake_up")
            assert "no weights for" in await c.refused(400, "/update_weights", {"weight_dir": str(tmp_path)})
            assert (await c.get("/status"))["sleep"]["weights_loaded"] is False
            await c.post("/update_weights", {"weight_dir": str(models / "w0")})
            assert await c.generate() == reference(models / "w0")

    run(body())


def test_case_068_a_partial_wake_runs_nothing(models: pathlib.Path) -> None:
    async def body() -> None:
        expected = reference(models / "w0")
        async with server(models / "w0") as c:
            before = (await c.post("/sleep", level=1, mode="abort"))["asleep"]
            assert before == ["weights", "kv_cache", "scheduling"]
            assert (await c.post("/sleep", level=1))["level"] == 1  # a second time changes nothing
            await c.post("/wake_up", tags="weights")
            assert "kv_cache" in await c.refused(409, "/inference/v1/generate", {"token_ids": [5]})
            steps = (await c.get("/status"))["num_steps"]
            await c.refused(409, "/resume")
            assert (await c.get("/status"))["num_steps"] == steps
            found = await c.post("/wake_up", tags="kv_cache")
            assert (found["status"], found["woken"], found["paused"]) == ("awake", ["kv_cache"], False)
            assert await c.generate() == expected
            # in a keep-pause requests queue, and run when all is awake and resumed
            await c.post("/pause", mode="keep")
            await c.post("/sleep", level=1)
            await c.post("/wake_up", tags="weights")
            queued = asyncio.create_task(c.generate())
            while (await c.get("/status"))["held"] < 1:
                pass
            await c.post("/wake_up", tags="kv_cache")
            assert not queued.done()
            await c.post("/resume")
            assert await queued == expected
            await c.refused(400, "/wake_up", tags="dreams")
            await c.refused(400, "/sleep", level=3)
            assert (await c.post("/wake_up"))["woken"] == []

    run(body())


def test_case_070_sleep_keeps_what_a_keep_pause_preserved(models: pathlib.Path) -> None:
    async def body() -> None:
        straight = reference(models / "w0", 400)
        async with server(models / "w0") as c:
            for level in (1, 0):
                held = c.held(2)
                await c.until_running(2)
                await c.post("/pause", mode="keep", clear_cache="false", owner="me")
                await c.post("/sleep", level=level)
                assert not any(task.done() for task in held)
                found = await c.post("/wake_up")
                assert (found["status"], found["paused"]) == ("awake", True)  # the pause was not sleep's
                assert (await c.get("/status"))["owner"] == "me" and not any(task.done() for task in held)
                await c.post("/resume", owner="me")
                assert await asyncio.gather(*held) == [straight] * 2
            # sleep's own pause in keep mode: the same, and undone by waking up
            held = c.held(2)
            await c.until_running(2)
            await c.post("/sleep", level=1, mode="keep")
            assert not any(task.done() for task in held)
            await c.post("/wake_up")
            assert await asyncio.gather(*held) == [straight] * 2
            # a pause that somebody takes while it sleeps stays
            await c.post("/sleep", level=1)
            await c.post("/pause", mode="abort", owner="late")
            await c.post("/wake_up")
            assert (await c.get("/status"))["owner"] == "late"
            await c.post("/resume", owner="late")
            # an open update does not sleep
            await c.post("/start_weight_update")
            assert "update-1" in await c.refused(409, "/sleep", level=1)
            await c.post("/abort_weight_update")
            found = await c.post("/collective_rpc", {"method": "skyrl_sleep_for_weight_sync", "kwargs": {"level": 1}})
            assert found["results"][0]["status"] == "sleeping"
            wake = {"method": "skyrl_wake_for_weight_sync", "kwargs": {"tags": ["weights"]}}
            found = await c.post("/collective_rpc", wake)
            assert found["results"][0]["asleep"] == ["kv_cache", "scheduling"]
            await c.post("/wake_up")
            assert await c.generate(400) == straight

    run(body())


def test_weights_of_a_device_come_back_from_host_memory(models: pathlib.Path) -> None:
    """The path that a GPU takes, walked on the CPU."""
    with LLM(str(models / "w0"), num_blocks=64) as llm:
        before = llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids
        worker = llm.core.worker
        cpu, worker.device = worker.device, torch.device("cuda")
        llm.sleep(1)
        worker.device = cpu
        assert worker.weights is None and not worker.has_lost_weights and llm.is_sleeping()
        assert worker.runner.key_cache.numel() == 0
        with pytest.raises(Conflict, match="wake_up"):
            llm.generate([5, 6, 7], GREEDY)
        llm.wake_up()
        assert llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids == before
        assert llm._call("weight_digests")["digests"] == digests_of(W0)
        cpu, worker.device = worker.device, torch.device("cuda")
        llm.sleep(1)
        llm.sleep(2)  # deeper: what was kept is dropped too
        worker.device = cpu
        assert worker.has_lost_weights
        llm.wake_up()
        with pytest.raises(Conflict, match="weights not loaded"):
            llm.generate([5, 6, 7], GREEDY)
        llm.update_weights({"weight_dir": str(models / "w0")})
        assert llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids == before


# -- safety, and the rest --------------------------------------------------------------------------------------------


class Poison:
    """Creates a file when unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_case_044_no_pickle_and_no_control_without_the_token(models: pathlib.Path, tmp_path: pathlib.Path) -> None:
    trap = tmp_path / "trap"
    poison = pickle.dumps(Poison(str(trap)))
    control = ["/pause", "/resume", "/update_weights", "/collective_rpc", "/sleep", "/abort_weight_update"]

    async def body() -> None:
        import base64

        async with server(models / "w0", {"control_token": "secret"}) as c:
            for path in control:
                for headers in ({}, {"Authorization": "Bearer wrong"}):
                    response = await c.http.post(path, headers=headers)
                    assert response.status_code == 401, (path, response.text)
            c.http.headers["Authorization"] = "Bearer secret"
            for path in ("/update_weights", "/init_weight_transfer_engine", "/collective_rpc", "/start_weight_update"):
                for kind in ("application/json", "application/octet-stream", "application/x-pickle"):
                    response = await c.http.post(path, content=poison, headers={"Content-Type": kind})
                    assert response.status_code == 400, (path, kind, response.text)
            pickled = base64.b64encode(poison).decode()
            info = {**info_of(W1), "ipc_handles_pickled": pickled}
            assert "ipc_handles_pickled" in await c.refused(400, "/update_weights", {"update_info": info})
            rpc = {"method": "update_weights_from_ipc", "kwargs": {"update_info": info}}
            await c.refused(400, "/collective_rpc", rpc)
            await c.refused(400, "/init_weight_transfer_engine", {"init_info": {"pickled": pickled}})
            assert not trap.exists()
            assert (await c.get("/weight_info"))["number"] == 0
            # with a listener of their own the control routes are not on the public one
        async with server(models / "w0", {"control_port": 0}) as c:
            for path in control:
                assert (await c.http.post(path)).status_code == 404
            inner = create_control_app(c.app.state.front)
            transport = httpx.ASGITransport(inner, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as private:
                assert (await private.post("/pause")).status_code == 200
                assert (await private.post("/resume")).json()["was_paused"]

    run(body())


def test_the_allow_list_of_methods(models: pathlib.Path) -> None:
    async def body() -> None:
        async with server(models / "w0") as c:
            assert "skyrl_start_weight_update" in await c.refused(404, "/collective_rpc", {"method": "load_model"})
            await c.refused(404, "/collective_rpc", {"method": "__init__"})
            for bad in (
                {"method": "start_weight_update", "args": [1]},
                {"method": "start_weight_update", "kwargs": {"mode": 5}},
                {"method": "update_weights", "args": [1, 2]},
                {"method": "update_weights_from_path"},
                {"method": "update_weights_from_path", "args": ["a", "b"]},
                {"method": "skyrl_sleep_for_weight_sync", "kwargs": {"depth": 1}},
                {"method": "finish_weight_update", "timeout": 0},
                {"kwargs": {}},
            ):
                await c.refused(400, "/collective_rpc", bad)
            await c.refused(404, "/start_draft_weight_update")
            found = await c.post("/collective_rpc", {"method": "start_weight_update"})
            assert found["results"][0]["session_id"] == "update-1"

    run(body())


def test_case_114_the_surplus_of_a_batch_stops_at_once(models: pathlib.Path) -> None:
    async def body() -> None:
        straight = reference(models / "w0", 400)
        async with server(models / "w0", max_num_seqs=16) as c:
            for round_ in range(3):
                lengths = [12] * 8 + [400] * 2
                tasks = [
                    asyncio.create_task(c.generate(length, request_id=f"{round_}-{i}"))
                    for i, length in enumerate(lengths)
                ]
                assert await asyncio.gather(*tasks[:8]) == [straight[:12]] * 8
                assert not any(task.done() for task in tasks[8:])
                before = (await c.get("/status"))["num_steps"]
                start = time.monotonic()
                found = await c.post("/abort_requests", {"request_ids": [f"{round_}-8", f"{round_}-9"]})
                assert found["aborted"] == 2
                for partial in await asyncio.gather(*tasks[8:]):
                    assert 12 <= len(partial) < 400 and partial == straight[: len(partial)]
                took = time.monotonic() - start
                status = await c.get("/status")
                assert took < 0.5 and status["num_steps"] - before < 100  # of the 388 that were left
                assert status["running"] + status["waiting"] == 0 and status["num_free_blocks"] == status["num_blocks"]

    run(body())


# -- the core's own rules --------------------------------------------------------------------------------------------


def test_case_116_status_agrees_with_the_truth_in_random_steps(models: pathlib.Path) -> None:
    """A model of pause, owner, sleep and updates beside the engine: after every call both say the same."""
    rng = random.Random(0)
    driver, metrics, prefix = Driver(models / "w0"), ServerMetrics(), "midstream_engine_"
    state: dict[str, Any] = {"mode": None, "owner": None, "level": None, "own": False, "update": None, "number": 0}
    sessions = 0

    def call(verb: str, **arguments: Any) -> bool:
        op = driver.call(verb, **arguments)
        driver.step()
        return not isinstance(driver.replies[op], Fail)

    for _ in range(1000):
        choice = rng.choice(["pause", "resume", "sleep", "wake", "start", "abort", "add", "step", "relabel"])
        if choice == "pause":
            owner, mode = rng.choice([None, "a", "b"]), rng.choice(["abort", "keep"])
            done = call("pause_generation", mode=mode, owner=owner)
            assert done == (state["owner"] in (None, owner))
            if done:
                state.update(mode=mode, owner=owner, own=False)
        elif choice == "resume":
            owner, force = rng.choice([None, "a", "b"]), rng.random() < 0.3
            done = call("resume_generation", owner=owner, force=force)
            asleep = state["level"] in (1, 2)
            assert done == ((force or state["owner"] in (None, owner)) and not asleep)
            if done:
                state.update(mode=None, owner=None, own=False, level=None)
        elif choice == "sleep":
            level = rng.choice([0, 1])
            done = call("sleep", level=level, mode="keep")
            assert done == (state["update"] is None or level == 0)
            if done and (state["level"] is None or level > state["level"]):
                if state["mode"] is None:
                    state.update(mode="keep", own=True)
                state["level"] = level
        elif choice == "wake":
            assert call("wake_up")
            if state["level"] is not None and state["own"]:
                state.update(mode=None, owner=None)
            state.update(level=None, own=False)
        elif choice == "start":
            done = call("start_weight_update")
            assert done == (state["update"] is None and state["level"] != 1)
            if done:
                sessions += 1
                state["update"] = f"update-{sessions}"
        elif choice == "abort":
            assert call("abort_weight_update")
            state["update"] = None
        elif choice == "add" and len(driver.core.scheduler.live) < 4:
            with contextlib.suppress(EnginePaused, Conflict):
                driver.add([5, 6, 7], max_tokens=rng.choice([3, 30]))
        elif choice == "step":
            driver.step()
        status = driver.core.status()
        live = driver.core.scheduler.live
        assert status["mode"] == state["mode"] and status["owner"] == state["owner"]
        assert status["state"] == ("running" if state["mode"] is None else "paused")
        assert (status["paused_since"] is None) == (state["mode"] is None)
        assert status["sleep"]["level"] == state["level"]
        assert (status["update"] or {}).get("session_id") == state["update"]
        assert status["held"] == (len(live) if state["mode"] or state["level"] else 0)
        assert status["running"] + status["waiting"] == len(live)
        assert status["device_idle"] == (not live or status["held"] > 0)
        assert (status["version"], status["number"]) == (driver.core.version()["version"], 0)
        shown = dict(line.split() for line in metrics.text(status).decode().splitlines() if line.startswith(prefix))
        assert shown[prefix + "paused"] == ("0.0" if state["mode"] is None else "1.0")
        for name in ("running", "waiting", "held", "number", "num_free_blocks", "num_steps"):
            assert float(shown[prefix + name]) == status[name]
    driver.core.close()


def test_a_wait_pause_that_times_out_gives_the_owner_back(models: pathlib.Path) -> None:
    driver = Driver(models / "w0")
    driver.now("pause_generation", mode="keep")
    driver.add([5, 6, 7], max_tokens=300)
    op = driver.call("pause_generation", mode="wait", owner="a", timeout_s=0)
    driver.step()
    assert driver.error(op) and driver.core.status()["owner"] is None
    driver.now("resume_generation")
    with pytest.raises(InvalidInput):
        raise driver.error(driver.call("pause_generation", owner=5))
    driver.core.close()


def test_a_pause_that_joins_the_one_of_a_sleep_stays_when_it_wakes(models: pathlib.Path) -> None:
    driver = Driver(models / "w0")
    driver.add([5, 6, 7], max_tokens=20)
    asleep = driver.call("sleep", level=1, mode="wait")
    paused = driver.call("pause_generation", mode="wait")
    driver.run()
    assert driver.result(asleep)["level"] == 1 and driver.result(paused)["mode"] == "wait"
    assert driver.now("wake_up")["paused"] is True
    driver.now("resume_generation")
    # one that is cancelled says so, and nothing sleeps
    driver.add([5, 6, 7], max_tokens=20)
    asleep = driver.call("sleep", level=1, mode="wait")
    driver.now("resume_generation")
    assert isinstance(driver.error(asleep), Conflict) and driver.core.status()["sleep"]["level"] is None
    # an update that opened meanwhile keeps it awake, and running
    driver.add([5, 6, 7], max_tokens=20)
    asleep = driver.call("sleep", level=2, mode="wait")
    driver.now("start_weight_update")
    driver.run()
    assert "is open" in str(driver.error(asleep)) and driver.core.status()["state"] == "running"
    driver.now("abort_weight_update")
    # level 0 is a pause and no more: a resume ends it
    driver.now("sleep", level=0)
    driver.now("resume_generation")
    assert driver.core.status()["sleep"] == {"status": "awake", "level": None, "asleep": [], "weights_loaded": True}
    driver.core.close()


def test_the_checker_runs_beside_the_steps(models: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import midstream.engine.worker as module

    gate, real = threading.Event(), digest

    def slow(tensor: torch.Tensor) -> str:
        assert gate.wait(LIMIT_S)
        return real(tensor)

    driver = Driver(models / "w0")
    monkeypatch.setattr(module, "digest", slow)
    name = driver.add([5, 6, 7], max_tokens=30)
    op = driver.call("weight_checker", action="checksum")
    driver.steps(20)
    assert not driver.answered(op) and len(driver.tokens(name)) >= 10
    gate.set()
    assert driver.wait(op)["checksums"] == digests_of(W0)
    driver.core.close()


def test_a_reset_whose_pause_is_undone_changes_nothing(models: pathlib.Path) -> None:
    driver = Driver(models / "w0")
    driver.now("pause_generation", mode="keep")
    op = driver.call("weight_checker", action="reset")
    driver.call("resume_generation")
    while not driver.answered(op):
        driver.step()
    assert isinstance(driver.error(op), Conflict) and driver.core.status()["number"] == 0
    assert driver.core.status()["update"] is None and driver.digests() == digests_of(W0)
    driver.core.close()


def test_json_of_every_answer_is_plain(models: pathlib.Path) -> None:
    with LLM(str(models / "w0"), num_blocks=64) as llm:
        llm.pause_generation(mode="keep", owner="a", lease_s=60)
        llm.start_weight_update()
        json.dumps(llm.status())
        json.dumps(llm.sleep(0))
        json.dumps(llm.wake_up())
        llm.resume_generation(owner="a")
        json.dumps(llm.update_weight_version("v"))
        assert llm.weight_checker("checksum")["version"] == "v"
