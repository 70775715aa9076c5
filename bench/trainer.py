"""An optimizer step's tokens per second, against transformers and AdamW on the same batch of uneven lengths.

    python -m bench --only trainer

Both hold fp32 masters, compute in bf16 and step AdamW on the policy gradient of the same completions. The peer does
what plain trainers do: whole sequences, padded to the longest of each micro-batch, autocast. Tokens are those of the
completions; ``largest_gap`` is the largest difference of their logprobs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.machine import figure, measured
from midstream.rl.policy import Policy
from midstream.types import SamplingParams

PROMPTS, SAMPLES, PROMPT_TOKENS = 4, 8, 64
Groups = list[tuple[list[int], list[list[int]]]]
"""Prompts with their completions."""
MICRO_BATCH = 8  # sequences of the peer at once, and as many of ours


def batch(vocab: int, seed: int = 0) -> Groups:
    """Prompts with their completions: lengths from 8 to 256, most of them short."""
    rng = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [rng.randrange(10, vocab - 10) for _ in range(n)]

    lengths = [[min(8 + int(rng.expovariate(1 / 60)), 256) for _ in range(SAMPLES)] for _ in range(PROMPTS)]
    return [(ids(PROMPT_TOKENS), [ids(n) for n in row]) for row in lengths]


def step_of_ours(model: str) -> Callable[[Groups], list[float]]:
    policy = Policy(model, "bfloat16")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=True)

    def step(groups: Groups) -> list[float]:
        optimizer.zero_grad(set_to_none=True)
        found: list[float] = []
        for prompt, completions in groups:  # a prompt's samples are a micro-batch: the prompt is computed once
            logprobs = policy.logprobs([(prompt, completions)], SamplingParams())
            (-logprobs.sum()).backward()
            found += logprobs.tolist()
        optimizer.step()
        return found

    return step


def step_of_peer(model: str) -> Callable[[Groups], list[float]]:
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    net.train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=True)

    def step(groups: Groups) -> list[float]:
        optimizer.zero_grad(set_to_none=True)
        rows = [(prompt, completion) for prompt, completions in groups for completion in completions]
        found: list[float] = []
        for at in range(0, len(rows), MICRO_BATCH):
            part = rows[at : at + MICRO_BATCH]
            longest = max(len(p) + len(c) for p, c in part)
            ids = torch.tensor([p + c + [0] * (longest - len(p) - len(c)) for p, c in part])
            mask = torch.tensor([[1] * (len(p) + len(c)) + [0] * (longest - len(p) - len(c)) for p, c in part])
            wanted = torch.tensor([
                [0] * (len(p) - 1) + [1] * len(c) + [0] * (longest - len(p) - len(c)) for p, c in part
            ]).bool()  # fmt: skip
            with torch.autocast("cpu", torch.bfloat16):
                logits = net(ids, attention_mask=mask).logits[:, :-1].float()
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)[wanted]
            (-logprobs.sum()).backward()
            found += logprobs.tolist()
        optimizer.step()
        return found

    return step


def figures(model: str, repeats: int = 3) -> Iterator[dict[str, Any]]:
    """``repeats`` steps of each, in turn; the best counts."""
    steps = [make(model) for make in (step_of_ours, step_of_peer)]
    groups = batch(40_000)
    tokens = sum(len(c) for _, completions in groups for c in completions)
    first = [step(groups) for step in steps]  # before any update: the same weights
    gap = max(abs(a - b) for a, b in zip(*first, strict=True))
    best, disturbed = [float("inf")] * 2, 0.0

    def seconds(step: Callable[[Groups], list[float]]) -> float:
        start = time.perf_counter()
        step(groups)
        return time.perf_counter() - start

    for _ in range(repeats):
        for i, step in enumerate(steps):
            took, share = measured(lambda _, step=step: seconds(step))
            best[i], disturbed = min(best[i], took), max(disturbed, share)
    more = {"largest_gap": round(gap, 4), "disturbed": disturbed}
    ours, peer = (tokens / took for took in best)
    yield figure("optimizer step, uneven lengths", ours, "tokens/s", peer, at_least=1.5, of="ratio", **more)
