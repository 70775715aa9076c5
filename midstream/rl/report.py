"""What a run's files say: pure functions over them, one picture, and the live display.

The engine's step log has one JSON object per line, with times of the monotonic clock that all processes of a machine
share: ``{"event": "step", t0, t1, running, tokens, reprefill, version, rank}`` for a forward, and ``{"event":
"commit", t0, t1, running, version, label, rank}`` for a weight commit, each of one rank of the engine.
``metrics.jsonl`` and ``updates.jsonl`` have t0 and t1 too, so that generation, updates and optimizer steps stand on
one time line.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from midstream.errors import InvalidInput
from midstream.rl.types import TakenGroups


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; none where there is no file. A last line still being written is left out."""
    if not path.exists():
        return []
    *complete, _partial = path.read_text().split("\n")
    return [json.loads(line) for line in complete if line]


# -- the engine's step log ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepLog:
    """The engine's steps and commits, in time order, with the fields of the module docstring."""

    steps: list[SimpleNamespace]
    commits: list[SimpleNamespace]

    @classmethod
    def read(cls, run: Path) -> StepLog:
        """Empty where the engine wrote none."""
        events = [SimpleNamespace(**line) for line in read_lines(run / "steps.jsonl")]
        return cls([e for e in events if e.event == "step"], [e for e in events if e.event == "commit"])

    def between(self, start: float, end: float) -> StepLog:
        """What began in [start, end]."""
        return StepLog(
            [s for s in self.steps if start <= s.t0 <= end], [c for c in self.commits if start <= c.t0 <= end]
        )

    def by_rank(self) -> list[StepLog]:
        """Of each rank alone."""
        parts: dict[int, StepLog] = defaultdict(lambda: StepLog([], []))
        for step in self.steps:
            parts[getattr(step, "rank", 0)].steps.append(step)
        for commit in self.commits:
            parts[getattr(commit, "rank", 0)].commits.append(commit)
        return list(parts.values())


def commit_stalls_ms(log: StepLog) -> list[float]:
    """Per commit that met running requests: the time in which no step ran around it, in ms.

    That is from the end of the step before the commit to the start of the step after it, the usual pause between two
    steps included. A commit without running requests stalls nobody and has no entry.
    """
    starts = [step.t0 for step in log.steps]
    stalls = []
    for commit in log.commits:
        after = bisect_right(starts, commit.t0)
        if commit.running and 0 < after < len(starts):
            stalls.append((starts[after] - log.steps[after - 1].t1) * 1e3)
    return stalls


def engine_figures(log: StepLog, metrics: Sequence[dict[str, Any]], max_num_seqs: int) -> dict[str, Any]:
    """The part of summary.json that comes from the step log. Only the training itself counts, not the evaluations.

    An update is in flight where at least half of the concurrency (``max_num_seqs`` for each rank) was running at its
    commit. A decode step is one in which every running request advanced by one token, and nothing was prefilled.
    """
    if not log.steps:
        return {}
    first = metrics[0]["t0"] - metrics[0]["wait_s"]
    log = log.between(first, max([metrics[-1]["t1"], *(commit.t1 for commit in log.commits)]))
    training_s = sum(line["t1"] - line["t0"] for line in metrics)
    ranks = log.by_rank()
    generating_s = sum(step.t1 - step.t0 for step in log.steps) / max(len(ranks), 1)
    decodes = [(s.t1 - s.t0) * 1e3 for s in log.steps if 0 < s.tokens == s.running and s.reprefill == 0]
    # every rank has made the same commits, and each in its own place among its steps
    running = [sum(commit.running for commit in one) for one in zip(*(part.commits for part in ranks), strict=False)]
    met = [number for number in running if number]
    return {
        "updates": len(running),
        "updates_in_flight": sum(2 * number >= max_num_seqs * len(ranks) for number in met),
        "stall_ms_median": _median([stall for part in ranks for stall in commit_stalls_ms(part)]),
        "step_ms_median": _median(decodes),
        "reprefill_tokens_per_update": sum(step.reprefill for step in log.steps) / max(len(met), 1),
        "generation_s": generating_s,
        "optimizer_s": training_s,
        "generation_to_training_ratio": generating_s / training_s,
    }


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


# -- the trainer's own figures -----------------------------------------------------------------------------------------


def describe_groups(taken: TakenGroups) -> dict[str, Any]:
    """What a step trained on, as a part of its line in metrics.jsonl. Rewards are over all groups sampled for it."""
    used = [rollout for group in taken.groups for rollout in group.rollouts]
    sampled = used + [rollout for group in taken.useless for rollout in group.rollouts]
    lags = [taken.step - version for rollout in used for version in rollout.policy_versions]
    lengths = [len(rollout.logprobs) for rollout in sampled]
    return {
        "reward": fmean(r.reward for r in sampled),
        "pass_rate": fmean(r.reward >= 1.0 for r in sampled),
        "penalty": fmean(r.penalty for r in sampled),
        "groups": len(taken.groups),
        "groups_useless": len(taken.useless),
        "rollouts": len(sampled),
        "rollouts_spanning": sum(r.spans_versions for r in sampled),
        "tokens": sum(lengths),
        "output_tokens_mean": fmean(lengths),
        "output_tokens_max": max(lengths),
        "staleness_mean": fmean(lags),
        "staleness_max": max(lags),
        "spanning_share": fmean(r.spans_versions for r in used),
        "first_group": taken.groups[0].index,
        "last_group": taken.groups[-1].index,
    }


# -- the picture -------------------------------------------------------------------------------------------------------

_ZOOM_STEPS = 6


def draw(run: Path) -> Path:
    """Write ``report.png`` from the files of a run directory; returns its path.

    Four panels: reward and held-out accuracy; staleness; running requests over the whole run with every commit; and
    some optimizer steps enlarged, where one can see that generation does not stop.
    """
    from matplotlib.figure import Figure

    metrics = read_lines(run / "metrics.jsonl")
    if not metrics:
        raise InvalidInput(f"{run} has no optimizer steps in metrics.jsonl; nothing to draw")
    summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").exists() else {}
    log, updates = StepLog.read(run), read_lines(run / "updates.jsonl")
    origin = metrics[0]["t0"] - metrics[0]["wait_s"]

    figure = Figure(figsize=(11, 12), layout="constrained")
    learning, stale, timeline, zoom = figure.subplots(4, 1, height_ratios=[3, 2, 2, 2])
    _draw_learning(learning, metrics, summary)
    _draw_staleness(stale, metrics)
    for axes in (learning, stale):
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize=8)
    _draw_running(timeline, log.between(origin, metrics[-1]["t1"]), origin)
    _draw_zoom(zoom, log, metrics, updates, origin)
    figure.savefig(run / "report.png", dpi=110)
    return run / "report.png"


def _draw_learning(axes: Any, metrics: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    if any(line["reward"] != line["pass_rate"] for line in metrics):  # with rewards of 0 and 1 they are one curve
        _curve(axes, metrics, "reward", label="reward of the rollouts", color="tab:blue", lw=1)
    _curve(axes, metrics, "pass_rate", label="pass rate of the rollouts", color="tab:cyan", lw=1)
    for key, name, marker in (("", "held-out, sampled at T = 1", "o"), ("greedy_", "held-out, greedy", "s")):
        if f"{key}accuracy_after" in summary:
            ends = [summary[f"{key}accuracy_before"], summary[f"{key}accuracy_after"]]
            label = f"{name}: {ends[0]:.3f} → {ends[1]:.3f}"
            axes.plot([metrics[0]["step"], metrics[-1]["step"] + 1], ends, marker, ms=8, label=label)
    axes.set(title="Learning", xlabel="optimizer step", ylabel="reward, accuracy")


def _draw_staleness(axes: Any, metrics: list[dict[str, Any]]) -> None:
    _curve(axes, metrics, "staleness_max", label="oldest token", color="tab:red", drawstyle="steps-mid")
    _curve(axes, metrics, "staleness_mean", label="mean over tokens", color="tab:orange")
    _curve(axes, metrics, "spanning_share", label="share of rollouts over 2+ versions", color="tab:gray", ls=":")
    axes.set(title="Staleness", xlabel="optimizer step", ylabel="optimizer steps")


def _curve(axes: Any, metrics: list[dict[str, Any]], key: str, **style: Any) -> None:
    axes.plot([line["step"] for line in metrics], [line[key] for line in metrics], **style)


def _draw_running(axes: Any, log: StepLog, origin: float) -> None:
    for one in log.by_rank():
        axes.plot([s.t0 - origin for s in one.steps], [s.running for s in one.steps], lw=0.5, color="tab:green")
    heights = [max(commit.running, 0.5) for commit in log.commits]
    axes.vlines([commit.t0 - origin for commit in log.commits], 0, heights, lw=0.7, color="tab:red")
    title = "Requests running in each rank of the engine (green), and at each weight commit (red)"
    axes.set(title=title, xlabel="seconds", ylabel="running")


def _draw_zoom(
    axes: Any, log: StepLog, metrics: list[dict[str, Any]], updates: list[dict[str, Any]], origin: float
) -> None:
    middle = max(0, len(metrics) // 2 - _ZOOM_STEPS // 2)
    window = metrics[middle : middle + _ZOOM_STEPS]
    start, end = window[0]["t0"], window[-1]["t1"]
    log = log.between(start, end)
    rows = (
        ("optimizer step", [(line["t0"], line["t1"]) for line in window], "tab:blue"),
        ("update (send)", [(u["t0"], u["t1"]) for u in updates if u["t1"] > start and u["t0"] < end], "tab:orange"),
        ("generation step", [(s.t0, s.t1) for s in log.steps], "tab:green"),
    )
    for row, (_, intervals, colour) in enumerate(rows):
        bars = [(t0 - origin, t1 - t0) for t0, t1 in intervals]
        axes.broken_barh(bars, (row - 0.35, 0.7), color=colour, edgecolor="white", lw=0.2)
    for commit in log.commits:
        axes.axvline(commit.t0 - origin, color="tab:red", lw=1)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    title = f"{len(window)} optimizer steps; commits in red"
    axes.set(title=title, xlabel="seconds", xlim=(start - origin, end - origin))


# -- the live display --------------------------------------------------------------------------------------------------

_COLUMNS = (
    ("step", "step", "d"),
    ("reward", "reward", ".3f"),
    ("pass rate", "pass_rate", ".3f"),
    ("staleness", "staleness_mean", ".2f"),
    ("max", "staleness_max", "d"),
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("updates", "updates", "d"),
    ("stall ms", "stall_ms", ".2f"),
    ("grad norm", "grad_norm", ".2f"),
    ("entropy", "entropy", ".3f"),
    ("time s", "time_s", ".1f"),
)
_PRINT_EVERY = 10


class LiveDisplay:
    """A table of the last steps that follows a run: ``with LiveDisplay(steps) as show: … on_step=show``.

    Where the output is not a terminal it prints one line every ten steps instead.
    """

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._steps = steps
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False)
        self._rows: deque[list[str]] = deque(maxlen=12)

    def __enter__(self) -> LiveDisplay:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, line: dict[str, Any]) -> None:
        cells = [format(line[key], form) for _, key, form in _COLUMNS]
        if self._console.is_terminal:
            self._rows.append(cells)
            table = Table(title=f"step {line['step'] + 1} of {self._steps}")
            for name, _, _ in _COLUMNS:
                table.add_column(name, justify="right")
            for row in self._rows:
                table.add_row(*row)
            self._live.update(table, refresh=True)
        elif line["step"] % _PRINT_EVERY == 0 or line["step"] + 1 == self._steps:
            named = zip(_COLUMNS, cells, strict=True)
            self._console.print("  ".join(f"{name} {cell}" for (name, _, _), cell in named))
