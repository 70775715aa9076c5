"""``midstream train`` beside itself with ``--sync``: the same steps, groups and seed, one run after the other.

    python -m bench --only async_training

Two figures; the value of each is the time of the synchronous training over that of the asynchronous one, evaluations
and start-up not counted, with the quick start's tiny model and one half of the cores for each side.

**A heavy tail of lengths** (bench/tasks.py): against the bound that this machine's own times allow. The decode step's
time is measured at 1, 2, 4, … running requests with the threads that the engine has in training. The synchronous run
then needs at least these times for the running requests that its steps really had, plus its optimizer steps. The
asynchronous one needs at least its tokens at the best rate of the curve, or its optimizer steps, whichever is longer.
The reference is the quotient of the two; prefill and weight updates are in neither. The learning rate is next to
nothing (and the reward the parity of the length), so that both modes train on the same tokens: see their rewards.

**Slow rewards**: words backwards as in the quick start, each reward 0.5 to 2 s; the speed-up alone is judged.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from bench import tasks
from bench.machine import figure, measured
from bench.step import MODEL, decode_step_s
from midstream import LLM, SamplingParams
from midstream.cli import QUICKSTART
from midstream.rl.report import StepLog, read_lines

CONCURRENCY = 64
COMMON = {"eval_problems": 0, "keep_versions": False, "max_num_seqs": CONCURRENCY}
TAIL = COMMON | {"groups_per_step": 16, "max_tokens": tasks.MAX_TOKENS, "dynamic_sampling": False, "lr": 1e-9}
"""Every group is used and next to nothing is learned: both modes train on the same tokens."""
SLOW = COMMON


def train(
    model: pathlib.Path, task: str, steps: int, settings: Mapping[str, Any], out: pathlib.Path, sync: bool
) -> dict[str, Any]:
    """The summary of a run."""
    spec = f"{pathlib.Path(tasks.__file__).absolute()}:{task}"
    command = [sys.executable, "-m", "midstream", "train", "--recipe", str(QUICKSTART), "--model", str(model)]
    command += ["--task", spec, "--steps", str(steps), "--out", str(out), "--no-check", "--force"]
    command += [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    subprocess.run([*command, *(["--sync"] if sync else [])], check=True, stdout=sys.stderr, timeout=600)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def step_curve(model: pathlib.Path, most: int, log: pathlib.Path) -> dict[int, float]:
    """Seconds of a decode step by the number of requests running, as ``midstream train`` sets its engine up."""
    cores = len(os.sched_getaffinity(0))
    options: dict[str, Any] = {"dtype": "float32", "num_threads": max(cores - max(cores // 2, 1), 1)}
    with LLM(str(model), max_num_seqs=most, step_log=str(log), **options) as llm:
        params = SamplingParams(max_tokens=100, ignore_eos=True, detokenize=False, logprobs=0)
        running = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
        for number in running:
            llm.generate([[4 + i % 26, 5 + i // 26, 6, 7] for i in range(number)], params)
    return {number: decode_step_s(log, number) for number in running}


def bounds(running: Sequence[int], tokens: int, optimizer_s: float, curve: Mapping[int, float]) -> tuple[float, float]:
    """(seconds of the synchronous run, of the asynchronous one), at least. ``running``: of each step of the former."""
    synchronous = float(np.interp(running, list(curve), list(curve.values())).sum()) + optimizer_s
    best_rate = max(number / seconds for number, seconds in curve.items())
    return synchronous, max(tokens / best_rate, optimizer_s)


def bounds_of(run: pathlib.Path, curve: Mapping[int, float]) -> tuple[float, float]:
    """:func:`bounds` from the files of a synchronous run."""
    metrics = read_lines(run / "metrics.jsonl")
    log = StepLog.read(run).between(metrics[0]["t0"] - metrics[0]["wait_s"], metrics[-1]["t1"])
    optimizer_s = sum(line["t1"] - line["t0"] - line["update_wait_s"] for line in metrics)
    return bounds([step.running for step in log.steps], sum(line["tokens"] for line in metrics), optimizer_s, curve)


def both(
    model: pathlib.Path, task: str, steps: int, settings: Mapping[str, Any], folder: pathlib.Path
) -> list[dict[str, Any]]:
    """The summaries of a synchronous and an asynchronous run, with the mean reward of all of their rollouts."""
    summaries = []
    for sync in (True, False):
        out = folder / (f"{task}-sync" if sync else f"{task}-async")
        summary = train(model, task, steps, settings, out, sync)
        summaries.append(summary | {"reward": fmean(line["reward"] for line in read_lines(out / "metrics.jsonl"))})
    return summaries


def pair(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{name}_{mode}": round(summary[name], 3)
        for name in ("training_s", "reward")
        for mode, summary in zip(("sync", "async"), summaries, strict=True)
    }


def figures(tail_steps: int = 32, slow_steps: int = 8) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder_name:
        folder = pathlib.Path(folder_name)
        tasks.save_model(MODEL, folder / "model")

        def tail(number: int) -> tuple[list[dict[str, Any]], tuple[float, float]]:
            summaries = both(folder / "model", "heavy_tail", tail_steps, TAIL, folder)
            curve = step_curve(folder / "model", CONCURRENCY, folder / f"curve-{number}.jsonl")
            return summaries, bounds_of(folder / "heavy_tail-sync", curve)

        (found, bound), disturbed = measured(tail)
        lengths = [len(line["output"]) for line in read_lines(folder / "heavy_tail-sync" / "rollouts.jsonl")]
        more = pair(found) | {"bound_s_sync": round(bound[0], 3), "bound_s_async": round(bound[1], 3)}
        more |= {"median_length": median(lengths), "longest": max(lengths)}
        yield figure(
            "async training, heavy tail of lengths: speed-up over --sync, against its bound",
            found[0]["training_s"] / found[1]["training_s"],
            "times",
            bound[0] / bound[1],
            at_least=0.85,
            of="ratio",
            disturbed=disturbed,
            **more,
        )
        found, disturbed = measured(lambda _: both(MODEL, "slow_rewards", slow_steps, SLOW, folder))
        speed_up = found[0]["training_s"] / found[1]["training_s"]
        name = "async training, rewards of 0.5 to 2 s: speed-up over --sync"
        yield figure(name, speed_up, "times", at_least=1.3, disturbed=disturbed, **pair(found))
