"""A task of two turns, small enough to copy: after a wrong answer the environment asks again, and pays half.

    midstream train --task examples/second_try.py:make_task --set max_tokens=20

``reply`` is the environment. It sees the model's turn and gives the text (or the token ids) that come next; None ends
the episode. All of it is one sequence for the trainer, in which only the model's own tokens have a loss. The text is
exact: a model with a chat template needs its markers, and ``user_turn(self.tokenizer, "No. Try again.")`` of
``midstream.rl.env`` gives the ids of a user's message in the middle of a chat.
"""

from __future__ import annotations

from midstream.rl.env import Completion, Problem, Tokenizer
from midstream.rl.tasks import ReverseTask


class SecondTry(ReverseTask):
    """``abc=`` → ``cba``; after anything else ``abc=`` is shown once more."""

    name = "second_try"
    max_turns = 2  # of the model; max_tokens is for both of them together

    async def reply(self, problem: Problem, completion: Completion) -> str | None:
        is_right = await super().reward(problem, completion)
        return None if is_right else problem.prompt

    async def reward(self, problem: Problem, completion: Completion) -> float:
        """``completion`` is the last turn, ``completion.earlier`` has those before."""
        is_right = await super().reward(problem, completion)
        return is_right / (1 + len(completion.earlier))


def make_task(tokenizer: Tokenizer, seed: int) -> SecondTry:
    return SecondTry(tokenizer, seed)
