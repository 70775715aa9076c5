from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fakes_rl import FakeEngineClient, FakeTransfer, TablePolicy
from midstream.errors import Conflict, TimedOut
from midstream.rl.engine_thread import EngineThread
from midstream.rl.sync import SyncClient, UpdateRecord, WeightSync, open_transfer


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    thread = EngineThread()
    yield thread
    thread.close()


REPLY = {"number": 3, "weights_id": "id", "bytes": 10, "updated": 1, "commit_wait_ms": 2.0, "stall_ms": 0.5}


class Gate:
    """A transfer that waits to be let through."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()

    def send_weights(self, weight_version: str | None = None) -> dict[str, Any]:
        self.entered.set()
        assert self.go.wait(5.0)
        return REPLY


def test_a_push_runs_beside_and_wait_ends_it() -> None:
    gate = Gate()
    order: list[UpdateRecord] = []
    sync = WeightSync(gate, timeout_s=5.0)  # type: ignore[arg-type]
    sync.wait()
    sync.push(4, on_commit=order.append)
    assert gate.entered.wait(5.0) and order == []  # push has returned while the update is under way
    with pytest.raises(Conflict, match="not waited for"):
        sync.push(5)
    gate.go.set()
    sync.wait()
    (record,) = order
    assert (record.policy_version, record.number, record.bytes, record.stall_ms) == (4, 3, 10, 0.5)
    assert record.seconds >= 0
    sync.push(5)  # the one before it is over
    sync.wait()
    sync.close()


def test_a_failure_reaches_both_sides_once() -> None:
    class Breaks:
        def send_weights(self, weight_version: str | None = None) -> dict[str, Any]:
            raise OSError("broken")

    heard: list[BaseException] = []
    released: list[UpdateRecord] = []
    sync = WeightSync(Breaks(), timeout_s=5.0)  # type: ignore[arg-type]
    sync.push(1, on_commit=released.append, on_error=heard.append)
    with pytest.raises(OSError, match="broken"):
        sync.wait()
    assert len(heard) == 1 and not released
    sync.wait()
    sync.close()


def test_waiting_has_a_time_limit() -> None:
    gate = Gate()
    sync = WeightSync(gate, timeout_s=0.01)  # type: ignore[arg-type]
    sync.push(1)
    with pytest.raises(TimedOut, match="the weight update did not end within 0.01 s"):
        sync.wait()
    gate.go.set()
    sync.close()


def test_the_verbs_reach_an_async_client(engine: EngineThread) -> None:
    client, policy = FakeEngineClient(), TablePolicy()
    transfer = open_transfer(
        "fakes_rl:FakeTransfer", client, engine, policy, timeout_s=5.0  # type: ignore[arg-type]
    )  # fmt: skip
    reply = transfer.send_weights(weight_version="12")
    assert reply["version"] == "12" and client.version.label == "12"
    assert client.table.equal(policy.table.detach())


def test_a_verb_that_hangs_is_a_time_out(engine: EngineThread) -> None:
    class Hangs(FakeEngineClient):
        async def finish_weight_update(
            self, weight_version: str | None = None, kv_policy: Any = None
        ) -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

    client = Hangs()
    verbs = SyncClient(client, engine, 0.05)  # type: ignore[arg-type]
    transfer = FakeTransfer(verbs, TablePolicy())
    with pytest.raises(TimedOut, match="finish_weight_update did not end within 0.05 s"):
        transfer.send_weights(weight_version="1")
    assert client._staged is None and client.version.number == 0, "the update was aborted, the old weights serve"
