from __future__ import annotations

import random
from collections import Counter

import pytest

from midstream.errors import InvalidInput
from midstream.types import (
    Request,
    RequestStatus,
    WeightVersionSpan,
    child_seed,
)
from tests.fakes import VOCAB_SIZE, FakeEngine, KVError, context_keys, reference_tokens, score, versions_of


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def outputs(requests: list[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


# ---- the same tokens, whatever the way ------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 3, 8, 256])
def test_chunked_prefill_equals_unchunked(budget: int) -> None:
    engine = FakeEngine(max_num_batched_tokens=budget)
    requests = [engine.add(prompt_of(n, n), max_tokens=6, seed=n)[0] for n in (1, 4, 5, 23, 40)]
    engine.run()
    assert outputs(requests) == [reference_tokens(r.prompt_token_ids, r.seed, 6) for r in requests]


def test_decode_and_prefill_share_a_step() -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    engine.add(prompt_of(3), max_tokens=20)
    engine.step()
    engine.add(prompt_of(20, 1))
    plan = engine.step()
    assert [(s.start, len(s.token_ids), s.sample) for s in plan.requests] == [(3, 1, True), (0, 7, False)]
    engine.run()


def test_prefix_hit_equals_none() -> None:
    prompt = prompt_of(30)
    engine = FakeEngine()
    for seed in (1, 2):
        (request,) = engine.add(prompt + [seed], seed=seed)
        engine.run()
        assert request.output_token_ids == reference_tokens(prompt + [seed], seed, 8)
        assert request.num_cached_tokens == (0 if seed == 1 else 28)
    without = FakeEngine(enable_prefix_caching=False)
    for seed in (1, 2):
        (request,) = without.add(prompt + [seed], seed=seed)
        without.run()
        assert request.output_token_ids == reference_tokens(prompt + [seed], seed, 8)
        assert request.num_cached_tokens == 0


def test_a_hit_covers_output_of_an_earlier_request() -> None:
    engine = FakeEngine()
    (first,) = engine.add(prompt_of(10), max_tokens=10)
    engine.run()
    (second,) = engine.add(first.token_ids, max_tokens=3)
    engine.run()
    assert second.num_cached_tokens == 16  # of the 20 tokens the last was never computed
    assert second.output_token_ids == reference_tokens(first.token_ids, 7, 3)


def test_cache_salt_separates() -> None:
    engine = FakeEngine()
    cached = []
    for salt in ("a", "b", "a"):
        (request,) = engine.add(prompt_of(20), cache_salt=salt)
        engine.run()
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 16]


def test_prompt_logprobs_take_no_hit_and_are_complete() -> None:
    engine = FakeEngine(max_num_batched_tokens=7)
    prompt = prompt_of(20)
    engine.add(prompt)
    engine.run()
    requests = engine.add(prompt, n=3, prompt_logprobs=0)
    engine.run()
    keys = context_keys(prompt)
    for request in requests:
        assert request.num_cached_tokens == 0
        assert [entry[0] for entry in request.prompt_logprobs] == [
            score(keys[i - 1], 0, prompt[i]) for i in range(1, 20)
        ]


def test_prompt_logprobs_are_recorded_once_when_the_prefill_starts_over() -> None:
    engine = FakeEngine(max_num_batched_tokens=7)
    (request,) = engine.add(prompt_of(20), prompt_logprobs=0)
    engine.step()
    engine.step()
    first = list(request.prompt_logprobs)
    assert len(first) == 14
    engine.commit("recompute")
    engine.run()
    assert len(request.prompt_logprobs) == 19 and request.prompt_logprobs[:14] == first


def test_admission_does_not_count_a_cached_block_twice() -> None:
    """The free blocks are just those the request would share, so there is none for the rest of it."""
    engine = FakeEngine(num_blocks=8, block_size=4)
    engine.add(prompt_of(17), max_tokens=1)
    engine.run()
    engine.add(prompt_of(13, 1), max_tokens=3)
    engine.step()
    (request,) = engine.add(prompt_of(17))
    assert engine.pool.num_free == 4
    engine.step()
    assert request.status is RequestStatus.WAITING
    engine.run()
    assert request.num_cached_tokens == 16 and request.num_preemptions == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_forced_preemption_equals_a_big_pool(prefix_caching: bool) -> None:
    tiny = FakeEngine(num_blocks=14, enable_prefix_caching=prefix_caching)
    big = FakeEngine(enable_prefix_caching=prefix_caching)
    made = []
    for engine in (tiny, big):
        made.append([engine.add(prompt_of(9 + i, i), max_tokens=20, seed=i)[0] for i in range(8)])
        engine.run()
    assert outputs(made[0]) == outputs(made[1])
    assert sum(request.num_preemptions for request in made[0]) > 3
    assert sum(request.num_preemptions for request in made[1]) == 0
    assert made[0][0].num_preemptions == 0, "the oldest is never preempted"


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 13])
@pytest.mark.parametrize("budget", [5, 256])
def test_forks_equal_single_requests(length: int, budget: int) -> None:
    prompt = prompt_of(length)
    forked = FakeEngine(max_num_batched_tokens=budget)
    children = forked.add(prompt, n=8, seed=99)
    forked.run()
    single = FakeEngine(enable_prefix_caching=False)
    alone = [single.add(prompt, seed=child_seed(99, index))[0] for index in range(8)]
    single.run()
    assert outputs(children) == outputs(alone)
    if budget > 8:  # else the last children start after the first have ended, and take a prefix hit
        assert all(child.num_cached_tokens == 0 for child in children)


def test_forks_compute_the_prompt_once_and_sample_together() -> None:
    engine = FakeEngine()
    engine.add(prompt_of(11), n=4)
    first, second = engine.step(), engine.step()
    assert [(s.start, len(s.token_ids), s.sample) for s in first.requests] == [(0, 10, False)]
    assert [(s.start, len(s.token_ids), s.sample) for s in second.requests] == [(10, 1, True)] * 4
    assert len(second.block_copies) == 3 and len({source for source, _ in second.block_copies}) == 1
    tables = [s.block_ids for s in second.requests]
    assert len({tuple(table[:2]) for table in tables}) == 1, "the full blocks are shared"
    assert len({table[2] for table in tables}) == 4, "the partial one is not"
    engine.run()


def test_forks_survive_a_leader_that_is_aborted_in_the_middle() -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    children = engine.add(prompt_of(30), n=4)
    engine.step()
    engine.step()
    engine.abort([children[0].request_id])
    engine.run()
    assert outputs(children[1:]) == [reference_tokens(prompt_of(30), r.seed, 8) for r in children[1:]]


def test_forks_in_a_tiny_pool() -> None:
    engine = FakeEngine(num_blocks=12)
    children = engine.add(prompt_of(14), n=8, max_tokens=12)
    engine.run()
    assert outputs(children) == [reference_tokens(prompt_of(14), r.seed, 12) for r in children]
    assert sum(child.num_preemptions for child in children) > 0


def test_a_preempted_fork_comes_back_by_forking() -> None:
    """It shares the prompt again, so only its own output is computed again."""
    engine = FakeEngine(num_blocks=12, enable_prefix_caching=False)
    children = engine.add(prompt_of(22), n=4, max_tokens=9)
    while children[3].status is not RequestStatus.PREEMPTED:
        engine.step()
    num_made = children[3].num_output_tokens
    engine.abort([children[1].request_id])
    plan = engine.step()
    assert (plan.requests[-1].request_id, plan.requests[-1].start) == (children[3].request_id, 21)
    assert plan.block_copies == [(children[0].block_ids[5], children[3].block_ids[5])]
    assert plan.num_reprefilled_tokens == num_made
    engine.run()


def test_stop_token_is_part_of_the_output() -> None:
    tokens = reference_tokens(prompt_of(6), 7, 20)
    engine = FakeEngine()
    (request,) = engine.add(prompt_of(6), max_tokens=20, stop_token_ids=[tokens[5]])
    engine.run()
    assert request.output_token_ids == tokens[: tokens.index(tokens[5]) + 1]
    assert request.status is RequestStatus.FINISHED_STOPPED


# ---- commits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "keep"])
@pytest.mark.parametrize("n", [1, 3])
def test_commit_at_every_step(policy: str, n: int) -> None:
    """Tokens agree with the version spans (checked at the end of every request), before and after each step."""

    def start() -> tuple[FakeEngine, list[Request]]:
        engine = FakeEngine(max_num_batched_tokens=9)
        return engine, [r for i in range(3) for r in engine.add(prompt_of(7 + 5 * i, i), n=n, max_tokens=6)]

    straight, _ = start()
    straight.run()
    for k in range(straight.num_steps):
        engine, requests = start()
        for _ in range(k):
            engine.step()
        held = {r.request_id: r.num_computed_tokens for r in requests if not r.status.is_finished}
        num_made = [r.num_output_tokens for r in requests]
        engine.commit(policy)  # type: ignore[arg-type]
        engine.scheduler.check_integrity()
        engine.run()
        for request, made in zip(requests, num_made, strict=True):
            assert versions_of(request.version_spans) == [0] * made + [1] * (6 - made)
            kept = policy == "keep" and held.get(request.request_id, 0) > 0
            assert bool(request.kv_history) == kept
            if policy == "recompute":
                assert request.num_reprefilled_tokens <= held.get(request.request_id, 0)
        assert engine.scheduler.num_reprefilled_tokens == sum(r.num_reprefilled_tokens for r in requests)


def test_same_tokens_after_a_recompute_commit_as_from_a_new_engine() -> None:
    engine = FakeEngine()
    engine.commit("recompute")
    (request,) = engine.add(prompt_of(9))
    engine.run()
    assert request.output_token_ids == reference_tokens(prompt_of(9), 7, 8, version=1)
    assert request.version_spans == [WeightVersionSpan("v1", 1, 0, 8)]


def test_a_group_shares_its_prompt_again_after_a_recompute_commit() -> None:
    engine = FakeEngine()
    children = engine.add(prompt_of(33), n=4, max_tokens=10)
    for _ in range(5):
        engine.step()
    engine.commit("recompute")
    plan = engine.step()
    assert [(s.start, len(s.token_ids)) for s in plan.requests] == [(0, 32)]
    assert plan.num_reprefilled_tokens == 32
    plan = engine.step()
    assert [(s.start, len(s.token_ids), s.sample) for s in plan.requests] == [(32, 5, True)] * 4
    engine.run()
    assert [child.num_reprefilled_tokens for child in children] == [36, 4, 4, 4]


def test_kept_kv_is_logged_and_not_published() -> None:
    engine = FakeEngine()
    (request,) = engine.add(prompt_of(10), max_tokens=30)
    for _ in range(5):
        engine.step()
    engine.commit("keep")
    assert request.kv_kept and request.kv_history == [(0, 0, 14)]
    num_cached = engine.pool.num_cached
    for _ in range(10):
        engine.step()
    assert engine.pool.num_cached == num_cached
    assert request.kv_spans == request.kv_history == [(0, 0, 14), (1, 14, 24)]
    engine.commit("recompute")
    assert not request.kv_kept
    engine.run()
    assert request.kv_history == [(0, 0, 14), (1, 14, 24), (2, 0, 39)]
    assert engine.pool.num_cached > num_cached


def test_drop_kv_computes_everything_again_under_the_same_version() -> None:
    engine = FakeEngine()
    requests = engine.add(prompt_of(13), n=2, max_tokens=12)
    for _ in range(6):
        engine.step()
    engine.scheduler.drop_kv()
    assert engine.pool.num_used == 0 and engine.pool.num_cached == 0
    engine.scheduler.check_integrity()
    engine.run()
    assert outputs(requests) == [reference_tokens(prompt_of(13), r.seed, 12) for r in requests]
    assert requests[0].num_reprefilled_tokens == 17


@pytest.mark.parametrize("budget", [4, 64])
def test_progress_under_a_commit_after_every_step_that_allows_one(budget: int) -> None:
    engine = FakeEngine(max_num_batched_tokens=budget, num_blocks=40)
    requests = [r for i in range(6) for r in engine.add(prompt_of(5 + 4 * i, i), n=1 + i % 3, max_tokens=10)]
    num_commits = 0
    engine.commit("recompute")
    while engine.scheduler.has_unfinished:
        oldest = next(iter(engine.scheduler.live.values()))
        before = oldest.num_output_tokens
        for _ in range(60):
            engine.step()
            if engine.scheduler.oldest_has_progressed():
                break
        assert engine.scheduler.oldest_has_progressed(), "bounded by one prefill"
        assert oldest.num_output_tokens > before
        engine.commit("recompute")
        num_commits += 1
    assert num_commits >= 10
    assert all(request.num_output_tokens == 10 for request in requests)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_add_refuses_what_can_never_run() -> None:
    engine = FakeEngine(num_blocks=8, block_size=4, max_num_seqs=4, max_model_len=40)
    for arguments, reason in [
        (dict(prompt=prompt_of(5), n=5), "max_num_seqs is 4"),
        (dict(prompt=prompt_of(40)), "shorten"),
        (dict(prompt=prompt_of(26), max_tokens=8), "needs 9 KV blocks"),
        (dict(prompt=prompt_of(26), max_tokens=2, n=3), "needs 9 KV blocks"),
        (dict(prompt=[]), "empty"),
    ]:
        with pytest.raises(InvalidInput, match=reason):
            engine.add(**arguments)  # type: ignore[arg-type]
    engine.add(prompt_of(25), max_tokens=8)  # 32 positions: the last token needs no KV
    engine.add(prompt_of(22), max_tokens=2, n=3)
    engine.run()


def test_add_refuses_ids_in_use() -> None:
    engine = FakeEngine()
    engine.add(prompt_of(5), n=2, parent_id="a")
    for parent_id in ("a", "a/0"):
        with pytest.raises(InvalidInput, match="in use"):
            engine.add(prompt_of(5), parent_id=parent_id)
    assert len(engine.scheduler.live) == 2
    engine.run()


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_abort_by_parent_by_child_and_of_all() -> None:
    engine = FakeEngine(max_num_seqs=4)
    first, second, third = (engine.add(prompt_of(6, i), n=n, parent_id=f"p{i}") for i, n in enumerate((2, 2, 1)))
    engine.step()
    engine.step()
    assert engine.abort(["p0/1", "nobody"]) == [first[1]]
    assert engine.abort(["p1", "p1/0", "p1"]) == second
    assert engine.abort(None) == [first[0], *third]
    assert third[0].num_output_tokens == 0 and first[0].num_output_tokens == 1
    assert {r.status for r in engine.ended} == {RequestStatus.FINISHED_ABORTED}
    assert not engine.scheduler.has_unfinished and engine.pool.num_used == 0
    assert engine.abort(None) == []


def test_fail_ends_with_error() -> None:
    engine = FakeEngine()
    (request,) = engine.add(prompt_of(6))
    engine.step()
    assert engine.scheduler.end([request.request_id], RequestStatus.FINISHED_ERROR) == [request]
    assert request.status is RequestStatus.FINISHED_ERROR
    engine.scheduler.check_integrity()


def test_an_abort_between_schedule_and_update_is_tolerated() -> None:
    engine = FakeEngine()
    engine.add(prompt_of(6), parent_id="a")
    (other,) = engine.add(prompt_of(6, 1), parent_id="b")
    engine.step()
    plan = engine.scheduler.schedule()
    engine.abort(["a"])
    (again,) = engine.add(prompt_of(9, 2), parent_id="a")  # the id is used again at once
    engine.runner.requests = {"b": other}  # the plan still means the first "a"
    result = engine.runner.execute(plan)
    engine.runner.requests = engine.scheduler.live
    assert engine.scheduler.update(plan, result) == [other]
    assert again.num_output_tokens == 0 and again.num_computed_tokens == 0
    engine.run()
    assert again.output_token_ids == reference_tokens(prompt_of(9, 2), 7, 8)


# ---- public cases ---------------------------------------------------------------------------------------------------


def test_case_062_aborted_groups_leave_nothing_behind() -> None:
    engine = FakeEngine()
    for i in range(1000):
        engine.add(prompt_of(5 + i % 7, i), n=4)
        for _ in range(i % 4):
            engine.step()
        assert len(engine.abort(None)) == 4
        scheduler = engine.scheduler
        assert not (scheduler.live or scheduler.running or scheduler.waiting or scheduler._siblings)
        assert engine.pool.num_used == 0
    engine.scheduler.check_integrity()
    assert len(engine.ended) == 4000


@pytest.mark.parametrize("room", ["seqs", "blocks"])
def test_case_063_n_samples_are_admitted_all_or_none(room: str) -> None:
    engine = FakeEngine(max_num_seqs=4) if room == "seqs" else FakeEngine(num_blocks=6)
    engine.add(prompt_of(7, 1), max_tokens=4)  # then there is room for 3
    engine.step()
    children = engine.add(prompt_of(7, 2), n=4, max_tokens=2)
    while engine.scheduler.live.get("r0"):
        assert {child.status for child in children} == {RequestStatus.WAITING}
        engine.step()
    engine.step()
    assert {child.status for child in children} == {RequestStatus.RUNNING}
    engine.run()
    assert outputs(children) == [reference_tokens(prompt_of(7, 2), r.seed, 2) for r in children]


def test_case_063_a_group_is_whole_in_the_middle_of_its_prefill() -> None:
    engine = FakeEngine(max_num_batched_tokens=3)
    children = engine.add(prompt_of(10), n=4)
    engine.step()
    assert {child.status for child in children} == {RequestStatus.RUNNING}
    assert len(engine.scheduler.running) == 4
    engine.run()


def test_case_073_no_prefix_of_older_weights_is_found() -> None:
    engine = FakeEngine()
    cached = []
    for version in (0, 0, 1, 1):
        if version != engine.scheduler.version.number:
            engine.commit("recompute")
        (request,) = engine.add(prompt_of(21))
        engine.run()
        cached.append(request.num_cached_tokens)
        assert request.output_token_ids == reference_tokens(prompt_of(21), 7, 8, version)
    assert cached == [0, 20, 0, 20]


def test_case_074_reset_says_that_it_did_nothing() -> None:
    engine = FakeEngine()
    engine.add(prompt_of(21), max_tokens=4)
    engine.step()
    assert engine.pool.num_cached == 5
    assert engine.scheduler.reset_prefix_cache() is False
    assert engine.pool.num_cached == 5
    engine.run()
    assert engine.scheduler.reset_prefix_cache() is True
    assert engine.pool.num_cached == 0


def test_case_078_an_aborted_prefill_leaves_only_what_was_computed() -> None:
    engine = FakeEngine(max_num_batched_tokens=10)
    (request,) = engine.add(prompt_of(80))
    for _ in range(3):
        engine.step()
    engine.abort([request.request_id])
    assert engine.pool.num_used == 0
    (again,) = engine.add(prompt_of(80))
    engine.run()
    assert again.num_cached_tokens == 28  # of the 30 computed
    assert again.output_token_ids == reference_tokens(prompt_of(80), 7, 8)


@pytest.mark.parametrize("length", [3, 4, 5, 15, 16, 17])
def test_case_082_a_prompt_that_is_cached_completely(length: int) -> None:
    engine = FakeEngine(block_size=4)
    for _ in range(2):
        (request,) = engine.add(prompt_of(length))
        engine.run()
        assert request.output_token_ids == reference_tokens(prompt_of(length), 7, 8)
        assert request.num_cached_tokens < length


def test_case_083_preemption_with_a_shared_prefix() -> None:
    engine = FakeEngine(num_blocks=24, max_num_seqs=16)
    shared = prompt_of(18)
    requests = [engine.add(shared + prompt_of(1 + i % 9, i), max_tokens=9, seed=i)[0] for i in range(256)]
    engine.run()
    assert outputs(requests) == [reference_tokens(r.prompt_token_ids, r.seed, 9) for r in requests]
    assert sum(request.num_preemptions for request in requests) > 20
    assert sum(request.num_cached_tokens for request in requests) > 200 * 16


def test_case_086_random_operations_keep_the_books() -> None:
    rng = random.Random(86)
    engine = FakeEngine(num_blocks=24, block_size=4, max_num_seqs=8, max_num_batched_tokens=24, max_model_len=64)
    added: list[Request] = []
    done: Counter[str] = Counter()
    shared = prompt_of(40)
    for operation in range(10_000):
        scheduler = engine.scheduler
        what = rng.random()
        if what < 0.12 and scheduler.num_waiting < 12:
            length = rng.randrange(1, 22)
            prompt = shared[:length] if rng.random() < 0.5 else prompt_of(length, rng.randrange(20))
            added += engine.add(
                prompt,
                n=rng.choice([1, 1, 2, 4]),
                max_tokens=rng.randrange(1, 24),
                seed=operation,
                stop_token_ids=range(rng.randrange(4)),
                cache_salt=rng.choice(["", "", "x"]),
                prompt_logprobs=rng.choice([None, None, 0]),
            )
            done["add"] += 1
        elif what < 0.15 and scheduler.live:
            request = rng.choice(list(scheduler.live.values()))
            engine.abort([rng.choice([request.request_id, request.parent_id])])
            done["abort"] += 1
        elif what < 0.152:
            engine.abort(None)
        elif what < 0.17:
            engine.commit("recompute")
            done["recompute"] += 1
        elif what < 0.19:
            engine.commit("keep")
            done["keep"] += 1
        elif what < 0.195:
            scheduler.drop_kv()
            done["drop"] += 1
        elif what < 0.2:
            assert scheduler.reset_prefix_cache() == (engine.pool.num_used == 0)
        elif scheduler.has_unfinished:
            engine.step()
            done["step"] += 1
        if operation % 5 == 0:
            scheduler.check_integrity()
    engine.run()
    assert Counter(request.request_id for request in engine.ended) == Counter(r.request_id for r in added)
    assert all(request.status.is_finished for request in added)
    assert sum(request.num_output_tokens for request in added) == engine.scheduler.num_sampled_tokens
    assert sum(request.num_preemptions for request in added) > 100
    assert sum(len(request.kv_spans) > 1 for request in added) > 20
    assert min(done.values()) > 20, done


def test_case_106_logprobs_after_preemption() -> None:
    engine = FakeEngine(num_blocks=16, max_num_batched_tokens=20)
    requests = [engine.add(prompt_of(8 + i, i), max_tokens=24, seed=i, prompt_logprobs=0)[0] for i in range(8)]
    engine.run()
    assert sum(request.num_preemptions >= 2 for request in requests) > 0
    for request in requests:
        keys = context_keys(request.token_ids)
        num_prompt = request.num_prompt_tokens
        assert len(request.sampled) == len(request.output_token_ids) == 24
        assert len(request.prompt_logprobs) == num_prompt - 1
        scored = [entry[0] for entry in request.prompt_logprobs] + [token.raw_logprob for token in request.sampled]
        assert scored == [score(keys[i - 1], 0, request.token_ids[i]) for i in range(1, request.num_tokens)]


def test_case_109_tokens_carry_the_version_that_made_them() -> None:
    engine = FakeEngine(max_num_seqs=1)
    (first,) = engine.add(prompt_of(9), max_tokens=64)
    (second,) = engine.add(prompt_of(9, 1), max_tokens=64)  # waits during the swap
    for _ in range(20):
        engine.step()
    engine.commit("recompute")
    engine.run()
    assert first.version_spans == [WeightVersionSpan("v0", 0, 0, 20), WeightVersionSpan("v1", 1, 20, 64)]
    assert second.version_spans == [WeightVersionSpan("v1", 1, 0, 64)]


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_case_113_a_commit_in_the_middle_of_a_chunked_prefill(policy: str) -> None:
    engine = FakeEngine(num_blocks=512, max_num_batched_tokens=64)
    (request,) = engine.add(prompt_of(1000))
    for _ in range(5):
        engine.step()
    engine.commit(policy)  # type: ignore[arg-type]
    engine.run()
    assert request.output_token_ids == reference_tokens(prompt_of(1000), 7, 8, version=1)
    if policy == "recompute":
        assert request.kv_spans == [(1, 0, 1007)] and request.num_reprefilled_tokens == 320
        assert request.kv_history == []
    else:
        assert request.kv_history == request.kv_spans == [(0, 0, 320), (1, 320, 1007)]
        assert request.num_reprefilled_tokens == 0


# ---- the fake detects what it should --------------------------------------------------------------------------------


def test_the_fake_runner_detects_wrong_kv() -> None:
    def prepared() -> tuple[FakeEngine, Request]:
        engine = FakeEngine()
        (request,) = engine.add(prompt_of(10), max_tokens=4)
        engine.add(prompt_of(10, 1), max_tokens=4)
        engine.step()
        return engine, request

    engine, request = prepared()
    request.block_ids[0] = next(r for r in engine.scheduler.running if r is not request).block_ids[0]
    with pytest.raises(KVError, match="another context"):
        engine.step()
    engine, request = prepared()
    request.block_ids[0] = 200
    with pytest.raises(KVError, match="never written"):
        engine.step()
    engine, request = prepared()
    engine.runner.version = 1  # the weights moved and nobody dropped the KV
    with pytest.raises(KVError, match="under version 1"):
        engine.step()
    engine = FakeEngine()
    engine.add(prompt_of(11), n=2)
    engine.step()
    plan = engine.scheduler.schedule()
    plan.block_copies.clear()
    with pytest.raises(KVError, match="never written"):
        engine.runner.execute(plan)
