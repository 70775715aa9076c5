"""Prefill of long prompts against the matrix products alone.

    python -m bench --only prefill

Prompts of 4,000 tokens, one at a time, none of them cached; bf16, all cores, the engine's own default of tokens per
step. The value is prompt tokens per second up to the first token out. The reference is the same figure for nothing but
the products of all layers, on as many rows in the same chunks. Both are the best of several, measured in turn.
``possible`` is the ratio of an engine whose attention multiplies as fast as its other products, and does nothing else:
the scores and the weighing of so long a prompt are most of what the layers multiply in a small model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

from bench.machine import figure, layer_weights, measured, products_s
from midstream import LLM, SamplingParams

PROMPT_TOKENS = 4000


def prefill_s(llm: LLM, seed: int) -> float:
    rng = random.Random(seed)
    prompt = [rng.randrange(10, llm.core.worker.model_config.vocab_size - 10) for _ in range(PROMPT_TOKENS)]
    start = time.perf_counter()
    llm.generate(prompt, SamplingParams(max_tokens=1, detokenize=False))
    return time.perf_counter() - start


def alone_s(llm: LLM) -> float:
    """The products of all layers on the rows of one prompt, in the engine's chunks."""
    chunk = llm.config.max_num_batched_tokens
    chunks = [min(chunk, PROMPT_TOKENS - done) for done in range(0, PROMPT_TOKENS, chunk)]
    return sum(products_s(layer_weights(llm), rows, passes=1) for rows in chunks)


def possible(llm: LLM) -> float:
    """Multiplications of all layers over those of layers and causal attention."""
    c = llm.core.worker.model_config
    layers = PROMPT_TOKENS * sum(w.shape[0] * w.shape[1] for w in layer_weights(llm))
    attention = PROMPT_TOKENS * (PROMPT_TOKENS + 1) // 2 * 2 * c.num_heads * c.head_dim * c.num_layers
    return layers / (layers + attention)


def figures(model: str, repeats: int = 5) -> Iterator[dict[str, Any]]:
    with LLM(model, dtype="bfloat16", max_model_len=PROMPT_TOKENS + 16, max_num_seqs=8, num_blocks=1024) as llm:
        prefill_s(llm, 0)
        alone_s(llm)
        turns = [
            [measured(lambda i, r=r: prefill_s(llm, 1 + 3 * r + i)), measured(lambda _: alone_s(llm))]
            for r in range(repeats)
        ]
        most = round(possible(llm), 3)
    speed, limit = (PROMPT_TOKENS / min(seconds for seconds, _ in tries) for tries in zip(*turns, strict=True))
    disturbed = max(share for turn in turns for _, share in turn)
    name = f"prefill of {PROMPT_TOKENS} tokens, against the products alone"
    yield figure(name, speed, "tokens/s", limit, at_least=0.6, of="ratio", disturbed=disturbed, possible=most)
