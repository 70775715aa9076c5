"""What a run's files say: pure functions over them, one picture, and the live display.

The engine's step log has one JSON object per line, with times of the monotonic clock that all processes of a machine
share: ``{"event": "step", t0, t1, running, tokens, reprefill, version}`` for a forward, and ``{"event": "commit", t0,
t1, running, version, label}`` for a weight commit. ``metrics.jsonl`` and ``updates.jsonl`` have t0 and t1 too, so that
generation, updates and optimizer steps stand on one time line.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from midstream.errors import InvalidInput
from midstream.rl.types import TakenGroups

Interval = tuple[float, float]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; none where there is no file. A last line still being written is left out."""
    if not path.exists():
        return []
    *complete, _partial = path.read_text().split("\n")
    return [json.loads(line) for line in complete if line]


# -- the engine's step log ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One forward of the engine."""

    t0: float
    t1: float
    running: int
    tokens: int
    reprefill: int
    version: int

    @property
    def is_decode(self) -> bool:
        """Every running request advanced by one token, and nothing was prefilled."""
        return self.running > 0 and self.tokens == self.running and self.reprefill == 0


@dataclass(frozen=True, slots=True)
class CommitEvent:
    """One weight commit, with the number of requests that were running then."""

    t0: float
    t1: float
    running: int
    version: int
    label: str


@dataclass(frozen=True, slots=True)
class StepLog:
    """The engine's steps and commits, in time order."""

    steps: list[StepEvent]
    commits: list[CommitEvent]

    @classmethod
    def read(cls, path: Path) -> StepLog:
        lines = read_lines(path)
        try:
            return cls(
                [StepEvent(*(x[k] for k in StepEvent.__dataclass_fields__)) for x in lines if x["event"] == "step"],
                [
                    CommitEvent(*(x[k] for k in CommitEvent.__dataclass_fields__))
                    for x in lines
                    if x["event"] == "commit"
                ],
            )
        except KeyError as error:
            raise InvalidInput(f"{path} is not a step log: a line lacks {error}") from error

    def between(self, start: float, end: float) -> StepLog:
        """What began in [start, end]."""
        return StepLog(
            [s for s in self.steps if start <= s.t0 <= end], [c for c in self.commits if start <= c.t0 <= end]
        )


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


def decode_steps_ms(log: StepLog) -> list[float]:
    """Durations of the pure decode steps."""
    return [(step.t1 - step.t0) * 1e3 for step in log.steps if step.is_decode]


def updates_in_flight(log: StepLog, max_num_seqs: int) -> int:
    """Commits at which at least half of the concurrency was running."""
    return sum(2 * commit.running >= max_num_seqs for commit in log.commits)


def overlap_s(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """How long an interval of ``a`` and one of ``b`` hold at once. Each list is sorted and disjoint in itself."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def engine_figures(log: StepLog, metrics: Sequence[dict[str, Any]], max_num_seqs: int) -> dict[str, Any]:
    """The part of summary.json that comes from the step log. Only the training itself counts, not the evaluations."""
    if not metrics:
        return {}
    first = metrics[0]["t0"] - metrics[0]["wait_s"]
    last = max([metrics[-1]["t1"], *(commit.t1 for commit in log.commits)])
    log = log.between(first, last)
    training = [(line["t0"], line["t1"]) for line in metrics]
    generating = [(step.t0, step.t1) for step in log.steps]
    training_s = sum(t1 - t0 for t0, t1 in training)
    generating_s = sum(t1 - t0 for t0, t1 in generating)
    commits = [commit for commit in log.commits if commit.running]
    gaps = [(b.t0 - a.t1) * 1e3 for a, b in zip(log.steps, log.steps[1:], strict=False)]
    return {
        "updates": len(log.commits),
        "updates_in_flight": updates_in_flight(log, max_num_seqs),
        "stall_ms_median": _median(commit_stalls_ms(log)),
        "step_ms_median": _median(decode_steps_ms(log)),
        "step_gap_ms_median": _median(gaps),
        "reprefill_tokens_per_update": sum(step.reprefill for step in log.steps) / max(len(commits), 1),
        "generation_s": generating_s,
        "optimizer_s": training_s,
        "generation_to_training_ratio": generating_s / training_s if training_s else None,
        "overlap_share": overlap_s(generating, training) / training_s if training_s else None,
    }


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


# -- the trainer's own figures -----------------------------------------------------------------------------------------


def describe_groups(taken: TakenGroups) -> dict[str, Any]:
    """What a step trained on, as a part of its line in metrics.jsonl. Rewards are over all groups sampled for it."""
    used = [rollout for group in taken.groups for rollout in group.rollouts]
    sampled = used + [rollout for group in taken.useless for rollout in group.rollouts]
    lags = [taken.step - version for rollout in used for version in rollout.policy_versions]
    return {
        "reward": sum(r.reward for r in sampled) / len(sampled),
        "pass_rate": sum(r.reward >= 1.0 for r in sampled) / len(sampled),
        "penalty": sum(r.penalty for r in sampled) / len(sampled),
        "groups": len(taken.groups),
        "groups_useless": len(taken.useless),
        "rollouts": len(sampled),
        "tokens": sum(len(r.logprobs) for r in sampled),
        "output_tokens_mean": sum(len(r.logprobs) for r in sampled) / len(sampled),
        "output_tokens_max": max(len(r.logprobs) for r in sampled),
        "staleness_mean": sum(lags) / len(lags),
        "staleness_max": max(lags),
        "spanning_share": sum(r.spans_versions for r in used) / len(used),
        "first_group": taken.groups[0].index,
        "last_group": taken.groups[-1].index,
    }


# -- the picture -------------------------------------------------------------------------------------------------------

_ZOOM_STEPS = 6


def draw(run: str | Path, step_log: str | Path | None = None) -> Path:
    """Write ``report.png`` from the files of a run directory; returns its path. ``step_log``: by default steps.jsonl.

    Four panels: reward and held-out accuracy; staleness; running requests over the whole run with every commit; and
    some optimizer steps enlarged, where one can see that generation does not stop.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run = Path(run)
    metrics = read_lines(run / "metrics.jsonl")
    if not metrics:
        raise InvalidInput(f"{run} has no optimizer steps in metrics.jsonl; nothing to draw")
    summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").exists() else {}
    log = StepLog.read(Path(step_log) if step_log is not None else run / "steps.jsonl")
    updates = read_lines(run / "updates.jsonl")

    figure = Figure(figsize=(11, 12), layout="constrained")
    FigureCanvasAgg(figure)
    learning, stale, timeline, zoom = figure.subplots(4, 1, height_ratios=[3, 2, 2, 2])
    _draw_learning(learning, metrics, summary)
    _draw_staleness(stale, metrics)
    origin = metrics[0]["t0"] - metrics[0]["wait_s"]
    _draw_running(timeline, log, origin, metrics[-1]["t1"])
    _draw_zoom(zoom, log, metrics, updates, origin)
    path = run / "report.png"
    figure.savefig(path, dpi=110)
    return path


def _draw_learning(axes: Any, metrics: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    steps = [line["step"] for line in metrics]
    rewards, passed = ([line[key] for line in metrics] for key in ("reward", "pass_rate"))
    if rewards != passed:  # with rewards of 0 and 1 they are one curve
        axes.plot(steps, rewards, label="reward of the rollouts", color="tab:blue", lw=1)
    axes.plot(steps, passed, label="pass rate of the rollouts", color="tab:cyan", lw=1)
    ends = [steps[0], steps[-1] + 1]
    for key, name, marker in (
        ("accuracy", "held-out, sampled at T = 1", "o"),
        ("greedy_accuracy", "held-out, greedy", "s"),
    ):
        if f"{key}_before" in summary and f"{key}_after" in summary:
            values = [summary[f"{key}_before"], summary[f"{key}_after"]]
            axes.plot(ends, values, marker, ms=8, label=f"{name}: {values[0]:.3f} → {values[1]:.3f}")
    axes.set(title="Learning", xlabel="optimizer step", ylabel="reward, accuracy")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)


def _draw_staleness(axes: Any, metrics: list[dict[str, Any]]) -> None:
    steps = [line["step"] for line in metrics]
    axes.step(steps, [line["staleness_max"] for line in metrics], where="mid", label="oldest token", color="tab:red")
    axes.plot(steps, [line["staleness_mean"] for line in metrics], label="mean over tokens", color="tab:orange")
    axes.plot(
        steps,
        [line["spanning_share"] for line in metrics],
        ":",
        label="share of rollouts over 2+ versions",
        color="tab:gray",
    )
    axes.set(title="Staleness", xlabel="optimizer step", ylabel="optimizer steps")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)


def _draw_running(axes: Any, log: StepLog, origin: float, end: float) -> None:
    log = log.between(origin, end)
    axes.plot([s.t0 - origin for s in log.steps], [s.running for s in log.steps], lw=0.5, color="tab:green")
    axes.vlines(
        [c.t0 - origin for c in log.commits], 0, [max(c.running, 0.5) for c in log.commits], lw=0.7, color="tab:red"
    )
    axes.set(
        title="Requests running in the engine (green), and at each weight commit (red)",
        xlabel="seconds",
        ylabel="running",
    )


def _draw_zoom(
    axes: Any, log: StepLog, metrics: list[dict[str, Any]], updates: list[dict[str, Any]], origin: float
) -> None:
    middle = max(0, len(metrics) // 2 - _ZOOM_STEPS // 2)
    window = metrics[middle : middle + _ZOOM_STEPS]
    start, end = window[0]["t0"], window[-1]["t1"]
    rows: tuple[tuple[str, list[Interval], str], ...] = (
        ("optimizer step", [(line["t0"], line["t1"]) for line in window], "tab:blue"),
        ("update (send)", [(u["t0"], u["t1"]) for u in updates if u["t1"] > start and u["t0"] < end], "tab:orange"),
        ("generation step", [(s.t0, s.t1) for s in log.between(start, end).steps], "tab:green"),
    )
    for row, (_, intervals, colour) in enumerate(rows):
        bars = [(t0 - origin, t1 - t0) for t0, t1 in intervals]
        axes.broken_barh(bars, (row - 0.35, 0.7), color=colour, edgecolor="white", lw=0.2)
    for commit in log.between(start, end).commits:
        axes.axvline(commit.t0 - origin, color="tab:red", lw=1)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set(
        title=f"{len(window)} optimizer steps; commits in red", xlabel="seconds", xlim=(start - origin, end - origin)
    )


# -- the live display --------------------------------------------------------------------------------------------------


class LiveDisplay:
    """A table that follows a run: ``with LiveDisplay(config) as show: … on_step=show``.

    Where the output is not a terminal it prints one line every ``every`` steps instead.
    """

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

    def __init__(self, steps: int, console: Console | None = None, every: int = 10, rows: int = 12) -> None:
        self._steps = steps
        self._console = console or Console()
        self._every = every
        self._rows = rows
        self._lines: list[dict[str, Any]] = []
        self._live: Live | None = None

    def __enter__(self) -> LiveDisplay:
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, line: dict[str, Any]) -> None:
        self._lines = [*self._lines[-self._rows + 1 :], line]
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif line["step"] % self._every == 0 or line["step"] + 1 == self._steps:
            self._console.print("  ".join(f"{name} {_cell(line, key, form)}" for name, key, form in self._COLUMNS))

    def _table(self) -> Table:
        table = Table(title=f"step {self._lines[-1]['step'] + 1 if self._lines else 0} of {self._steps}")
        for name, _, _ in self._COLUMNS:
            table.add_column(name, justify="right")
        for line in self._lines:
            table.add_row(*(_cell(line, key, form) for _, key, form in self._COLUMNS))
        return table


def _cell(line: dict[str, Any], key: str, form: str) -> str:
    value = line.get(key)
    return "-" if value is None else format(value, form)
