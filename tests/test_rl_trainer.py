"""Whole runs against a table for a model and an engine that samples from it: milliseconds, every thread real."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fakes_rl import FakeEngineClient, FakeTransfer, LetterTokenizer, SuccessorTask, TablePolicy, logprobs_from_bits
from midstream.errors import Conflict, InvalidInput, RewardError, TimedOut
from midstream.rl.config import TrainConfig
from midstream.rl.engine_thread import EngineThread
from midstream.rl.env import Completion, Problem
from midstream.rl.report import read_lines
from midstream.rl.sync import SyncClient
from midstream.rl.trainer import AsyncTrainer


def config(**values: Any) -> TrainConfig:
    base: dict[str, Any] = {
        "model": "table", "task": "successor", "seed": 1, "steps": 4, "groups_per_step": 3, "samples_per_group": 4,
        "max_tokens": 4, "max_num_seqs": 64, "lr": 0.05, "warmup_steps": 2, "max_micro_batch_tokens": 40,
        "eval_problems": 0, "step_timeout_s": 20.0,
    }  # fmt: skip
    return TrainConfig(**(base | values))


class Run:
    """One run and what it left behind."""

    def __init__(self, trainer: AsyncTrainer, client: FakeEngineClient, path: Path) -> None:
        self.trainer, self.client, self.path = trainer, client, path
        self.summary: dict[str, Any] = {}

    def train(self) -> Run:
        self.summary = self.trainer.train()
        return self

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "metrics.jsonl")

    @property
    def rollouts(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "rollouts.jsonl")


@contextmanager
def a_run(
    path: Path,
    cfg: TrainConfig,
    *,
    shuffle: int | None = None,
    task: SuccessorTask | None = None,
    fail_update: int | None = None,
    **kwargs: Any,
) -> Iterator[Run]:
    """``shuffle`` seeds the order in which requests make progress."""
    rng = random.Random(shuffle)
    ticks: Callable[[str, int, int], int] = (lambda *_: 1) if shuffle is None else (lambda *_: rng.randint(0, 3))
    client = FakeEngineClient(cfg.max_num_seqs, ticks)
    engine = EngineThread()
    policy = TablePolicy()
    try:
        transfer = FakeTransfer(SyncClient(client, engine, 10.0), policy, fail_at=fail_update)
        trainer = AsyncTrainer(
            cfg,
            policy=policy,  # type: ignore[arg-type]
            client=client,  # type: ignore[arg-type]
            engine=engine,
            transfer=transfer,
            task=task or SuccessorTask(LetterTokenizer(), cfg.seed),
            run_directory=path,
            **kwargs,
        )
        yield Run(trainer, client, path)
    finally:
        engine.close()


def train(path: Path, cfg: TrainConfig, **kwargs: Any) -> Run:
    with a_run(path, cfg, **kwargs) as run:
        return run.train()


def consumed(run: Run) -> list[tuple[int, int, int, list[int], str]]:
    return [
        (r["step"], r["group"], r["index"], r["output"], r["logprobs"]) for r in run.rollouts if r["kind"] == "train"
    ]


def test_sync_twice_and_async_with_staleness_zero_are_one_run(tmp_path: Path) -> None:
    """One seed: the same groups, the same bits in every logprob, the same weights at the end."""
    runs = [
        train(tmp_path / "a", config(sync=True)),
        train(tmp_path / "b", config(sync=True), shuffle=1),
        train(tmp_path / "c", config(max_staleness=0), shuffle=2),
        train(tmp_path / "d", config(max_staleness=0), shuffle=3),
    ]
    assert len({run.summary["weight_digest"] for run in runs}) == 1
    assert all(consumed(run) == consumed(runs[0]) for run in runs)
    dropped = [[(r["step"], r["group"]) for r in run.rollouts if r["kind"] == "useless"] for run in runs]
    assert dropped[0] and all(d == dropped[0] for d in dropped), "the seed is chosen so that there are useless groups"
    other = train(tmp_path / "e", config(sync=True, seed=2))
    assert other.summary["weight_digest"] != runs[0].summary["weight_digest"]


def test_the_published_recipe_runs_scaled_down(tmp_path: Path) -> None:
    recipe = Path(__file__).parent.parent / "examples" / "recipes" / "qwen3_1.7b_dapo.toml"
    cfg = TrainConfig.from_toml(recipe, seed=1).scaled_to_tiny("table")
    run = train(tmp_path / "run", cfg)
    assert run.summary["steps"] == 4 and run.summary["requests"] == 4 * 4 * 8
    assert sum(line["groups_useless"] for line in run.metrics) == 0, "no dynamic sampling in this recipe"
    assert all(line["masked_fraction"] == 0 for line in run.metrics), "at lr 1e-6 four steps move nothing far"


def test_evaluating_changes_nothing(tmp_path: Path) -> None:
    plain = train(tmp_path / "a", config(sync=True))
    evaluated = train(tmp_path / "b", config(max_staleness=0, eval_problems=20))
    assert plain.summary["weight_digest"] == evaluated.summary["weight_digest"]


def test_a_resumed_run_is_the_whole_run(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", config(max_staleness=0, steps=5, checkpoint_every=2), shuffle=1)
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-000002"
    rest = train(tmp_path / "rest", config(max_staleness=0, steps=5), shuffle=2, resume=checkpoint)
    assert rest.summary["weight_digest"] == whole.summary["weight_digest"]
    assert [line["step"] for line in rest.metrics] == [2, 3, 4]
    assert consumed(rest) == [line for line in consumed(whole) if line[0] >= 2]
    with pytest.raises(InvalidInput, match="seed 1, not 9"):
        train(tmp_path / "c", config(seed=9), resume=checkpoint)
    with pytest.raises(InvalidInput, match="already"):
        train(tmp_path / "d", config(steps=2), resume=checkpoint)
    with pytest.raises(InvalidInput, match="not a checkpoint"):
        train(tmp_path / "e", config(), resume=tmp_path)


@pytest.mark.parametrize("staleness", [0, 2])
def test_it_learns(tmp_path: Path, staleness: int) -> None:
    cfg = config(
        steps=60, max_staleness=staleness, groups_per_step=4, samples_per_group=6, lr=0.15, eval_problems=100
    )  # fmt: skip
    run = train(tmp_path / "run", cfg, shuffle=0)
    assert run.summary["accuracy_before"] < 0.45 and run.summary["accuracy_after"] > 0.75
    assert run.summary["greedy_accuracy_after"] == 1.0
    assert run.summary["requests"] == sum(line["rollouts"] for line in run.metrics)
    assert all(line["staleness_max"] <= staleness for line in run.metrics)
    if staleness:
        assert any(line["staleness_max"] > 0 for line in run.metrics)


def test_every_fresh_token_is_exact_on_both_sides(tmp_path: Path) -> None:
    run = train(tmp_path / "run", config(max_staleness=0))
    for line in run.metrics:
        assert line["fresh_tokens"] == line["fresh_tokens_exact"] > 0
        assert line["importance_weight"] == 1.0


def hold_until_commit(run: Run, names: set[str]) -> None:
    """The requests ``names`` stop after their first token until the engine's next commit."""

    async def hold(request: str, position: int) -> None:
        if position == 1 and request in names:
            await run.client.committed.wait()

    run.client.hold = hold


def test_requests_cross_updates_and_every_token_knows_its_version(tmp_path: Path) -> None:
    cfg = config(max_staleness=1, dynamic_sampling=False, keep_versions=True, steps=3, max_tokens=6)
    with a_run(tmp_path / "run", cfg) as run:
        hold_until_commit(run, {"group-3", "group-4", "group-5"})  # step 1's groups, launched under version 0
        run.train()
    assert run.summary["requests_spanning_versions"] > 0
    assert run.metrics[1]["staleness_max"] == 1 and run.metrics[1]["spanning_share"] > 0
    assert run.summary["requests"] == 3 * 3 * 4
    # every logprob again, from the kept weights of the version that made the token
    tables = {int(p.stem): load_file(p)["table"] for p in (tmp_path / "run" / "versions").iterdir()}
    policy, checked = TablePolicy(), 0
    for line in run.rollouts:
        stored = logprobs_from_bits(line["logprobs"])
        for number, start, end in line["spans"]:
            policy.load_state({"table": tables[number]})
            again = policy.logprobs([(line["prompt"], [line["output"]])], cfg.sampling).tolist()
            assert again[start:end] == stored[start:end]
            checked += end - start
    assert checked == run.summary["tokens"]


def test_the_files_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    seen: list[int] = []
    cfg = config(eval_problems=8, keep_versions=True)
    run = train(path, cfg, checker=lambda p: 17, on_step=lambda line: seen.append(line["step"]))
    assert seen == [0, 1, 2, 3]
    assert {p.name for p in path.iterdir()} == {
        "config.json", "metrics.jsonl", "updates.jsonl", "rollouts.jsonl", "summary.json", "versions", "checkpoints",
    }  # fmt: skip
    assert run.summary == json.loads((path / "summary.json").read_text())
    assert run.summary["exact_tokens"] == 17
    assert run.summary["tokens"] == sum(len(r["output"]) for r in run.rollouts)
    kinds = {r["kind"] for r in run.rollouts}
    assert {"train", "eval before", "greedy before", "eval after", "greedy after"} <= kinds
    updates = read_lines(path / "updates.jsonl")
    assert [(u["policy_version"], u["number"]) for u in updates] == [(v, v + 1) for v in range(5)]
    assert {p.name for p in (path / "versions").iterdir()} == {f"{n}.safetensors" for n in range(1, 6)}
    assert {p.name for p in (path / "checkpoints").iterdir()} == {"step-000004"}
    with pytest.raises(Conflict, match="holds another run"):
        train(path, config())


def test_the_soft_overlong_punishment_reaches_the_advantages(tmp_path: Path) -> None:
    run = train(tmp_path / "run", config(overlong_buffer_tokens=3, overlong_factor=0.5))
    lines = [r for r in run.rollouts if r["kind"] == "train"]
    assert {r["penalty"] for r in lines if len(r["output"]) == 4} == {-0.5}
    assert {r["penalty"] for r in lines if len(r["output"]) == 1} <= {0.0}
    assert run.metrics[0]["penalty"] < 0


# -- what can go wrong -------------------------------------------------------------------------------------------------


class FailingReward(SuccessorTask):
    async def reward(self, problem: Problem, completion: Completion) -> float:
        if problem.index >= 5:
            raise ValueError("no more")
        return await super().reward(problem, completion)


@pytest.mark.parametrize("sync", [False, True])
def test_a_failing_reward_ends_the_run(tmp_path: Path, sync: bool) -> None:
    with pytest.raises(RewardError, match="ValueError: no more"):
        train(tmp_path / "run", config(sync=sync), task=FailingReward(LetterTokenizer(), 1))


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_failing_update_ends_the_run_and_leaves_the_old_weights(tmp_path: Path, staleness: int) -> None:
    with a_run(tmp_path / "run", config(max_staleness=staleness), fail_update=3) as run:
        with pytest.raises(OSError, match="the channel broke"):
            run.train()
        assert run.client.version.label == "1" and run.client._staged is None


def test_a_task_without_signal_is_a_time_out_that_says_so(tmp_path: Path) -> None:
    class Deaf(SuccessorTask):
        async def reward(self, problem: Problem, completion: Completion) -> float:
            return 1.0

    for name, sync in (("a", True), ("b", False)):
        with pytest.raises(TimedOut, match=r"0 of 3 useful groups.*useless \(all rewards equal\)"):
            train(tmp_path / name, config(sync=sync, step_timeout_s=0.1), task=Deaf(LetterTokenizer(), 1))


def test_pauses_by_others_are_waited_out(tmp_path: Path) -> None:
    """Refused and cut-short groups are sampled again, from the same seed: the run is the same."""
    plain = train(tmp_path / "a", config(max_staleness=0))
    with a_run(tmp_path / "b", config(max_staleness=0)) as run:
        run.client.refuse, run.client.cut_short = 2, 1
        run.train()
    assert any("retry" in name for name in run.client.requests)
    assert run.summary["weight_digest"] == plain.summary["weight_digest"]


def test_a_run_leaves_no_thread_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    train(tmp_path / "a", config())
    for thread in set(threading.enumerate()) - before:
        thread.join(5.0)
    assert set(threading.enumerate()) <= before


def test_a_policy_that_gives_too_few_logprobs_is_refused(tmp_path: Path) -> None:
    with a_run(tmp_path / "run", config()) as run:
        run.trainer.policy.logprobs = lambda sequences, params, routes: torch.zeros(1)  # type: ignore[method-assign]
        with pytest.raises(InvalidInput, match="1 logprobs for"):
            run.train()
