"""A server under load while its weights change: what is lost, what is left over, and how fast it is.

    python -m bench.load_server [--requests 2000] [--streams 256] [--cycles 50] [--backend ipc]

1. Streams on loopback, a pause(keep), a whole weight update and a resume every two seconds, and a tenth of the clients
   vanish at some point. The weights sent are those that serve, so every other stream must give the very ids of an
   undisturbed run, once, with version spans that cover all of them.
2. Cycles of {pause, update, requests, aborts, clients that vanish, resume}: after the first 50 of them, memory, file
   descriptors, threads and shared memory stay as they are.

One JSON line for each part. Exit 1 with a message for anything that is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

import midstream
from midstream.types import ParamMeta
from midstream.weights.base import TrainerWeightTransferEngine, trainer_engines

MODEL = pathlib.Path(midstream.__file__).parent / "rl" / "models" / "reverse"
LIMIT_S = 120.0
"""Of one request from its first byte to its last."""
_PERIOD_S = 2.0
_TABLES = ("requests", "unread")
FLAGS = ("--max-num-seqs", "128", "--num-gpu-blocks-override", "1024", "--reattach-s", "1")
"""A cache that is soon used from end to end, and answers that are soon forgotten: what then grows is a leak."""


class Source:
    """A checkpoint's tensors, as a trainer would send them."""

    def __init__(self, model: pathlib.Path) -> None:
        self._tensors = load_file(str(model / "model.safetensors"))

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())


class Control:
    """The control routes, blocking. It is the client of a trainer half too."""

    def __init__(self, url: str) -> None:
        self._url = url

    def post(self, path: str, body: Any = None) -> dict[str, Any]:
        """Raises urllib's HTTPError for anything but 200."""
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"} if body is not None else {}
        request = urllib.request.Request(self._url + path, data=data, headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            return json.load(response)  # type: ignore[no-any-return]

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._url}/status", timeout=LIMIT_S) as response:
            return json.load(response)  # type: ignore[no-any-return]

    def init_weight_transfer_engine(self, request: dict[str, Any], /) -> dict[str, Any]:
        return self.post("/init_weight_transfer_engine", request)

    def start_weight_update(self, *, manifest: Any = None, mode: str = "full", cast: str = "deny") -> dict[str, Any]:
        return self.post("/start_weight_update", {"manifest": manifest, "mode": mode, "cast": cast})

    def update_weights(self, request: dict[str, Any], /) -> dict[str, Any]:
        return self.post("/update_weights", request)

    def finish_weight_update(self, *, weight_version: Any = None, kv_policy: Any = None) -> dict[str, Any]:
        return self.post("/finish_weight_update", {"weight_version": weight_version, "kv_policy": kv_policy})

    def abort_weight_update(self) -> dict[str, Any]:
        return self.post("/abort_weight_update")


@dataclass(frozen=True)
class Wanted:
    """A request, and the ids that it gives whatever happens meanwhile."""

    body: dict[str, Any]
    ids: list[int]


class Load:
    """Clients of one server. ``num_tokens`` counts what they have got."""

    def __init__(self, url: str, seed: int = 0) -> None:
        found = re.fullmatch(r"http://([^:]+):(\d+)", url)
        assert found
        self._address = (found[1], int(found[2]))
        self._rng = random.Random(seed)
        self.control = Control(url)
        self.wanted: list[Wanted] = []
        self.num_tokens = 0

    async def learn(self, number: int, least: int, most: int) -> None:
        """The ids of ``number`` different requests of ``least`` to ``most`` tokens, undisturbed."""
        for seed in range(number):
            prompt = [self._rng.randrange(4, 40) for _ in range(self._rng.randint(2, 40))]
            body = {"prompt": prompt, "seed": seed, "max_tokens": self._rng.randint(least, most), "ignore_eos": True}
            body |= {"return_token_ids": True, "return_weight_versions": True}
            answer = await asyncio.to_thread(self.control.post, "/v1/completions", body)
            ids = answer["choices"][0]["token_ids"]
            assert len(ids) == body["max_tokens"]
            self.wanted.append(Wanted(body, ids))

    async def ask(self, wanted: Wanted, *, leave_after: int | None = None, request_id: str | None = None) -> str:
        """One stream, checked: how it ended, "length" or "abort"; "vanished" where the client leaves after so many
        events. Raises AssertionError for a stream that is wrong."""
        body = {**wanted.body, "stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps({**body, "request_id": request_id} if request_id else body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: load\r\nContent-Length: {len(data)}\r\nConnection: close\r\n"
        events: list[bytes] = []
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(*self._address)
            try:
                writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
                await writer.drain()
                status = b"" if leave_after == 0 else await reader.readline()
                assert leave_after == 0 or b" 200 " in status, (status, await reader.read())
                while leave_after is None or len(events) < leave_after:
                    line = await reader.readline()
                    if not line:
                        break
                    if line.startswith(b"data: "):
                        events.append(line[6:].strip())
            finally:
                writer.transport.abort() if len(events) % 2 else writer.close()
        if leave_after is not None and len(events) == leave_after:
            return "vanished"
        assert events[-1:] == [b"[DONE]"] and events.count(b"[DONE]") == 1, events[-2:]
        return self._checked(wanted, [json.loads(event) for event in events[:-1]])

    def _checked(self, wanted: Wanted, events: list[dict[str, Any]]) -> str:
        choices = [choice for event in events for choice in event["choices"]]
        ids = [token for choice in choices for token in choice["token_ids"]]
        self.num_tokens += len(ids)
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        assert len(reasons) == 1 and choices[-1]["finish_reason"], f"a stream ends once: {reasons}"
        assert events[-1]["usage"]["completion_tokens"] == len(ids)
        assert ids == (wanted.ids if reasons == ["length"] else wanted.ids[: len(ids)]), "ids were lost or repeated"
        spans = choices[-1]["weight_versions"]
        borders = [0, *(span["end"] for span in spans)]
        assert [span["start"] for span in spans] == borders[:-1] and borders[-1] == len(ids), spans
        return str(reasons[0])

    async def update(self, trainer: TrainerWeightTransferEngine, clear_cache: bool) -> None:
        """Pause, send the weights that serve, resume."""
        post = self.control.post
        await asyncio.to_thread(post, f"/pause?mode=keep&clear_cache={str(clear_cache).lower()}")
        await asyncio.to_thread(trainer.send_weights, None)
        await asyncio.to_thread(post, "/resume")

    async def many(
        self, trainer: TrainerWeightTransferEngine, requests: int, streams: int, period_s: float = _PERIOD_S
    ) -> dict[str, Any]:
        """``requests`` requests, at most ``streams`` at a time, beside updates; a tenth of the clients vanish."""
        free = asyncio.Semaphore(streams)
        ended: dict[str, int] = {}

        async def one(number: int) -> None:
            wanted = self.wanted[number % len(self.wanted)]
            leave = self._rng.randrange(len(wanted.ids) // 2) if number % 10 == 3 else None
            async with free:
                how = await self.ask(wanted, leave_after=leave)
            assert leave is not None or how == "length", how
            ended[how] = ended.get(how, 0) + 1

        over = asyncio.Event()

        async def updates() -> None:
            for number in itertools.count():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), period_s)
                    return
                await self.update(trainer, clear_cache=bool(number % 2))
                ended["updates"] = number + 1

        start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(updates())
            async with asyncio.TaskGroup() as asking:
                for number in range(requests):
                    asking.create_task(one(number))
            took = time.monotonic() - start
            over.set()
        return {**ended, "seconds": round(took, 2), "requests_per_s": round(requests / took, 1)}

    async def cycle(
        self, trainer: TrainerWeightTransferEngine, number: int, requests: int, aborts: int, vanish: int
    ) -> None:
        """Pause, update, ``requests`` requests of which some are aborted and some vanish, resume; until all ended."""

        def ask(i: int) -> Any:
            wanted = self.wanted[(number + i) % len(self.wanted)]
            leave = i % 3 if i < vanish else None
            name = f"cycle-{number}-{i}" if vanish <= i < vanish + aborts else None
            return self.ask(wanted, leave_after=leave, request_id=name)

        tasks = [asyncio.ensure_future(ask(i)) for i in range(requests)]
        await self.update(trainer, clear_cache=bool(number % 2))
        names = [f"cycle-{number}-{i}" for i in range(vanish, vanish + aborts)]
        await asyncio.to_thread(self.control.post, "/abort_requests", {"request_ids": names})
        ends = await asyncio.gather(*tasks)
        assert ends[:vanish] == ["vanished"] * vanish
        assert all(end == "length" for end in ends[vanish + aborts :]), ends

    async def idle(self) -> dict[str, Any]:
        """Until nothing runs and no answer is kept, then: every block free, nothing held, no update open."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            status = await asyncio.to_thread(self.control.status)
            if not status["running"] + status["waiting"] + status["held"] + sum(status["server"][k] for k in _TABLES):
                break
            assert time.monotonic() < deadline, status
        assert status["num_free_blocks"] == status["num_blocks"] and status["update"] is None, status
        return status


class Processes:
    """A server and its engine, as the operating system sees them."""

    def __init__(self, pid: int) -> None:
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self.pids = [pid, *map(int, children)]

    def memory_kb(self) -> int:
        """Resident memory of all that is their own: without the files they map."""
        texts = [pathlib.Path(f"/proc/{pid}/status").read_text() for pid in self.pids]
        return sum(int(kb) for text in texts for kb in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", text))

    def counts(self) -> dict[str, int]:
        fds = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids)
        threads = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in self.pids)
        maps = [pathlib.Path(f"/proc/{pid}/maps").read_text() for pid in self.pids]
        return {"fds": fds, "threads": threads, "shm": sum(t.count("/memfd:") + t.count("/dev/shm/") for t in maps)}


@contextlib.contextmanager
def serve(model: pathlib.Path, *flags: str) -> Iterator[tuple[str, Processes]]:
    """``midstream serve`` on a free port: its URL and its processes."""
    command = [sys.executable, "-m", "midstream", "serve", str(model), "--port", "0", "--num-threads", "1", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = next(found[1] for line in process.stdout if (found := re.search(r"on (http://\S+)", line)))
            yield url, Processes(process.pid)
        finally:
            process.terminate()


def open_trainer(backend: str, control: Control, model: pathlib.Path, folder: str) -> TrainerWeightTransferEngine:
    info = {"directory": folder} if backend == "disk" else {}
    return trainer_engines.lookup(backend).trainer_init(info, client=control, source=Source(model))


async def measured(
    load: Load, trainer: TrainerWeightTransferEngine, of: Processes, warm: int, cycles: int
) -> dict[str, Any]:
    """Memory and counts after ``warm`` cycles, and what ``cycles`` more of them add."""
    for number in range(warm):
        await load.cycle(trainer, number, requests=64, aborts=8, vanish=2)
    await load.idle()
    before, counts = of.memory_kb(), of.counts()
    for number in range(warm, warm + cycles):
        await load.cycle(trainer, number, requests=64, aborts=8, vanish=2)
    await load.idle()
    after = of.memory_kb()
    return {
        "cycles": [warm, cycles],
        "memory_kb": [before, after],
        "growth": round(after / before - 1, 5),
        "kb_per_cycle": round((after - before) / cycles, 2),
        "counts": {name: [counts[name], value] for name, value in of.counts().items()},
    }


async def run(given: argparse.Namespace, url: str, of: Processes, folder: str) -> list[str]:
    load = Load(url)
    trainer = await asyncio.to_thread(open_trainer, given.backend, load.control, pathlib.Path(given.model), folder)
    await load.learn(32, 32, 128)
    start = time.monotonic()
    found = await load.many(trainer, given.requests, given.streams)
    found["tokens_per_s"] = round(load.num_tokens / (time.monotonic() - start))
    await load.idle()
    print(json.dumps({"name": "load", "streams": given.streams, "requests": given.requests, **found}), flush=True)
    wrong = [] if found.get("updates") else ["no update fell into the run: ask for more requests"]
    load.wanted.clear()
    await load.learn(16, 8, 24)
    found = await measured(load, trainer, of, 50, given.cycles)
    print(json.dumps({"name": "cycles", "backend": given.backend, **found}), flush=True)
    wrong += [f"{name} grew: {pair}" for name, pair in found["counts"].items() if pair[1] > pair[0]]
    return wrong + ([f"memory grew by {found['growth']:.2%}"] if found["growth"] > 0.01 else [])


def main() -> int:
    parser = argparse.ArgumentParser(description="A server under load while its weights change.")
    parser.add_argument("model", nargs="?", default=str(MODEL))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--cycles", type=int, default=50, help="after the first 50")
    parser.add_argument("--backend", default="ipc")
    given = parser.parse_args()
    flags = (*FLAGS, "--weight-transfer-config", json.dumps({"backend": given.backend}))
    with tempfile.TemporaryDirectory() as folder, serve(pathlib.Path(given.model), *flags) as (url, processes):
        wrong = asyncio.run(run(given, url, processes, folder))
    for message in wrong:
        print(message, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
