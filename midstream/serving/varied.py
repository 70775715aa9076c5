"""One set of requests under very different circumstances: what an exact engine must not notice.

``sample_varied`` runs the same prompts alone and together, whole and in chunks, with preemption forced by a tiny
cache, through prefix hits and through pauses; the outputs must be the same bits every time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from midstream.serving.llm import LLM
from midstream.types import RequestOutput, SamplingParams

_PAUSE_EVERY = 5


@dataclass(frozen=True, slots=True)
class Circumstance:
    """A name, the engine's options, and whether to pause and resume in between."""

    name: str
    options: dict[str, Any]
    pauses: bool = False
    repeat: bool = False
    """Run the prompts once before, so that their prefixes are cached."""


def circumstances(longest: int, block_size: int, n: int) -> list[Circumstance]:
    """``longest``: most tokens (prompt + output) of one request."""
    per_request = -(-longest // block_size)
    return [
        Circumstance("one at a time", {"max_num_seqs": n}),
        Circumstance("together", {}),
        Circumstance("chunked prefill of 8", {"max_num_batched_tokens": 8, "max_num_seqs": 8}),
        Circumstance("prefix hits", {}, repeat=True),
        Circumstance("forced preemption", {"num_blocks": per_request + n + 2, "enable_prefix_caching": False}),
        Circumstance("pause and resume", {}, pauses=True),
    ]


def prompts_for(vocab_size: int, count: int, longest: int, seed: int) -> list[list[int]]:
    """Random ids of lengths from 1 to ``longest``."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def sample_varied(
    model: str,
    prompts: list[list[int]],
    params: SamplingParams,
    options: dict[str, Any],
    on_circumstance: Callable[[str], None] = lambda name: None,
) -> Iterator[tuple[str, list[RequestOutput], LLM]]:
    """(circumstance, outputs, engine) each; the engine is open until the next one is asked for."""
    longest = max(map(len, prompts)) + (params.max_tokens or 0)
    for case in circumstances(longest, options.get("block_size", 16), params.n):
        on_circumstance(case.name)
        with LLM(model, **{**options, **case.options}) as llm:
            if case.repeat:
                llm.generate(prompts, params)
            if case.name == "one at a time":
                outputs = [llm.generate([prompt], params)[0] for prompt in prompts]
            else:
                outputs = llm.generate(prompts, params, on_step=_pauser(llm) if case.pauses else None)
            yield case.name, outputs, llm


def _pauser(llm: LLM) -> Callable[[int], None]:
    """Pause (keep) and resume every few steps, KV kept and dropped in turn."""

    def on_step(step: int) -> None:
        if step % _PAUSE_EVERY == 0:
            llm.pause_generation("keep", clear_cache=step % (2 * _PAUSE_EVERY) == 0)
            llm.resume_generation()

    return on_step
