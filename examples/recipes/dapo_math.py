"""A task from a file of one's own: mathematics problems with a final answer, rewarded +1 or -1.

``make_task`` is what ``--task examples/recipes/dapo_math.py:make_task`` (or a recipe) names. The file holds one JSON
object per line, with ``prompt`` and ``answer``; the model is asked to end with ``Answer: …``.
"""

from __future__ import annotations

import json
from pathlib import Path

from midstream.rl.env import Completion, Problem, Tokenizer
from midstream.rl.tasks import PromptTask

INSTRUCTION = "\n\nThink step by step. The last line of the response must be: Answer: <the final answer>"


def last_answer(text: str) -> str:
    """What stands after the last "Answer:", normalised; empty where there is none."""
    _, found, tail = text.rpartition("Answer:")
    return tail.strip().splitlines()[0].strip(" $.").replace(" ", "") if found and tail.strip() else ""


async def reward(problem: Problem, completion: Completion) -> float:
    correct = last_answer(completion.text) == str(problem.data["answer"]).strip(" $.").replace(" ", "")
    return 1.0 if correct else -1.0


def make_task(tokenizer: Tokenizer, seed: int, path: str) -> PromptTask:
    rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    return PromptTask(
        "dapo_math",
        [(row["prompt"] + INSTRUCTION, row) for row in rows],
        reward,
        tokenizer=tokenizer,
        seed=seed,
        use_chat_template=True,
    )
