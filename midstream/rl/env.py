"""What a task is: problems by number, a reward for a completion, and perhaps an environment that answers in between.

A problem is a function of (split, seed, index): nothing is drawn from a shared stream, so problem g is the same in
every mode, after a resume, and in a process that checks a run.

**The split rule.** ``split_of(prompt)`` looks at the first byte of the SHA-256 of the prompt's UTF-8 text, modulo 8:
0 is *heldout* (evaluation), 1 to 3 are *warm* (supervised warm starts), 4 to 7 are *train* (reinforcement learning).
A task only ever deals a prompt to the split it hashes to, so held-out problems are disjoint from everything that a
warm start or a run draws, by construction and without a list.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from midstream.errors import InvalidInput, MidstreamError, RewardError
from midstream.types import FinishReason

Split = Literal["train", "warm", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)
_BUCKETS: tuple[Split, ...] = ("heldout", "warm", "warm", "warm", "train", "train", "train", "train")


def split_of(prompt: str) -> Split:
    """The split that a prompt belongs to, for good: the rule of the module docstring."""
    return _BUCKETS[hashlib.sha256(prompt.encode()).digest()[0] % len(_BUCKETS)]


class Tokenizer(Protocol):
    """What a task needs of a tokenizer."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text: of the special tokens, those that it spells out and no others."""

    def prompt(self, text: str) -> list[int]:
        """Ids of a text that a sequence begins with: after the special tokens that the model wants there, if any."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation under the model's chat template, ready for the assistant's turn."""


def user_turn(tokenizer: Tokenizer, content: str) -> list[int]:
    """Ids of a user's message in the middle of a chat: what stands between the stop token that ended the assistant's
    turn and the assistant's next one. For ``reply``.

    Found by rendering two chats that differ in what the assistant said: what both end with begins at the stop token.
    Raises ``InvalidInput`` where the template ends the assistant's turn with a token that the model does not stop at.
    """
    one, two = (
        tokenizer.chat([
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": said},
            {"role": "user", "content": content},
        ])
        for said in ("a", "b")
    )  # fmt: skip
    backwards = zip(reversed(one), reversed(two), strict=False)
    tail = [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], backwards)][::-1]
    if not tail or tail[0] not in tokenizer.eos_token_ids:
        raise InvalidInput(
            f"the chat template ends the assistant's turn with token {tail[:1]}, and the model stops at "
            f"{tokenizer.eos_token_ids}: write the text between two turns of the assistant yourself"
        )
    return tail[1:]


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt. ``data`` is the task's own: the answer, a dataset entry, a row of a file."""

    split: Split
    index: int
    prompt: str
    prompt_token_ids: list[int]
    data: Any = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What a reward function sees of a rollout: the model's turn, in a task of several turns its last one."""

    token_ids: list[int]
    """Ends with the stop token where ``finish_reason`` is "stop"."""
    text: str
    """Without special tokens."""
    finish_reason: FinishReason
    """"stop": the model ended its turn. "length": there was no room, for this turn or for the one after the reply."""
    earlier: tuple[Completion, ...] = ()
    """The model's turns before this one."""


class Task(Protocol):
    """Problems by number and a reward. Anything with these members can be trained on."""

    name: str

    def problem(self, split: Split, index: int) -> Problem:
        """The same problem for the same (split, index), in any process. Called from one thread at a time."""

    async def reward(self, problem: Problem, completion: Completion) -> float:
        """A finite number; 1 counts as passed. Runs beside generation; must not block."""

    def completion(self, token_ids: list[int], finish_reason: FinishReason) -> Completion:
        """One turn of the model."""


class TurnTask(Task, Protocol):
    """A task of several turns: one whose environment replies to the model.

    An episode is tokens in, tokens out: the next turn's prompt is the ids so far, the ids the model drew, and the
    reply's. It ends where ``reply`` gives None, after ``max_turns`` turns of the model, or where a turn is cut short
    or finds no room (``max_tokens`` is for all of the model's turns together; the engine's ``max_model_len`` for all).
    """

    tokenizer: Tokenizer
    max_turns: int
    """Of the model. A task without this attribute has one turn."""

    async def reply(self, problem: Problem, completion: Completion) -> list[int] | str | None:
        """What comes after a turn that the model ended: ids, or the exact text with all markers of the chat template
        (``user_turn`` renders a message). None: the episode is over. Like ``reward``, it must not block; episodes of
        one problem run at once and share ``problem``."""


async def score(task: Task, problem: Problem, completion: Completion, timeout_s: float) -> float:
    """The reward, within ``timeout_s``. Raises ``RewardError`` if the function raises, is late, or is not finite."""
    where = f"reward of task {task.name} for {problem.split} problem {problem.index} ({problem.prompt[:60]!r})"
    value = await _within(timeout_s, where, lambda: task.reward(problem, completion))
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RewardError(f"{where} must be a finite number, got {value!r}")
    return float(value)


async def next_turn(task: TurnTask, problem: Problem, completion: Completion, timeout_s: float) -> list[int] | None:
    """The ids of the environment's reply, within ``timeout_s``; None ends the episode. Raises ``RewardError``."""

    async def ask() -> list[int] | None:
        said = await task.reply(problem, completion)
        return task.tokenizer.encode(said) if isinstance(said, str) else said

    where = f"reply of task {task.name} for {problem.split} problem {problem.index} ({problem.prompt[:60]!r})"
    said = await _within(timeout_s, where, ask)
    if said is not None and not (isinstance(said, list) and said and all(type(t) is int for t in said)):
        raise RewardError(f"{where} must be a text or a list of token ids, not empty, or None, got {said!r}")
    return said


async def _within(timeout_s: float, where: str, call: Callable[[], Awaitable[Any]]) -> Any:
    """What a task's own function gives; whatever goes wrong there is a ``RewardError``."""
    try:
        return await asyncio.wait_for(call(), timeout_s)
    except TimeoutError as error:
        raise RewardError(
            f"{where} took longer than {timeout_s:g} s; raise reward_timeout_s or make it faster"
        ) from error
    except MidstreamError:
        raise
    except Exception as error:
        raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error


def heldout_problems(task: Task, count: int) -> list[Problem]:
    """``count`` held-out problems, all different, the same ones at every call. Fewer only if the task has fewer."""
    found: dict[str, Problem] = {}
    index = 0
    while len(found) < count and index < 20 * (len(found) + 1):
        problem = task.problem("heldout", index)
        found.setdefault(problem.prompt, problem)
        index += 1
    return list(found.values())
