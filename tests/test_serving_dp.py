"""Several ranks behind one front end, as real processes: replicas, and what happens when a rank dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from engines import LONG, SHORT, collect, run, tokens_of
from midstream.errors import Conflict, EngineDead, EnginePaused, InvalidInput, MidstreamError, NotReady, TimedOut
from midstream.serving.async_llm import AsyncLLM
from midstream.types import RequestIncrement, RequestOutput, SamplingParams, WeightVersionSpan

torch.set_num_threads(1)

OPTIONS: dict[str, Any] = {"num_blocks": 128, "num_threads": 1, "max_num_seqs": 16, "dtype": "float32"}
REPLICAS: dict[str, Any] = {"data_parallel_size": 2}
LOCKSTEP: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
BOUND_S = 6.0
"""For what must happen at once, on a busy machine."""


@pytest.fixture
def meetings(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Where this test's engines meet, and hand weights on: nothing may be left there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "s"))
    (tmp_path / "s").mkdir()
    return tmp_path / "s"


@contextlib.asynccontextmanager
async def engine(model: pathlib.Path, **options: Any) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(str(model), **{**OPTIONS, **options}) as llm:
        yield llm


def began(
    llm: AsyncLLM, prompt: list[int], name: str, session: str, params: SamplingParams = LONG
) -> asyncio.Task[Any]:
    """A request under way, in a task."""
    return asyncio.create_task(collect(llm, prompt, params, request_id=name, session=session), name=name)


async def until(condition: Callable[[dict[str, Any]], bool], llm: AsyncLLM, limit_s: float = 40.0) -> dict[str, Any]:
    async with asyncio.timeout(limit_s):
        while True:
            with contextlib.suppress(MidstreamError):
                if condition(status := await llm.status()):
                    return status
            await asyncio.sleep(0.01)  # as a client does: all that it can see is the status


def serves(status: dict[str, Any]) -> bool:
    return status["state"] in ("running", "paused") and all("why" not in rank for rank in status["ranks"])


def pids(llm: AsyncLLM) -> list[int]:
    ranks = llm._engine
    return [ranks[i].process.pid for i in range(len(ranks))]


def at(llm: AsyncLLM, name: str) -> int:
    """The rank of a request."""
    return llm._engine.requests.rank_of(name, llm._front)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def without_pauses(post: Callable[[bytes], None], held: list[bytes]) -> Callable[[bytes], None]:
    """A way to a rank on which a pause takes its time: until ``held`` is posted."""
    return lambda frame: held.append(frame) if b"pause" in frame and b"is_paused" not in frame else post(frame)


def look(output: RequestOutput) -> tuple[Any, ...]:
    one = output.outputs[0]
    return one.token_ids, one.processed_logprobs, one.finish_reason


# -- replicas ---------------------------------------------------------------------------------------------------------


def test_replicas_give_one_ranks_tokens_and_take_calls_as_one(dense: list[pathlib.Path]) -> None:
    prompts = [[5 + i, 6, 7] for i in range(6)]

    async def outputs(llm: AsyncLLM) -> list[Any]:
        return [look(o) for o in await asyncio.gather(*(collect(llm, p) for p in prompts))]

    async def alone() -> list[list[Any]]:
        found = []
        for directory in dense[:2]:
            async with engine(directory) as llm:
                found.append(await outputs(llm))
        return found

    async def body() -> None:
        one = await alone()
        async with engine(dense[0], **REPLICAS) as llm:
            assert await outputs(llm) == one[0]
            status = await llm.status()
            assert all(rank["num_steps"] > 0 for rank in status["ranks"]), "both have worked"
            for mode in ("keep", "abort", "wait"):
                tasks = [began(llm, [5, 6], f"{mode}{i}", "ab"[i]) for i in range(2)]
                for i in range(2):
                    await tokens_of(llm, f"{mode}{i}", 2)
                assert (await asyncio.wait_for(llm.pause_generation(mode), BOUND_S))["paused"]  # type: ignore[arg-type]
                status = await llm.status()
                assert [rank["state"] for rank in status["ranks"]] == ["paused"] * 2
                assert status["held"] == (2 if mode == "keep" else 0)
                assert await llm.resume_generation() == {"was_paused": True}
                reasons = [(await task).outputs[0].finish_reason for task in tasks]
                assert reasons == (["abort"] * 2 if mode == "abort" else ["length"] * 2)

            # a time limit that ends on one replica only: the pause is undone on both
            slow = began(llm, [5, 6], "slow", "a")
            await tokens_of(llm, "slow", 2)
            with pytest.raises(TimedOut):
                await llm.pause_generation("wait", timeout_s=0.02)
            assert not await llm.is_paused()
            assert len((await collect(llm, [9], session="b")).outputs[0].token_ids) == 24
            await llm.abort("slow")
            assert (await slow).outputs[0].finish_reason == "abort"

            live = [began(llm, [5, 6], f"live{i}", "ab"[i]) for i in range(2)]
            await tokens_of(llm, "live1", 2)
            found = await asyncio.wait_for(
                llm.update_weights({"weight_dir": str(dense[1]), "weight_version": "one"}), BOUND_S
            )
            assert (found["number"], found["version"]) == (1, "one")
            for output in await asyncio.gather(*live):
                assert {span.number for span in output.outputs[0].weight_versions} <= {0, 1}
            assert await outputs(llm) == one[1]
            status = await llm.status()
            assert [(rank["number"], rank["version"]) for rank in status["ranks"]] == [(1, "one")] * 2
            for i in range(2):  # a session stays where it is, whatever the load
                streams = [began(llm, [5], f"s{i}{k}", "s") for k in range(3)]
                await tokens_of(llm, f"s{i}2", 1)
                assert len({at(llm, f"s{i}{k}") for k in range(3)}) == 1
                await llm.abort_requests()
                await asyncio.gather(*streams)

    run(body())


def test_case_055_a_pause_that_aborts_tells_all_callers_on_both_ranks(
    dense: list[pathlib.Path], moe: list[pathlib.Path]
) -> None:
    async def body(model: pathlib.Path, options: dict[str, Any]) -> None:
        async with engine(model, **options) as llm:
            tasks = [began(llm, [5, i], f"r{i}", str(i)) for i in range(10)]
            for i in range(10):
                await tokens_of(llm, f"r{i}", 1)
            await llm.pause_generation("abort")
            outs = await asyncio.wait_for(asyncio.gather(*tasks), 2)
            assert {out.outputs[0].finish_reason for out in outs} == {"abort"}
            with pytest.raises(EnginePaused):
                await collect(llm, [5])

    run(body(dense[0], REPLICAS))
    run(body(moe[0], LOCKSTEP))


def test_case_090_all_load_on_one_rank_also_while_the_other_pauses_first(moe: list[pathlib.Path]) -> None:
    params = SamplingParams(max_tokens=100, seed=3, ignore_eos=True, detokenize=False)

    async def body() -> None:
        async with engine(moe[0], **LOCKSTEP) as llm:
            straight = await asyncio.wait_for(collect(llm, [5, 6], params, session="a"), 30)
            assert len(straight.outputs[0].token_ids) == 100
            task = began(llm, [5, 6], "x", "a", params)
            await tokens_of(llm, "x", 10)
            # Rank 1 takes the pause while rank 0 can not take any message: it is paused locally first.
            ranks = llm._engine
            held: list[bytes] = []
            post, ranks[0].post = ranks[0].post, without_pauses(ranks[0].post, held)  # type: ignore[method-assign]
            pause = asyncio.create_task(llm.pause_generation("keep", clear_cache=False))
            before = len(llm._streams["x"].builder.output.outputs[0].token_ids)
            await tokens_of(llm, "x", before + 10)  # rank 1 goes on taking part
            assert not pause.done()
            ranks[0].post = post  # type: ignore[method-assign]
            for frame in held:
                post(frame)
            assert (await asyncio.wait_for(pause, 5))["paused"]
            await llm.resume_generation()
            assert look(await task) == look(straight)

    run(body())


@pytest.mark.parametrize("kind", ["replicas", "lockstep"])
def test_case_091_one_request_under_a_pause_does_not_keep_a_drain_for_ever(
    dense: list[pathlib.Path], moe: list[pathlib.Path], kind: str
) -> None:
    model, options = (dense[0], REPLICAS) if kind == "replicas" else (moe[0], LOCKSTEP)

    async def body() -> None:
        async with engine(model, **options) as llm:
            await llm.pause_generation("keep")
            task = began(llm, [5, 6], "x", "a")
            await until(lambda s: s["held"] == 1, llm)
            await llm.abort("x")
            assert (await asyncio.wait_for(task, 2)).outputs[0].finish_reason == "abort"
            assert (await asyncio.wait_for(llm.pause_generation("wait"), 2))["paused"]

    run(body())


def test_case_045_one_replica_that_fails_a_chunk_commits_nowhere_and_a_retry_converges(
    dense: list[pathlib.Path], tmp_path: pathlib.Path
) -> None:
    """The directory that one replica reads is torn for it alone: the other has prepared, and does not commit."""

    async def body() -> None:
        async with engine(dense[0], **REPLICAS) as llm:
            ranks = llm._engine
            post = ranks[1].post

            def torn(frame: bytes) -> None:
                post(frame.replace(str(dense[1]).encode(), str(dense[1]).encode()[:-1] + b"X"))

            ranks[1].post = torn  # type: ignore[method-assign]
            for _ in range(2):
                with pytest.raises(InvalidInput, match="rank 1"):
                    await asyncio.wait_for(llm.update_weights({"weight_dir": str(dense[1])}), BOUND_S)
                status = await llm.status()
                assert [rank["number"] for rank in status["ranks"]] == [0, 0] and status["update"] is None
            ranks[1].post = post  # type: ignore[method-assign]
            found = await llm.update_weights({"weight_dir": str(dense[1])})
            assert found["number"] == 1
            assert len({rank["number"] for rank in (await llm.status())["ranks"]}) == 1

    run(body())


@pytest.mark.parametrize("kind", ["replicas", "lockstep"])
def test_case_088_what_is_aborted_in_a_keep_pause_takes_nobody_along(
    dense: list[pathlib.Path], moe: list[pathlib.Path], kind: str
) -> None:
    model, options = (dense[0], REPLICAS) if kind == "replicas" else (moe[0], LOCKSTEP)

    async def body() -> None:
        async with engine(model, **options) as llm:
            straight = look(await collect(llm, [5, 6], LONG))
            free = (await llm.status())["num_free_blocks"]
            tasks = [began(llm, [5, 6], f"r{i}", "ab"[i % 2]) for i in range(6)]
            for i in range(6):
                await tokens_of(llm, f"r{i}", 2)
            await llm.pause_generation("keep", clear_cache=False)
            for i in (0, 3):  # one of each rank
                await llm.abort(f"r{i}")
            tasks[1].cancel()  # and a client that leaves
            ended = await asyncio.wait_for(asyncio.gather(tasks[0], tasks[3]), BOUND_S)
            assert {output.outputs[0].finish_reason for output in ended} == {"abort"}
            await until(lambda s: s["held"] == 3, llm)
            await llm.resume_generation()
            others = await asyncio.wait_for(asyncio.gather(tasks[2], tasks[4], tasks[5]), 30)
            assert [look(output) for output in others] == [straight] * 3
            assert (await llm.status())["num_free_blocks"] == free

    run(body())


@pytest.mark.parametrize("kind", ["replicas", "lockstep"])
def test_case_116_status_agrees_with_the_truth_on_every_rank(
    dense: list[pathlib.Path], moe: list[pathlib.Path], kind: str
) -> None:
    """Pauses, owners and versions in random order: after every call the status says what the calls were told."""
    models, options = (dense, REPLICAS) if kind == "replicas" else (moe, LOCKSTEP)
    rng = random.Random(0)

    async def body() -> None:
        async with engine(models[0], **options) as llm:
            mode: str | None = None
            owner: str | None = None
            number, label, held = 0, "0", 0
            tasks: list[asyncio.Task[Any]] = []
            for step in range(120):
                who = rng.choice((None, None, "a"))
                match rng.choice(("pause", "resume", "update", "label", "request", "request", "request")):
                    case "pause":
                        wanted = rng.choice(("keep", "keep", "abort"))
                        may = owner in (None, who)
                        with contextlib.nullcontext() if may else pytest.raises(Conflict, match="belongs to"):
                            await llm.pause_generation(wanted, owner=who)
                        if may:
                            mode, owner, held = wanted, who, held if wanted == "keep" else 0
                    case "resume":
                        may = owner in (None, who)
                        with contextlib.nullcontext() if may else pytest.raises(Conflict, match="belongs to"):
                            await llm.resume_generation(owner=who)
                        if may:
                            mode, owner, held = None, None, 0
                            await asyncio.gather(*tasks)
                    case "update":
                        which = rng.randrange(3)
                        await llm.update_weights({"weight_dir": str(models[which]), "weight_version": f"v{step}"})
                        number, label = number + 1, f"v{step}"
                    case "label":
                        label = f"l{step}"
                        await llm.update_weight_version(label)
                    case "request" if mode == "keep":
                        tasks.append(asyncio.create_task(collect(llm, [5, 6], SHORT, request_id=f"x{step}")))
                        held += 1
                        while f"x{step}" not in llm._streams:
                            await asyncio.sleep(0)
                status = await llm.status()
                assert (status["state"], status["mode"]) == ("running" if mode is None else "paused", mode)
                assert (status["owner"], status["held"], status["number"]) == (owner, held, number)
                assert [(rank["number"], rank["version"]) for rank in status["ranks"]] == [(number, label)] * 2
                assert (status["paused_since"] is not None) == (mode is not None) == await llm.is_paused()
            await llm.resume_generation(force=True)
            await asyncio.gather(*tasks)
            assert number > 5 and len(tasks) > 5

    run(body())


# -- loss, and the engine ends ----------------------------------------------------------------------------------------

STATES = ["idle", "vote", "forward", "paused", "pausing", "chunks", "prepared"]


async def bring(llm: AsyncLLM, state: str, models: list[pathlib.Path]) -> list[asyncio.Task[Any]]:
    """Into ``state``; what waits for an answer then."""
    tasks: list[asyncio.Task[Any]] = []
    if state != "idle":
        tasks = [began(llm, [5, 6], f"r{i}", "ab"[i]) for i in range(2)]
        for i in range(2):
            await tokens_of(llm, f"r{i}", 2)
    if state == "vote":
        tasks.append(asyncio.create_task(llm.pause_generation("keep")))
    if state == "paused":
        await llm.pause_generation("keep")
    if state == "pausing":
        tasks.append(asyncio.create_task(llm.pause_generation("wait")))
        await asyncio.sleep(0)
        assert await llm.is_paused()
    if state == "chunks":
        await llm.start_weight_update()
    if state == "prepared":
        tasks.append(asyncio.create_task(llm.update_weights({"weight_dir": str(models[1])})))
    return tasks


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="dies"), pytest.param(signal.SIGSTOP, id="hangs", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("kind", ["lockstep", "replicas"])
def test_a_lost_rank_ends_the_engine_for_every_client(
    dense: list[pathlib.Path], moe: list[pathlib.Path], meetings: pathlib.Path, kind: str, number: signal.Signals
) -> None:
    models, options = (moe, LOCKSTEP) if kind == "lockstep" else (dense, REPLICAS)
    states = STATES
    if number == signal.SIGSTOP:  # a time limit each
        states = ["idle", "forward", "paused"] if kind == "lockstep" else ["idle"]
    limit_s = 60.0 if number == signal.SIGKILL else 2.0

    async def body(at: int, state: str) -> None:
        llm = AsyncLLM(str(models[0]), **OPTIONS, **options, dp_timeout_s=limit_s)
        await llm.start()
        all_pids, ranks = pids(llm), list(llm._engine._ranks)
        tasks = await bring(llm, state, models)
        start = time.monotonic()
        os.kill(all_pids[at % 2], number)
        tasks.append(asyncio.create_task(llm.is_paused()))
        bound_s = BOUND_S if number == signal.SIGKILL else limit_s + BOUND_S
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), bound_s)
        finished = [r for r in results if isinstance(r, RequestOutput)]
        assert len(finished) <= 2
        errors = [r for r in results if isinstance(r, BaseException)]
        # a question may be answered before the loss is known
        assert results[-1] in errors or results[-1] is (state in ("vote", "paused", "pausing")), (state, results)
        assert errors or state == "idle"
        assert all(isinstance(r, EngineDead) and "lost" in str(r) for r in errors), (state, results)
        await asyncio.wait_for(llm.ended.wait(), bound_s)
        # the others do not stay behind, before anybody closes anything
        await asyncio.wait_for(asyncio.gather(*(rank.ended.wait() for rank in ranks)), BOUND_S)
        assert not any(is_alive(pid) for pid in all_pids)
        for late in (llm.status(), collect(llm, [5]), llm.abort("r0")):
            with pytest.raises(EngineDead):
                await asyncio.wait_for(late, 1)
        await asyncio.wait_for(llm.aclose(), 5)
        print(f"{kind} {state}: every client told after {time.monotonic() - start:.1f} s")
        assert not list(meetings.iterdir())

    for at, state in enumerate(states):
        run(body(at, state))


def test_a_rank_lost_while_the_others_start_is_an_error_of_the_start(
    dense: list[pathlib.Path], meetings: pathlib.Path
) -> None:
    async def body() -> None:
        llm = AsyncLLM(str(dense[0]), **OPTIONS, **REPLICAS)
        starting = asyncio.create_task(llm.start())
        while llm._ranks is None or len(llm._ranks) < 2:
            await asyncio.sleep(0)
        first, second = llm._engine
        os.kill(second.process.pid, signal.SIGSTOP)
        await asyncio.wait_for(asyncio.shield(first.ready), 30)
        os.kill(first.process.pid, signal.SIGKILL)
        await asyncio.wait_for(first.ended.wait(), BOUND_S)
        os.kill(second.process.pid, signal.SIGCONT)
        with pytest.raises(EngineDead, match="rank 0 was lost"):
            await asyncio.wait_for(starting, 30)
        assert not list(meetings.iterdir())

    run(body())


def test_a_number_that_clients_have_seen_is_remembered(dense: list[pathlib.Path]) -> None:
    """For a start of all ranks again, also where the answer of its commit was lost with a rank."""

    async def body() -> None:
        async with engine(dense[0], **REPLICAS) as llm:
            await llm.pause_generation("keep", timeout_s=5)
            await llm.weight_checker("reset")
            assert llm._engine.held.version["number"] == 1 and llm._engine.held.version["weights_id"]
            assert llm._engine.held.pause is not None and "timeout_s" not in llm._engine.held.pause
            span = WeightVersionSpan("seven", 7, 0, 1)
            increment = RequestIncrement("x", 0, [], [span], 0)
            llm._engine.held.note_numbers([increment])
            assert llm._engine.held.version == {"number": 7, "version": "seven", "weights_id": ""}

    run(body())


def test_an_abort_is_told_also_while_another_rank_hangs(moe: list[pathlib.Path]) -> None:
    """A server that ends gives its clients what they have."""

    async def body() -> None:
        async with engine(moe[0], **LOCKSTEP) as llm:
            tasks = [began(llm, [5, 6], f"r{i}", "ab"[i]) for i in range(2)]
            for i in range(2):
                await tokens_of(llm, f"r{i}", 2)
            await llm.pause_generation("keep")
            ends, hangs = (tasks[i] for i in sorted(range(2), key=lambda i: at(llm, f"r{i}")))
            os.kill(pids(llm)[1], signal.SIGSTOP)
            aborting = asyncio.create_task(llm.abort_requests())
            assert (await asyncio.wait_for(ends, BOUND_S)).outputs[0].finish_reason == "abort"
            assert not hangs.done() and not aborting.done()
            os.kill(pids(llm)[1], signal.SIGCONT)
            assert (await asyncio.wait_for(aborting, BOUND_S))["aborted"] == 2
            await hangs

    run(body())


def test_closing_with_a_rank_that_hangs_is_bounded(moe: list[pathlib.Path], meetings: pathlib.Path) -> None:
    async def body() -> None:
        llm = AsyncLLM(str(moe[0]), **OPTIONS, **LOCKSTEP)
        await llm.start()
        all_pids = pids(llm)
        os.kill(all_pids[1], signal.SIGSTOP)
        await asyncio.wait_for(llm.aclose(), 12)
        assert not any(map(is_alive, all_pids)) and not list(meetings.iterdir())

    run(body())


MUTANT = """
from midstream.check import scenarios
from midstream.engine import core
from midstream.weights.ipc import IPCWeightTransferEngine as Engine


class StopsAtOnce(scenarios.StopsAtOnce):
    # And forgets the wake-up: it waits for nobody.

    def pause(self, *arguments):
        actions = super().pause(*arguments)
        self._is_woken = False
        return actions


core.p.Protocol = StopsAtOnce
"""


@pytest.mark.parametrize("is_mutant", [True, False], ids=["mutant", "real"])
def test_case_089_the_deadlock_of_the_seed(
    moe: list[pathlib.Path],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    is_mutant: bool,
) -> None:
    """A pause that reaches one rank while the other goes on. Where it stops stepping at once, the other one waits for
    it in the forward; the dump of the watchdog says so."""
    (tmp_path / "stops_at_once.py").write_text(MUTANT)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"weight_transfer_backend": "stops_at_once:Engine"} if is_mutant else {}

    async def body() -> None:
        # votes far apart, so that ranks meet in the forward
        llm = AsyncLLM(
            str(moe[0]), **OPTIONS, **LOCKSTEP, **options, dp_timeout_s=3.0, dp_vote="interval", dp_sync_interval=1000
        )
        await llm.start()
        task = began(llm, [5, 6], "x", "a")
        await tokens_of(llm, "x", 5)
        ranks = llm._engine
        held: list[bytes] = []
        post = ranks[0].post
        ranks[0].post = without_pauses(post, held)  # type: ignore[method-assign]
        pause = asyncio.create_task(llm.pause_generation("keep"))
        await asyncio.sleep(0)
        made = len(llm._streams["x"].builder.output.outputs[0].token_ids)
        if is_mutant:
            results = await asyncio.wait_for(asyncio.gather(task, pause, return_exceptions=True), 12)
            assert all(isinstance(r, EngineDead) for r in results), results
        else:
            await tokens_of(llm, "x", made + 5)
            ranks[0].post = post  # type: ignore[method-assign]
            for frame in held:
                post(frame)
            assert (await asyncio.wait_for(pause, 20))["paused"]
            await llm.resume_generation()
            assert len((await asyncio.wait_for(task, 20)).outputs[0].token_ids) == 480
        await llm.aclose()

    run(body())
    dump = capfd.readouterr().err
    if is_mutant:
        _, first, second = dump.split("midstream: rank ")[:3]
        assert first.startswith("0 (silent)") and "expert.py" in first and "all_to_all" in first, dump
        assert second.startswith("1 (answers)") and "all_to_all" not in second and "_serve" in second, dump
    else:
        assert "midstream: rank" not in dump, dump


# -- loss, and with elastic the service comes back --------------------------------------------------------------------


class Unwritable(io.StringIO):
    """Standard error whose reader has gone, as with ``2>&1 | head``."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "nobody reads this")


def test_a_lost_replica_comes_back_while_the_other_goes_on(
    dense: list[pathlib.Path],
    meetings: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        monkeypatch.setattr(sys, "stderr", Unwritable())
        async with engine(dense[0], **REPLICAS, elastic=True) as llm:
            straight = await collect(llm, [5, 6], LONG)
            stays, goes = began(llm, [5, 6], "stays", "a"), began(llm, [5, 6], "goes", "b")
            await tokens_of(llm, "stays", 2)
            await tokens_of(llm, "goes", 2)
            gone = at(llm, "goes")
            start = time.monotonic()
            os.kill(pids(llm)[gone], signal.SIGKILL)
            with pytest.raises(EngineDead, match=f"rank {gone} was lost"):
                await asyncio.wait_for(goes, 2)
            assert look(await stays) == look(straight), "undisturbed"
            status = await llm.status()
            assert status["state"] == "running"
            [lost] = [rank for rank in status["ranks"] if rank["rank"] == gone]
            assert lost["state"] == "starting" and "was lost" in lost["why"]
            # all requests go to the other meanwhile, also those of the lost one's session
            assert look(await collect(llm, [5, 6], LONG, session="b")) == look(straight)
            await until(serves, llm)
            print(f"a replica is back after {time.monotonic() - start:.1f} s")
            both = [began(llm, [5, 6], f"n{i}", f"new{i}") for i in range(2)]
            await tokens_of(llm, "n1", 1)
            assert {at(llm, f"n{i}") for i in range(2)} == {0, 1}
            assert [look(o) for o in await asyncio.gather(*both)] == [look(straight)] * 2
            assert (await llm.pause_generation("abort"))["paused"], "it takes part in what the group agrees"
        assert not list(meetings.iterdir())
        said = [message for message in caplog.messages if message.startswith("midstream: ")]
        ended = f"midstream: rank {gone} was lost: its process ended (exit code -9)"
        assert said == [f"{ended}; it is started again", f"midstream: rank {gone} serves again"]

    run(body())


def test_case_119_a_replica_started_again_serves_only_the_groups_weights(
    dense: list[pathlib.Path], meetings: pathlib.Path
) -> None:
    async def body() -> None:
        async with engine(dense[0], **REPLICAS, elastic=True) as llm:
            for k in (1, 2, 1):
                await llm.update_weights({"weight_dir": str(dense[k]), "weight_version": f"v{k}"})
            await llm.update_weight_version("v3")
            right = look(await collect(llm, [5, 6]))
            want = await llm.status()
            # while an update is open it can not join: it has not seen its beginning
            await llm.start_weight_update()
            await llm.pause_generation("keep", clear_cache=False, owner="trainer")
            os.kill(pids(llm)[1], signal.SIGKILL)
            status = await until(lambda s: s["ranks"][1]["state"] == "pending_weights", llm)
            assert "update-" in status["ranks"][1]["why"] and status["number"] == 3
            held = began(llm, [5, 6], "held", "x", SHORT)
            await until(lambda s: s["held"] == 1, llm)
            assert at(llm, "held") == 0, "nothing is routed to it"
            await llm.abort_weight_update()
            status = await until(serves, llm)
            own = ("state", "number", "version")
            assert [[rank[key] for key in own] for rank in status["ranks"]] == [["paused", 3, "v3"]] * 2
            assert status["weights_id"] == want["weights_id"] and status["owner"] == "trainer"
            await llm.resume_generation(owner="trainer")
            assert look(await held) == right
            streams = [collect(llm, [5, 6], session=f"s{i}") for i in range(4)]
            assert [look(o) for o in await asyncio.gather(*streams)] == [right] * 4
            assert all(rank["num_steps"] for rank in (await llm.status())["ranks"])
            await llm.abort_weight_update()  # chunks of the one that was aborted are not expected any more
            found = await llm.update_weights({"weight_dir": str(dense[2])})
            assert found["number"] == 4, "one log, one number"
        assert not list(meetings.iterdir())

    run(body())


@pytest.mark.parametrize("kind", ["lockstep", "replicas"])
def test_all_ranks_lost_start_again_whole_and_wait_for_the_current_weights(
    dense: list[pathlib.Path],
    moe: list[pathlib.Path],
    meetings: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    models, options = (moe, LOCKSTEP) if kind == "lockstep" else (dense, REPLICAS)
    monkeypatch.setattr(sys, "stderr", Unwritable())

    async def lose(llm: AsyncLLM) -> None:
        for pid in pids(llm)[: 1 if kind == "lockstep" else 2]:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises((EngineDead, NotReady)):
            async with asyncio.timeout(BOUND_S):
                while True:  # the first call that is not answered any more
                    await llm.is_paused()

    async def body() -> None:
        async with engine(models[0], **options, elastic=True) as llm:
            before = look(await collect(llm, [5, 6]))
            task = began(llm, [5, 6], "x", "a")
            await tokens_of(llm, "x", 2)
            start = time.monotonic()
            await lose(llm)
            with pytest.raises(EngineDead, match="lost"):
                await asyncio.wait_for(task, BOUND_S)
            if kind == "lockstep":
                assert (await llm.status())["state"] == "starting"
                with pytest.raises(NotReady, match="started again"):
                    await llm.pause_generation()
                with pytest.raises(NotReady):
                    await collect(llm, [5, 6])
            await until(serves, llm)
            print(f"{kind}: back after {time.monotonic() - start:.1f} s")
            assert look(await collect(llm, [5, 6])) == before, "no update had come: the checkpoint is current"

            await llm.update_weights({"weight_dir": str(models[1]), "weight_version": "v1"})
            after = look(await collect(llm, [5, 6]))
            await llm.pause_generation("keep", owner="trainer")
            await lose(llm)
            if kind == "lockstep":
                found = await llm.status()
                assert (found["state"], found["number"], found["version"]) == ("starting", 1, "v1")
                assert (found["mode"], found["owner"]) == ("keep", "trainer")
                assert all(rank["state"] == "starting" and "lost" in rank["why"] for rank in found["ranks"])
            await until(lambda s: s["state"] == "pending_weights", llm)
            with pytest.raises(Conflict, match="no weights that could have a label"):
                await llm.update_weight_version("v1")
            await lose(llm)  # and nobody takes the checkpoint for v1 then
            status = await until(lambda s: s["state"] == "pending_weights", llm)
            assert (status["number"], status["version"]) == (1, "v1")
            assert all(rank["state"] == "pending_weights" and rank["why"] for rank in status["ranks"])
            assert "next full update" in status["why"] and "v1" in status["why"]
            with pytest.raises(NotReady, match="pending_weights"):
                await collect(llm, [5, 6])
            with pytest.raises(NotReady):
                llm.check_alive()
            await llm.start_weight_update(mode="partial")
            with pytest.raises(MidstreamError):
                await llm.finish_weight_update()
            await llm.abort_weight_update()
            assert (await llm.status())["state"] == "pending_weights"
            found = await llm.update_weights({"weight_dir": str(models[1]), "weight_version": "v1"})
            assert found["number"] == 2, "commit numbers go on"
            assert (await llm.status())["state"] == "paused"
            assert await llm.resume_generation(owner="trainer") == {"was_paused": True}
            assert look(await collect(llm, [5, 6])) == after
        assert not list(meetings.iterdir())

    run(body(), 120)


@pytest.mark.parametrize("moments", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["lockstep", "replicas"])
def test_each_rank_killed_at_random_moments(
    dense: list[pathlib.Path], moe: list[pathlib.Path], meetings: pathlib.Path, kind: str, moments: int
) -> None:
    """Requests and calls all the time: each ends once, with its output or an error, and the service comes back."""
    models, options = (moe, LOCKSTEP) if kind == "lockstep" else (dense, REPLICAS)
    rng = random.Random(moments)

    async def client(llm: AsyncLLM, name: str) -> str:
        try:
            output = await collect(llm, [5, rng.randrange(2, 150)], rng.choice((LONG, SHORT)), request_id=name)
            return str(output.outputs[0].finish_reason)
        except MidstreamError as error:
            assert error.status in (409, 503), error
            return type(error).__name__

    async def controller(llm: AsyncLLM) -> None:
        with contextlib.suppress(MidstreamError):
            mode = rng.choice(("keep", "abort", "wait"))
            await asyncio.wait_for(llm.pause_generation(mode, timeout_s=2.0), 10)  # type: ignore[arg-type]
        with contextlib.suppress(MidstreamError):
            await asyncio.wait_for(llm.update_weights({"weight_dir": str(rng.choice(models))}), 10)
        with contextlib.suppress(MidstreamError):
            await asyncio.wait_for(llm.resume_generation(), 10)

    async def body() -> None:
        times = []
        async with engine(models[0], **options, elastic=True) as llm:
            for moment in range(2 * moments):
                tasks = [asyncio.create_task(client(llm, f"{moment}-{i}")) for i in range(4)]
                tasks.append(asyncio.create_task(controller(llm)))  # type: ignore[arg-type]
                await asyncio.sleep(rng.random() * 0.3)  # when it dies; nothing is hoped for
                os.kill(pids(llm)[moment % 2], signal.SIGKILL)
                start = time.monotonic()
                await asyncio.wait_for(asyncio.gather(*tasks), 30)
                async with asyncio.timeout(40):
                    while True:
                        with contextlib.suppress(MidstreamError):
                            await llm.resume_generation(force=True)
                            if (await llm.status())["state"] == "pending_weights":
                                await llm.update_weights({"weight_dir": str(models[0])})
                            if serves(await llm.status()):
                                break
                        await asyncio.sleep(0.02)
                times.append(time.monotonic() - start)
                assert len((await collect(llm, [5, 6])).outputs[0].token_ids) == 24
            assert not llm._streams and not llm._leaving and not llm._calls
            status = await llm.status()
            assert len({rank["number"] for rank in status["ranks"]}) == 1 and status["running"] == 0
        times.sort()
        median = times[len(times) // 2]
        print(f"{kind}: service back in {median:.1f} s (median), {times[-1]:.1f} s at most, of {len(times)}")
        assert not list(meetings.iterdir())

    run(body(), 30 + 100 * moments)
