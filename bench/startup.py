"""From a cold interpreter to the first token, and the memory that is neither weights nor KV cache.

    python -m bench --only startup

Each engine starts in a fresh process on the same model; seconds are from its spawning to the first token of a prompt
of 64. Memory is what is resident after 64 completions of 128 tokens have filled the KV cache to its last block, less
the weights (a tied table in both its forms) and the cache.
"""

from __future__ import annotations

import json
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench.machine import figure, killed_after, measured

_LIMIT_S = 300.0
_SEQUENCES, _PROMPT, _OUT, _BLOCK = 64, 64, 128, 16
_BLOCKS = _SEQUENCES * (_PROMPT + _OUT) // _BLOCK

_OURS = """
import json, sys
from midstream import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=512, max_num_seqs=64, num_blocks=int(sys.argv[2]))
llm.generate([list(range(10, 74))], SamplingParams(max_tokens=1, detokenize=False))
print("first", flush=True)
prompts, out = json.loads(sys.stdin.readline())
params = SamplingParams(n=8, max_tokens=out, ignore_eos=True, logprobs=1, detokenize=False)
for _ in range(3):
    llm.generate(prompts, params)
worker = llm.core.worker
page = {line.split(":")[0]: int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")}
cache = worker.runner.key_cache.nbytes + worker.runner.value_cache.nbytes
tied = worker.weights.embed.nbytes if worker.tied else 0
print(json.dumps({"rss": page["VmRSS"] * 1024, "known": cache + tied}), flush=True)
"""


def weight_bytes(model: str) -> int:
    """Of the checkpoint's files, which are in bf16."""
    return sum(path.stat().st_size for path in pathlib.Path(model).glob("*.safetensors"))


def ours(model: str) -> tuple[float, int]:
    """(seconds to the first token, bytes beyond weights and cache)."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 40_000) for _ in range(_PROMPT)] for _ in range(_SEQUENCES // 8)]
    start = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", _OURS, model, str(_BLOCKS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child, killed_after(child, _LIMIT_S):
        assert child.stdin and child.stdout
        child.stdout.readline()
        seconds = time.perf_counter() - start
        child.stdin.write(json.dumps([prompts, _OUT]) + "\n")
        child.stdin.close()
        found = json.loads(child.stdout.readline())
    return seconds, found["rss"] - found["known"] - weight_bytes(model)


def figures(model: str, peer_python: str | None = None) -> Iterator[dict[str, Any]]:
    ours(model)  # files into the page cache, kernels built
    runs = [measured(lambda _: ours(model)) for _ in range(3)]
    disturbed = max(share for _, share in runs)
    seconds, memory = min(found[0] for found, _ in runs), max(found[1] for found, _ in runs) / 1e6
    peer_s = None
    if peer_python:
        from bench.rollout import Peer

        start = time.perf_counter()
        peer = Peer(peer_python, model, 512, 64)
        peer.seconds({"prompts": [list(range(10, 74))], "n": 1, "max_tokens": 1})
        peer_s = time.perf_counter() - start
        peer.close()
    yield figure("import to first token", seconds, "s", peer_s, at_most=4.0, disturbed=disturbed)
    yield figure("memory beyond weights and KV cache", memory, "MB", at_most=350.0, disturbed=disturbed)
