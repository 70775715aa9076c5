"""One engine over several nodes: ranks that are launched elsewhere, and several front ends that see one engine."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from engines import LONG, SHORT, collect, run, tokens_of
from midstream.engine.process import Add
from midstream.errors import Conflict, EngineDead, EnginePaused, InvalidInput, MidstreamError, NotReady, TimedOut
from midstream.serving.async_llm import AsyncLLM
from midstream.serving.head import Front
from midstream.types import RequestOutput

torch.set_num_threads(1)

OPTIONS: dict[str, Any] = {"num_blocks": 128, "num_threads": 1, "max_num_seqs": 16, "dtype": "float32"}
LOCKSTEP: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
REPLICAS: dict[str, Any] = {"data_parallel_size": 2}
BOUND_S = 6.0


@pytest.fixture
def address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


@contextlib.asynccontextmanager
async def engines(model: pathlib.Path, *places: dict[str, Any], **options: Any) -> AsyncIterator[list[AsyncLLM]]:
    """The parts of one engine, each as its own command would make it; the first one owns it. Started at once."""
    parts = [AsyncLLM(str(model), **OPTIONS, **options, **place) for place in places]
    try:
        async with asyncio.timeout(40):
            await asyncio.gather(*(part.start() for part in parts))
        yield parts
    finally:
        for part in parts:
            await part.aclose()


def owner(address: str, local: int = 1) -> dict[str, Any]:
    return {"data_parallel_address": address, "data_parallel_rank": 0, "data_parallel_size_local": local}


def node(address: str, rank: int) -> dict[str, Any]:
    return {"data_parallel_address": address, "data_parallel_rank": rank}


def front(address: str) -> dict[str, Any]:
    return {"data_parallel_address": address}


def look(output: RequestOutput) -> tuple[Any, ...]:
    one = output.outputs[0]
    return one.token_ids, one.processed_logprobs, one.finish_reason


async def alone(model: pathlib.Path, prompts: list[list[int]], params: Any = SHORT) -> list[tuple[Any, ...]]:
    """What one engine says, a request at a time."""
    async with AsyncLLM(str(model), **OPTIONS) as llm:
        return [look(await collect(llm, prompt, params)) for prompt in prompts]


PROMPTS = [[5, 6], [7], [8, 9, 10], [11] * 17, [12, 13], [14]]

# -- several front ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one rank", "replicas", "lockstep"])
def test_case_047_three_front_ends_see_one_pause(
    dense: list[pathlib.Path], moe: list[pathlib.Path], address: str, kind: str
) -> None:
    model = moe[0] if kind == "lockstep" else dense[0]
    options = {"one rank": {}, "replicas": REPLICAS, "lockstep": LOCKSTEP}[kind]

    async def body() -> None:
        expected = await alone(model, PROMPTS[:3], LONG)
        local = 1 if kind == "one rank" else 2
        async with engines(model, owner(address, local), front(address), front(address), **options) as llms:
            a, b, c = llms

            async def paused() -> list[bool]:
                return [await llm.is_paused() for llm in llms]

            assert await paused() == [False] * 3
            for pauses, resumes in ((b, a), (c, b), (a, c))[: 1 if kind == "lockstep" else 3]:
                tasks = [
                    asyncio.create_task(collect(llm, prompt, LONG, request_id=f"r{i}"))
                    for i, (llm, prompt) in enumerate(zip(llms, PROMPTS, strict=False))
                ]
                for i, llm in enumerate(llms):
                    await tokens_of(llm, f"r{i}", 2)
                assert (await pauses.pause_generation("keep"))["paused"]
                assert await paused() == [True] * 3
                made = [(await llm.status())["num_sampled_tokens"] for llm in llms]
                assert len(set(made)) == 1
                held = asyncio.create_task(collect(b, [9, 9], SHORT))
                await asyncio.sleep(1.0)  # what must not happen in it: a token
                assert {(await llm.status())["num_sampled_tokens"] for llm in llms} == set(made)
                assert not held.done() and not any(task.done() for task in tasks)
                await resumes.resume_generation()
                assert await paused() == [False] * 3
                assert [look(output) for output in await asyncio.gather(*tasks)] == expected
                await held
            await c.pause_generation("abort")
            for llm in llms:
                with pytest.raises(EnginePaused):
                    await collect(llm, [5])
            await a.resume_generation()
            assert look(await collect(c, PROMPTS[0], LONG)) == expected[0]

    run(body(), 90)


def test_an_update_through_any_front_end_is_everyones(dense: list[pathlib.Path], address: str) -> None:
    async def body() -> None:
        expected = [await alone(model, PROMPTS[:2]) for model in dense]
        async with engines(dense[0], owner(address), front(address)) as (a, b):
            for number, llm in enumerate((b, a, b), 1):
                done = await llm.update_weights({"weight_dir": str(dense[number % 2]), "weight_version": f"v{number}"})
                assert done["number"] == number
                late = AsyncLLM(str(dense[0]), **OPTIONS, **front(address))
                try:
                    assert (await late.start())["version"] == f"v{number}"
                finally:
                    await late.aclose()
                for reader in (a, b):
                    assert (await reader.status())["version"] == f"v{number}"
                    assert [look(await collect(reader, p)) for p in PROMPTS[:2]] == expected[number % 2]
            await a.pause_generation("keep", owner="a")
            with pytest.raises(Conflict):
                await b.resume_generation()
            await b.resume_generation(force=True)

    run(body())


def test_requests_are_known_by_their_front_end(dense: list[pathlib.Path], address: str) -> None:
    """A name in use is refused, without harm to the other; an abort works across; who leaves ends what it asked."""

    async def body() -> None:
        (expected,) = await alone(dense[0], [[5, 6]], LONG)
        async with engines(dense[0], owner(address), front(address), front(address)) as (a, b, c):
            mine = asyncio.create_task(collect(a, [5, 6], LONG, request_id="x"))
            await tokens_of(a, "x", 2)
            for other in (b, c):
                with pytest.raises(InvalidInput, match="in use"):
                    await collect(other, [7], request_id="x")
            for at in range(6):  # whoever leaves before the refusal has come, too
                leaves = asyncio.create_task(collect(b, [7], request_id="x"))
                for _ in range(at):
                    await asyncio.sleep(0)
                leaves.cancel()
                await asyncio.gather(leaves, return_exceptions=True)
            await b.is_paused()
            assert look(await mine) == expected
            assert look(await collect(b, [5, 6], LONG, request_id="x")) == expected, "free again"
            theirs = asyncio.create_task(collect(b, [5, 6], LONG, request_id="y"))
            await tokens_of(b, "y", 2)
            assert (await c.abort_requests(["y"]))["aborted"] == 1
            assert (await theirs).outputs[0].finish_reason == "abort"
            stays = asyncio.create_task(collect(a, [5, 6], LONG, request_id="stays"))
            left = asyncio.create_task(collect(b, [5, 6], LONG, request_id="left"))
            await asyncio.gather(tokens_of(a, "stays", 2), tokens_of(b, "left", 2))
            await b.end_requests()
            assert (await left).outputs[0].finish_reason == "abort"
            assert look(await stays) == expected
            left = asyncio.create_task(collect(b, [5, 6], LONG, request_id="z"))
            await tokens_of(b, "z", 2)
            await b.pause_generation("keep")
            await b.aclose()
            with pytest.raises(EngineDead):
                await left
            async with asyncio.timeout(BOUND_S):
                while len(a._engine.guests) == 2:
                    await asyncio.sleep(0.01)
            assert await a.is_paused(), "a pause is the engine's"
            await a.resume_generation()
            status = await a.status()
            assert status["running"] + status["waiting"] == 0
            assert look(await collect(c, [5, 6], LONG, request_id="z")) == expected
            await c.is_paused()  # behind what it had to say of its request
            assert not a._engine.requests and not a._engine._calls

    run(body())


# -- ranks that are launched elsewhere ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["replicas", "lockstep"])
def test_ranks_of_two_nodes_are_one_engine(
    dense: list[pathlib.Path], moe: list[pathlib.Path], address: str, kind: str
) -> None:
    models, options = (moe, LOCKSTEP) if kind == "lockstep" else (dense, REPLICAS)

    async def body() -> None:
        expected = [await alone(model, PROMPTS) for model in models]
        async with engines(models[0], owner(address), node(address, 1), **options) as (a, b):
            for number in range(3):
                outputs = await asyncio.gather(*(collect((a, b)[i % 2], p) for i, p in enumerate(PROMPTS)))
                assert [look(output) for output in outputs] == expected[number % 2]
                status = await (a, b)[number % 2].status()
                assert [rank["number"] for rank in status["ranks"]] == [number] * 2
                assert all(rank["num_steps"] > 0 for rank in status["ranks"])
                await (b, a)[number % 2].update_weights({"weight_dir": str(models[(number + 1) % 2])})

    run(body())


@pytest.mark.parametrize("kind", ["replicas", "lockstep"])
def test_a_node_that_goes_ends_the_engine_for_every_client(
    dense: list[pathlib.Path], moe: list[pathlib.Path], address: str, kind: str
) -> None:
    models, options = (moe, LOCKSTEP) if kind == "lockstep" else (dense, REPLICAS)

    async def body() -> None:
        async with engines(models[0], owner(address), node(address, 1), front(address), **options) as (a, b, c):
            tasks = [asyncio.create_task(collect(llm, [5], LONG, request_id=n)) for llm, n in ((a, "a"), (c, "c"))]
            await asyncio.gather(tokens_of(a, "a", 2), tokens_of(c, "c", 2))
            (process,) = b._engine._processes.values()
            process.kill()
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), BOUND_S)
            assert all(isinstance(r, (EngineDead, RequestOutput)) for r in results)
            assert any(isinstance(r, EngineDead) and "lost" in str(r) for r in results)
            for llm in (a, b, c):
                await asyncio.wait_for(llm.ended.wait(), BOUND_S)
                with pytest.raises(EngineDead):
                    await collect(llm, [5])

    run(body())


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("replicas", "process"),
        ("lockstep", "node"),
        pytest.param("lockstep", "process", marks=pytest.mark.slow),
        pytest.param("replicas", "node", marks=pytest.mark.slow),
    ],
)
def test_what_was_lost_elsewhere_comes_back(
    dense: list[pathlib.Path], moe: list[pathlib.Path], address: str, kind: str, what: str
) -> None:
    """With elastic: the process by its node, a node by another one."""
    models, options = (moe, LOCKSTEP) if kind == "lockstep" else (dense, REPLICAS)

    async def body() -> None:
        (expected,) = await alone(models[0], [[5, 6]])
        async with engines(models[0], owner(address), node(address, 1), elastic=True, **options) as (a, b):
            if what == "process":
                (process,) = b._engine._processes.values()
                process.kill()
                again = b
            else:
                await b.aclose()
                again = AsyncLLM(str(models[0]), **OPTIONS, **options, **node(address, 1), elastic=True)
            try:
                start = time.monotonic()
                async with asyncio.timeout(30):
                    if again is not b:
                        await again.start()
                    while True:
                        with contextlib.suppress(MidstreamError):
                            status = await a.status()
                            if status["state"] == "running" and all("why" not in rank for rank in status["ranks"]):
                                break
                        await asyncio.sleep(0.05)  # as a client does
                print(f"{kind}, {what}: back after {time.monotonic() - start:.1f} s")
                outputs = await asyncio.gather(*(collect(llm, [5, 6]) for llm in (a, again, a, again)))
                assert [look(output) for output in outputs] == [expected] * 4
            finally:
                await again.aclose()

    run(body())


def test_the_owner_goes(dense: list[pathlib.Path], address: str) -> None:
    async def body() -> None:
        async with engines(dense[0], owner(address), node(address, 1), front(address), **REPLICAS) as (a, b, c):
            tasks = [asyncio.create_task(collect(llm, [5], LONG, request_id="x")) for llm in (c,)]
            await tokens_of(c, "x", 2)
            (process,) = b._engine._processes.values()
            await a.aclose()
            with pytest.raises(EngineDead):
                await asyncio.wait_for(tasks[0], BOUND_S)
            await asyncio.wait_for(asyncio.gather(b.ended.wait(), c.ended.wait(), process.ended.wait()), BOUND_S)

    run(body())


def test_a_front_end_knows_that_the_engine_waits_for_weights(moe: list[pathlib.Path], address: str) -> None:
    async def body() -> None:
        options = {**LOCKSTEP, "elastic": True}
        async with engines(moe[0], owner(address, 2), front(address), **options) as (a, b):
            await b.update_weights({"weight_dir": str(moe[1])})
            a._engine[1].process.kill()
            async with asyncio.timeout(30):
                while True:
                    with contextlib.suppress(MidstreamError):
                        if (await b.status())["state"] == "pending_weights":
                            break
                    await asyncio.sleep(0.05)  # as a client does
            for llm in (a, b):
                with pytest.raises(NotReady, match="pending_weights"):
                    llm.check_alive()
            await b.update_weights({"weight_dir": str(moe[1])})
            assert len((await collect(b, [5])).outputs[0].token_ids) == 24
            b.check_alive()

    run(body())


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_refusals(dense: list[pathlib.Path], address: str) -> None:
    async def body() -> None:
        async with engines(dense[0], owner(address), node(address, 1), **REPLICAS) as (a, _):
            for wrong, error, text in (
                (node(address, 1), Conflict, "rank 1 has been launched by another node"),
                ({**front(address), "max_num_seqs": 8}, InvalidInput, "max_num_seqs is 16 at rank 0 and 8 here"),
                ({**front(address), "data_parallel_size": 3}, InvalidInput, "data_parallel_size is 2 at rank 0"),
            ):
                other = AsyncLLM(str(dense[0]), **{**OPTIONS, **REPLICAS, **wrong})
                with pytest.raises(error, match=text):
                    await asyncio.wait_for(other.start(), BOUND_S)
            host, _, port = address.rpartition(":")
            for garbage in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 7 + b"\4\xff\xff\xff\xff", b"\0" * 8, b""):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(garbage)
                writer.write_eof()
                await asyncio.wait_for(reader.read(), BOUND_S)
                writer.close()
            assert len((await collect(a, [5])).outputs[0].token_ids) == 24, "it serves on"
            second = AsyncLLM(str(dense[0]), **OPTIONS, **REPLICAS, **owner(address))
            with pytest.raises(InvalidInput, match="can not listen"):
                await second.start()

    run(body())


def test_a_front_end_before_the_engine_serves(dense: list[pathlib.Path], address: str) -> None:
    """It waits, in any order of starts; and is told to wait where a rank is missing."""

    async def body() -> None:
        first = AsyncLLM(str(dense[0]), **OPTIONS, **REPLICAS, **front(address))
        starting = asyncio.create_task(first.start())
        await asyncio.sleep(0)
        a = AsyncLLM(str(dense[0]), **OPTIONS, **REPLICAS, **owner(address))
        owning = asyncio.create_task(a.start())
        try:
            async with asyncio.timeout(30):
                while first._ranks is None or first._ranks._link is None:
                    await asyncio.sleep(0.01)
            with pytest.raises(NotReady):
                first._ranks.check_serving()
            assert not starting.done() and not owning.done(), "rank 1 is not here"
            b = AsyncLLM(str(dense[0]), **OPTIONS, **REPLICAS, **node(address, 1))
            try:
                await asyncio.wait_for(asyncio.gather(b.start(), owning, starting), 30)
                assert len((await collect(first, [5])).outputs[0].token_ids) == 24
            finally:
                await b.aclose()
        finally:
            await a.aclose()
            await first.aclose()

    run(body())


@pytest.mark.parametrize("part", ["owner", "node", "front end"])
def test_waiting_for_others_can_be_ended_and_has_a_limit(dense: list[pathlib.Path], address: str, part: str) -> None:
    place = {"owner": owner(address), "node": node(address, 1), "front end": front(address)}[part]

    async def body() -> None:
        llm = AsyncLLM(str(dense[0]), **OPTIONS, **REPLICAS, **place)
        starting = asyncio.create_task(llm.start())
        await asyncio.sleep(0.1)
        await asyncio.wait_for(llm.aclose(), BOUND_S)
        with pytest.raises(EngineDead, match="closed"):
            await asyncio.wait_for(starting, 1)
        again = AsyncLLM(str(dense[0]), **OPTIONS, **REPLICAS, **place)
        with pytest.raises(TimedOut, match="did not start within 0.2 s"):
            await asyncio.wait_for(again.start(timeout_s=0.2), BOUND_S)

    run(body())


def test_nodes_that_hold_prompts_of_different_lengths_are_refused(dense: list[pathlib.Path], address: str) -> None:
    async def body() -> None:
        options = {**OPTIONS, **REPLICAS, "num_blocks": None}
        a = AsyncLLM(str(dense[0]), **options, **owner(address), kv_cache_bytes=1 << 22)
        b = AsyncLLM(str(dense[0]), **options, **node(address, 1), kv_cache_bytes=1 << 16)
        results = await asyncio.wait_for(asyncio.gather(a.start(), b.start(), return_exceptions=True), 30)
        await asyncio.gather(a.aclose(), b.aclose())
        assert all(isinstance(r, MidstreamError) and "different lengths" in str(r) for r in results), results

    run(body())


def test_nothing_is_left_of_a_front_end_that_goes_after_its_rank(dense: list[pathlib.Path], address: str) -> None:
    """It was told that its requests are over, and said nothing more."""

    async def body() -> None:
        async with engines(dense[0], owner(address, 2), elastic=True, **REPLICAS) as (a,):
            ranks, told = a._engine, []
            silent = Front(lambda increments, refused: told.extend(refused), lambda *_: None, lambda _: None)
            ranks.guests.add(silent)
            await a.pause_generation("keep")
            for i in range(4):
                ranks.add(silent, Add(f"r{i}", [5], LONG), None)
            await a.is_paused()
            ranks[1].process.kill()
            async with asyncio.timeout(BOUND_S):
                while len(told) < 2:
                    await asyncio.sleep(0.01)
            await a.resume_generation()
            ranks.leave(silent)
            async with asyncio.timeout(BOUND_S):
                while ranks.requests:
                    await asyncio.sleep(0.01)
            assert sum(ranks.requests.router.num_live) == 0

    run(body())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"data_parallel_rank": 0}, "needs data_parallel_address"),
        ({"data_parallel_size_local": 2}, "needs data_parallel_rank"),
        ({"data_parallel_address": "nowhere", "data_parallel_rank": 0}, "host:port"),
        ({"data_parallel_address": "h:0", "data_parallel_rank": 0}, "host:port"),
        ({"data_parallel_address": "h:99999"}, "host:port"),
        ({"data_parallel_address": "0.0.0.0:1", **LOCKSTEP, "data_parallel_rank": 0}, "no address"),
        ({"data_parallel_address": "h:1", "data_parallel_rank": 2, "data_parallel_size": 2}, "not of"),
        ({"data_parallel_address": "h:1", "data_parallel_rank": -1, "data_parallel_size": 2}, "not of"),
        (
            {"data_parallel_address": "h:1", "data_parallel_rank": 1, "data_parallel_size": 2}
            | {"data_parallel_size_local": 2},
            "not of",
        ),
    ],
)
def test_options(dense: list[pathlib.Path], options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        AsyncLLM(str(dense[0]), **options)
