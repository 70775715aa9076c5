"""The core, turn by turn: pauses at every step, commits under every rule, and updates that fail anywhere."""

from __future__ import annotations

import itertools
import json
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checkpoints import random_weights, write_checkpoint
from cores import TINY, Driver, Teacher, digests_of
from fakes import versions_of
from midstream.engine import core as core_module
from midstream.engine import pauses as pauses_module
from midstream.engine import updates as updates_module
from midstream.errors import (
    Conflict,
    EnginePaused,
    InvalidInput,
    MidstreamError,
    PauseCancelled,
    TimedOut,
    UpdateConflict,
    WeightUpdateError,
)
from midstream.models.weights import EMBEDDING, HEAD, Staging
from midstream.ops.layers import LinearWeight
from midstream.types import RequestStatus, SamplingParams, WeightVersionSpan
from midstream.weights.manifest import digest, weights_id

torch.set_num_threads(1)

PLAIN = SamplingParams(temperature=1.0)
K_PROJ = "model.layers.0.self_attn.k_proj.weight"


def weights(seed: int, variant: str = "llama") -> dict[str, torch.Tensor]:
    return random_weights(variant, seed, **TINY)


W0, W1, W2 = weights(0), weights(1), weights(2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("models")
    write_checkpoint(root / "w0", "llama", 0, **TINY)
    write_checkpoint(root / "w1", "llama", 1, **TINY)
    write_checkpoint(root / "tied0", "qwen3", 0, **TINY)
    write_checkpoint(root / "tied1", "qwen3", 1, **TINY)
    write_checkpoint(root / "bf16", "llama", 0, torch.bfloat16, **TINY)
    return root


@pytest.fixture
def make(models: pathlib.Path) -> Iterator[Callable[..., Driver]]:
    made: list[Driver] = []

    def build(name: str = "w0", **options: Any) -> Driver:
        made.append(Driver(models / name, **options))
        return made[-1]

    yield build
    for driver in made:
        driver.close()


def prompt(length: int, salt: int = 0) -> list[int]:
    return [2 + (7 * i + 31 * salt + i * i) % 150 for i in range(length)]


def record(driver: Driver) -> dict[str, Any]:
    """Everything of every output that neither a pause nor a neighbour may change."""
    return {
        name: [(c.token_ids, c.processed_logprobs, c.token_logprobs, c.finish_reason) for c in b.output.outputs]
        for name, b in driver.builders.items()
    }


# A pool and a budget so small that requests wait, are preempted, and prefill in chunks.
TIGHT = {"num_blocks": 9, "max_num_seqs": 4, "max_num_batched_tokens": 16}


def crowd(driver: Driver) -> None:
    driver.builders.clear()
    assert driver.core.scheduler.reset_prefix_cache()
    driver.add(prompt(20, 1), "a", max_tokens=13, seed=1)
    driver.add(prompt(37, 2), "b", n=2, max_tokens=14, seed=2)
    driver.add(prompt(18, 3), "c", max_tokens=15, seed=3)
    driver.add(prompt(20, 1), "d", max_tokens=10, seed=4)


def situations(driver: Driver) -> set[str]:
    seen = set()
    for request in driver.core.scheduler.live.values():
        seen.add(request.status.value)
        if 0 < request.num_computed_tokens < request.num_prompt_tokens:
            seen.add("mid-prefill")
    return seen


@pytest.fixture(scope="module")
def straight(models: pathlib.Path) -> tuple[dict[str, Any], int]:
    driver = Driver(models / "w0", **TIGHT)
    crowd(driver)
    driver.run()
    count = driver.core.num_steps
    driver.close()
    return record(driver), count


# -- pauses at every step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clear", [True, False])
def test_keep_pause_at_every_step_changes_nothing(
    make: Callable[..., Driver], straight: tuple[dict[str, Any], int], clear: bool
) -> None:
    expected, count = straight
    driver = make(**TIGHT)
    seen: set[str] = set()
    for k in range(count + 1):
        crowd(driver)
        driver.steps(k)
        seen |= situations(driver)
        live = len(driver.core.scheduler.live)
        assert driver.pause("keep", clear) == {"paused": True, "mode": "keep", "clear_cache": clear}
        before, tokens = driver.core.num_steps, record(driver)
        assert (driver.core.scheduler.pool.num_used == 0) >= clear
        late = driver.add(prompt(5, 9), "late", max_tokens=2)
        driver.steps(3)
        status = driver.core.status()
        assert (status["held"], status["state"], status["mode"]) == (live + 1, "paused", "keep")
        assert driver.core.num_steps == before and {**record(driver), "late": None} == {**tokens, "late": None}
        assert driver.resume() == {"was_paused": True}
        driver.run()
        got = record(driver)
        assert len(got.pop(late)[0][0]) == 2
        assert got == expected, k
    assert seen == {"running", "waiting", "preempted", "mid-prefill"}


def test_one_run_with_a_keep_pause_after_every_single_step(
    make: Callable[..., Driver], straight: tuple[dict[str, Any], int]
) -> None:
    for clear_every in (2, 5, 10**9):  # always clearing would still advance, only slower
        driver = make(**TIGHT)
        crowd(driver)
        for turn in range(2000):
            if not driver.core.scheduler.has_unfinished:
                break
            driver.step()
            driver.pause("keep", turn % clear_every == 0)
            driver.resume()
        driver.run()
        assert record(driver) == straight[0]


def test_abort_pause_at_every_step_returns_what_was_made(
    make: Callable[..., Driver], straight: tuple[dict[str, Any], int]
) -> None:
    expected, count = straight
    driver = make(**TIGHT)
    for k in range(count):
        crowd(driver)
        driver.steps(k)
        driver.pause("abort", clear_cache=k % 2 == 0)
        driver.check_idle()
        for name, children in record(driver).items():
            for (ids, processed, raw, reason), (all_ids, all_processed, all_raw, end) in zip(
                children, expected[name], strict=True
            ):
                done = len(ids)
                assert (ids, processed, raw) == (all_ids[:done], all_processed[:done], all_raw[:done])
                assert reason == (end if done == len(all_ids) else "abort")
        with pytest.raises(EnginePaused) as refused:
            driver.add(prompt(4))
        assert refused.value.retryable and refused.value.status == 503
        driver.resume()


def test_wait_pause_at_every_step_finishes_everything_accepted(
    make: Callable[..., Driver], straight: tuple[dict[str, Any], int]
) -> None:
    expected, count = straight
    driver = make(**TIGHT)
    for k in range(count):
        crowd(driver)
        driver.steps(k)
        op = driver.call("pause_generation", mode="wait", clear_cache=k % 2 == 0)
        with pytest.raises(EnginePaused):
            driver.add(prompt(4))
        assert driver.core.protocol.is_paused
        while driver.core.scheduler.has_unfinished:
            assert not driver.answered(op)
            driver.step()
        driver.step()
        assert driver.result(op)["paused"] and record(driver) == expected
        driver.check_idle()
        with pytest.raises(EnginePaused):
            driver.add(prompt(4))
        driver.resume()


def test_a_wait_pause_that_times_out_says_who_runs_and_is_undone(
    make: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = patched_clock(monkeypatch)
    driver = make()
    driver.add(prompt(5), "slow", max_tokens=50)
    driver.step()
    op = driver.call("pause_generation", mode="wait", timeout_s=3)
    driver.steps(3)
    assert not driver.answered(op) and driver.core.is_waiting
    clock.now += 2.9
    driver.step()
    assert not driver.answered(op)
    clock.now += 0.2
    driver.step()
    with pytest.raises(TimedOut, match=r"1 requests still run \(slow\)"):
        driver.result(op)
    assert not driver.core.protocol.is_paused and not driver.core.is_waiting
    driver.add(prompt(4))
    driver.run()
    assert len(driver.tokens("slow")) == 50
    # one that completes in the very turn in which its time is up is complete
    op = driver.call("pause_generation", mode="wait", timeout_s=0)
    driver.step()
    assert driver.result(op)["paused"]
    driver.resume()
    for bad in (-1, float("nan"), "3"):
        op = driver.call("pause_generation", mode="wait", timeout_s=bad)
        assert isinstance(driver.error(op), InvalidInput) and not driver.core.protocol.is_paused


def test_crossed_pauses_end_as_documented(make: Callable[..., Driver]) -> None:
    driver = make()
    driver.add(prompt(5), "r", max_tokens=30)
    driver.steps(3)
    wait = driver.call("pause_generation", mode="wait")
    same = driver.call("pause_generation", mode="wait", clear_cache=False)
    driver.steps(2)
    keep = driver.call("pause_generation", mode="keep", clear_cache=False)
    driver.step()
    assert driver.result(keep) == {"paused": True, "mode": "keep", "clear_cache": False}
    for op in (wait, same):
        assert isinstance(driver.error(op), PauseCancelled) and driver.error(op).status == 409
    held = len(driver.tokens("r"))
    assert driver.pause("abort")["mode"] == "abort"
    assert len(driver.tokens("r")) == held and driver.output("r").outputs[0].finish_reason == "abort"
    assert driver.resume() == {"was_paused": True} and driver.resume() == {"was_paused": False}
    op = driver.call("pause_generation", mode="soft")
    assert isinstance(driver.error(op), InvalidInput) and "abort, wait, keep" in str(driver.error(op))
    assert driver.core.status()["state"] == "running"


def test_case_049_nothing_moves_after_the_answer(make: Callable[..., Driver]) -> None:
    for mode in ("keep", "abort", "wait"):
        driver = make(num_blocks=256)
        added = 0
        for turn in range(40):
            for _ in range(5):
                try:
                    driver.add(prompt(3, added), f"{mode}{added}", max_tokens=3)
                    added += 1
                except EnginePaused:
                    assert mode != "keep"
            if turn == 10:
                op = driver.call("pause_generation", mode=mode)
            driver.step()
            if turn >= 10 and driver.answered(op):
                frozen = driver.core.num_steps, driver.core.scheduler.num_sampled_tokens
                break
        for _ in range(10):
            if mode == "keep":
                driver.add(prompt(3, added), f"{mode}{added}", max_tokens=3)
                added += 1
            driver.step()
        assert (driver.core.num_steps, driver.core.scheduler.num_sampled_tokens) == frozen
        driver.resume()
        driver.run()
        assert all(b.output.finished for b in driver.builders.values())


def test_case_052_an_abort_that_races_the_natural_end_leaves_nothing_to_wait_for(make: Callable[..., Driver]) -> None:
    driver = make()
    for round_ in range(500):
        name = driver.add(prompt(3), f"r{round_}", max_tokens=1 + round_ % 2)
        driver.step()
        driver.core.abort([name])
        op = driver.call("pause_generation", mode="wait")
        driver.step()
        assert driver.answered(op)
        assert driver.output(name).outputs[0].finish_reason == ("abort" if round_ % 2 else "length")
        driver.call("resume_generation")
    driver.check_idle()


def test_case_054_case_056_abort_returns_every_token_made_and_nothing_comes_later(make: Callable[..., Driver]) -> None:
    driver = make(**TIGHT)
    crowd(driver)
    driver.until(lambda: RequestStatus.PREEMPTED in {r.status for r in driver.core.scheduler.live.values()})
    driver.add(prompt(9), "never", max_tokens=4)
    live = driver.core.scheduler.live
    made = {name: (r.parent_id, r.index, r.output_token_ids) for name, r in live.items()}
    assert {RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.WAITING} == {r.status for r in live.values()}
    assert any(ids and live[n].status is RequestStatus.PREEMPTED for n, (_, _, ids) in made.items())
    reply = driver.now("abort_requests")
    assert reply["aborted"] == len(made)
    for parent, index, ids in made.values():
        out = driver.output(parent).outputs[index]
        assert out.token_ids == ids and out.finish_reason == "abort" and len(out.processed_logprobs) == len(ids)
    status = driver.core.status()
    assert (status["running"], status["waiting"]) == (0, 0) and status["num_free_blocks"] == status["num_blocks"]
    driver.steps(3)  # the driver fails at any word after the end


def test_case_062_a_thousand_aborted_groups_leave_no_record(make: Callable[..., Driver]) -> None:
    driver = make()
    for round_ in range(1000):
        name = driver.add(prompt(3), f"g{round_}", n=4, max_tokens=3)
        if round_ % 4 == 0:
            driver.step()
        driver.core.abort([name] if round_ % 2 else [f"{k}_{name}" for k in range(4)])
        driver.take()
        assert driver.output(name).finished
    driver.check_idle()
    core = driver.core
    assert not core.worker.is_busy and not core.pauses.is_waiting and not core.outputs.increments


def test_case_063_a_group_is_admitted_whole_or_not(make: Callable[..., Driver]) -> None:
    driver = make(max_num_seqs=4)
    driver.add(prompt(3), "first", max_tokens=6)
    driver.step()
    driver.add(prompt(4), "group", n=4, max_tokens=3)
    driver.steps(2)
    assert len(driver.core.scheduler.running) == 1 and driver.core.scheduler.num_waiting == 4
    driver.pause("keep")
    assert driver.core.status()["held"] == 5
    driver.resume()
    driver.until(lambda: driver.output("first").finished)
    driver.step()
    assert len(driver.core.scheduler.running) == 4
    driver.pause("keep")
    assert driver.core.status()["held"] == 4
    driver.resume()
    driver.run()
    with pytest.raises(InvalidInput, match="n = 5 samples never run together"):
        driver.add(prompt(4), n=5)


# -- commits ---------------------------------------------------------------------------------------------------


def test_case_109_case_038_a_commit_without_pause_at_every_step(
    make: Callable[..., Driver], straight: tuple[dict[str, Any], int]
) -> None:
    """Spans say which weights made each token; every logprob is that version's score; nothing else changed."""
    expected, count = straight
    driver = make(**TIGHT)
    versions, labels = {0: W0}, {0: "0"}
    teacher = Teacher(driver, versions)
    for k in range(0, count, 2):
        crowd(driver)
        driver.steps(k)
        number = driver.core.scheduler.version.number
        driver.begin_update(W1 if number % 2 == 0 else W0, num_chunks=2)
        op = driver.call("finish_weight_update", weight_version=f"step-{k}")
        counts: dict[tuple[str, int], int] = {}
        while not driver.answered(op):
            driver.settle()
            counts = {(n, c.index): len(c.token_ids) for n, b in driver.builders.items() for c in b.output.outputs}
            driver.step()
        assert driver.result(op)["number"] == number + 1
        versions[number + 1], labels[number + 1] = (W1 if number % 2 == 0 else W0), f"step-{k}"
        driver.run()
        for name, builder in driver.builders.items():
            for c in builder.output.outputs:
                made, end = counts[(name, c.index)], len(c.token_ids)
                spans = [(number, 0, made)] if made else []
                spans += [(number + 1, made, end)] if end > made else []
                assert c.weight_versions == [WeightVersionSpan(labels[v], v, start, stop) for v, start, stop in spans]
                assert c.kv_versions is None
                if number % 2 == 0:
                    assert c.token_ids[:made] == expected[name][c.index][0][:made]
        teacher.check([b.output for b in driver.builders.values()], PLAIN)


def test_an_update_to_the_same_weights_changes_no_token(
    make: Callable[..., Driver], straight: tuple[dict[str, Any], int]
) -> None:
    for policy in ("recompute", "keep"):
        driver = make(**TIGHT)
        crowd(driver)
        updates = 0
        while driver.core.scheduler.has_unfinished:
            driver.step()
            if updates < 12:
                reply = driver.update(W0, kv_policy=policy)
                updates += 1
                assert reply["number"] == updates and reply["weights_id"] == weights_id(digests_of(W0))
        driver.run()
        assert updates > 5 and record(driver) == straight[0]


@pytest.mark.parametrize("num_chunks", [1, 5])
def test_case_005_an_update_to_w1_is_a_fresh_engine_from_w1_and_again_and_back(
    make: Callable[..., Driver], num_chunks: int
) -> None:
    fresh = {"w1": make("w1"), "w0": make("w0")}
    driver = make("w0")
    shapes = {name: getattr(slot, "shape", None) for name, slot in driver.core.worker.weights.slots.items()}
    for round_, (name, target) in enumerate([("w0", W0), ("w0", W0), ("w1", W1), ("w1", W1), ("w0", W0)]):
        driver.begin_update(target, num_chunks)
        reply = driver.now("finish_weight_update")
        assert (reply["updated"], reply["of"], reply["number"]) == (len(W0), len(W0), round_ + 1)
        assert reply["version"] == str(round_ + 1) and reply["bytes"] == sum(t.nbytes for t in target.values())
        assert driver.digests() == digests_of(target)
        assert reply["weights_id"] == weights_id(digests_of(target)) == fresh[name].core.scheduler.version.weights_id
        assert {n: getattr(s, "shape", None) for n, s in driver.core.worker.weights.slots.items()} == shapes
        for one in (driver, fresh[name]):
            one.builders.clear()
            one.add(prompt(21), "x", max_tokens=9, logprobs=3, prompt_logprobs=2)
            one.add(prompt(4), "g", n=3, max_tokens=5)
            one.run()
        assert record(driver) == record(fresh[name])
        ours, theirs = driver.output("x"), fresh[name].output("x")
        assert (ours.prompt_logprobs, ours.outputs[0].logprobs) == (theirs.prompt_logprobs, theirs.outputs[0].logprobs)


@pytest.mark.parametrize(("clear", "policy"), [(True, "recompute"), (False, "keep")])
def test_inside_a_pause_clear_cache_decides_the_policy(make: Callable[..., Driver], clear: bool, policy: str) -> None:
    driver = make()
    driver.add(prompt(20), "r", max_tokens=20)
    driver.steps(6)
    driver.pause("keep", clear)
    other = "keep" if policy == "recompute" else "recompute"
    driver.begin_update(W1)
    op = driver.call("finish_weight_update", kv_policy=other)
    with pytest.raises(Conflict, match="nothing was committed and the update stays prepared") as refused:
        driver.wait(op)
    assert refused.value.status == 409 and not isinstance(refused.value, UpdateConflict)
    assert driver.digests() == digests_of(W0) and driver.core.status()["number"] == 0
    assert driver.core.status()["update"]["state"] == "prepared"
    with pytest.raises(UpdateConflict, match="takes no more chunks"):
        driver.result(driver.send(("model.norm.weight", W1["model.norm.weight"])))
    reply = driver.now("finish_weight_update", weight_version="v1", kv_policy=policy)
    assert reply["kv_policy"] == policy and reply["version"] == "v1"
    driver.resume()
    driver.run()
    out = driver.output("r").outputs[0]
    assert out.weight_versions == [WeightVersionSpan("0", 0, 0, 6), WeightVersionSpan("v1", 1, 6, 20)]
    if clear:
        assert out.kv_versions is None and out.num_reprefilled_tokens == 25
        Teacher(driver, {0: W0, 1: W1}).check([driver.output("r")], PLAIN)
    else:
        assert out.kv_versions == [(0, 0, 25), (1, 25, 39)] and out.num_reprefilled_tokens == 0


def test_case_113_weights_change_in_the_middle_of_a_chunked_prefill(
    make: Callable[..., Driver], models: pathlib.Path
) -> None:
    options = {"max_num_batched_tokens": 16}
    reference = make("w1", **options)
    reference.add(prompt(200), "r", max_tokens=10)
    reference.run()
    for clear in (True, False):
        driver = make(**options)
        driver.add(prompt(200), "r", max_tokens=10)
        driver.steps(5)
        assert driver.core.scheduler.live["r"].num_computed_tokens == 80
        driver.pause("keep", clear)
        driver.update(W1)
        driver.resume()
        driver.run()
        out = driver.output("r").outputs[0]
        assert [s.number for s in out.weight_versions] == [1]
        if clear:
            assert record(driver) == record(reference) and out.kv_versions is None
        else:
            assert out.kv_versions == [(0, 0, 80), (1, 80, 209)]
    # what was computed on mixed KV is never found by others
    driver.add(prompt(200), "again", max_tokens=10)
    driver.run()
    assert driver.tokens("again") == reference.tokens("r")
    assert driver.output("again").outputs[0].kv_versions is None


def test_kept_kv_that_is_lost_later_is_recomputed_and_the_log_says_so(make: Callable[..., Driver]) -> None:
    driver = make()
    driver.add(prompt(10), "r", max_tokens=12)
    driver.steps(4)
    driver.update(W1, kv_policy="keep")
    driver.steps(2)
    kept = len(driver.tokens("r"))
    driver.pause("keep", clear_cache=True)
    driver.resume()
    driver.run()
    out = driver.output("r").outputs[0]
    assert out.kv_versions is not None
    life = [(number, start, end) for number, start, end in out.kv_versions]
    restart = next(i for i, (_, start, _) in enumerate(life) if i and start == 0)
    assert life[0][0] == 0 and life[restart] == (1, 0, 21) and life[restart - 1][2] == 10 + kept - 1


def test_a_finish_during_a_wait_pause_is_held_and_a_cancelled_pause_leaves_it_prepared(
    make: Callable[..., Driver],
) -> None:
    driver = make()
    driver.add(prompt(6), "r", max_tokens=25)
    driver.steps(2)
    pause = driver.call("pause_generation", mode="wait")
    driver.begin_update(W1)
    first = driver.call("finish_weight_update", weight_version="lost")
    driver.settle()
    driver.step()
    driver.settle()
    driver.steps(3)
    assert driver.core.session.state.value == "prepared" and not driver.answered(first)
    second = driver.call("finish_weight_update")
    assert isinstance(driver.error(second), UpdateConflict)
    driver.resume()
    assert isinstance(driver.error(pause), PauseCancelled)
    with pytest.raises(Conflict, match="stays prepared") as refused:
        driver.result(first)
    assert refused.value.status == 409
    assert driver.core.status()["number"] == 0
    pause = driver.call("pause_generation", mode="wait")
    third = driver.call("finish_weight_update", weight_version="kept")
    driver.until(lambda: driver.answered(third))
    assert driver.result(pause)["paused"] and driver.result(third)["version"] == "kept"
    driver.resume()
    driver.run()
    assert [s.number for s in driver.output("r").outputs[0].weight_versions] == [0]
    assert driver.digests() == digests_of(W1)


def test_progress_under_a_commit_after_every_step(make: Callable[..., Driver]) -> None:
    """Commits as often as they are let: the oldest always ends first, and everyone ends."""
    driver = make(num_blocks=40, max_num_seqs=6, max_num_batched_tokens=24)
    versions = {0: W0}
    names = [driver.add(prompt(40, i), max_tokens=8, seed=i) for i in range(6)]
    ended: list[str] = []
    promised: str | None = None  # the oldest request at the last commit, which must get a token before the next one
    had = 0
    for turn in range(1000):
        driver.begin_update((W1, W2, W0)[turn % 3])
        op = driver.call("finish_weight_update")
        for _ in range(200):
            driver.settle()
            sampled = {n: len(driver.tokens(n)) for n in names}
            oldest = next(iter(driver.core.scheduler.live), None)
            driver.step()
            ended += [n for n in names if n not in ended and driver.output(n).finished]
            if driver.answered(op):
                break
        else:
            raise AssertionError("a finish was held for more than 200 steps")
        assert promised is None or turn == 0 or sampled[promised] > had
        promised, had = oldest, sampled[oldest] if oldest else 0
        number = driver.result(op)["number"]
        versions[number] = (W1, W2, W0)[turn % 3]
        assert driver.result(op)["commit_wait_ms"] >= 0 <= driver.result(op)["stall_ms"]
        if len(ended) == len(names):
            break
    assert ended == names, "not in the order of arrival"
    for name in names:
        spans = driver.output(name).outputs[0].weight_versions
        assert versions_of(spans) == sorted(versions_of(spans))
    assert len({s.number for n in names for s in driver.output(n).outputs[0].weight_versions}) > 8
    assert Teacher(driver, versions).check([driver.output(n) for n in names], PLAIN) == 48


def test_a_held_commit_does_not_stop_the_steps_and_can_be_aborted(make: Callable[..., Driver]) -> None:
    driver = make(max_num_batched_tokens=16)
    driver.add(prompt(160), "r", max_tokens=5)
    driver.step()
    driver.update(W1)
    driver.begin_update(W2)
    op = driver.call("finish_weight_update")
    driver.settle()
    driver.step()
    driver.settle()
    before = driver.core.num_steps
    driver.steps(3)
    assert driver.core.num_steps == before + 3 and not driver.answered(op)
    assert driver.now("abort_weight_update")["aborted"] is not None
    assert isinstance(driver.error(op), UpdateConflict)
    driver.run()
    assert driver.digests() == digests_of(W1)
    Teacher(driver, {1: W1}).check([driver.output("r")], PLAIN)


def test_case_073_a_prefix_is_never_found_under_other_weights(make: Callable[..., Driver]) -> None:
    reference, driver = make("w1"), make()
    for one in (driver, reference):
        one.add(prompt(50), "p", max_tokens=6)
        one.run()
    driver.add(prompt(50), "hit", max_tokens=6)
    driver.run()
    assert driver.output("hit").outputs[0].num_cached_tokens == 48
    driver.update(W1)
    driver.add(prompt(50), "after", max_tokens=6)
    driver.run()
    assert driver.output("after").outputs[0].num_cached_tokens == 0
    assert driver.tokens("after") == reference.tokens("p")
    driver.update(W0)  # the old weights come back under a new number: their old blocks do not
    driver.add(prompt(50), "back", max_tokens=6)
    driver.run()
    assert driver.output("back").outputs[0].num_cached_tokens == 0 and driver.tokens("back") == driver.tokens("p")


def test_case_074_a_reset_that_can_do_nothing_says_so(make: Callable[..., Driver]) -> None:
    driver = make()
    driver.add(prompt(30, 1), "a", max_tokens=9)
    driver.add(prompt(33, 2), "b", max_tokens=9)
    driver.steps(3)
    driver.pause("keep", clear_cache=False)
    op = driver.call("reset_prefix_cache")
    assert isinstance(driver.error(op), Conflict) and "2 requests hold KV" in str(driver.error(op))
    assert driver.core.scheduler.pool.num_used > 0
    driver.pause("keep", clear_cache=True)
    assert driver.core.scheduler.pool.num_used == 0
    assert driver.now("reset_prefix_cache") == {"success": True, "reset_requests": 0}
    assert driver.update(W1)["kv_policy"] == "recompute"
    driver.resume()
    driver.run()
    Teacher(driver, {0: W0, 1: W1}).check([driver.output("a"), driver.output("b")], PLAIN)


def test_case_078_an_aborted_prefill_leaves_only_what_it_computed(make: Callable[..., Driver]) -> None:
    reference = make(max_num_batched_tokens=16)
    reference.add(prompt(128), "r", max_tokens=6)
    reference.run()
    for chunks in range(1, 8):
        driver = make(max_num_batched_tokens=16)
        driver.add(prompt(128), "gone", max_tokens=6)
        driver.steps(chunks)
        driver.core.abort(["gone"])
        driver.take()
        driver.check_idle()
        driver.add(prompt(128), "r", max_tokens=6)
        driver.run()
        assert driver.output("r").outputs[0].num_cached_tokens == 16 * chunks
        assert driver.tokens("r") == reference.tokens("r")


def test_case_082_prompts_around_a_block_s_end_twice(make: Callable[..., Driver]) -> None:
    driver = make()
    for length in (15, 16, 17, 31, 32, 33, 47, 48, 49):
        names = [driver.add(prompt(length, length), f"{length}-{i}", max_tokens=5) for i in range(2)]
        driver.run()
        names.append(driver.add(prompt(length, length), f"{length}-2", max_tokens=5))
        driver.run()
        a, b, c = (driver.output(n).outputs[0] for n in names)
        assert a.token_ids == b.token_ids == c.token_ids
        assert a.processed_logprobs == b.processed_logprobs == c.processed_logprobs
        assert c.num_cached_tokens == (length - 1) // 16 * 16


def test_case_083_preemption_with_a_shared_prefix(make: Callable[..., Driver]) -> None:
    outputs = []
    for blocks in (256, 9):
        driver = make(num_blocks=blocks, max_num_seqs=8)
        for i in range(48):
            driver.add(prompt(33) + prompt(i % 5, i), f"r{i}", max_tokens=12 + i % 9, seed=i)
        driver.run()
        outputs.append(record(driver))
    assert outputs[0] == outputs[1]
    assert sum(c.num_preemptions for b in driver.builders.values() for c in b.output.outputs) > 10


# -- the update itself -------------------------------------------------------------------------------------------------


def test_case_008_case_001_a_tied_tensor_counts_once(make: Callable[..., Driver]) -> None:
    tied1 = weights(1, "qwen3")
    assert HEAD not in tied1
    reference = make("tied1")
    reference.add(prompt(12), "r", max_tokens=8)
    reference.run()
    for sent in (
        tied1,
        {**tied1, HEAD: tied1[EMBEDDING]},
        {**{n: t for n, t in tied1.items() if n != EMBEDDING}, HEAD: tied1[EMBEDDING]},
    ):
        driver = make("tied0")
        reply = driver.update(sent)
        assert reply["updated"] == reply["of"] == len(tied1)
        assert driver.digests() == digests_of(tied1)
        driver.add(prompt(12), "r", max_tokens=8)
        driver.run()
        assert record(driver) == record(reference)
        held = driver.core.worker.weights
        assert torch.equal(held.head.dense(), held.embed)
    driver = make("tied0")
    driver.begin_update({**tied1, HEAD: tied1[EMBEDDING] + 1})
    with pytest.raises(WeightUpdateError) as torn:
        driver.now("finish_weight_update")
    assert set(torn.value.tensors) == {EMBEDDING, HEAD}
    assert driver.digests() == digests_of(weights(0, "qwen3"))
    untied = make("w0")
    untied.update({EMBEDDING: W1[EMBEDDING]}, mode="partial")
    assert untied.digests() == {**digests_of(W0), EMBEDDING: digest(W1[EMBEDDING])}


def test_case_002_one_tensor_per_call_in_any_order(make: Callable[..., Driver]) -> None:
    generator = torch.Generator().manual_seed(3)
    names = list(W1)
    driver = make()
    for round_ in range(5):
        order = [names[i] for i in torch.randperm(len(names), generator=generator)]
        driver.update(W0 if round_ % 2 else W2)
        driver.begin_update({n: W1[n] for n in order}, num_chunks=len(order))
        driver.now("finish_weight_update")
        assert driver.digests() == digests_of(W1)
    driver.begin_update({n: t for n, t in W0.items() if n != K_PROJ}, num_chunks=4)
    with pytest.raises(WeightUpdateError) as missing:
        driver.now("finish_weight_update")
    assert missing.value.tensors == [K_PROJ] and driver.digests() == digests_of(W1)


def test_case_010_partial_is_declared_and_never_empty(make: Callable[..., Driver]) -> None:
    driver = make()
    some = {n: W1[n] for n in ("model.norm.weight", K_PROJ, "model.layers.0.mlp.up_proj.weight")}
    reply = driver.update(some, mode="partial")
    assert (reply["updated"], reply["of"]) == (3, len(W0))
    assert driver.digests() == {**digests_of(W0), **digests_of(some)}
    assert reply["weights_id"] == weights_id({**digests_of(W0), **digests_of(some)})
    driver.begin_update(some)
    with pytest.raises(WeightUpdateError, match="never received"):
        driver.now("finish_weight_update")
    driver.result(driver.call("start_weight_update", mode="partial"))
    with pytest.raises(WeightUpdateError, match="no tensor was received"):
        driver.now("finish_weight_update")
    driver.result(driver.call("start_weight_update", mode="partial"))
    with pytest.raises(WeightUpdateError, match="no tensor of this model"):
        driver.wait(driver.send(("nobody", torch.zeros(2))))
    assert driver.core.status()["number"] == 1


def test_case_012_dtypes_are_declared(make: Callable[..., Driver]) -> None:
    driver = make("bf16")
    wide = {n: t.float() + 1e-4 for n, t in W1.items()}
    driver.result(driver.call("start_weight_update"))
    with pytest.raises(WeightUpdateError, match="has dtype float32, the engine holds bfloat16") as wrong:
        driver.wait(driver.send(*wide.items()))
    assert set(wrong.value.tensors) == set(wide)
    reply = driver.update(wide, cast="allow")
    assert reply["bytes"] == sum(t.nbytes for t in wide.values())
    assert driver.digests() == digests_of({n: t.bfloat16() for n, t in wide.items()})
    driver.result(driver.call("start_weight_update", cast="allow"))
    with pytest.raises(WeightUpdateError, match="int32"):
        driver.wait(driver.send((EMBEDDING, W1[EMBEDDING].int())))


def memory(value: Any) -> set[int]:
    parts = [value.plain] if isinstance(value, LinearWeight) else [value]
    return {part.untyped_storage().data_ptr() for part in parts if part is not None}


def test_case_016_nothing_live_aliases_what_was_sent_or_served_before(make: Callable[..., Driver]) -> None:
    driver = make()
    for target in (W1, W2, W0, W1, W2):
        sent = {n: t.clone() for n, t in target.items()}
        old = driver.core.worker.weights
        driver.update(sent)
        new = driver.core.worker.weights
        foreign = {t.untyped_storage().data_ptr() for t in sent.values()}
        for name, value in new.slots.items():
            before = old.slots[name]
            assert value is not before and not memory(value) & (memory(before) | foreign), name
            if isinstance(value, LinearWeight) and value.packed is not None:
                assert value.packed is not before.packed  # type: ignore[union-attr]
        for tensor in sent.values():
            tensor.fill_(7.0)
        with torch.inference_mode():
            for value in old.slots.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(9.0)
        assert driver.digests() == digests_of(target)
        assert new.embed is new.slots["embed"] and new.head is new.slots["head"] and new.norm is new.slots["norm"]


def test_case_016_a_partial_update_keeps_the_storage_of_what_it_leaves_alone(make: Callable[..., Driver]) -> None:
    driver = make()
    old = dict(driver.core.worker.weights.slots)
    driver.update({K_PROJ: W1[K_PROJ], "model.norm.weight": W1["model.norm.weight"]}, mode="partial")
    new = driver.core.worker.weights.slots
    assert {name for name in new if new[name] is not old[name]} == {"0.qkv", "norm"}
    assert driver.digests() == {**digests_of(W0), **digests_of({n: W1[n] for n in (K_PROJ, "model.norm.weight")})}


def test_the_digest_is_of_the_bytes_held_not_of_the_senders_memory(
    make: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that writes on while the engine reads: whatever is held, its digest is the one that is reported."""
    from midstream.engine import worker as worker_module

    sent = {n: t.clone() for n, t in W1.items()}

    def racing(tensor: torch.Tensor) -> str:
        found = digest(tensor)
        for name in sent:
            sent[name].zero_()
        return found

    driver = make()
    monkeypatch.setattr(worker_module, "digest", racing)
    driver.begin_update(sent)
    reply = driver.now("finish_weight_update")
    monkeypatch.undo()
    assert reply["weights_id"] == weights_id(driver.digests())


def test_case_019_an_update_that_delivers_nothing_or_other_bytes_fails(make: Callable[..., Driver]) -> None:
    driver = make()
    driver.result(driver.call("start_weight_update"))
    assert driver.wait(driver.send()) == {"received": 0, "bytes": 0}
    with pytest.raises(WeightUpdateError, match="no tensor was received"):
        driver.now("finish_weight_update")
    manifest = {
        "names": list(W1),
        "dtype_names": ["float32"] * len(W1),
        "shapes": [list(t.shape) for t in W1.values()],
        "digests": list(digests_of(W1).values()),
    }
    flipped = W1[K_PROJ].clone()
    flipped.view(-1).view(torch.int32)[3] ^= 1
    driver.begin_update({**W1, K_PROJ: flipped}, manifest=manifest)
    with pytest.raises(WeightUpdateError) as wrong:
        driver.now("finish_weight_update", weight_version="v1")
    assert wrong.value.tensors == [K_PROJ]
    assert driver.core.status()["version"] == "0" and driver.digests() == digests_of(W0)
    driver.begin_update(W1, manifest=manifest)
    assert driver.now("finish_weight_update", weight_version="v1")["version"] == "v1"


def test_case_023_the_format_is_echoed_and_another_layout_is_refused(make: Callable[..., Driver]) -> None:
    driver = make()
    reply = driver.result(driver.call("start_weight_update"))
    assert (reply["format"], reply["mode"], reply["cast"]) == ("checkpoint", "full", "deny")
    fused = driver.core.worker.weights.layers[0].qkv.dense()
    with pytest.raises(WeightUpdateError, match=r"has shape \[\d+, 64\], the checkpoint format has"):
        driver.wait(driver.send(("model.layers.0.self_attn.q_proj.weight", fused)))
    assert driver.digests() == digests_of(W0)


def patched_clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    import time as real

    class Clock:
        now = 1000.0

        @classmethod
        def monotonic(cls) -> float:
            return cls.now

        time = staticmethod(real.time)

    monkeypatch.setattr(core_module, "time", Clock)
    monkeypatch.setattr(updates_module, "time", Clock)
    monkeypatch.setattr(pauses_module, "time", Clock)
    return Clock


def test_case_028_sessions_conflict_and_leases_end(
    make: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = patched_clock(monkeypatch)
    driver = make(update_lease_s=10.0)
    first = driver.result(driver.call("start_weight_update"))
    assert first["lease_s"] == 10.0
    clock.now += 4
    conflict = driver.error(driver.call("start_weight_update"))
    assert isinstance(conflict, UpdateConflict) and conflict.details == {"session_id": "update-1", "age_s": 4.0}
    assert driver.now("abort_weight_update")["aborted"] == "update-1"
    assert driver.now("abort_weight_update")["aborted"] is None
    second = driver.result(driver.call("start_weight_update"))
    assert second["session_id"] == "update-2"
    for _ in range(5):  # every chunk is a sign of life
        clock.now += 9
        driver.wait(driver.send(("model.norm.weight", W1["model.norm.weight"])))
    clock.now += 10.5
    driver.step()
    assert driver.core.status()["update"] is None and not driver.core.is_waiting
    late = driver.error(driver.send(("model.norm.weight", W1["model.norm.weight"])))
    assert isinstance(late, UpdateConflict) and "its lease of 10.0 s ended" in str(late)
    assert driver.digests() == digests_of(W0)
    assert driver.update(W1)["number"] == 1


def test_case_028_a_start_in_the_gap_in_which_a_lease_ends(
    make: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = patched_clock(monkeypatch)
    driver = make(update_lease_s=10.0)
    driver.result(driver.call("start_weight_update"))
    driver.wait(driver.send(("model.norm.weight", W2["model.norm.weight"])))
    clock.now += 11
    driver.result(driver.call("start_weight_update"))  # no turn in between
    with pytest.raises(WeightUpdateError, match="never received"):
        driver.wait(driver.send(("model.norm.weight", W1["model.norm.weight"])))
        driver.now("finish_weight_update")
    assert driver.update(W1)["number"] == 1


def test_a_long_step_does_not_end_the_lease_of_an_update_the_engine_works_on(
    make: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another trainer's start comes first after a gap longer than the lease, while a finish is held."""
    clock = patched_clock(monkeypatch)
    driver = make(update_lease_s=10.0)
    driver.add(prompt(5), "r", max_tokens=12)
    driver.step()
    driver.call("pause_generation", mode="wait")
    driver.begin_update(W1)
    op = driver.call("finish_weight_update")
    driver.settle()
    driver.step()
    driver.settle()
    driver.step()
    assert driver.core.session.state.value == "prepared"
    clock.now += 60
    other = driver.call("start_weight_update")
    assert isinstance(driver.error(other), UpdateConflict)
    driver.until(lambda: driver.answered(op))
    assert driver.result(op)["number"] == 1
    driver.resume()
    assert driver.update(W2)["number"] == 2


def test_a_paused_finish_may_wait_longer_than_the_lease(
    make: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = patched_clock(monkeypatch)
    driver = make(update_lease_s=10.0)
    driver.add(prompt(5), "r", max_tokens=30)
    driver.step()
    driver.call("pause_generation", mode="wait")
    driver.begin_update(W1)
    op = driver.call("finish_weight_update")
    driver.settle()
    for _ in range(60):
        clock.now += 5
        driver.settle()
        driver.step()
    assert driver.result(op)["number"] == 1


def foreign_error(driver: Driver) -> None:
    driver.result(driver.call("start_weight_update"))
    with pytest.raises(MidstreamError, match="ZeroDivisionError: oops"):
        driver.wait(driver.send((EMBEDDING, W1[EMBEDDING]), ("x", ZeroDivisionError("oops"))))


def bad_chunk(pair: tuple[str, Any], match: str) -> Callable[[Driver], None]:
    def fail(driver: Driver) -> None:
        """Chunk 3 of 4 is bad."""
        names = list(W1)
        driver.result(driver.call("start_weight_update"))
        for part in (names[:3], names[3:6]):
            driver.wait(driver.send(*((n, W1[n]) for n in part)))
        with pytest.raises(WeightUpdateError, match=match):
            driver.wait(driver.send(*((n, W1[n]) for n in names[6:9]), pair))
        late = driver.send(*((n, W1[n]) for n in names[9:]))
        assert isinstance(driver.error(late), UpdateConflict)
        assert isinstance(driver.error(driver.call("finish_weight_update")), UpdateConflict)

    return fail


def missing_at_finish(driver: Driver) -> None:
    driver.begin_update({n: t for n, t in W1.items() if n != K_PROJ})
    with pytest.raises(WeightUpdateError, match=K_PROJ):
        driver.now("finish_weight_update")


def bad_manifest(driver: Driver) -> None:
    op = driver.call("start_weight_update", manifest={"names": ["x"]})
    assert isinstance(driver.error(op), InvalidInput)


def bad_start_values(driver: Driver) -> None:
    for arguments in ({"mode": "some"}, {"cast": "maybe"}, {"mode": []}, {"manifest": 5}, {"color": 1}):
        assert isinstance(driver.error(driver.call("start_weight_update", **arguments)), InvalidInput)
    assert driver.core.status()["update"] is None


def aborted_open(driver: Driver) -> None:
    driver.begin_update(W1)
    driver.now("abort_weight_update")


def aborted_with_a_chunk_on_its_way(driver: Driver) -> None:
    gate = threading.Event()
    driver.result(driver.call("start_weight_update"))
    late = driver.send(("gate", gate), *W1.items())
    driver.step()
    driver.result(driver.call("abort_weight_update"))
    driver.result(driver.call("start_weight_update"))  # a new session, while the old chunk is still being read
    driver.send(*W2.items())
    gate.set()
    with pytest.raises(UpdateConflict, match="was aborted while this chunk was received"):
        driver.wait(late)
    driver.now("abort_weight_update")


def aborted_between_finish_and_commit(driver: Driver) -> None:
    gate = threading.Event()
    driver.begin_update(W1)
    driver.send(("gate", gate))
    op = driver.call("finish_weight_update")
    driver.steps(2)
    assert not driver.answered(op)
    driver.result(driver.call("abort_weight_update"))
    assert isinstance(driver.error(op), UpdateConflict)
    gate.set()


def failed_chunk_after_finish(driver: Driver) -> None:
    driver.begin_update(W1)
    bad = driver.send(("nobody", torch.zeros(1)))
    op = driver.call("finish_weight_update")
    with pytest.raises(UpdateConflict, match="nobody is no tensor of this model"):
        driver.wait(op)
    assert isinstance(driver.error(bad), WeightUpdateError)


def failed_preparation(driver: Driver) -> None:
    real, calls = Staging.finalize, []

    def fail(self: Staging, live: Any) -> Any:
        calls.append(1)
        raise MemoryError("no room")

    Staging.finalize = fail  # type: ignore[method-assign]
    try:
        driver.begin_update(W1)
        with pytest.raises(MidstreamError, match="MemoryError: no room"):
            driver.now("finish_weight_update")
    finally:
        Staging.finalize = real  # type: ignore[method-assign]
    assert calls == [1]


def channel_opened_again(driver: Driver) -> None:
    driver.begin_update(W1)
    reply = driver.now("init_weight_transfer_engine", request={"init_info": {"token": "t"}})
    assert reply["token"] == "t" and reply["fingerprint"] == driver.core.worker.fingerprint


def wrong_session(driver: Driver) -> None:
    driver.result(driver.call("start_weight_update"))
    request = driver.chunk(*W1.items())
    request["update_info"]["update"] = "update-0"
    assert isinstance(driver.error(driver.call("update_weights", request=request)), UpdateConflict)
    driver.now("abort_weight_update")


def changed_retry(driver: Driver) -> None:
    driver.begin_update(W1)
    with pytest.raises(WeightUpdateError, match="sent twice with different bytes"):
        driver.wait(driver.send((K_PROJ, W2[K_PROJ])))


def malformed_calls(driver: Driver) -> None:
    driver.result(driver.call("start_weight_update"))
    for request in (None, 5, {}, {"update_info": 3}, {"update_info": None}):
        assert isinstance(driver.error(driver.call("update_weights", request=request)), InvalidInput)
    for verb, arguments in (
        ("finish_weight_update", {"kv_policy": "burn"}),
        ("finish_weight_update", {"kv_policy": ["keep"]}),
        ("finish_weight_update", {"weight_version": 3}),
        ("finish_weight_update", {"nope": 3}),
        ("pause_generation", {"clear_cache": "yes"}),
        ("abort_requests", {"request_ids": 5}),
        ("abort_requests", {"request_ids": "r0"}),
        ("abort_requests", {"request_ids": [3]}),
        ("never_heard_of", {}),
    ):
        assert isinstance(driver.error(driver.call(verb, **arguments)), InvalidInput), (verb, arguments)
    assert driver.core.session.is_open
    driver.now("abort_weight_update")


def malformed_info(driver: Driver) -> None:
    for info in ({}, {"key": 0, "other": 1}, {"key": 10**6}):
        driver.result(driver.call("start_weight_update"))
        with pytest.raises(InvalidInput):
            driver.now("update_weights", request={"update_info": info})
        assert not driver.core.session.is_open
    with pytest.raises(InvalidInput):
        driver.now("init_weight_transfer_engine", request={"init_info": {"who": 1}})
    with pytest.raises(InvalidInput):
        driver.now("init_weight_transfer_engine", request={"init_info": 5})


FAILURES: list[Callable[[Driver], None]] = [
    *(foreign_error, missing_at_finish, bad_manifest, bad_start_values, aborted_open, changed_retry, malformed_calls),
    *(aborted_with_a_chunk_on_its_way, aborted_between_finish_and_commit, failed_chunk_after_finish, malformed_info),
    *(failed_preparation, channel_opened_again, wrong_session),
    bad_chunk(("nobody", torch.zeros(3)), "nobody is no tensor of this model"),
    bad_chunk((K_PROJ, torch.zeros(3, 3)), "has shape"),
    bad_chunk((K_PROJ, W1[K_PROJ].double()), "has dtype float64"),
    bad_chunk(("base_model.model." + K_PROJ, W1[K_PROJ]), "is no tensor of this model"),
]


@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: getattr(fail, "__name__", "case"))
def test_case_029_case_030_a_failed_update_leaves_the_old_weights_bit_for_bit(
    make: Callable[..., Driver], straight: tuple[dict[str, Any], int], fail: Callable[[Driver], None]
) -> None:
    driver = make(**TIGHT)
    before = driver.core.worker.weights
    crowd(driver)
    driver.steps(4)
    fail(driver)
    assert driver.core.worker.weights is before and driver.core.status()["version"] == "0"
    assert driver.digests() == digests_of(W0)
    driver.run()
    assert record(driver) == straight[0]
    reply = driver.update(W1, "v1")
    assert reply["number"] == 1 and reply["version"] == "v1" and driver.digests() == digests_of(W1)
    driver.add(prompt(8), "after", max_tokens=5)
    driver.run()
    Teacher(driver, {1: W1}).check([driver.output("after")], PLAIN)
    assert not driver.core.worker.is_busy and not driver.core.updates._in_flight


def test_verbs_out_of_order_each_get_one_clear_error(make: Callable[..., Driver]) -> None:
    driver = make()
    for verb, arguments in (
        ("update_weights", {"request": {"update_info": {"key": 0, "update": "update-1"}}}),
        ("finish_weight_update", {}),
    ):
        error = driver.error(driver.call(verb, **arguments))
        assert isinstance(error, UpdateConflict) and "call start_weight_update first" in str(error)
    driver.result(driver.call("start_weight_update"))
    error = driver.error(driver.call("shutdown_weight_transfer_engine"))
    assert isinstance(error, UpdateConflict)
    driver.now("abort_weight_update")
    assert "message" in driver.now("shutdown_weight_transfer_engine")


def test_without_a_limit_of_its_own_a_request_goes_on_to_what_the_cache_holds(make: Callable[..., Driver]) -> None:
    driver = make(num_blocks=4)
    assert driver.now("status")["max_model_len"] == 64
    driver.add(prompt(4), "a", max_tokens=None)
    driver.run()
    assert len(driver.tokens("a")) == 60


@pytest.mark.parametrize(
    ("ids", "params", "match"),
    [
        ([], {}, "prompt is empty"),
        ([1, 160], {}, "token id 160 is not in"),
        ([-1], {}, "token id -1 is not in"),
        ([1, True], {}, "token id True is not in"),
        ([1.5], {}, "token id 1.5 is not in"),
        ([3] * 512, {}, "leaves no room in max_model_len 512"),
        ([3] * 600, {}, "leaves no room in max_model_len 512"),
        ([3] * 100, {"max_tokens": None}, "num_blocks"),
        ([3], {"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ([3], {"max_tokens": -4}, "max_tokens must be >= 1, got -4"),
        ([3], {"temperature": float("nan")}, "temperature must be a finite number"),
        ([3], {"temperature": -0.1}, "temperature must be >= 0"),
        ([3], {"top_p": 0.0}, "top_p must be in"),
        ([3], {"top_k": -2}, "top_k must be"),
        ([3], {"n": 0}, "n must be >= 1"),
        ([3], {"n": 5000}, "n must be >= 1 and <= 1024, got 5000"),
        ([3], {"n": 9}, "never run together"),
        ([3], {"stop_token_ids": (160,)}, "stop_token_ids"),
        ([3], {"seed": -1}, "seed must be"),
        ([3], {"seed": 1 << 63}, "seed must be"),
    ],
)
def test_bad_requests_are_refused_and_the_others_go_on(
    make: Callable[..., Driver], ids: list[int], params: dict[str, Any], match: str
) -> None:
    driver = make(num_blocks=20, max_model_len=512)
    driver.add(prompt(4), "good", max_tokens=6)
    driver.steps(2)
    with pytest.raises(InvalidInput, match=match):
        driver.add(ids, "bad", **params)
    with pytest.raises(InvalidInput, match="in use"):
        driver.add(prompt(4), "good")
    driver.run()
    assert len(driver.tokens("good")) == 6 and "bad" not in driver.builders


@pytest.mark.parametrize(
    "params",
    [{"top_k": 1 << 70}, {"max_tokens": 1 << 70}, {"temperature": 1e300}, {"temperature": 1e-300}, {"top_p": 1e-300}],
)
def test_extreme_but_valid_parameters_do_not_stop_the_engine(
    make: Callable[..., Driver], params: dict[str, Any]
) -> None:
    driver = make(num_blocks=64)
    driver.add(prompt(4), "extreme", **{"max_tokens": 5, "logprobs": 2, "top_p": 0.9, **params})
    driver.add(prompt(5), "good", max_tokens=6)
    driver.until(lambda: driver.output("good").finished)
    driver.core.abort(None)
    driver.take()
    driver.check_idle()


def test_status_tells_the_truth(make: Callable[..., Driver]) -> None:
    driver = make()
    status = driver.core.status()
    assert (status["state"], status["mode"], status["paused_since"]) == ("running", None, None)
    assert status["num_blocks"] == status["num_free_blocks"] == 64 and status["update"] is None
    driver.add(prompt(40), "r", max_tokens=4)
    driver.step()
    driver.pause("keep", clear_cache=False)
    status = driver.core.status()
    assert (status["state"], status["mode"], status["held"], status["running"]) == ("paused", "keep", 1, 1)
    assert status["paused_since"] is not None and status["num_free_blocks"] == 61
    since = status["paused_since"]
    driver.pause("keep", clear_cache=True)
    assert driver.core.status()["paused_since"] == since
    driver.resume()
    driver.run()
    status = driver.core.status()
    assert status["num_sampled_tokens"] == 4 and status["num_reprefilled_tokens"] == 40 and status["held"] == 0
    assert driver.now("is_paused") == {"is_paused": False}


def test_the_step_log_has_every_step_and_commit(make: Callable[..., Driver], tmp_path: pathlib.Path) -> None:
    driver = make(step_log=str(tmp_path / "steps.jsonl"))
    driver.add(prompt(20), "r", max_tokens=12)
    driver.steps(4)
    driver.update(W1, "one")
    driver.run()
    entries = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    steps = [e for e in entries if e["event"] == "step"]
    commits = [e for e in entries if e["event"] == "commit"]
    assert len(steps) == driver.core.num_steps and len(commits) == 1 and commits[0]["label"] == "one"
    assert (
        commits[0]["running"] == 1
        and sum(e["reprefill"] for e in steps) == driver.core.scheduler.num_reprefilled_tokens
    )
    assert all(a["t1"] <= b["t0"] for a, b in itertools.pairwise(entries))


def test_a_cache_larger_than_any_memory_is_refused_by_its_size(models: pathlib.Path) -> None:
    with pytest.raises(InvalidInput, match=r"no memory for \d+ KV blocks \(\d+ bytes\)"):
        Driver(models / "w0", num_blocks=1 << 45)


# -- one of several ---------------------------------------------------------------------------------------------------


def prepared_replica(make: Callable[..., Driver], *calls: tuple[str, dict[str, Any]]) -> tuple[Driver, int]:
    """A replica under an agreed keep-pause, and the last of these calls, whose update it has prepared."""
    driver = make(data_parallel_size=2)
    pause = driver.call("pause_generation", mode="keep")
    driver.step()
    driver.core.agree(driver.core.protocol.position)
    driver.take()
    assert driver.result(pause)["paused"]
    for verb, arguments in calls:
        op = driver.call(verb, **arguments)
    driver.settle()
    while driver.core.worker.is_busy:
        driver.settle()
        driver.step()
    return driver, op


def test_a_reset_that_all_have_prepared_needs_the_pause_still(make: Callable[..., Driver]) -> None:
    driver, reset = prepared_replica(make, ("weight_checker", {"action": "reset"}))
    assert driver.core.session.state.value == "prepared"
    driver.result(driver.call("resume_generation"))
    driver.core.call(reset, "finish", {})
    driver.take()
    assert isinstance(driver.error(reset), Conflict) and driver.core.scheduler.version.number == 0


def test_an_update_of_several_ranks_is_aborted_by_its_own_calls_alone(make: Callable[..., Driver]) -> None:
    driver = make(data_parallel_size=2, update_lease_s=1e-6)
    start = driver.call("start_weight_update")
    driver.steps(3)
    assert driver.core.session.is_open, "no clock of a rank's own ends it"
    assert driver.now("abort_weight_update", of=[start + 1])["aborted"] is None and driver.core.session.is_open
    assert driver.now("abort_weight_update", of=[start])["aborted"] == f"update-{start}"
