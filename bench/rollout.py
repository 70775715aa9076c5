"""Rollouts per second: output tokens/s of the offline engine, with the peer's in turn and this machine's limit.

    python -m bench.rollout --model DIR --concurrency 1,8,32,64,128 --peer-python PATH

One JSON line per concurrency C (prompts of 64 tokens, 8 samples each, 128 tokens out, T = 1, logprobs on, bf16):
tokens_per_s, peer_tokens_per_s and their ratio; step_ms, a decode step without the prefill; limit_ms, what the packed
products of such a step take alone plus its KV bytes at the measured read bandwidth; disturbed, the largest share of the
machine that other processes took during what is reported. A disturbed measurement is repeated, at most twice. Both
engines take three turns, one after the other, each with its own limit, and the turn with the median ratio is reported:
this machine's own speed moves more from one minute to the next than one turn takes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bench.machine import figure, killed_after, layer_weights, measured, products_s, read_bytes_per_s
from midstream import LLM, SamplingParams
from midstream.engine.runner import ModelRunner

PROMPT_TOKENS, OUTPUT_TOKENS, SAMPLES = 64, 128, 8
LIMIT_S = 600.0
"""For one answer of the peer; compiling belongs to its first."""
TURNS = 3
"""Of each engine, one after the other; the median counts."""
SETTLE_S = 1.5
"""Before each: the peer's threads spin for a while after their work."""
NEAR_LIMIT = 0.8
"""A step that takes the limit divided by this is as good as the ratio that is asked for."""


def work_of(concurrency: int, max_tokens: int, seed: int, vocab: int) -> dict[str, Any]:
    """Distinct prompts that nothing has cached."""
    rng = random.Random(seed)
    n = min(SAMPLES, concurrency)
    prompts = [[rng.randrange(10, vocab - 10) for _ in range(PROMPT_TOKENS)] for _ in range(concurrency // n)]
    return {"prompts": prompts, "n": n, "max_tokens": max_tokens}


class Ours:
    """Our engine, in this process."""

    def __init__(self, model: str, longest: int, most: int) -> None:
        blocks = most * -(-longest // 16)
        self.llm = LLM(model, dtype="bfloat16", max_model_len=longest, max_num_seqs=most, num_blocks=blocks)

    def seconds(self, work: dict[str, Any]) -> float:
        params = SamplingParams(
            n=work["n"], max_tokens=work["max_tokens"], ignore_eos=True, logprobs=1, detokenize=False
        )
        start = time.perf_counter()
        outputs = self.llm.generate(work["prompts"], params)
        seconds = time.perf_counter() - start
        assert all(len(c.token_ids) == len(c.logprobs) == work["max_tokens"] for o in outputs for c in o.outputs)
        return seconds

    def limit_ms(self, rows: int) -> float:
        """All products of a decode step of ``rows`` requests, and its KV at half of its output."""
        worker = self.llm.core.worker
        products = products_s([*layer_weights(self.llm), worker.weights.head], rows)
        context = PROMPT_TOKENS + OUTPUT_TOKENS // 2
        kv = rows * context * ModelRunner.block_bytes(worker.model_config, torch.bfloat16, 1)
        return (products + kv / read_bytes_per_s()) * 1e3


class Peer:
    """vLLM in a process of its own, with the settings it advises."""

    def __init__(self, python: str, model: str, longest: int, most: int) -> None:
        home = pathlib.Path(python).absolute().parent.parent
        libraries = [*pathlib.Path("/usr/lib").rglob("libtcmalloc_minimal.so.4"), home / "lib" / "libiomp5.so"]
        settings = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "LD_PRELOAD": ":".join(str(path) for path in libraries if path.exists()),
        }
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "PYTHON"))} | settings
        script = pathlib.Path(__file__).with_name("peer_vllm.py")
        self._process = subprocess.Popen(
            [python, str(script), model, str(longest), str(most)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.ready_s = float(self._answer()["ready_s"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with killed_after(self._process, LIMIT_S):
            line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer ended with exit code {self._process.wait(30)}")
        return json.loads(line)  # type: ignore[no-any-return]

    def seconds(self, work: dict[str, Any]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()


def rows(model: str, concurrencies: Sequence[int], peer_python: str | None) -> Iterator[dict[str, Any]]:
    longest, most = 512, max(concurrencies)
    ours = Ours(model, longest, most)
    peer = Peer(peer_python, model, longest, most) if peer_python else None
    vocab = ours.llm.core.worker.model_config.vocab_size

    def timed(engine: Ours | Peer, c: int, max_tokens: int, seed: int) -> tuple[float, float]:
        """Seconds, and the share of the machine that others took."""
        time.sleep(SETTLE_S)
        return measured(lambda i: engine.seconds(work_of(c, max_tokens, seed + i, vocab)))

    try:
        for c in concurrencies:
            for engine in [ours, *([peer] if peer else [])]:  # caches of shapes, threads, memory
                engine.seconds(work_of(c, 8, 0, vocab))
            turns = []
            for seed in range(100 * c, 100 * c + 10 * TURNS, 10):
                first, _ = timed(ours, c, 2, seed + 5)
                seconds, share = timed(ours, c, OUTPUT_TOKENS, seed)
                limit_ms = ours.limit_ms(c)
                line: dict[str, Any] = {"C": c, "tokens_per_s": round(c * OUTPUT_TOKENS / seconds, 1)}
                if peer is not None:
                    peer_seconds, other = timed(peer, c, OUTPUT_TOKENS, seed)
                    line["peer_tokens_per_s"] = round(c * OUTPUT_TOKENS / peer_seconds, 1)
                    line["ratio"] = round(peer_seconds / seconds, 3)
                    share = max(share, other)
                line["step_ms"] = round((seconds - first) / (OUTPUT_TOKENS - 2) * 1e3, 2)
                line["limit_ms"] = round(limit_ms, 2)
                line["disturbed"] = round(share, 3)
                turns.append(line)
            yield sorted(turns, key=lambda line: line["ratio"] if peer else line["tokens_per_s"])[TURNS // 2]
    finally:
        if peer is not None:
            peer.close()
        ours.llm.close()


def figures(
    model: str, asked: Sequence[tuple[int, float]], peer_python: str | None = None, name: str = "rollout"
) -> Iterator[dict[str, Any]]:
    """One figure per (concurrency, ratio asked for). Met by the ratio, or near the limit."""
    least = dict(asked)
    for line in rows(model, list(least), peer_python):
        near = line["limit_ms"] / line["step_ms"]
        more = {"step_ms": line["step_ms"], "limit_ms": line["limit_ms"], "of_limit": round(near, 3)}
        found = figure(
            f"{name}, {line['C']} concurrent",
            line["tokens_per_s"],
            "tokens/s",
            line.get("peer_tokens_per_s"),
            at_least=least[line["C"]],
            of="ratio",
            disturbed=line["disturbed"],
            **more,
        )
        yield found | {"met": found["met"] or near >= NEAR_LIMIT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="a directory of safetensors that both can read")
    parser.add_argument("--concurrency", default="1,8,32,64,128", metavar="C,C,…", help="completions at once")
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter of an environment with vllm-cpu")
    arguments = parser.parse_args()
    concurrencies = [int(c) for c in arguments.concurrency.split(",")]
    for line in rows(arguments.model, concurrencies, arguments.peer_python):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
