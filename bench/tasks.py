"""Two tasks for ``midstream train``, as FILE.py:FUNCTION, whose rollouts are not alike: in length, or in how long their
reward takes; and the model of the first.

**Lengths.** A heavy tail must come from the model. :func:`save_model` writes one of the shape of the quick start's
whose layers add nothing to what they are given (their work is done all the same), so that a next token depends on the
last one alone: a letter repeats itself or ends the sequence, with a chance of its own. The mean lengths of the letters
are quantiles of a log-normal distribution, the prompt's last letter decides which one it is, and so lengths are a
log-normal mixture: most are short, a few very long, and those of one prompt are alike.
"""

from __future__ import annotations

import asyncio
import json
import math
import pathlib
import random
import shutil
from statistics import NormalDist

import torch
from safetensors.torch import load_file, save_file

from midstream.rl.env import Completion, Problem, Tokenizer
from midstream.rl.tasks import DrawnTask, ReverseTask

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MEDIAN, SIGMA = 16.0, 1.1
"""Of the log-normal distribution of mean lengths."""
MAX_TOKENS = 400
NEVER = -30.0


def mean_lengths() -> dict[str, float]:
    """Of the completions that follow each letter, the end included; not cut at MAX_TOKENS."""
    normal = NormalDist(math.log(MEDIAN), SIGMA)
    return {x: max(math.exp(normal.inv_cdf((i + 0.5) / len(LETTERS))), 1.01) for i, x in enumerate(LETTERS)}


def save_model(source: pathlib.Path, directory: pathlib.Path) -> None:
    """The model of the module docstring, in the shape and with the tokenizer of the one at ``source``."""
    tensors = load_file(str(source / "model.safetensors"))
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    ids = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    size, width, eos = config["vocab_size"], config["hidden_size"], config["eos_token_id"]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.norm.weight"] = torch.ones(width)
    tensors["model.embed_tokens.weight"] = torch.eye(size, width)  # normed: one place has sqrt(width)
    logits = torch.full((size, size), NEVER)  # [last, next]
    logits[:, eos] = 0.0
    for letter, mean in mean_lengths().items():
        logits[ids[letter], ids[letter]] = math.log(mean - 1)  # the end has chance 1 / mean
    tensors["lm_head.weight"] = torch.zeros(size, width)
    tensors["lm_head.weight"][:, :size] = logits.T / math.sqrt(width)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, directory / name)


class HeavyTail(DrawnTask):
    """Any letters; 1 for a completion of an odd number of tokens, which half of them are, trained or not."""

    name = "heavy_tail"

    def draw(self, rng: random.Random) -> tuple[str, None]:
        return "".join(rng.choice(LETTERS) for _ in range(8)), None

    async def reward(self, problem: Problem, completion: Completion) -> float:
        return float(len(completion.token_ids) % 2)


class SlowReverse(ReverseTask):
    """The quick start's task, with rewards that take 0.5 to 2 s each, drawn by the problem and the answer."""

    async def reward(self, problem: Problem, completion: Completion) -> float:
        await asyncio.sleep(random.Random(f"{problem.index}/{completion.token_ids}").uniform(0.5, 2.0))
        return await super().reward(problem, completion)


def heavy_tail(tokenizer: Tokenizer, seed: int) -> HeavyTail:
    return HeavyTail(tokenizer, seed)


def slow_rewards(tokenizer: Tokenizer, seed: int) -> SlowReverse:
    return SlowReverse(tokenizer, seed)
