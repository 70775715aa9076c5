"""The HTTP server at 64 concurrent streams against the offline engine.

    python -m bench --only streams

Output tokens per second, all 64 completions together, from the first request sent to the last byte. 64 prompts of 64
tokens that nothing has cached, 128 tokens out, T = 1, logprobs and text on, bf16, all cores. The server
(``midstream serve`` in a process of its own) gets 64 streaming requests of /v1/completions; the reference is
``LLM.generate`` of the 64 prompts in this process. They take turns, and the median of the turns' ratios counts: the
machine's own speed moves more from one minute to the next than the two differ. The client shares the cores with the
server, so it is one thread that only counts events; that every token was sent is checked by the usage that each stream
ends with. ``…_us`` is CPU time per output token.
"""

from __future__ import annotations

import json
import pathlib
import random
import re
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch

from bench.load_server import serve
from bench.machine import cpu_s, figure, measured
from midstream import LLM, SamplingParams

STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64, 128
LIMIT_S = 300.0


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(STREAMS)]


def stream_all(url: str, bodies: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Post all ``bodies`` at once to /v1/completions and read every answer to its end: (tokens by usage, events)."""
    address = urlsplit(url)
    selector, num_tokens, num_events = selectors.DefaultSelector(), 0, 0
    for body in bodies:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
        stream = socket.create_connection((address.hostname, address.port), LIMIT_S)
        stream.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        selector.register(stream, selectors.EVENT_READ, bytearray())
    while selector.get_map():
        if not (ready := selector.select(LIMIT_S)):
            raise TimeoutError(f"no stream said anything for {LIMIT_S} s")
        for key, _ in ready:
            connection, tail = key.fileobj, key.data
            assert isinstance(connection, socket.socket)
            data = connection.recv(1 << 16)
            num_events += (tail[-5:] + data).count(b"data: ")
            tail += data
            del tail[:-2000]
            if not data:
                selector.unregister(connection)
                connection.close()
                if not (found := re.search(rb'"completion_tokens":\s*(\d+)', tail)):
                    raise RuntimeError(f"a stream ended without its usage: {bytes(tail[-500:])!r}")
                num_tokens += int(found[1])
    return num_tokens, num_events


def served_s(url: str, seed: int, tokens: int) -> float:
    common: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "logprobs": 1}
    common |= {"stream": True, "stream_options": {"include_usage": True}}
    bodies = [{"prompt": prompt, **common} for prompt in prompts_of(seed)]
    start = time.perf_counter()
    got, _ = stream_all(url, bodies)
    seconds = time.perf_counter() - start
    assert got == len(bodies) * tokens, f"{got} tokens instead of {len(bodies) * tokens}"
    return seconds


def offline_s(llm: LLM, seed: int, tokens: int) -> float:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=1)
    start = time.perf_counter()
    outputs = llm.generate(list(prompts_of(seed)), params)
    seconds = time.perf_counter() - start
    assert all(len(c.token_ids) == tokens for o in outputs for c in o.outputs)
    return seconds


def figures(model: str, repeats: int = 9, tokens: int = OUTPUT_TOKENS) -> Iterator[dict[str, Any]]:
    number = STREAMS
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": number, "num_blocks": 2048}
    flags = ["--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", str(number)]
    flags += ["--num-gpu-blocks-override", "2048", "--num-threads", str(torch.get_num_threads())]
    with serve(pathlib.Path(model), *flags) as (url, server), LLM(model, **options) as llm:

        def cpus() -> list[float]:
            front, *engine = server.pids
            return [cpu_s(front), sum(map(cpu_s, engine)), time.process_time()]

        def turn(seed: int) -> tuple[float, list[float]]:
            before = cpus()
            seconds = served_s(url, seed, tokens)
            return seconds, [(b - a) / number / tokens * 1e6 for a, b in zip(before, cpus(), strict=True)]

        served_s(url, 0, min(tokens, 16))
        offline_s(llm, 0, min(tokens, 16))
        turns = []
        for r in range(repeats):
            online, share = measured(lambda i, r=r: turn(100 + 3 * r + i))
            offline, other = measured(lambda i, r=r: offline_s(llm, 200 + 3 * r + i, tokens))
            turns.append((offline / online[0], online, offline, max(share, other)))
    turns.sort()
    _, (seconds, used), reference, _ = turns[len(turns) // 2]
    yield figure(
        f"HTTP server at {number} streams against the offline engine",
        number * tokens / seconds,
        "tokens/s",
        number * tokens / reference,
        at_least=0.9,
        of="ratio",
        disturbed=max(share for *_, share in turns),
        ratios=[round(ratio, 3) for ratio, *_ in turns],
        **{f"{name}_us": round(us, 1) for name, us in zip(("front", "engine", "client"), used, strict=True)},
    )
