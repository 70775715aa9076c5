"""`midstream train` and `midstream check`, whole: engine process, trainer, run directory, checker."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import sys
from typing import Any

import pytest

from midstream.cli import QUICKSTART, main
from midstream.errors import InvalidInput
from midstream.rl.exact import check_run

ROOT = pathlib.Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "recipes" / "qwen3_1.7b_dapo.toml"
PROMISED = [
    "accuracy_before",
    "accuracy_after",
    "updates_in_flight",
    "requests",
    "requests_spanning_versions",
    "stall_ms_median",
    "step_ms_median",
    "reprefill_tokens_per_update",
    "tokens",
    "exact_tokens",
    "weight_digest",
]
SMALL = ["--set", "eval_problems=16", "--set", "groups_per_step=3"]


def train(out: pathlib.Path, *arguments: str) -> dict[str, Any]:
    assert main(["train", "--out", str(out), *SMALL, *arguments]) == 0
    return dict(json.loads((out / "summary.json").read_text()))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("run")
    train(out, "--steps", "8")
    return out


def test_a_run_says_everything_its_summary_promises(run: pathlib.Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert set(PROMISED) <= set(summary)
    assert summary["exact_tokens"] == summary["tokens"] > 1000
    for name in ("metrics.jsonl", "updates.jsonl", "rollouts.jsonl", "steps.jsonl", "config.json", "report.png"):
        assert (run / name).stat().st_size > 0
    assert (run / "checkpoints" / "step-000008" / "model.safetensors").is_file()
    staleness = [json.loads(line)["staleness_max"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(staleness) <= json.loads((run / "config.json").read_text())["max_staleness"]


def test_the_checker_recomputes_the_run_and_finds_every_flipped_bit(
    run: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check_run(run)
    assert report.is_exact and report.exact == report.tokens
    flipped = check_run(run, "logprob")
    assert len(flipped.wrong) == 1 and flipped.exact == report.tokens - 1
    assert re.search(r"group \d+, sample \d+, token \d+ \(id \d+\), version \d+", flipped.wrong[0])
    weight = check_run(run, "weight")
    assert weight.exact == 0 and re.search(r"version \d+ .* is not what the engine committed", weight.reason)
    assert main(["check", "exact", "--run", str(run)]) == 0
    assert f"exact: {report.tokens} of {report.tokens} tokens" in capsys.readouterr().out
    assert main(["check", "exact", "--run", str(run), "--flip", "weight"]) == 1


def test_a_wrong_bit_on_disk_is_found(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    lines = (copy / "rollouts.jsonl").read_text().splitlines()
    line = json.loads(lines[5])
    line["logprobs"] = format(int(line["logprobs"][:8], 16) ^ 1, "08x") + line["logprobs"][8:]
    lines[5] = json.dumps(line)
    (copy / "rollouts.jsonl").write_text("\n".join(lines) + "\n")
    assert len(check_run(copy).wrong) == 1


def test_sync_twice_and_async_without_staleness_end_with_the_same_weights(tmp_path: pathlib.Path) -> None:
    quick = ["--steps", "3", "--no-check", "--set", "keep_versions=false"]
    digests = {
        train(tmp_path / name, *quick, *arguments)["weight_digest"]
        for name, arguments in {"a": ["--sync"], "b": ["--sync"], "c": ["--max-staleness", "0"]}.items()
    }
    assert len(digests) == 1
    other = train(tmp_path / "d", *quick, "--sync", "--seed", "1")["weight_digest"]
    assert other not in digests


def test_a_run_resumed_from_a_checkpoint_goes_on(
    run: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = train(tmp_path / "more", "--steps", "10", "--resume", str(run / "checkpoints" / "step-000008"))
    assert summary["steps"] == 10 and summary["exact_tokens"] == summary["tokens"]
    assert re.search(r"training +[0-9.]+ s for 2 steps", capsys.readouterr().out)


def test_a_file_of_prompts_is_a_task(tmp_path: pathlib.Path) -> None:
    words = ["".join(chr(97 + (7 * i * k + i + k) % 26) for k in range(6)) for i in range(200)]
    rows = [{"prompt": f"{word}=", "answer": word[::-1]} for word in words]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = str(tmp_path / "words.jsonl")
    summary = train(tmp_path / "run", "--task", task, "--steps", "3", "--set", "eval_problems=0")
    assert summary["exact_tokens"] == summary["tokens"] > 300
    assert summary["updates"] == 3, "also the last one, that no evaluation comes after"
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert {line["reward"] for line in lines} == {0.0, 1.0}


def test_a_task_of_two_turns_is_exact_under_updates(tmp_path: pathlib.Path) -> None:
    task = str(ROOT / "examples" / "second_try.py") + ":make_task"
    summary = train(tmp_path / "run", "--task", task, "--steps", "6", "--set", "max_tokens=20")
    assert summary["exact_tokens"] == summary["tokens"] > 1000
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    second = [line for line in lines if len(line["output"]) > len(line["logprobs"]) // 8]
    assert len(lines) // 8 < len(second) < len(lines) and {line["reward"] for line in second} <= {0.0, 0.5}
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["staleness_max"] for line in metrics) in (1, 2, 3, 4)
    assert all(line["fresh_tokens"] == line["fresh_tokens_exact"] for line in metrics)
    assert len(check_run(tmp_path / "run", "logprob").wrong) == 1


def test_the_published_recipe_runs_on_the_tiny_model_and_dries(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--recipe", str(RECIPE), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "1,720,574,976" in text and "3,441,149,952 bytes" in text and "[151936, 2048]" in text
    out = tmp_path / "tiny"
    assert main(["train", "--recipe", str(RECIPE), "--scale", "tiny", "--steps", "2", "--out", str(out)]) == 0
    assert json.loads((out / "summary.json").read_text())["steps"] == 2


def test_check_exact_of_any_model(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(QUICKSTART.parent)
    assert main(["check", "exact", "--model", model, "--prompts", "3", "--max-tokens", "12"]) == 0
    text = capsys.readouterr().out
    for name in ("one at a time", "together", "chunked", "prefix hits", "preemption", "pause"):
        assert name in text
    assert "exact: yes" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--model", "nowhere", "--task", "reverse"], "no model at nowhere"),
        (["train", "--task", "nothing"], "unknown task 'nothing'"),
        (["train", "--set", "colour=1"], "unknown key(s) in the recipe: colour"),
        (["train", "--set", "lr"], "--set takes NAME=VALUE"),
        (["train", "--set", "lr=-1"], "lr must be"),
        (["train", "--set", "samples_per_group=1"], "samples_per_group must be at least 2"),
        (["train", "--set", "task_options=5"], "task_options must be an object"),
        (["train", "--set", "sync=maybe"], "sync must be true or false"),
        (["train", "--set", "sequence_mask=5"], "sequence_mask must be"),
        (["train", "--set", "task=5"], "task must be a string"),
        (["train", "--set", "steps=1e400"], "steps must be an integer"),
        (["train", "--set", "steps=1" + "0" * 400], "steps must be an integer"),
        (["train", "--recipe", "none.toml"], "recipe none.toml cannot be read"),
        (["check", "exact", "--model", "nowhere", "--prompts", "0"], "--prompts must be at least 1"),
        (["check", "exact", "--run", "nowhere"], "has no rollouts.jsonl"),
        (["check", "exact", "--model", "nowhere"], "no model at nowhere"),
    ],
)
def test_bad_input_gets_one_line(
    arguments: list[str], said: str, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    extra = ["--out", str(tmp_path / "out")] if arguments[0] == "train" else []
    assert main([*arguments, *extra]) == 1
    error = capfd.readouterr().err
    assert error.startswith("midstream: ") and said in error and "Traceback" not in error


def test_an_output_that_cannot_be_written_gets_one_line(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["train", "--out", str(out)]) == 1
        error = capfd.readouterr().err
        assert error.startswith("midstream: ") and "Traceback" not in error


def test_an_output_directory_in_use_is_not_overwritten(run: pathlib.Path) -> None:
    before = (run / "summary.json").read_text()
    assert main(["train", "--out", str(run), "--steps", "1"]) == 1
    assert (run / "summary.json").read_text() == before


def test_a_run_without_versions_cannot_be_checked(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text("")
    with pytest.raises(InvalidInput, match="kept no versions"):
        check_run(tmp_path)


def test_the_examples_of_readme_and_the_loop_run(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    readme = (ROOT / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", readme, re.S)
    assert len(code) == 1
    monkeypatch.chdir(ROOT)
    exec(compile(code[0], "README.md", "exec"), {"__name__": "readme"})
    assert "my step 1 made tokens" in capsys.readouterr().out
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import rl_loop

    rl_loop.main(steps=2)
    assert "version 2" in capsys.readouterr().out
    sys.modules.pop("rl_loop")


def test_force_keeps_the_old_run_until_the_new_one_stands(
    run: pathlib.Path, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    before = sorted(p.relative_to(copy) for p in copy.rglob("*"))
    resume = ["--resume", str(copy / "checkpoints" / "step-000008")]
    broken = tmp_path / "broken.py"
    broken.write_text("def make_task(tokenizer, seed):\n    raise ValueError('no')\n")
    for arguments in ([*resume], ["--model", "nowhere", "--task", "reverse"], ["--task", f"{broken}:make_task"]):
        assert main(["train", "--out", str(copy), "--force", *arguments]) == 1
        assert capfd.readouterr().err.startswith("midstream: ")
        assert sorted(p.relative_to(copy) for p in copy.rglob("*")) == before
        assert list(tmp_path.glob(".run*")) == []
    train(copy, "--steps", "1", "--force")
    assert len((copy / "metrics.jsonl").read_text().splitlines()) == 1


def test_tokens_without_a_version_are_not_passed_over(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    whole = (copy / "rollouts.jsonl").read_text()
    lines = whole.splitlines()
    for damaged in (
        "\n".join([json.dumps({**json.loads(lines[0]), "spans": []}), *lines[1:]]),
        whole[: len(whole) // 2],
        "",
    ):
        (copy / "rollouts.jsonl").write_text(damaged)
        with pytest.raises(InvalidInput):
            check_run(copy)
