"""Streams, vanishing clients and updates at once: what is lost and what is left over. The long form is in bench/."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from bench.load_server import FLAGS, Load, Processes, measured, open_trainer, serve
from midstream.serving.jobs import Job
from servers import MODEL, Served, served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(engine={"num_blocks": 128}, reattach_s=0.2) as found:
        yield found


def tables(server: Served) -> dict[str, int]:
    """Every table of the front end, and how many of its jobs live anywhere."""
    gc.collect()
    front = server.server.front
    found = {name: len(getattr(front.jobs, name)) for name in ("_running", "_keyed", "_waiting")}
    found |= {name: len(getattr(front.llm, name)) for name in ("_streams", "_leaving", "_calls")}
    return {**found, "live": sum(type(job) is Job and job._jobs is front.jobs for job in gc.get_objects())}


def test_streams_beside_updates_and_clients_that_vanish(server: Served, tmp_path: Any) -> None:
    async def body() -> None:
        load = Load(server.url)
        await load.learn(8, 24, 64)
        trainer = await asyncio.to_thread(open_trainer, "ipc", load.control, MODEL, str(tmp_path))
        found = await load.many(trainer, 80, 24, period_s=0.05)
        assert found["length"] >= 72 and found["vanished"] > 0 and found["updates"] > 0
        assert (await load.idle())["number"] >= found["updates"]

    asyncio.run(body())


def test_case_117_nothing_is_left_of_cycles_of_updates_requests_and_clients_that_vanish(server: Served) -> None:
    """40 short cycles: tables, file descriptors and threads of both processes are what they were, to the last one."""
    engine = Processes(server.server.front.llm._ranks[0].process.pid)

    async def body() -> None:
        load = Load(server.url)
        await load.learn(4, 4, 12)
        trainer = await asyncio.to_thread(open_trainer, "ipc", load.control, MODEL, "")
        seen: list[Any] = []
        for number in range(40):
            if number in (10, 20, 30):
                await load.idle()
                seen.append((tables(server), engine.counts(), len(os.listdir("/proc/self/task"))))
            await load.cycle(trainer, number, requests=8, aborts=2, vanish=2)
        await load.idle()
        seen.append((tables(server), engine.counts(), len(os.listdir("/proc/self/task"))))
        assert sum(seen[0][0].values()) == 0, seen[0]
        assert seen[1:] == seen[:-1], seen
        assert engine.memory_kb() < 600_000

    asyncio.run(body())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ipc", "disk"])
def test_case_117_memory_is_flat_over_300_cycles(backend: str, tmp_path: Any) -> None:
    few = ("--num-gpu-blocks-override", "512")  # every page of the cache is touched before the first look
    flags = (*FLAGS, *few, "--weight-transfer-config", json.dumps({"backend": backend}))

    async def body(url: str, of: Processes) -> None:
        load = Load(url)
        await load.learn(16, 8, 24)
        trainer = await asyncio.to_thread(open_trainer, backend, load.control, MODEL, str(tmp_path))
        found = await measured(load, trainer, of, warm=50, cycles=250)
        assert found["kb_per_cycle"] < 50, found
        assert all(before == after for before, after in found["counts"].values()), found

    with serve(MODEL, *flags) as (url, of):
        asyncio.run(body(url, of))
