"""The tasks that come with midstream (made-up problems, reasoning-gym's, your prompts), and how a recipe names one."""

from __future__ import annotations

import abc
import importlib.util
import inspect
import json
import random
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from midstream.errors import InvalidInput
from midstream.rl.env import SPLITS, Completion, Problem, Split, Task, Tokenizer, split_of
from midstream.types import FinishReason

_MAX_ATTEMPTS = 10_000


@dataclass(eq=False)
class TextTask:
    """Base of the tasks here: decodes completions."""

    tokenizer: Tokenizer
    seed: int
    name = "task"

    def completion(self, token_ids: list[int], finish_reason: FinishReason) -> Completion:
        return Completion(token_ids, self.tokenizer.decode(token_ids), finish_reason)


class DrawnTask(TextTask, abc.ABC):
    """Prompts made up: drawn until one hashes to the split."""

    @abc.abstractmethod
    def draw(self, rng: random.Random) -> tuple[str, Any]:
        """A prompt and the task's data for it."""

    def encode_prompt(self, prompt: str) -> list[int]:
        return self.tokenizer.prompt(prompt)

    def problem(self, split: Split, index: int) -> Problem:
        for attempt in range(_MAX_ATTEMPTS):
            rng = random.Random(f"{self.name}/{self.seed}/{split}/{index}/{attempt}")
            prompt, data = self.draw(rng)
            if split_of(prompt) == split:
                return Problem(split, index, prompt, self.encode_prompt(prompt), data)
        raise InvalidInput(
            f"task {self.name} has no prompt in the split {split} among {_MAX_ATTEMPTS} draws; it has too few prompts"
        )


class ExactTask(DrawnTask):
    """Reward 1 for exactly the answer followed by the end-of-sequence token, else 0. ``data`` is the answer."""

    def __post_init__(self) -> None:
        lengths = {f.name: getattr(self, f.name) for f in fields(self) if f.name.startswith(("min_", "max_"))}
        if sorted([1, *lengths.values()]) != [1, *lengths.values()]:
            raise InvalidInput(f"task {self.name}: 1 <= min <= max must hold, got {lengths}")

    async def reward(self, problem: Problem, completion: Completion) -> float:
        # Compared as ids: what the model emitted, not what a decoder makes of it.
        ids = completion.token_ids
        right = self.tokenizer.encode(str(problem.data))
        return float(ids[:-1] == right and ids[-1] in self.tokenizer.eos_token_ids)


@dataclass(eq=False)
class ReverseTask(ExactTask):
    """``abcdef=`` → ``fedcba``: a random word of lower-case letters, backwards."""

    name = "reverse"
    min_letters: int = 5
    max_letters: int = 8

    def draw(self, rng: random.Random) -> tuple[str, str]:
        length = rng.randint(self.min_letters, self.max_letters)
        word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))
        return word + "=", word[::-1]


@dataclass(eq=False)
class AdditionTask(ExactTask):
    """``27+981=`` → ``1008``."""

    name = "addition"
    min_digits: int = 2
    max_digits: int = 3

    def draw(self, rng: random.Random) -> tuple[str, str]:
        lengths = [rng.randint(self.min_digits, self.max_digits) for _ in range(2)]
        a, b = (rng.randrange(10 ** (d - 1), 10**d) for d in lengths)
        return f"{a}+{b}=", str(a + b)


@dataclass(eq=False)
class SortTask(ExactTask):
    """``40213=`` → ``01234``: digits in ascending order."""

    name = "sort"
    min_digits: int = 6
    max_digits: int = 10

    def draw(self, rng: random.Random) -> tuple[str, str]:
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(self.min_digits, self.max_digits)))
        return digits + "=", "".join(sorted(digits))


@dataclass(eq=False)
class ReasoningGymTask(DrawnTask):
    """Any task of the ``reasoning-gym`` package, by default through the model's chat template."""

    dataset: str
    """Its name there."""
    config: dict[str, Any] = field(default_factory=dict)
    """For the dataset."""
    instruction: str = "Answer with the result only."
    """Put after the question."""
    partial_credit: bool = False
    """The dataset's own score, which for many tasks pays something for an answer that contains the right one; otherwise
    1 for a full score and 0 for less."""
    chat: bool = True
    """False: the bare question, for a model that only continues text."""
    first_line: bool = False
    """The answer is what stands before the first line break of the completion's text, stripped; otherwise all of it."""

    _SIZE = 1 << 30  # datasets make entry i from (seed, i) when asked; the size only bounds i

    def __post_init__(self) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise InvalidInput(
                "task reasoning_gym needs the package reasoning-gym: pip install reasoning-gym"
            ) from error
        self.name = f"reasoning_gym:{self.dataset}"
        try:
            self._made = reasoning_gym.create_dataset(self.dataset, size=self._SIZE, seed=self.seed, **self.config)
        except (ValueError, TypeError, AssertionError) as error:
            what = f"{self.dataset!r} with config {self.config}"
            raise InvalidInput(f"reasoning_gym cannot make {what}: {error}") from error

    def draw(self, rng: random.Random) -> tuple[str, Any]:
        entry = self._made[rng.randrange(self._SIZE)]
        return str(entry["question"]), entry

    def encode_prompt(self, prompt: str) -> list[int]:
        text = f"{prompt}\n{self.instruction}".strip()
        return self.tokenizer.chat([{"role": "user", "content": text}]) if self.chat else self.tokenizer.prompt(text)

    async def reward(self, problem: Problem, completion: Completion) -> float:
        answer = completion.text.strip()
        if self.first_line:
            answer = answer.partition("\n")[0].strip()
        score = float(self._made.score_answer(answer, entry=problem.data))
        return score if self.partial_credit else float(score >= 1.0)


RewardFunction = Callable[[Problem, Completion], Awaitable[float]]
Prompt = str | list[dict[str, str]]
"""A text, or the messages of a chat."""


class PromptTask(TextTask):
    """A user's own prompts and async reward function.

    ``prompts`` are texts or messages, or pairs of one and data that the reward function finds in ``problem.data``.
    Each prompt belongs to the split it hashes to (messages as JSON text); a split is dealt out in a shuffled order
    that depends on the seed, pass by pass. Messages go through the chat template, texts with ``use_chat_template``.
    """

    def __init__(
        self,
        name: str,
        prompts: Sequence[Prompt | tuple[Prompt, Any]],
        reward: RewardFunction,
        *,
        tokenizer: Tokenizer,
        seed: int = 0,
        use_chat_template: bool = False,
    ) -> None:
        super().__init__(tokenizer, seed)
        self.name = name
        self.use_chat_template = use_chat_template
        self._reward = reward
        self._by_split: dict[Split, list[tuple[str, Prompt, Any]]] = {split: [] for split in SPLITS}
        for entry in prompts:
            prompt, data = entry if isinstance(entry, tuple) else (entry, None)
            text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
            self._by_split[split_of(text)].append((text, prompt, data))
        self.problem("train", 0)  # what cannot be dealt or shown to the model shall be heard of now

    def problem(self, split: Split, index: int) -> Problem:
        entries = self._by_split[split]
        if not entries:
            raise InvalidInput(
                f"task {self.name}: none of its {sum(map(len, self._by_split.values()))} prompts hashes to the split "
                f"{split}; give more prompts" + (", or set eval_problems to 0" if split == "heldout" else "")
            )
        epoch, place = divmod(index, len(entries))
        order = list(range(len(entries)))
        random.Random(f"{self.name}/{self.seed}/{split}/{epoch}").shuffle(order)
        text, prompt, data = entries[order[place]]
        if self.use_chat_template and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        ids = self.tokenizer.prompt(prompt) if isinstance(prompt, str) else self.tokenizer.chat(prompt)
        return Problem(split, index, text, ids, data)

    async def reward(self, problem: Problem, completion: Completion) -> float:
        return await self._reward(problem, completion)


def jsonl_task(
    path: Path, reward: RewardFunction | None, tokenizer: Tokenizer, seed: int, chat: bool = False
) -> PromptTask:
    """A file with one JSON object per line: ``prompt`` (a text; with ``chat`` a user's message) or ``messages``.

    The object is the problem's ``data``. Without ``reward`` it has an ``answer``, a text or a number, and
    ``answer_reward`` compares. Raises ``InvalidInput`` that names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"prompts {path} cannot be read: {error}") from error
    rows: list[tuple[Prompt, Any]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidInput(f"{path}, line {number} is not JSON: {error}") from error
            if fault := _fault(row, needs_answer=reward is None):
                raise InvalidInput(f"{path}, line {number}: {fault}")
            rows.append((row["prompt"] if "prompt" in row else row["messages"], row))
    if not rows:
        raise InvalidInput(f"{path} is empty: one JSON object with `prompt` or `messages` per line")
    return PromptTask(path.name, rows, reward or answer_reward, tokenizer=tokenizer, seed=seed, use_chat_template=chat)


def _fault(row: Any, needs_answer: bool) -> str:
    """What is wrong with a line of a JSONL file; empty if nothing is."""
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        return "it must be an object with either `prompt` or `messages`"
    if "prompt" in row and not (isinstance(row["prompt"], str) and row["prompt"]):
        return f"`prompt` must be a text, not empty, got {row['prompt']!r}"
    if "messages" in row:
        chat = row["messages"]
        shaped = isinstance(chat, list) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in chat
        )
        if not shaped or not chat or chat[-1]["role"] == "assistant":
            return "`messages` must be a list of {role, content}, both texts, up to where the assistant's turn begins"
    answer = row.get("answer")
    if needs_answer and (isinstance(answer, bool) or not isinstance(answer, (str, int, float))):
        return (
            f"`answer` must be a text or a number, got {answer!r}; or name your own reward: FILE.jsonl:FILE.py:FUNCTION"
        )
    return ""


async def answer_reward(problem: Problem, completion: Completion) -> float:
    """1 if the model ended by itself and its whole text, white space at both ends aside, is the answer's; else 0."""
    is_right = completion.text.strip() == str(problem.data["answer"]).strip()
    return float(is_right and completion.finish_reason == "stop")


# -- by name -----------------------------------------------------------------------------------------------------------

_BUILT_IN: dict[str, Callable[..., Task]] = {"reverse": ReverseTask, "addition": AdditionTask, "sort": SortTask}


def make_task(spec: str, tokenizer: Tokenizer, seed: int, options: Mapping[str, Any] | None = None) -> Task:
    """The task a recipe names: ``reverse``, ``addition``, ``sort``, ``reasoning_gym:NAME``, ``FILE.jsonl``,
    ``FILE.jsonl:FILE.py:REWARD`` or ``FILE.py:FUNCTION``.

    A function of a file is called with (tokenizer, seed, **options) and returns a ``Task``, such as a ``PromptTask``.
    Raises ``InvalidInput`` for an unknown name or options that the task does not take.
    """
    make: Callable[..., Task]
    args: tuple[Any, ...] = (tokenizer, seed)
    if spec in _BUILT_IN:
        make = _BUILT_IN[spec]
    elif named := re.fullmatch("reasoning_gym:(.+)", spec):
        make, args = ReasoningGymTask, (*args, named[1])
    elif rows := re.fullmatch(r"(.+\.jsonl)(?::(.+\.py:[^:]+))?", spec):
        given = _function_of_file(rows[2]) if rows[2] else None
        if given is not None and not inspect.iscoroutinefunction(given):
            raise InvalidInput(f"the reward {rows[2]} must be an `async def` of (problem, completion)")
        make, args = jsonl_task, (Path(rows[1]), given, *args)
    elif re.fullmatch(r".+\.py:[^:]+", spec):
        make = _function_of_file(spec)
    else:
        raise InvalidInput(
            f"unknown task {spec!r}; use {', '.join(_BUILT_IN)}, reasoning_gym:NAME, FILE.jsonl, "
            "FILE.jsonl:FILE.py:REWARD or FILE.py:FUNCTION"
        )
    options = dict(options or {})
    try:
        inspect.signature(make).bind(*args, **options)
    except TypeError as error:
        raise InvalidInput(f"task {spec!r} does not take the options {options}: {error}") from error
    try:
        return make(*args, **options)
    except InvalidInput:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"task {spec!r} cannot be made with the options {options}: {error}") from error


def _function_of_file(spec: str) -> Callable[..., Any]:
    """What ``FILE.py:NAME`` names."""
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise InvalidInput(f"task file {path} does not exist")
    found = importlib.util.spec_from_file_location(f"midstream_task_{path.stem}", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses in the file look their module up
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise InvalidInput(f"task file {path} failed to load: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InvalidInput(f"task file {path} has no function {name!r}")
    return function  # type: ignore[no-any-return]
