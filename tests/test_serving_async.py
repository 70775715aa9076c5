"""AsyncLLM: the core in its own process. Streams, pauses seen from outside, and every way in which a side may die."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from checkpoints import random_weights, write_checkpoint
from cores import TINY
from engines import LONG, SHORT, collect, run, tokens_of
from midstream.errors import (
    Conflict,
    EngineDead,
    EnginePaused,
    InvalidInput,
    MidstreamError,
    ModelLoadError,
    PauseCancelled,
    TimedOut,
)
from midstream.serving.async_llm import AsyncLLM
from midstream.serving.llm import LLM
from midstream.serving.outputs import OutputBuilder
from midstream.types import RequestIncrement, RequestOutput, SamplingParams

torch.set_num_threads(1)

LIMIT_S = 20.0
OPTIONS: dict[str, Any] = {"num_blocks": 64, "num_threads": 1, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_checkpoint(tmp_path_factory.mktemp("m") / "w0", "llama", 0, **TINY)


@contextlib.asynccontextmanager
async def engine(model: pathlib.Path, **options: Any) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(str(model), **{**OPTIONS, **options}) as llm:
        yield llm


async def idle(llm: AsyncLLM) -> dict[str, Any]:
    while (status := await llm.status())["running"] + status["waiting"]:
        pass
    assert status["num_free_blocks"] == status["num_blocks"]
    return status


def expected_tokens(model: pathlib.Path, prompt: list[int], params: SamplingParams) -> list[int]:
    with LLM(str(model), num_blocks=64) as llm:
        return llm.generate(prompt, params)[0].outputs[0].token_ids


def test_follow_tells_what_generate_yields(model: pathlib.Path) -> None:
    def lengths(output: RequestOutput) -> list[int]:
        return [len(sample.token_ids) for sample in output.outputs]

    async def body() -> None:
        async with engine(model) as llm:
            for options in ({}, {"n": 2}, {"final_only": True}):
                params = dataclasses.replace(SHORT, **options)  # type: ignore[arg-type]
                told: list[RequestOutput] = []
                seen: list[list[int]] = []

                def on_news(output: RequestOutput, told: Any = told, seen: Any = seen) -> None:
                    told.append(output)
                    seen.append(lengths(output))

                await llm.follow(on_news, [5, 6, 7], params)
                assert told[-1].finished and len(seen) == (1 if params.final_only else 24 * params.n)
                async for output in llm.generate([5, 6, 7], params):
                    assert lengths(output) in seen
                assert [o.token_ids for o in output.outputs] == [o.token_ids for o in told[-1].outputs]
            with pytest.raises(InvalidInput, match="max_model_len"):
                await llm.follow(lambda _: None, [5] * 5000, SHORT)
            assert not llm._streams and not llm._leaving

    run(body())


def test_a_steps_tokens_are_heard_in_parts_and_before_the_answer_that_follows_them(
    model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    whole: list[str] = []
    add = OutputBuilder.add

    def added(self: OutputBuilder, increment: RequestIncrement) -> str | None:
        heard.append("made")
        return add(self, increment)

    monkeypatch.setattr(OutputBuilder, "add", added)

    async def read(llm: AsyncLLM, i: int) -> None:
        async for _ in llm.generate([5, i], LONG):
            heard.append("seen")

    async def body() -> None:
        async with engine(model, max_num_seqs=24, num_blocks=2048) as llm:
            readers = [asyncio.create_task(read(llm, i)) for i in range(24)]
            for _ in range(10):
                await llm.pause_generation("keep")
                count = heard.count("made")
                status = await llm.status()
                assert count == heard.count("made") == status["num_sampled_tokens"]
                await llm.resume_generation()
                while heard.count("made") < count + 48:
                    await asyncio.sleep(0)
            whole.extend(heard)
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    run(body())
    runs = [len(list(group)) for what, group in itertools.groupby(whole) if what == "made"]
    assert len(runs) > 100 and max(runs) <= 5  # nobody reads between the one of a message and the first of the next


def test_an_interrupt_in_a_reader_leaves_the_engine_hearing(model: pathlib.Path) -> None:
    """Ctrl-C in a notebook, whose loop is run again."""
    loop = asyncio.new_event_loop()
    llm = AsyncLLM(str(model), **OPTIONS)

    has_come = False

    def interrupt(_: RequestOutput) -> None:
        nonlocal has_come
        if not has_come:
            has_come = True
            raise KeyboardInterrupt

    async def interrupted() -> None:
        await asyncio.gather(llm.follow(interrupt, [5, 6], LONG), *(collect(llm, [5, i], LONG) for i in range(6)))

    try:
        loop.run_until_complete(llm.start())
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(interrupted())
        output = loop.run_until_complete(asyncio.wait_for(collect(llm, [7, 8], SHORT), LIMIT_S))
        assert output.outputs[0].token_ids == expected_tokens(model, [7, 8], SHORT)
        assert loop.run_until_complete(asyncio.wait_for(llm.status(), LIMIT_S))["state"] == "running"
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(llm.aclose())
        loop.close()


def test_a_fault_in_a_reader_ends_the_engine_and_its_process(model: pathlib.Path) -> None:
    def fault(_: RequestOutput) -> None:
        raise ValueError("a fault")

    async def body() -> None:
        async with engine(model) as llm:
            other = asyncio.create_task(collect(llm, [5, 6], LONG))
            with pytest.raises(EngineDead, match="a fault"):
                await llm.follow(fault, [5, 6], LONG)
            with pytest.raises(EngineDead, match="a fault"):
                await other
            await asyncio.wait_for(llm._ranks[0].ended.wait(), LIMIT_S)

    run(body())


def test_streams_grow_token_by_token_and_equal_the_offline_engine(model: pathlib.Path) -> None:
    async def body() -> None:
        async with engine(model) as llm:
            lengths, out = [], None
            async for out in llm.generate([5, 6, 7], SHORT):
                lengths.append(len(out.outputs[0].token_ids))
                assert out.finished == (lengths[-1] == 24)
            assert lengths == sorted(lengths) and lengths[0] < 24 and lengths[-1] == 24
            assert out is not None and out.prompt_token_ids == [5, 6, 7]
            assert out.outputs[0].token_ids == expected_tokens(model, [5, 6, 7], SHORT)
            assert out.outputs[0].finish_reason == "length" and out.outputs[0].seed == 3
            group = SamplingParams(n=4, max_tokens=6, seed=3, detokenize=False, logprobs=1)
            whole = await llm.generate_one([5, 6, 7], group)
            assert [len(c.token_ids) for c in whole.outputs] == [6] * 4
            assert whole.outputs[0].token_ids == out.outputs[0].token_ids[:6]
            many = await asyncio.gather(*(collect(llm, [5, 6, 7], request_id=f"m{i}") for i in range(12)))
            assert all(m.outputs[0].token_ids == out.outputs[0].token_ids for m in many)
            unseeded = SamplingParams(max_tokens=4, detokenize=False)
            first = await llm.generate_one([9], unseeded)
            again = await llm.generate_one([9], SamplingParams(max_tokens=4, seed=first.outputs[0].seed))
            assert again.outputs[0].token_ids == first.outputs[0].token_ids
            await idle(llm)

    run(body())


def test_case_054_case_061_abort_keeps_the_tokens_and_whoever_leaves_frees_all(model: pathlib.Path) -> None:
    async def body() -> None:
        async with engine(model) as llm:
            task = asyncio.create_task(collect(llm, [5, 6], LONG, request_id="a"))
            await asyncio.sleep(0)
            await tokens_of(llm, "a", 5)
            await llm.abort("a")
            out = (await task).outputs[0]
            assert out.finish_reason == "abort" and len(out.token_ids) >= 5
            assert len(out.processed_logprobs) == len(out.token_ids)
            assert out.token_ids == expected_tokens(model, [5, 6], LONG)[: len(out.token_ids)]

            for params in (LONG, SamplingParams(n=4, max_tokens=100, ignore_eos=True, detokenize=False)):
                async for output in llm.generate([5, 6], params, request_id="b"):
                    if len(output.outputs[0].token_ids) >= 3:
                        break
                await idle(llm)
            # a caller that does not stream, cancelled
            task = asyncio.create_task(llm.generate_one([5, 6], LONG))  # type: ignore[arg-type]
            while not (await llm.status())["running"]:
                pass
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await idle(llm)
            # and while everything is held
            await llm.pause_generation("keep")
            stream = llm.generate([5, 6], LONG)
            waiting = asyncio.create_task(anext(stream))
            while (await llm.status())["held"] != 1:
                pass
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await stream.aclose()  # type: ignore[attr-defined]
            assert (await llm.status())["held"] == 0
            await llm.resume_generation()
            assert not llm._streams

    run(body())


def test_an_id_used_again_right_after_its_client_left_gets_only_its_own_tokens(model: pathlib.Path) -> None:
    async def body() -> None:
        async with engine(model) as llm:
            alone = await collect(llm, [8, 9, 10])
            for _ in range(20):
                stream = llm.generate([5, 6], LONG, request_id="same")
                await anext(stream)
                await stream.aclose()  # type: ignore[attr-defined]
                out = await collect(llm, [8, 9, 10], request_id="same")
                assert out.outputs[0].finish_reason == "length"
                assert out.outputs[0].token_ids == alone.outputs[0].token_ids
            stream = llm.generate([5, 6], LONG, request_id="same")
            await anext(stream)
            with pytest.raises(InvalidInput, match="in use"):
                await anext(llm.generate([5, 6], LONG, request_id="same"))
            await stream.aclose()  # type: ignore[attr-defined]
            await idle(llm)

    run(body())


@pytest.mark.parametrize("clear", [True, False])
def test_keep_holds_the_streams_and_they_end_as_if_nothing_happened(model: pathlib.Path, clear: bool) -> None:
    async def body() -> None:
        async with engine(model, num_blocks=128) as llm:
            straight = [await collect(llm, [5 + i, 6], LONG) for i in range(3)]
            tasks = [asyncio.create_task(collect(llm, [5 + i, 6], LONG, request_id=f"k{i}")) for i in range(3)]
            await asyncio.sleep(0)
            for at in (3, 60, 150):
                await tokens_of(llm, "k0", at)
                reply = await llm.pause_generation("keep", clear_cache=clear)
                assert reply == {"paused": True, "mode": "keep", "clear_cache": clear} and await llm.is_paused()
                made = [len(llm._streams[f"k{i}"].builder.output.outputs[0].token_ids) for i in range(3)]
                late = asyncio.create_task(collect(llm, [40, 41], request_id=f"late{at}"))
                while (status := await llm.status())["held"] < 4:
                    pass
                assert [len(llm._streams[f"k{i}"].builder.output.outputs[0].token_ids) for i in range(3)] == made
                assert (await llm.status())["num_steps"] == status["num_steps"] and not late.done()
                assert (await llm.resume_generation()) == {"was_paused": True}
                assert len((await late).outputs[0].token_ids) == 24
            for task, before in zip(tasks, straight, strict=True):
                out = (await task).outputs[0]
                assert out.token_ids == before.outputs[0].token_ids
                assert out.processed_logprobs == before.outputs[0].processed_logprobs
                assert (out.num_reprefilled_tokens > 0) == clear

    run(body())


def test_case_055_abort_and_wait_pauses_answer_every_caller_and_refuse_new_ones(model: pathlib.Path) -> None:
    async def body() -> None:
        async with engine(model) as llm:
            tasks = [asyncio.create_task(collect(llm, [5, i], LONG, request_id=f"r{i}")) for i in range(10)]
            await asyncio.sleep(0)
            await tokens_of(llm, "r0", 2)
            await llm.pause_generation()  # the default mode is abort
            outs = await asyncio.wait_for(asyncio.gather(*tasks), 2)
            assert {o.outputs[0].finish_reason for o in outs} == {"abort"}
            with pytest.raises(EnginePaused) as refused:
                await collect(llm, [5])
            assert refused.value.retryable and not llm._streams
            await llm.resume_generation()

            tasks = [asyncio.create_task(collect(llm, [5, i], request_id=f"w{i}")) for i in range(10)]
            await asyncio.sleep(0)
            await tokens_of(llm, "w0", 1)
            pause = asyncio.create_task(llm.pause_generation("wait"))
            await llm.status()
            with pytest.raises(EnginePaused):
                await collect(llm, [5])
            assert (await pause)["paused"] and all(
                len(out.outputs[0].token_ids) == 24 for out in await asyncio.gather(*tasks)
            )
            await llm.resume_generation()

            task = asyncio.create_task(collect(llm, [5], LONG, request_id="slow"))
            await asyncio.sleep(0)
            with pytest.raises(TimedOut, match="slow"):
                await llm.pause_generation("wait", timeout_s=0.02)
            assert not await llm.is_paused()
            await llm.abort("slow")
            await task
            with pytest.raises(InvalidInput, match="unknown pause mode"):
                await llm.pause_generation("gently")  # type: ignore[arg-type]
            assert not await llm.is_paused()

    run(body())


def test_case_048_two_hundred_crossed_pauses_and_resumes_each_return(model: pathlib.Path) -> None:
    async def body() -> None:
        async with engine(model) as llm:
            rng = random.Random(4)
            tasks = [asyncio.create_task(collect(llm, [5, i], LONG)) for i in range(4)]

            async def one() -> str:
                kind = rng.choice(("resume", "resume", "keep", "wait", "abort"))
                try:
                    if kind == "resume":
                        await llm.resume_generation()
                    else:
                        await llm.pause_generation(kind, clear_cache=rng.random() < 0.5)  # type: ignore[arg-type]
                except PauseCancelled:
                    return "cancelled"
                return kind

            for _ in range(20):
                calls = [asyncio.create_task(one()) for _ in range(10)]
                # a wait ends with its requests, or at the latest with this
                await llm.resume_generation()
                await asyncio.wait_for(asyncio.gather(*calls), LIMIT_S)
            await llm.pause_generation("keep")
            assert await llm.is_paused()
            await llm.resume_generation()
            assert not await llm.is_paused() and not llm._calls
            await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)
            assert len((await collect(llm, [5])).outputs[0].token_ids) == 24

    run(body())


def test_bad_input_is_one_clear_error_and_the_others_go_on(model: pathlib.Path) -> None:
    async def body() -> None:
        async with engine(model) as llm:
            good = asyncio.create_task(collect(llm, [5], LONG, request_id="good"))
            await asyncio.sleep(0)
            for prompt in ([], [160], [-1], [1 << 70], [3] * 600, [1.5], "text", {"nothing": 1}, 7):
                with pytest.raises(InvalidInput):
                    await asyncio.wait_for(collect(llm, prompt), 5)  # type: ignore[arg-type]
            for params in ({"stop_token_ids": [1 << 70]}, {"n": 1 << 70}, {"n": 9}, {"top_k": 1 << 70}):
                with pytest.raises(InvalidInput):
                    await asyncio.wait_for(collect(llm, [5], SamplingParams(detokenize=False, **params)), 5)  # type: ignore[arg-type]
            for request in (None, {"update_info": {"key": object()}}, {"update_info": {"key": torch.zeros(1)}}):
                with pytest.raises((InvalidInput, Conflict)):
                    await asyncio.wait_for(llm.update_weights(request), 5)  # type: ignore[arg-type]
            with pytest.raises(Conflict, match="call start_weight_update first"):
                await llm.finish_weight_update()
            await llm.start_weight_update()
            with pytest.raises(Conflict, match="finish or abort it first"):
                await llm.start_weight_update()
            assert (await llm.abort_weight_update())["aborted"] == "update-1"
            with pytest.raises(InvalidInput, match="request_ids must be a list"):
                await llm.abort_requests(5)  # type: ignore[arg-type]
            assert len((await good).outputs[0].token_ids) == 480 and not llm._streams and not llm._calls

    run(body())


def test_the_core_killed_every_stream_and_call_is_told(model: pathlib.Path) -> None:
    async def body() -> None:
        fds = len(os.listdir("/proc/self/fd"))
        llm = AsyncLLM(str(model), **OPTIONS)
        await llm.start()
        tasks = [asyncio.create_task(collect(llm, [5, i], LONG, request_id=f"r{i}")) for i in range(4)]
        await asyncio.sleep(0)
        await tokens_of(llm, "r0", 2)
        tasks.append(asyncio.create_task(llm.pause_generation("wait")))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        os.kill(llm._ranks[0].process.pid, signal.SIGKILL)
        start = time.monotonic()
        for _ in range(10):  # calls made before the death is known
            tasks.append(asyncio.create_task(llm.status()))  # type: ignore[arg-type]
            await asyncio.sleep(0)
        tasks.append(asyncio.create_task(collect(llm, [5])))
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2)
        assert time.monotonic() - start < 2
        assert all(isinstance(r, EngineDead) for r in results), results
        for late in (llm.status(), collect(llm, [5]), llm.abort("r0")):
            with pytest.raises(EngineDead):
                await asyncio.wait_for(late, 2)
        await asyncio.wait_for(llm.aclose(), 5)
        await asyncio.wait_for(llm.aclose(), 5)
        assert not llm._streams and not llm._calls and len(os.listdir("/proc/self/fd")) == fds

    run(body())


def test_close_ends_what_is_open_and_leaves_nothing(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async def body() -> None:
        fds = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            log = tmp_path / "steps.jsonl"
            log.unlink(missing_ok=True)
            llm = AsyncLLM(str(model), step_log=str(log), **OPTIONS)
            await llm.start()
            process = llm._ranks[0].process
            held = asyncio.create_task(collect(llm, [5, 6], LONG, request_id="held"))
            await asyncio.sleep(0)
            await tokens_of(llm, "held", 40)
            await llm.pause_generation("keep")
            steps = (await llm.status())["num_steps"]
            start = time.monotonic()
            await llm.aclose()
            assert time.monotonic() - start < 5
            with pytest.raises(EngineDead, match="closed"):
                await held
            assert process.exit_code == 0
            # the log is whole: its last steps are not lost with the process
            assert len(log.read_text().splitlines()) == steps >= 40
            del llm, process, held
        assert len(os.listdir("/proc/self/fd")) <= fds + 2

    run(body())


def test_a_start_that_fails_raises_its_own_error_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty").mkdir()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    bare = write_checkpoint(tmp_path / "bare", "llama", 0, **TINY)
    (bare / "model.safetensors").unlink()

    async def body(path: pathlib.Path, match: str, **options: Any) -> None:
        llm = AsyncLLM(str(path), **{**OPTIONS, **options})
        with pytest.raises(MidstreamError, match=match) as error:
            await llm.start()
        assert type(error.value) is (InvalidInput if options else ModelLoadError)
        with pytest.raises(MidstreamError, match=match):
            await llm.generate_one([5], SHORT)
        await asyncio.wait_for(llm.aclose(), 5)

    run(body(tmp_path / "nowhere", "no model at"))
    for path, match in (tmp_path / "empty", "has no config.json"), (foreign, "MambaForCausalLM is not supported"):
        with pytest.raises(ModelLoadError, match=match):
            LLM(str(path))
    run(body(bare, "has no \\*.safetensors"))
    fds = len(os.listdir("/proc/self/fd"))
    good = write_checkpoint(tmp_path / "good", "llama", 0, **TINY)
    run(body(good, "unknown WeightTransferEngine 'pigeon'", weight_transfer_backend="pigeon"))
    run(body(bare, "has no \\*.safetensors"))
    assert len(os.listdir("/proc/self/fd")) == fds
    for options in ({"colour": 1}, {"num_blocks": 0}, {"dtype": "int3"}):
        with pytest.raises(InvalidInput):
            AsyncLLM(str(good), **options)


def test_a_child_that_cannot_even_begin_is_an_error_at_once(
    model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        llm = AsyncLLM(str(model), **OPTIONS)
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(EngineDead, match="exit code 1"):
            await asyncio.wait_for(llm.start(), 5)
        await asyncio.wait_for(llm.aclose(), 5)

    run(body())


PARENT = """
import asyncio, sys
from midstream.serving.async_llm import AsyncLLM
from midstream.types import SamplingParams

async def main():
    llm = AsyncLLM(sys.argv[1], num_blocks=64, num_threads=1)
    await llm.start()
    params = SamplingParams(max_tokens=480, ignore_eos=True, detokenize=False)
    async for _ in llm.generate([5, 6], params):
        print(llm._ranks[0].process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_core_ends_when_its_parent_is_killed(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    root = pathlib.Path(__file__).parent.parent
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)},
    )
    try:
        assert parent.stdout is not None
        pid = parent.stdout.readline()
        pidfd = os.pidfd_open(int(pid))
        parent.send_signal(signal.SIGKILL)
        parent.wait(5)
        assert select.select([pidfd], [], [], 5)[0], "the core outlived its parent"
        os.close(pidfd)
        assert not list(tmp_path.iterdir())
    finally:
        parent.kill()
        parent.wait(5)


DROPPED = """
import asyncio, gc, os, sys
from midstream.serving.async_llm import AsyncLLM

async def main():
    llm = AsyncLLM(sys.argv[1], num_blocks=64, num_threads=1, data_parallel_size=int(sys.argv[2]))
    await llm.start()
    return [os.pidfd_open(rank.process.pid) for rank in llm._ranks._ranks]

pidfds = asyncio.run(main())
gc.collect()
import select
assert all(select.select([pidfd], [], [], 5)[0] for pidfd in pidfds), "a core outlived its engine"
print("collected")
"""


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_that_nobody_closes_ends_when_it_is_collected(model: pathlib.Path, size: int) -> None:
    """Its sockets are collected in any order, and nothing waits in the garbage collector."""
    root = pathlib.Path(__file__).parent.parent
    command = [sys.executable, "-c", DROPPED, str(model), str(size)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=root, env=environment, timeout=60)
    assert done.stdout == "collected\n"


def test_two_engines_in_one_process(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = write_checkpoint(tmp_path / "w1", "llama", 1, **TINY)

    async def body() -> None:
        async with engine(model) as a, engine(other) as b:
            calls = (collect(e, [5, 6], request_id="same") for e in (a, b, a, b))
            outs = await asyncio.gather(*calls, return_exceptions=True)
            good = [o for o in outs if isinstance(o, RequestOutput)]
            assert len(good) == 2 and sum(isinstance(o, InvalidInput) for o in outs) == 2
            assert good[0].outputs[0].token_ids == expected_tokens(model, [5, 6], SHORT)
            assert good[1].outputs[0].token_ids == expected_tokens(other, [5, 6], SHORT)
            await a.pause_generation("keep")
            assert await a.is_paused() and not await b.is_paused()
            assert len((await collect(b, [9])).outputs[0].token_ids) == 24
            os.kill(a._ranks[0].process.pid, signal.SIGKILL)
            assert len((await collect(b, [9])).outputs[0].token_ids) == 24
            with pytest.raises(EngineDead):
                await a.resume_generation()

    run(body())
    with LLM(str(model), num_blocks=64) as one, LLM(str(other), num_blocks=64) as two:
        first, second = (e.generate([[5, 6], [7]], SHORT) for e in (one, two))
        assert first[0].outputs[0].token_ids != second[0].outputs[0].token_ids


# -- LLM, in process ------------------------------------------------------------------------------------------------


def test_llm_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(
    model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(model), num_blocks=64) as llm:
        before = llm.generate([5, 6], SHORT)[0].outputs[0].token_ids
        real, calls = llm.core.worker.execute, []

        def execute(plan: Any) -> Any:
            calls.append(plan)
            if len(calls) == 5:
                raise RuntimeError("a bad step")
            return real(plan)

        monkeypatch.setattr(llm.core.worker, "execute", execute)
        with pytest.raises(MidstreamError, match="a bad step"):
            llm.generate([[5, 6], [7, 8]], SHORT)
        assert not llm.core.scheduler.live
        llm.core.scheduler.check_integrity()
        assert llm.core.scheduler.pool.num_used == 0
        assert llm.generate([5, 6], SHORT)[0].outputs[0].token_ids == before


FAILING = """
from my_transfer_engine import FileWeightTransferEngine
from midstream.engine import runner

real, calls = runner.ModelRunner.execute, []

def execute(self, plan, weights):
    calls.append(1)
    if len(calls) == 5:
        raise RuntimeError("a bad step")
    return real(self, plan, weights)

runner.ModelRunner.execute = execute
Engine = FileWeightTransferEngine
"""


def test_a_step_that_fails_ends_its_streams_with_the_reason_and_the_engine_goes_on(
    model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_engine.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent.parent / "examples"))

    async def body() -> None:
        async with engine(model, weight_transfer_backend="failing_engine:Engine") as llm:
            results = await asyncio.wait_for(
                asyncio.gather(*(collect(llm, [5, i], LONG) for i in range(3)), return_exceptions=True), 10
            )
            assert all(isinstance(r, MidstreamError) and "a bad step" in str(r) for r in results), results
            status = await asyncio.wait_for(llm.status(), 5)  # the engine goes on
            assert (status["running"], status["num_free_blocks"]) == (0, status["num_blocks"])
            assert (await collect(llm, [5, 6], LONG)).finished

    run(body())


def test_llm_pauses_and_refusals(model: pathlib.Path) -> None:
    with LLM(str(model), num_blocks=64) as llm:
        for mode, error in (("abort", EnginePaused), ("wait", EnginePaused), ("keep", Conflict)):
            assert llm.pause_generation(mode)["mode"] == mode and llm.is_paused()  # type: ignore[arg-type]
            with pytest.raises(error):
                llm.generate([5, 6], SHORT)
            assert llm.resume_generation() == {"was_paused": True}
        with pytest.raises(InvalidInput):
            llm.generate([[5, 6], [999]], SHORT)
        assert not llm.core.scheduler.live
        assert llm.generate([], SHORT) == []
        with pytest.raises(InvalidInput, match="2 prompts but 1 sampling_params"):
            llm.generate([[5], [6]], [SHORT])
        assert [len(o.outputs[0].token_ids) for o in llm.generate([[5], [6]], [SHORT, SHORT])] == [24, 24]


def test_llm_is_shared_by_threads_one_generates_the_others_call(model: pathlib.Path) -> None:
    """What a trainer's half needs: an abort, a status or an update from another thread while requests run."""
    with LLM(str(model), num_blocks=64) as llm:
        alone = [o.outputs[0].token_ids for o in llm.generate([[5], [6]], LONG)]
        problems: list[BaseException] = []
        stop = threading.Event()

        def others(index: int) -> None:
            try:
                while not stop.is_set():
                    llm.status()
                    if index == 0:
                        llm.start_weight_update()
                        llm.abort_weight_update()
                    llm.is_paused()
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=others, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(2):
                assert [o.outputs[0].token_ids for o in llm.generate([[5], [6]], LONG)] == alone
        finally:
            stop.set()
            for thread in threads:
                thread.join(LIMIT_S)
        assert not problems and not llm._answers
        assert random_weights("llama", 0, **TINY).keys() == llm.core.session.held_digests.keys()


def test_a_text_that_can_not_be_shown_ends_its_stream_alone(model: pathlib.Path) -> None:
    async def body() -> None:
        async with engine(model) as llm:

            class Broken:
                exists, is_loaded = True, True

                def decode(self, ids: list[int]) -> str:
                    raise ValueError("no such id")

            whole = llm.text
            llm.text = Broken()  # type: ignore[assignment]
            with pytest.raises(MidstreamError, match="can not be shown"):
                await asyncio.wait_for(collect(llm, [5, 6], SamplingParams(max_tokens=400)), 10)
            llm.text = whole
            assert (await asyncio.wait_for(collect(llm, [5, 6], LONG), 10)).finished
            async with asyncio.timeout(10):
                while (await llm.status())["running"]:
                    pass

    run(body())


def test_values_of_a_wrong_type_are_refused_and_harm_nobody(model: pathlib.Path) -> None:
    async def body() -> None:
        async with engine(model) as llm:
            running = asyncio.create_task(collect(llm, [5, 6], LONG))
            for wrong in (None, 5):
                with pytest.raises(InvalidInput):
                    await llm.abort(wrong)  # type: ignore[arg-type]
            for options in ({"cache_salt": None}, {"request_id": 5}, {"priority": "high"}):
                with pytest.raises(InvalidInput):
                    await anext(llm.generate([5, 6], SHORT, **options))
            with pytest.raises(InvalidInput):
                await anext(llm.generate([5, 6], {"max_tokens": 3}))  # type: ignore[arg-type]
            with pytest.raises(MidstreamError):
                await llm.update_weights({"update_info": {"update": [[]], "names": 5}})
            assert (await asyncio.wait_for(running, 20)).finished
        with pytest.raises(EngineDead):
            await llm.start()

    for values in ({"ignore_eos": 1}, {"detokenize": "yes"}, {"final_only": None}, {"stop_token_ids": 5}):
        with pytest.raises(InvalidInput):
            SamplingParams(**values)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        SamplingParams(temperature=10**400)
    run(body())
