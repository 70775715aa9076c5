from __future__ import annotations

import asyncio
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes_rl import EOS, LetterTokenizer, SuccessorTask
from midstream.errors import InvalidInput, RewardError
from midstream.rl.env import (
    SPLITS,
    Completion,
    Problem,
    heldout_problems,
    score,
    split_of,
)
from midstream.rl.tasks import PromptTask, ReverseTask, make_task

RECIPES = Path(__file__).parent.parent / "examples" / "recipes"


class Characters:
    """A tokenizer over all printable characters; 0 ends a sequence."""

    eos_token_ids = (0,)

    def encode(self, text: str) -> list[int]:
        return [1 + string.printable.index(c) for c in text]

    prompt = encode

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(string.printable[i - 1] for i in token_ids if i)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode(f"user: {messages[-1]['content']}\nassistant: ")


def answer(problem: Problem, text: str, end: bool = True) -> Completion:
    return Completion(Characters().encode(text) + [0] * end, text, "stop" if end else "length")


def reward(task: Any, problem: Problem, completion: Completion) -> float:
    return asyncio.run(score(task, problem, completion, 1.0))


@pytest.mark.parametrize("name", ["reverse", "addition", "sort"])
def test_problems_are_a_function_of_split_seed_and_index(name: str) -> None:
    one, two, other = (make_task(name, Characters(), seed) for seed in (3, 3, 4))
    assert [one.problem("train", i) for i in (5, 0)] == [two.problem("train", i) for i in (5, 0)]
    assert one.problem("train", 0).prompt != other.problem("train", 0).prompt
    assert one.problem("train", 0).prompt_token_ids == Characters().encode(one.problem("train", 0).prompt)


@pytest.mark.parametrize("name", ["reverse", "addition", "sort"])
def test_the_splits_are_disjoint_whatever_the_seed(name: str) -> None:
    prompts = {
        split: {make_task(name, Characters(), seed).problem(split, i).prompt for i in range(200) for seed in (0, 1)}
        for split in SPLITS
    }
    assert all(split_of(prompt) == split for split in SPLITS for prompt in prompts[split])
    assert not prompts["heldout"] & (prompts["train"] | prompts["warm"])


def test_the_split_rule_is_pinned() -> None:
    """Old warm starts and old runs must stay disjoint from new evaluations."""
    assert [split_of(p) for p in ("abcdef=", "zyxwvu=", "hello=", "27+981=", "")] == PINNED
    share = sum(split_of(f"prompt {i}") == "heldout" for i in range(8000)) / 8000
    assert 0.11 < share < 0.14


PINNED = ["train", "warm", "train", "heldout", "warm"]


def test_exact_answers_include_the_end() -> None:
    task = ReverseTask(Characters(), 0)
    problem = task.problem("train", 0)
    assert problem.prompt[:-1][::-1] == problem.data and 5 <= len(problem.data) <= 8
    assert reward(task, problem, answer(problem, problem.data)) == 1.0
    assert reward(task, problem, answer(problem, problem.data, end=False)) == 0.0
    assert reward(task, problem, answer(problem, problem.data + "a")) == 0.0
    assert reward(task, problem, answer(problem, problem.prompt[:-1])) == 0.0


def test_addition_and_sort_pay_for_the_right_answer() -> None:
    for name in ("addition", "sort"):
        task = make_task(name, Characters(), 0)
        problem = task.problem("heldout", 1)
        left = problem.prompt[:-1]
        right = str(sum(map(int, left.split("+")))) if name == "addition" else "".join(sorted(left))
        assert reward(task, problem, answer(problem, right)) == 1.0
        assert reward(task, problem, answer(problem, right + "0")) == 0.0


def test_heldout_problems_are_all_different() -> None:
    problems = heldout_problems(ReverseTask(Characters(), 0, min_letters=1, max_letters=2), 60)
    assert len({p.prompt for p in problems}) == len(problems) == 60
    tiny = heldout_problems(ReverseTask(Characters(), 0, min_letters=1, max_letters=1), 60)
    assert 0 < len(tiny) < 27  # all there are


def test_reasoning_gym_through_the_chat_template() -> None:
    pytest.importorskip("reasoning_gym")
    options: dict[str, Any] = {"config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    task = make_task("reasoning_gym:chain_sum", Characters(), 0, options)
    problem = task.problem("train", 3)
    assert problem == make_task("reasoning_gym:chain_sum", Characters(), 0, options).problem("train", 3)
    text = Characters().decode(problem.prompt_token_ids)
    assert text.startswith("user: ") and problem.prompt in text and "result only" in text
    right = problem.data["answer"]
    assert reward(task, problem, answer(problem, f" {right}\n")) == 1.0
    assert reward(task, problem, answer(problem, f"It is {right}, I think")) == 0.0
    with pytest.raises(InvalidInput, match="nope"):
        make_task("reasoning_gym:nope", Characters(), 0)
    with pytest.raises(InvalidInput, match="unheard_of"):
        make_task("reasoning_gym:chain_sum", Characters(), 0, {"config": {"unheard_of": 1}})


def test_partial_credit_is_the_datasets_own_score() -> None:
    pytest.importorskip("reasoning_gym")
    scores = {}
    for partial in (False, True):
        task = make_task("reasoning_gym:gcd", Characters(), 0, {"partial_credit": partial})
        problem = task.problem("train", 0)
        scores[partial] = reward(task, problem, answer(problem, f"{problem.data['answer']} I say"))
    assert scores[False] == 0.0 < scores[True] < 1.0


def test_a_users_own_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from midstream.rl.tasks import PromptTask\n"
        "async def reward(problem, completion):\n"
        "    return float(len(completion.text))\n"
        "def make_task(tokenizer, seed, count=100):\n"
        "    return PromptTask('mine', [f'prompt {i}' for i in range(count)], reward, tokenizer=tokenizer, seed=seed)\n"
    )
    task = make_task(f"{path}:make_task", Characters(), 0)
    problem = task.problem("train", 0)
    assert reward(task, problem, answer(problem, "four")) == 4.0
    once = {task.problem("train", i).prompt for i in range(100)}
    assert all(split_of(p) == "train" for p in once) and 35 < len(once) < 65
    with pytest.raises(InvalidInput, match="no function 'other'"):
        make_task(f"{path}:other", Characters(), 0)
    with pytest.raises(InvalidInput, match="does not take the options"):
        make_task(f"{path}:make_task", Characters(), 0, {"cuont": 3})
    with pytest.raises(InvalidInput, match="does not exist"):
        make_task(f"{tmp_path}/none.py:make_task", Characters(), 0)
    path.write_text("1 / 0\n")
    with pytest.raises(InvalidInput, match="ZeroDivisionError"):
        make_task(f"{path}:make_task", Characters(), 0)


def test_an_epoch_deals_every_prompt_once() -> None:
    async def nothing(problem: Problem, completion: Completion) -> float:
        return 0.0

    task = PromptTask("p", [(f"prompt {i}", i) for i in range(60)], nothing, tokenizer=Characters())
    size = len(task._by_split["train"])
    passes = [[task.problem("train", e * size + i).data for i in range(size)] for e in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(set(passes[0]))
    assert passes[0] != passes[1]
    with pytest.raises(InvalidInput, match="none of its 0 prompts"):
        PromptTask("p", [], nothing, tokenizer=Characters())


def test_the_math_example_reads_a_file(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "What is {i} + 1?", "answer": "{i + 1}"}}\n' for i in range(50)))
    task = make_task(f"{RECIPES}/dapo_math.py:make_task", Characters(), 0, {"path": str(rows)})
    problem = task.problem("train", 0)
    right = problem.data["answer"]
    for text, value in (
        (f"So.\nAnswer: ${right}$.", 1.0),
        (f"Answer: {right}0", -1.0),
        (right, -1.0),
        ("Answer:", -1.0),
    ):
        assert reward(task, problem, answer(problem, text)) == value


def test_unknown_tasks_are_refused_with_the_choice() -> None:
    for name in ("revers", "reverse:x", "reasoning_gym:", "reasoning_gym"):
        with pytest.raises(InvalidInput, match="reverse, addition, sort"):
            make_task(name, Characters(), 0)
    with pytest.raises(InvalidInput, match="min_letters"):
        make_task("reverse", Characters(), 0, {"min_letters": 0})


class Misbehaves(SuccessorTask):
    def __init__(self, what: Any) -> None:
        super().__init__(LetterTokenizer(), 0)
        self.what = what

    async def reward(self, problem: Problem, completion: Completion) -> float:
        if isinstance(self.what, Exception):
            raise self.what
        if self.what == "never":
            await asyncio.Event().wait()
        return self.what  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (ValueError("oh"), "ValueError: oh"),
        ("never", "longer than 0.01 s"),
        (float("nan"), "nan"),
        ("1", "'1'"),
        (None, "None"),
    ],
)
def test_a_bad_reward_is_one_clear_error(what: Any, says: str) -> None:
    task = Misbehaves(what)
    problem = task.problem("train", 0)
    with pytest.raises(RewardError, match=says):
        asyncio.run(score(task, problem, Completion([EOS], "", "stop"), 0.01))
