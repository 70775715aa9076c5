"""Tasks: problems by number, and a reward for a completion.

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
import importlib.util
import inspect
import math
import random
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from midstream.errors import InvalidInput, MidstreamError, RewardError
from midstream.types import FinishReason

Split = Literal["train", "warm", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "warm", "heldout")
_BUCKETS: tuple[Split, ...] = ("heldout", "warm", "warm", "warm", "train", "train", "train", "train")
_MAX_ATTEMPTS = 10_000


def split_of(prompt: str) -> Split:
    """The split that a prompt belongs to, for good: the rule of the module docstring."""
    return _BUCKETS[hashlib.sha256(prompt.encode()).digest()[0] % len(_BUCKETS)]


class Tokenizer(Protocol):
    """What a task needs of a tokenizer."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without adding special tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation under the model's chat template, ready for the assistant's turn."""


class HFTokenizer:
    """A ``Tokenizer`` over one from transformers, handed in so that this module need not import that library."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int] | None = None) -> None:
        self._tokenizer = tokenizer
        eos = tokenizer.eos_token_id if eos_token_ids is None else eos_token_ids
        self.eos_token_ids: tuple[int, ...] = (eos,) if isinstance(eos, int) else tuple(eos or ())

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        # As text and then encoded: what apply_chat_template returns for ids differs between library versions.
        return self.encode(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


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
    """What a reward function sees of a rollout."""

    token_ids: list[int]
    """Ends with the stop token where ``finish_reason`` is "stop"."""
    text: str
    """Without special tokens."""
    finish_reason: FinishReason


class Task(Protocol):
    """Problems by number and a reward. Anything with these members can be trained on."""

    name: str

    def problem(self, split: Split, index: int) -> Problem:
        """The same problem for the same (split, index), in any process. Called from one thread at a time."""

    async def reward(self, problem: Problem, completion: Completion) -> float:
        """A finite number; 1 counts as passed. Runs beside generation; must not block."""

    def completion(self, token_ids: list[int], finish_reason: FinishReason) -> Completion: ...


class TextTask:
    """Base of the tasks here: draws prompts until one hashes to the split, and decodes completions."""

    name = "task"

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.seed = seed

    def draw(self, rng: random.Random) -> tuple[str, Any]:
        """A prompt and the task's data for it."""
        raise NotImplementedError

    def encode_prompt(self, prompt: str) -> list[int]:
        return self.tokenizer.encode(prompt)

    def problem(self, split: Split, index: int) -> Problem:
        for attempt in range(_MAX_ATTEMPTS):
            rng = random.Random(f"{self.name}/{self.seed}/{split}/{index}/{attempt}")
            prompt, data = self.draw(rng)
            if split_of(prompt) == split:
                return Problem(split, index, prompt, self.encode_prompt(prompt), data)
        raise InvalidInput(
            f"task {self.name} has no prompt in the split {split} among {_MAX_ATTEMPTS} draws; it has too few prompts"
        )

    def completion(self, token_ids: list[int], finish_reason: FinishReason) -> Completion:
        return Completion(token_ids, self.tokenizer.decode(token_ids), finish_reason)

    async def reward(self, problem: Problem, completion: Completion) -> float:
        raise NotImplementedError


class ExactTask(TextTask):
    """Reward 1 for exactly the answer followed by the end-of-sequence token, else 0. ``data`` is the answer."""

    async def reward(self, problem: Problem, completion: Completion) -> float:
        # Compared as ids: what the model emitted, not what a decoder makes of it.
        ids = completion.token_ids
        right = self.tokenizer.encode(str(problem.data))
        return float(ids[:-1] == right and ids[-1] in self.tokenizer.eos_token_ids)


class ReverseTask(ExactTask):
    """``abcdef=`` → ``fedcba``: a random word of lower-case letters, backwards."""

    name = "reverse"

    def __init__(self, tokenizer: Tokenizer, seed: int, min_letters: int = 5, max_letters: int = 8) -> None:
        super().__init__(tokenizer, seed)
        self.lengths = _bounds("letters", min_letters, max_letters)

    def draw(self, rng: random.Random) -> tuple[str, str]:
        word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(*self.lengths)))
        return word + "=", word[::-1]


class AdditionTask(ExactTask):
    """``27+981=`` → ``1008``."""

    name = "addition"

    def __init__(self, tokenizer: Tokenizer, seed: int, min_digits: int = 2, max_digits: int = 3) -> None:
        super().__init__(tokenizer, seed)
        self.lengths = _bounds("digits", min_digits, max_digits)

    def draw(self, rng: random.Random) -> tuple[str, str]:
        a, b = (rng.randrange(10 ** (d - 1), 10**d) for d in (rng.randint(*self.lengths), rng.randint(*self.lengths)))
        return f"{a}+{b}=", str(a + b)


class SortTask(ExactTask):
    """``40213=`` → ``01234``: digits in ascending order."""

    name = "sort"

    def __init__(self, tokenizer: Tokenizer, seed: int, min_digits: int = 6, max_digits: int = 10) -> None:
        super().__init__(tokenizer, seed)
        self.lengths = _bounds("digits", min_digits, max_digits)

    def draw(self, rng: random.Random) -> tuple[str, str]:
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(*self.lengths)))
        return digits + "=", "".join(sorted(digits))


def _bounds(what: str, low: int, high: int) -> tuple[int, int]:
    if not 1 <= low <= high:
        raise InvalidInput(f"min_{what} and max_{what} must satisfy 1 <= min <= max, got {low} and {high}")
    return low, high


class ReasoningGymTask(TextTask):
    """Any task of the ``reasoning-gym`` package, by default through the model's chat template.

    ``config`` goes to the dataset. ``instruction`` is put after the question. The answer is the completion's text,
    stripped; with ``first_line``, what stands before its first line break. ``chat=False`` gives the bare question to
    a model that only continues text. ``partial_credit``: the dataset's own score, which for many tasks pays something
    for an answer that contains the right one; otherwise 1 for a full score and 0 for less.
    """

    _SIZE = 1 << 30  # datasets make entry i from (seed, i) when asked; the size only bounds i

    def __init__(
        self,
        dataset: str,
        tokenizer: Tokenizer,
        seed: int,
        config: Mapping[str, Any] | None = None,
        instruction: str = "Answer with the result only.",
        partial_credit: bool = False,
        chat: bool = True,
        first_line: bool = False,
    ) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise InvalidInput(
                "task reasoning_gym needs the package reasoning-gym: pip install reasoning-gym"
            ) from error
        super().__init__(tokenizer, seed)
        self.name = f"reasoning_gym:{dataset}"
        self.instruction = instruction
        self.partial_credit = partial_credit
        self.chat = chat
        self.first_line = first_line
        try:
            self._dataset = reasoning_gym.create_dataset(dataset, size=self._SIZE, seed=seed, **(config or {}))
        except (ValueError, TypeError, AssertionError) as error:
            raise InvalidInput(
                f"reasoning_gym cannot make {dataset!r} with config {dict(config or {})}: {error}"
            ) from error

    def draw(self, rng: random.Random) -> tuple[str, Any]:
        entry = self._dataset[rng.randrange(self._SIZE)]
        return str(entry["question"]), entry

    def encode_prompt(self, prompt: str) -> list[int]:
        text = f"{prompt}\n{self.instruction}".strip()
        return self.tokenizer.chat([{"role": "user", "content": text}]) if self.chat else self.tokenizer.encode(text)

    async def reward(self, problem: Problem, completion: Completion) -> float:
        answer = completion.text.strip()
        if self.first_line:
            answer = answer.partition("\n")[0].strip()
        score = float(self._dataset.score_answer(answer, entry=problem.data))
        return score if self.partial_credit else float(score >= 1.0)


RewardFunction = Callable[[Problem, Completion], Awaitable[float]]


class PromptTask(TextTask):
    """A user's own prompts and async reward function.

    ``prompts`` are texts, or pairs of a text and data that the reward function finds in ``problem.data``. Each prompt
    belongs to the split it hashes to; a split is dealt out in a shuffled order that depends on the seed, pass by pass.
    """

    def __init__(
        self,
        name: str,
        prompts: Sequence[str | tuple[str, Any]],
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
        pairs = [(p, None) if isinstance(p, str) else (p[0], p[1]) for p in prompts]
        self._by_split = {split: [pair for pair in pairs if split_of(pair[0]) == split] for split in SPLITS}
        if not self._by_split["train"]:
            raise InvalidInput(
                f"task {name}: none of its {len(pairs)} prompts hashes to the train split; give more prompts"
            )

    def problem(self, split: Split, index: int) -> Problem:
        pairs = self._by_split[split]
        if not pairs:
            raise InvalidInput(f"task {self.name} has no prompt in the split {split}; give more prompts")
        epoch, place = divmod(index, len(pairs))
        order = list(range(len(pairs)))
        random.Random(f"{self.name}/{self.seed}/{split}/{epoch}").shuffle(order)
        prompt, data = pairs[order[place]]
        return Problem(split, index, prompt, self.encode_prompt(prompt), data)

    def encode_prompt(self, prompt: str) -> list[int]:
        if self.use_chat_template:
            return self.tokenizer.chat([{"role": "user", "content": prompt}])
        return self.tokenizer.encode(prompt)

    async def reward(self, problem: Problem, completion: Completion) -> float:
        return await self._reward(problem, completion)


# -- what the trainer calls --------------------------------------------------------------------------------------------

_BUILT_IN: dict[str, Callable[..., Task]] = {"reverse": ReverseTask, "addition": AdditionTask, "sort": SortTask}


def make_task(spec: str, tokenizer: Tokenizer, seed: int, options: Mapping[str, Any] | None = None) -> Task:
    """The task a recipe names: ``reverse``, ``addition``, ``sort``, ``reasoning_gym:NAME`` or ``FILE.py:FUNCTION``.

    A function of a file is called with (tokenizer, seed, **options) and returns a ``Task``, such as a ``PromptTask``.
    Raises ``InvalidInput`` for an unknown name or options that the task does not take.
    """
    kind, _, rest = spec.rpartition(":") if ".py:" in spec else spec.partition(":")
    make: Callable[..., Task]
    args: tuple[Any, ...] = (tokenizer, seed)
    if kind in _BUILT_IN and not rest:
        make = _BUILT_IN[kind]
    elif kind == "reasoning_gym" and rest:
        make, args = ReasoningGymTask, (rest, *args)
    elif kind.endswith(".py") and rest:
        make = _function_of_file(Path(kind), rest)
    else:
        raise InvalidInput(f"unknown task {spec!r}; use {', '.join(_BUILT_IN)}, reasoning_gym:NAME or FILE.py:FUNCTION")
    try:
        inspect.signature(make).bind(*args, **(options or {}))
    except TypeError as error:
        raise InvalidInput(f"task {spec!r} does not take the options {dict(options or {})}: {error}") from error
    try:
        return make(*args, **(options or {}))
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"task {spec!r} cannot be made with the options {dict(options or {})}: {error}") from error


def _function_of_file(path: Path, name: str) -> Callable[..., Task]:
    if not path.is_file():
        raise InvalidInput(f"task file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"midstream_task_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in the file look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InvalidInput(f"task file {path} failed to load: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InvalidInput(f"task file {path} has no function {name!r}")
    return function  # type: ignore[no-any-return]


async def score(task: Task, problem: Problem, completion: Completion, timeout_s: float) -> float:
    """The reward, within ``timeout_s``. Raises ``RewardError`` if the function raises, is late, or is not finite."""
    where = f"reward of task {task.name} for {problem.split} problem {problem.index} ({problem.prompt[:60]!r})"
    try:
        value = await asyncio.wait_for(task.reward(problem, completion), timeout_s)
    except TimeoutError as error:
        raise RewardError(
            f"{where} took longer than {timeout_s:g} s; raise reward_timeout_s or make it faster"
        ) from error
    except MidstreamError:
        raise
    except Exception as error:
        raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error
    if isinstance(value, complex) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RewardError(f"{where} must be a finite number, got {value!r}")
    return float(value)


def heldout_problems(task: Task, count: int) -> list[Problem]:
    """``count`` held-out problems, all different, the same ones at every call. Fewer only if the task has fewer."""
    found: dict[str, Problem] = {}
    for index in range(20 * count):
        if len(found) == count:
            break
        problem = task.problem("heldout", index)
        found.setdefault(problem.prompt, problem)
    return list(found.values())
