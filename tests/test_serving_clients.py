"""What RL frameworks send, as they send it: a trainer's admin sequence in flight, and clients that resubmit."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from checkpoints import write_checkpoint
from cores import TINY
from servers import LIMIT_S, Served, events, served

NUM_IN_FLIGHT, LENGTH, NUM_SEQUENCES = 32, 400, 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        write_checkpoint(root / f"w{seed}", "llama", seed, **TINY)
    return root


@pytest.fixture(scope="module")
def server(models: pathlib.Path) -> Iterator[Served]:
    with served(models / "w0", {"max_num_seqs": NUM_IN_FLIGHT}) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(server: Served) -> list[dict[str, Any]]:
    """The same requests without any update, from the weights that a server starts with."""

    async def run() -> list[dict[str, Any]]:
        async with client(server) as http:
            return await asyncio.gather(*(rollout(http, i) for i in range(NUM_IN_FLIGHT)))

    return asyncio.run(run())


@asynccontextmanager
async def client(server: Served) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=NUM_IN_FLIGHT + 8)
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S, limits=limits) as found:
        yield found


async def until(http: httpx.AsyncClient, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    async with asyncio.timeout(LIMIT_S):
        while not condition(status := (await http.get("/status")).json()):
            pass
        return status  # type: ignore[no-any-return]


async def rollout(http: httpx.AsyncClient, number: int) -> dict[str, Any]:
    """One request of prime-rl's data plane, every fourth one as a stream: its ids, logprobs and version spans."""
    is_stream = number % 4 == 0
    params = {"max_tokens": LENGTH, "logprobs": 1, "seed": number, "ignore_eos": True, "skip_special_tokens": False}
    body = {"token_ids": [5, 6, 7 + number], "sampling_params": params, "stream": is_stream}
    response = await http.post("/inference/v1/generate", json=body, headers={"X-Session-ID": f"trace-{number}"})
    assert response.status_code == 200
    parts = [c for e in (events(response.text) if is_stream else [response.json()]) for c in e["choices"]]
    content = [entry for part in parts for entry in part["logprobs"]["content"]]
    ids = [token for part in parts for token in part["token_ids"]]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in ids]
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
    return {"ids": ids, "logprobs": [e["logprob"] for e in content], "spans": parts[-1]["weight_versions"]}


@pytest.mark.parametrize("names", [("w0",), ("w1", "w0")], ids=["same", "other"])
def test_updates_by_directory_under_32_requests_lose_and_repeat_nothing(
    server: Served, undisturbed: list[dict[str, Any]], models: pathlib.Path, names: tuple[str, ...]
) -> None:
    """prime-rl's admin sequence, four times while 32 requests run. Where each commit brings the same bits, every token
    and logprob is that of an undisturbed run; where not, those made before the first commit are."""

    async def run() -> None:
        async with client(server) as http:
            await http.post("/update_weights", json={"weight_dir": str(models / "w0")})
            await http.post("/pause?mode=keep")  # so that all begin in one step and go on together
            tasks = [asyncio.create_task(rollout(http, i)) for i in range(NUM_IN_FLIGHT)]
            first = await until(http, lambda s: s["held"] == NUM_IN_FLIGHT)
            status = first
            for k in range(NUM_SEQUENCES):
                wanted = status["num_sampled_tokens"] + NUM_IN_FLIGHT
                while status["num_sampled_tokens"] < wanted:  # asked while paused: no request ends meanwhile
                    assert (await http.post("/resume")).status_code == 200
                    paused = await http.post("/pause?mode=keep&clear_cache=false")
                    assert paused.status_code == 200 and paused.json()["status"] == "paused"
                    status = (await http.get("/status")).json()
                assert status["held"] == NUM_IN_FLIGHT
                body = {"weight_dir": str(models / names[k % len(names)])}
                updated = await http.post("/update_weights", json=body)
                assert updated.status_code == 200 and updated.json()["number"] == first["number"] + k + 1
            assert (await http.post("/resume")).status_code == 200
            found = await asyncio.gather(*tasks)
            numbers = [first["number"] + k for k in range(NUM_SEQUENCES + 1)]
            for one, whole in zip(found, undisturbed, strict=True):
                assert len(one["ids"]) == len(one["logprobs"]) == LENGTH
                ends = [span["end"] for span in one["spans"]]
                assert [span["start"] for span in one["spans"]] == [0, *ends[:-1]] and ends[-1] == LENGTH
                assert [span["number"] for span in one["spans"]] == numbers
                same = LENGTH if len(names) == 1 else ends[0]
                assert one["ids"][:same] == whole["ids"][:same]
                assert one["logprobs"][:same] == whole["logprobs"][:same]
                assert len(names) == 1 or one["logprobs"] != whole["logprobs"]

    asyncio.run(run())
    server.idle()


PROMPT, BUDGET = [4, 5, 6], 480


def areal(prompt: list[int], budget: int, seed: int | None) -> tuple[str, dict[str, Any]]:
    """AReaL's request, key for key: flat, without a model; the seed is what a client adds that wants equal tokens."""
    body: dict[str, Any] = {
        "top_p": 1.0, "top_k": -1, "max_tokens": budget, "temperature": 1.2, "stop_token_ids": [], "ignore_eos": True,
        "skip_special_tokens": False, "return_tokens_as_token_ids": True, "logprobs": 0, "use_beam_search": False,
        "stream": False, "prompt": prompt,
    }  # fmt: skip
    return "/v1/completions", body if seed is None else {**body, "seed": seed}


def generate(prompt: list[int], budget: int, seed: int | None) -> tuple[str, dict[str, Any]]:
    params = {"max_tokens": budget, "temperature": 1.2, "stop_token_ids": [], "ignore_eos": True, "logprobs": 0}
    return "/inference/v1/generate", {"token_ids": prompt, "sampling_params": {**params, "seed": seed}}


def read(choice: dict[str, Any]) -> list[tuple[int, float]]:
    """(id, logprob) of every token, from AReaL's shape or from generate's."""
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        pairs = [(entry["token"], entry["logprob"]) for entry in logprobs["content"]]
    else:
        pairs = list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))
    return [(int(name.removeprefix("token_id:")), logprob) for name, logprob in pairs]


@pytest.mark.parametrize("form", [areal, generate])
@pytest.mark.parametrize("clear_cache", [True, False])
def test_abort_and_resubmit_equals_an_uninterrupted_run(server: Served, form: Any, clear_cache: bool) -> None:
    """Cut up to four times: prompt + partial, what is left of the budget, the seed that came back."""

    async def send(http: httpx.AsyncClient, prompt: list[int], budget: int, seed: int | None) -> dict[str, Any]:
        path, body = form(prompt, budget, seed)
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]  # type: ignore[no-any-return]

    async def run() -> None:
        async with client(server) as http:
            made: list[tuple[int, float]] = []
            seed, cuts = None, []
            while True:
                before = (await http.get("/status")).json()["num_sampled_tokens"]
                prompt = [*PROMPT, *(token for token, _ in made)]
                task = asyncio.create_task(send(http, prompt, BUDGET - len(made), seed))
                if len(cuts) < 4:
                    await until(http, lambda s: s["num_sampled_tokens"] > before)  # noqa: B023
                    await http.post("/pause", params={"mode": "abort", "clear_cache": clear_cache})
                    await http.post("/resume")
                choice = await task
                made += read(choice)
                seed = choice["seed"]
                if choice["finish_reason"] != "abort":
                    break
                cuts.append(len(made))
            assert cuts == sorted(set(cuts)) and len(cuts) >= 2, cuts  # a slow reader may come after the end
            whole = await send(http, PROMPT, BUDGET, seed)
            assert made == read(whole) and whole["finish_reason"] == choice["finish_reason"]

    asyncio.run(run())
    server.idle()
