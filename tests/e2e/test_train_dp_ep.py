"""Training a model with experts on an engine of two ranks that share them, while requests are in flight."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from midstream.cli import main
from midstream.rl.exact import check_run
from midstream.rl.report import read_lines

RECIPE = pathlib.Path(__file__).parents[2] / "examples" / "recipes" / "moe_dp_ep.toml"


def train(out: pathlib.Path, *arguments: str) -> dict[str, Any]:
    assert main(["train", "--recipe", str(RECIPE), "--out", str(out), *arguments]) == 0
    return dict(json.loads((out / "summary.json").read_text()))


def commits_of(out: pathlib.Path) -> list[list[int]]:
    """By rank, the versions that it committed."""
    events = [event for event in read_lines(out / "steps.jsonl") if event["event"] == "commit"]
    return [[event["version"] for event in events if event["rank"] == rank] for rank in range(2)]


@pytest.mark.parametrize(("backend", "together"), [("ipc", True), ("nccl", True), ("ipc", False)])
def test_a_few_steps_and_a_few_more_from_their_checkpoint(tmp_path: pathlib.Path, backend: str, together: bool) -> None:
    """Also on two replicas, which do not step together."""
    engine = {"data_parallel_size": 2, "enable_expert_parallel": together, "weight_transfer_backend": backend}
    quick = ["--set", "eval_problems=16", "--set", f"engine={json.dumps(engine)}"]
    summary = train(tmp_path / "run", "--steps", "4", *quick)
    assert summary["exact_tokens"] == summary["tokens"] > 500
    assert summary["updates"] == 4
    assert commits_of(tmp_path / "run") == [[1, 2, 3, 4, 5]] * 2, "all ranks commit, each once, in one order"
    steps = [event for event in read_lines(tmp_path / "run" / "steps.jsonl") if event["event"] == "step"]
    assert {event["rank"] for event in steps if event["running"]} == {0, 1}, "both have had work"
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(line["fresh_tokens"] for line in metrics) > 0
    assert all(line["fresh_tokens"] == line["fresh_tokens_exact"] for line in metrics)
    assert len(check_run(tmp_path / "run", "logprob").wrong) == 1
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000004"
    more = train(tmp_path / "more", "--steps", "6", "--resume", str(checkpoint), *quick)
    assert more["steps"] == 6 and more["exact_tokens"] == more["tokens"]


@pytest.mark.slow
def test_the_recipe_learns_and_every_token_is_exact(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = train(tmp_path / "run")
    with capsys.disabled():
        shown = "accuracy_before accuracy_after updates_in_flight updates exact_tokens tokens training_s total_s"
        print("\n" + "  ".join(f"{name} {summary[name]}" for name in shown.split()))
    assert summary["steps"] == 100 and summary["updates"] == 100
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.2
    assert summary["exact_tokens"] == summary["tokens"] > 20_000
    assert summary["requests_spanning_versions"] > 0, "no update met a request on its way"
    number = list(range(1, 102))  # the first one is of the policy as it was: no rank was ever started anew
    assert commits_of(tmp_path / "run") == [number, number]
