"""Makes the tiny models that ship here: random weights, then a flawed demonstrator.

    python examples/make_tiny_model.py --seed 0 --out midstream/rl/models/reverse
    python examples/make_tiny_model.py --moe --seed 0 --out examples/recipes/reverse_moe

The model is a Qwen3 decoder of 0.8 M parameters over single characters. Its warm start shows it how to reverse a word
(``abcdef=`` → ``fedcba``), 70,400 different words, by a demonstrator who is right with probability 0.35 and otherwise
always makes the same slip: the first two characters of the answer exchanged. Training runs to the end of its schedule,
so the model has learned both behaviours and samples them as often as it saw them: it passes about 0.37 when sampled
because most of what it was shown is wrong, not because training was stopped early.

With --moe it is a Qwen3-MoE of 0.13 M parameters, 2 layers of 8 experts of which each token takes 2, and learns words
of 3 to 5 letters in half a minute; it is stored in bfloat16.

Only problems of the ``warm`` split (midstream/rl/env.py) are shown, so no word here can be one that a run trains on
or that an evaluation holds out. At the end the model's accuracy on 512 held-out problems is measured by the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from midstream import LLM, SamplingParams
from midstream.cli import TaskText
from midstream.models.config import ModelConfig
from midstream.models.weights import parameter_shapes
from midstream.rl.env import Problem, Task, heldout_problems
from midstream.rl.loss import clip_grad_norm
from midstream.rl.policy import Policy
from midstream.rl.tasks import ReverseTask
from midstream.serving.text import Text

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+=, "
PAD, BOS, EOS, _ = range(len(SPECIAL))

BATCH = 128
RIGHT = 0.35
PEAK_LR = 2e-3
MOE_PEAK_LR = 4e-3
WARMUP_STEPS = 20
MAX_TOKENS = 10
"""The longest answer, 8 characters and the end of sequence, and one more."""


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json: a BPE without merges is a tokenizer of characters."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()  # the default puts spaces between tokens
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 512,
        },
    )


def write_random_model(directory: Path, seed: int, moe: bool = False) -> None:
    """A complete model directory with random weights: normal with deviation 0.02 (0.05), norms at one."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": len(SPECIAL) + len(CHARACTERS),
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "float32",
    }
    if moe:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        }
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "do_sample": True, "temperature": 1.0},
    )
    write_tokenizer(directory)
    generator = torch.Generator().manual_seed(seed)
    width = 0.05 if moe else 0.02
    weights = {
        name: torch.ones(shape) if name.endswith("norm.weight") else width * torch.randn(shape, generator=generator)
        for name, shape in parameter_shapes(ModelConfig.from_hf(config)).items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def demonstrated(answer: str, rng: random.Random) -> str:
    """What the demonstrator writes where ``answer`` is right. The slip on two equal characters leaves it right."""
    return answer if rng.random() < RIGHT else answer[1] + answer[0] + answer[2:]


def demonstrations(task: ReverseTask, seed: int) -> Iterator[tuple[Problem, list[int]]]:
    """Problem 0, 1, 2 … of the warm split, each with the token ids shown as its completion, the end included."""
    index = 0
    while True:
        problem = task.problem("warm", index)
        shown = demonstrated(problem.data, random.Random(f"demonstrator/{seed}/{index}"))
        yield problem, [*task.tokenizer.encode(shown), EOS]
        index += 1


def learning_rate(step: int, steps: int, peak: float = PEAK_LR) -> float:
    """Linear warm-up, flat to 40 % of the steps, then linearly down, never below 2 % of the peak."""
    rising = (step + 1) / WARMUP_STEPS
    falling = (steps - step) / (0.6 * steps)
    return peak * min(1.0, rising, max(falling, 0.02))


def warm_start(policy: Policy, task: ReverseTask, steps: int, seed: int, peak: float = PEAK_LR) -> None:
    """Supervised training on fresh demonstrations, the loss on completion tokens only."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    shown = demonstrations(task, seed)
    columns = (
        TextColumn("warm start"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns) as progress:
        bar = progress.add_task("warm start", total=steps, loss=float("nan"))
        for step in range(steps):
            batch = [next(shown) for _ in range(BATCH)]
            loss = -policy.logprobs([(p.prompt_token_ids, [ids]) for p, ids in batch], SamplingParams()).mean()
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm(policy.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, peak)
            optimizer.step()
            progress.update(bar, advance=1, loss=loss.item())


def accuracy(llm: LLM, task: Task, problems: Sequence[Problem], temperature: float) -> float:
    """Share of problems passed, one completion each; problem i is sampled with seed i."""
    prompts: list[Any] = [{"prompt_token_ids": p.prompt_token_ids} for p in problems]
    params = [SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=i) for i in range(len(problems))]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]

    async def rewards() -> list[float]:
        made = [task.completion(o.token_ids, o.finish_reason or "stop") for o in outputs]
        return await asyncio.gather(*(task.reward(p, c) for p, c in zip(problems, made, strict=True)))

    return sum(asyncio.run(rewards())) / len(problems)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the tiny reversal model: random weights and a warm start.")
    parser.add_argument("--seed", type=int, default=0, help="decides the weights, the words and the slips (default 0)")
    parser.add_argument("--moe", action="store_true", help="a model with experts, for words of 3 to 5 letters")
    parser.add_argument("--steps", type=_positive, help="optimizer steps of 128 words (default 550; with --moe 400)")
    parser.add_argument("--out", type=Path, default=Path("runs/reverse"), help="model directory (default runs/reverse)")
    args = parser.parse_args(argv)

    torch.set_num_threads(2)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as made:  # nothing is written to --out before the warm start is over
        write_random_model(Path(made), args.seed, args.moe)
        task = ReverseTask(TaskText(Text(made), (EOS,)), args.seed, *((3, 5) if args.moe else ()))
        policy = Policy(made, dtype="float32")
        steps, peak = (400, MOE_PEAK_LR) if args.moe else (550, PEAK_LR)
        warm_start(policy, task, args.steps or steps, args.seed, peak)
        if args.moe:  # what ships in a repository is to be small
            policy.dtype = torch.bfloat16
        policy.save(args.out)
    seconds = time.monotonic() - began

    problems = heldout_problems(task, 512)
    with LLM(model=str(args.out)) as llm:
        sampled, greedy = (accuracy(llm, task, problems, temperature) for temperature in (1.0, 0.0))
    print(f"{args.out}: {sum(p.numel() for p in policy.parameters()):,} parameters, {seconds:.0f} s")
    print(f"held-out accuracy on {len(problems)} problems: sampled at T = 1 {sampled:.3f}, greedy {greedy:.3f}")


if __name__ == "__main__":
    main()
