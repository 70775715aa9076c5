"""The decode step of the tiny model against its limit: the matrix products of the same step alone, in the same run.

One JSON line per concurrency: {"name", "C", "value" (ms per step), "unit", "reference" (ms of the products), "ratio"}.
"""

from __future__ import annotations

import json
import pathlib
import time

import torch

import midstream
from midstream import LLM, SamplingParams

MODEL = pathlib.Path(midstream.__file__).parent / "rl" / "models" / "reverse"
STEPS = 100


def products_ms(llm: LLM, rows: int) -> float:
    """All products of one step on ``rows`` rows; the best of five passes."""
    weights = llm.core.worker.weights
    linears = [w for layer in weights.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)] + [weights.head]
    inputs = [torch.randn(rows, w.shape[1], dtype=w.dtype) for w in linears]
    best = float("inf")
    with torch.inference_mode():
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(STEPS // 5):
                for x, w in zip(inputs, linears, strict=True):
                    w.product(x)
            best = min(best, (time.perf_counter() - start) / (STEPS // 5))
    return best * 1e3


def main() -> None:
    with LLM(str(MODEL), num_threads=1, max_num_seqs=128, num_blocks=2048) as llm:
        prompts = [[5 + i, 6, 7, 8, 9, 10] for i in range(16)]
        llm.generate(prompts[0], SamplingParams(n=8, max_tokens=20, ignore_eos=True, detokenize=False))
        for concurrency in (16, 32, 64, 128):
            params = SamplingParams(n=8, max_tokens=STEPS, ignore_eos=True, detokenize=False, seed=0)
            before, start = llm.core.num_steps, time.perf_counter()
            llm.generate(prompts[: concurrency // 8], params)
            step = (time.perf_counter() - start) / (llm.core.num_steps - before) * 1e3
            limit = products_ms(llm, concurrency)
            line = {"name": "tiny model: decode step, 1 thread", "C": concurrency, "unit": "ms"}
            line |= {"value": round(step, 3), "reference": round(limit, 3), "ratio": round(step / limit, 2)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
