"""The decode step of the tiny model against its limit: the matrix products of the same step alone, in the same run.

    python -m bench --only step

One JSON line per concurrency: ms per step with one thread, the reference being the products' ms.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import midstream
from bench.machine import figure, layer_weights, measured, products_s
from midstream import LLM, SamplingParams
from midstream.rl.report import read_lines

MODEL = pathlib.Path(midstream.__file__).parent / "rl" / "models" / "reverse"
STEPS = 100


def decode_step_s(log: pathlib.Path, running: int, near: float | None = None) -> float:
    """From an engine's step log: the median time from one decode step of ``running`` requests to the next. Unlike the
    length of a step's forward, that is what a token costs. ``near``: of the eight before this time and the eight after
    it alone."""
    steps = [line for line in read_lines(log) if line["event"] == "step"]
    is_decode = [step["running"] == step["tokens"] == running and not step["reprefill"] for step in steps]
    gaps = [(b["t0"], b["t0"] - a["t0"]) for a, b, one, two in zip(steps, steps[1:], is_decode, is_decode[1:],
            strict=False) if one and two]  # fmt: skip
    if near is not None:
        gaps = [gap for gap in gaps if gap[0] < near][-8:] + [gap for gap in gaps if gap[0] >= near][:8]
    return median(gap for _, gap in gaps)


def figures() -> Iterator[dict[str, Any]]:
    with LLM(str(MODEL), num_threads=1, max_num_seqs=128, num_blocks=2048) as llm:
        prompts = [[5 + i, 6, 7, 8, 9, 10] for i in range(16)]
        llm.generate(prompts[0], SamplingParams(n=8, max_tokens=20, ignore_eos=True, detokenize=False))

        def step_s(concurrency: int) -> float:
            params = SamplingParams(n=8, max_tokens=STEPS, ignore_eos=True, detokenize=False, seed=0)
            before, start = llm.core.num_steps, time.perf_counter()
            llm.generate(prompts[: concurrency // 8], params)
            return (time.perf_counter() - start) / (llm.core.num_steps - before)

        for c in (16, 32, 64, 128):
            step, disturbed = measured(lambda _, c=c: step_s(c))
            alone = products_s([*layer_weights(llm), llm.core.worker.weights.head], c, passes=STEPS)
            name = f"decode step of the tiny model, 1 thread, {c} concurrent"
            yield figure(name, step * 1e3, "ms", alone * 1e3, disturbed=disturbed)
