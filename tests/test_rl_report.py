from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from midstream.errors import InvalidInput
from midstream.rl import report
from midstream.rl.report import LiveDisplay, StepLog
from midstream.rl.types import RolloutGroup, TakenGroups
from test_rl_types import rollout


def step(t0: float, t1: float, running: int = 4, tokens: int = 4, reprefill: int = 0) -> SimpleNamespace:
    return SimpleNamespace(t0=t0, t1=t1, running=running, tokens=tokens, reprefill=reprefill)


def commit(t0: float, running: int = 4) -> SimpleNamespace:
    return SimpleNamespace(t0=t0, t1=t0 + 0.001, running=running)


def figures(log: StepLog, max_num_seqs: int = 8) -> dict[str, Any]:
    return report.engine_figures(log, [{"t0": 0.0, "t1": 9.0, "wait_s": 0.0}], max_num_seqs)


def test_a_stall_is_the_gap_around_the_commit() -> None:
    log = StepLog(
        [step(0.0, 0.010), step(0.011, 0.020), step(0.025, 0.030), step(0.031, 0.040)],
        [commit(0.021), commit(0.0305), commit(0.0305, running=0)],
    )
    assert report.commit_stalls_ms(log) == pytest.approx([5.0, 1.0])


def test_a_commit_outside_of_all_steps_stalls_nobody() -> None:
    assert report.commit_stalls_ms(StepLog([step(1.0, 1.1)], [commit(0.5), commit(1.2)])) == []
    assert report.commit_stalls_ms(StepLog([], [commit(0.5)])) == []


def test_a_decode_step_moves_every_request_by_one() -> None:
    log = StepLog(
        [step(0, 0.002), step(1, 1.5, tokens=40), step(2, 2.5, reprefill=3), step(3, 3.004), step(4, 5, 0, 0)], []
    )
    assert figures(log)["step_ms_median"] == pytest.approx(3.0)


def test_an_update_in_flight_meets_half_of_the_concurrency() -> None:
    log = StepLog([step(0, 1)], [commit(0, running=n) for n in (0, 3, 4, 8)])
    assert [figures(log, most)["updates_in_flight"] for most in (8, 7, 6)] == [2, 2, 3]


def test_several_ranks_make_one_commit_each_in_its_own_place() -> None:
    steps, commits = [], []
    for rank, (end, start, running) in enumerate([(0.020, 0.025, 1), (0.020, 0.023, 5)]):
        steps += [step(0.010, end), step(start, 0.040)]
        commits.append(commit(0.021, running))
        for event in (*steps[-2:], commits[-1]):
            event.rank = rank
    log = StepLog(sorted(steps, key=lambda s: s.t0), commits)
    found = figures(log, 6)
    assert (found["updates"], found["updates_in_flight"]) == (1, 1), "six of two ranks' twelve were running"
    assert figures(log, 7)["updates_in_flight"] == 0
    assert found["stall_ms_median"] == pytest.approx(4.0)
    assert found["generation_s"] == pytest.approx((0.010 + 0.015 + 0.010 + 0.017) / 2)


def metrics() -> list[dict[str, Any]]:
    base = {"reward": 0.5, "pass_rate": 0.5, "staleness_mean": 0.4, "staleness_max": 1, "spanning_share": 0.2}
    return [base | {"step": i, "t0": i + 0.5, "t1": i + 1.0, "wait_s": 0.5} for i in range(3)]


def write_log(path: Path) -> None:
    """One evaluation step before training starts at 0, then steps of 0.1 s all the time, and commits at 1, 2, 3."""
    decode: dict[str, Any] = {"event": "step", "running": 4, "tokens": 4, "reprefill": 0, "version": 0}
    steps = [decode | {"t0": t / 10, "t1": t / 10 + 0.09} for t in range(-9, 31)]
    steps[20] |= {"tokens": 12, "reprefill": 9}
    commits = [{"event": "commit", "t0": t + 0.091, "t1": t + 0.092, "running": 4, "version": t, "label": str(t)}
               for t in (1, 2)]  # fmt: skip
    lines = sorted([*steps, *commits], key=lambda x: float(str(x["t0"])))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "st')  # the engine is still writing


def test_the_figures_of_the_engine(tmp_path: Path) -> None:
    write_log(tmp_path / "steps.jsonl")
    log = StepLog.read(tmp_path)
    assert len(log.steps) == 40 and len(log.commits) == 2
    figures = report.engine_figures(log, metrics(), max_num_seqs=8)
    assert figures["updates"] == figures["updates_in_flight"] == 2
    assert figures["stall_ms_median"] == pytest.approx(10.0)
    assert figures["step_ms_median"] == pytest.approx(90.0)
    assert figures["reprefill_tokens_per_update"] == 4.5
    assert figures["optimizer_s"] == pytest.approx(1.5)
    assert figures["generation_to_training_ratio"] == pytest.approx(31 * 0.09 / 1.5)
    assert report.engine_figures(StepLog.read(tmp_path / "nowhere"), metrics(), 8) == {}


def test_a_step_is_described_by_its_groups() -> None:
    used = RolloutGroup(4, [rollout(4, 0, 4, [("1", 0, 1), ("2", 1, 4)]), rollout(4, 1, 2, [("2", 0, 2)])])
    line = report.describe_groups(TakenGroups(3, [used], [RolloutGroup(3, [rollout(3, 0, 3, [("2", 0, 3)])])]))
    assert line["staleness_mean"] == pytest.approx((2 + 5 * 1) / 6) and line["staleness_max"] == 2
    assert line["rollouts"] == 3 and line["tokens"] == 9 and line["groups_useless"] == 1
    assert line["spanning_share"] == 0.5 and (line["first_group"], line["last_group"]) == (4, 4)


def test_the_picture_is_drawn_from_the_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nothing to draw"):
        report.draw(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics()))
    assert report.draw(tmp_path).stat().st_size > 10_000  # a run without an engine log, still going on
    write_log(tmp_path / "steps.jsonl")
    (tmp_path / "updates.jsonl").write_text('{"t0": 1.0, "t1": 1.1}\n')
    (tmp_path / "summary.json").write_text('{"accuracy_before": 0.3, "accuracy_after": 0.9}')
    path = report.draw(tmp_path)
    assert path == tmp_path / "report.png" and path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_display_follows_a_run(terminal: bool) -> None:
    out = io.StringIO()
    rest = {"updates": 1, "stall_ms": 0.31, "grad_norm": 1.0, "entropy": 0.1, "time_s": 2.0}
    with LiveDisplay(14, Console(file=out, force_terminal=terminal, width=160)) as show:
        for i in range(14):
            show(metrics()[0] | rest | {"step": i, "tokens_per_s": 1234.0 * i})
    text = out.getvalue()
    assert "pass rate" in text and "12,340" in text and "0.31" in text
    if not terminal:
        assert text.count("\n") == 3  # steps 0, 10 and the last one
