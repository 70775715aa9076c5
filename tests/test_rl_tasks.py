"""A task from a file of prompts: ``FILE.jsonl`` and ``FILE.jsonl:FILE.py:REWARD``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from midstream.errors import InvalidInput
from midstream.rl.config import TrainConfig
from midstream.rl.env import SPLITS, Problem, heldout_problems, score
from midstream.rl.tasks import make_task
from test_rl_env import Characters, answer


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(count: int = 60) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+1=", "answer": i + 1, "level": i} for i in range(count)]


def deal(task: Any, count: int = 60) -> list[Problem]:
    return [task.problem(split, i) for split in SPLITS for i in range(count)]


def test_every_line_is_a_problem_and_its_object_the_problems_data(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", sums())
    (tmp_path / "sums.jsonl").write_text("\n" + Path(path).read_text() + " \r\n\n")  # empty lines are nothing
    task = make_task(path, Characters(), 0)
    problems = deal(task)
    assert sorted({p.data["level"] for p in problems}) == list(range(60))
    assert all(p.data == sums()[p.data["level"]] and p.prompt == p.data["prompt"] for p in problems)
    assert all(p.prompt_token_ids == Characters().encode(p.prompt) for p in problems)
    (tmp_path / "elsewhere").mkdir()
    moved = write(tmp_path / "elsewhere" / "sums.jsonl", sums())
    assert deal(make_task(moved, Characters(), 0)) == problems, "not the folder's name, but the file's"
    assert [p.data for p in deal(make_task(path, Characters(), 1))] != [p.data for p in problems]


@pytest.mark.parametrize(
    ("said", "end", "value"),
    [
        ("7", True, 1.0),
        (" 7\n", True, 1.0),
        ("7", False, 0.0),
        ("7.", True, 0.0),
        ("It is 7", True, 0.0),
        ("", True, 0),
    ],
)
def test_right_is_exactly_the_answer_and_an_end(tmp_path: Path, said: str, end: bool, value: float) -> None:
    rows: list[Any] = [{"prompt": f"{i}", "answer": a} for i, a in enumerate([7, "7", " 7 "] * 20)]
    task = make_task(write(tmp_path / "f.jsonl", rows), Characters(), 0)
    for i in range(10):
        problem = task.problem("train", i)
        assert asyncio.run(score(task, problem, answer(problem, said, end), 1.0)) == value


def test_a_reward_of_ones_own_needs_no_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", [{"prompt": f"{i}", "least": 3} for i in range(30)])
    (tmp_path / "r.py").write_text(
        "async def longer(problem, completion):\n    return float(len(completion.text) > problem.data['least'])\n"
        "def sync(problem, completion):\n    return 1.0\n"
    )
    task = make_task(f"{path}:{tmp_path}/r.py:longer", Characters(), 0)
    problem = task.problem("train", 0)
    assert [asyncio.run(score(task, problem, answer(problem, t), 1.0)) for t in ("abc", "abcd")] == [0.0, 1.0]
    with pytest.raises(InvalidInput, match="async def"):
        make_task(f"{path}:{tmp_path}/r.py:sync", Characters(), 0)
    with pytest.raises(InvalidInput, match="no function 'shorter'"):
        make_task(f"{path}:{tmp_path}/r.py:shorter", Characters(), 0)
    for spec in (f"{path}:longer", f"{path}:", f"{path}x"):
        with pytest.raises(InvalidInput, match="FILE.jsonl:FILE.py:REWARD"):
            make_task(spec, Characters(), 0)
    with pytest.raises(InvalidInput, match="does not take the options"):
        make_task(path, Characters(), 0, {"cat": True})


def test_chats_go_through_the_template(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    rows = [{"messages": [*chat, {"role": "user", "content": f"{i}"}], "answer": "x"} for i in range(40)]
    problem = make_task(write(tmp_path / "f.jsonl", rows), Characters(), 0).problem("train", 0)
    asked = problem.data["messages"][-1]["content"]
    assert Characters().decode(problem.prompt_token_ids) == f"user: {asked}\nassistant: "
    assert json.loads(problem.prompt) == problem.data["messages"]
    path = write(tmp_path / "g.jsonl", sums())
    plain, chatty = (make_task(path, Characters(), 0, {"chat": chat}).problem("train", 0) for chat in (False, True))
    assert chatty.prompt == plain.prompt
    assert Characters().decode(chatty.prompt_token_ids) == f"user: {plain.prompt}\nassistant: "


GOOD = '{"prompt": "1", "answer": "2"}'


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("3", "object with either `prompt` or `messages`"),
        ('{"text": "a"}', "object with either `prompt` or `messages`"),
        ('{"prompt": "a", "messages": []}', "object with either `prompt` or `messages`"),
        ('{"prompt": "", "answer": "2"}', "`prompt` must be a text, not empty, got ''"),
        ('{"prompt": 3, "answer": "2"}', "`prompt` must be a text, not empty, got 3"),
        ('{"prompt": "a"}', "`answer` must be a text or a number, got None; or name your own reward"),
        ('{"prompt": "a", "answer": true}', "got True"),
        ('{"messages": [], "answer": "2"}', "`messages` must be a list"),
        ('{"messages": [{"role": "user"}], "answer": "2"}', "`messages` must be a list"),
        ('{"messages": [{"role": "assistant", "content": "a"}], "answer": "2"}', "where the assistant's turn begins"),
    ],
    ids=range(12),
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(InvalidInput, match=f"f.jsonl, line 3.*{says}"):
        make_task(str(path), Characters(), 0)


def test_too_few_prompts_are_said_before_the_run(tmp_path: Path) -> None:
    for text, says in (("\n\n", "is empty"), (None, "cannot be read"), (b"\xff{", "cannot be read")):
        path = tmp_path / f"{says}.jsonl"
        if text is not None:
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(InvalidInput, match=says):
            make_task(str(path), Characters(), 0)
    found = []
    for i in range(20):  # one prompt has one split
        path = tmp_path / "one.jsonl"
        write(path, [{"prompt": f"{i}", "answer": 0}])
        try:
            heldout_problems(make_task(str(path), Characters(), 0), 3)
        except InvalidInput as error:
            found.append(str(error).partition(":")[2])
    assert set(found) == {
        " none of its 1 prompts hashes to the split train; give more prompts",
        " none of its 1 prompts hashes to the split heldout; give more prompts, or set eval_problems to 0",
    }
    few = make_task(write(tmp_path / "few.jsonl", sums(40)), Characters(), 0)
    assert 0 < len(heldout_problems(few, 500)) < 15, "all there are, and no more"


def test_a_recipes_files_are_looked_for_beside_it(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    for name in ("p.jsonl", "r.py"):
        (tmp_path / name).touch()
    for task, wanted in (
        ("p.jsonl", f"{tmp_path}/p.jsonl"),
        ("p.jsonl:r.py:score", f"{tmp_path}/p.jsonl:{tmp_path}/r.py:score"),
        ("r.py:make_task", f"{tmp_path}/r.py:make_task"),
        ("elsewhere/p.jsonl", "elsewhere/p.jsonl"),
        ("reverse", "reverse"),
    ):
        recipe.write_text(f'model = "nowhere"\ntask = "{task}"\n')
        assert TrainConfig.from_toml(recipe).task == wanted
    assert TrainConfig.from_toml(recipe, task="p.jsonl").task == "p.jsonl", "what the caller names is the caller's"
