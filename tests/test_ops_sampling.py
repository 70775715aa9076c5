"""Sampling: what is drawn, from which distribution, and the log-probability that is reported for it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from midstream.ops import cpu, sampling
from midstream.ops.sampling import (
    draw,
    processed_logits,
    processed_logprobs,
    prompt_logprobs,
    sample,
    token_logprobs,
    uniforms,
)
from midstream.types import SamplingParams, child_seed

TRUNCATIONS = [{"top_k": 5}, {"top_p": 0.9}, {"top_k": 7, "top_p": 0.8}]


def logits_of(seed: int, rows: int, vocab: int, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def kept(params: SamplingParams, row: torch.Tensor) -> list[int]:
    return torch.isfinite(processed_logits(row[None], [params])[0]).nonzero().flatten().tolist()


def plainly_kept(params: SamplingParams, row: torch.Tensor) -> list[int]:
    """The definition by a loop: most likely first, lower id first among equals."""
    z = (row / params.temperature).double()
    order = sorted(range(len(row)), key=lambda i: (-float(z[i]), i))
    if params.top_k > 0:
        order = order[: params.top_k]
    p = torch.softmax(z[order], 0)
    out, mass = [], 0.0
    for i, weight in zip(order, p.tolist(), strict=True):
        if out and mass >= params.top_p - 1e-9 and params.top_p < 1:
            break
        out.append(i)
        mass += weight
    return sorted(out)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"temperature": 1.5, "top_k": 6}, {"top_p": 0.7}])
def test_draws_follow_the_processed_distribution(options: dict) -> None:
    params = SamplingParams(**options)
    row, count = logits_of(1, 1, 12, 1.0), 20_000
    drawn = sample(row.expand(count, -1), [params] * count, range(count), [17] * count)
    p = torch.softmax(processed_logits(row, [params])[0].double(), 0)
    seen = torch.bincount(torch.tensor([t.token_id for t in drawn]), minlength=12).double()
    assert seen[p == 0].sum() == 0
    live = p > 0
    chi = float(((seen - count * p)[live] ** 2 / (count * p)[live]).sum())
    degrees = int(live.sum()) - 1
    assert chi < degrees + 4 * math.sqrt(2 * degrees) + 8  # far beyond the 99.9 % quantile; the seeds are fixed


def test_uniforms_are_uniform_over_seeds_and_over_positions() -> None:
    for u in (uniforms(range(50_000), [3] * 50_000), uniforms([7] * 50_000, range(50_000))):
        assert float(u.min()) >= 0 and float(u.max()) < 1
        counts = torch.histc(u.double(), 50, 0, 1)
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 49 + 4 * math.sqrt(98)
        assert abs(float(torch.corrcoef(torch.stack((u[:-1], u[1:])))[0, 1])) < 0.02


def test_uniforms_of_children_and_neighbouring_positions_do_not_repeat_each_other() -> None:
    streams = [uniforms([child_seed(5, k)] * 400, range(400)) for k in range(8)]
    for i in range(8):
        for j in range(i):
            for shift in range(3):
                assert not torch.equal(streams[i][shift:300], streams[j][: 300 - shift])
    largest = uniforms([(1 << 63) - 1, 0], [8191, 0])
    assert torch.equal(largest, uniforms([(1 << 63) - 1, 0], [8191, 0]))


def test_case_108_a_draw_depends_on_its_own_seed_and_position_only() -> None:
    logits = logits_of(3, 40, 96)
    kinds = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(temperature=0.6, logprobs=3)]
    kinds += [SamplingParams(temperature=1.5, **options) for options in TRUNCATIONS]
    params = [kinds[i % len(kinds)] for i in range(40)]
    seeds, positions = [900 + i for i in range(40)], [11 * i for i in range(40)]
    together = sample(logits, params, seeds, positions)
    for at, rows in [(0, 1), (1, 1), (2, 2), (3, 37), (39, 1), (6, 18)]:
        s = slice(at, at + rows)
        assert sample(logits[s].clone(), params[s], seeds[s], positions[s]) == together[s]
    for i in range(40):
        assert sample(logits[i : i + 1], params[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) == [together[i]]


@pytest.mark.parametrize("options", [*TRUNCATIONS, {"top_k": 1}, {"top_k": 1000}, {"top_p": 1e-6}, {"top_k": -1}])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_truncation_is_the_definition_by_a_loop(options: dict, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, **options)
    for row in logits_of(5, 30, 40):
        assert kept(params, row) == plainly_kept(params, row)


def test_ties_go_to_the_lower_id() -> None:
    row = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0])
    assert kept(SamplingParams(top_k=2), row) == [1, 3]
    assert kept(SamplingParams(top_k=5), row) == [1, 2, 3, 4, 5]
    flat = torch.zeros(8)
    assert kept(SamplingParams(top_p=0.5), flat) == [0, 1, 2, 3]
    assert kept(SamplingParams(top_p=0.51), flat) == [0, 1, 2, 3, 4]
    assert kept(SamplingParams(top_k=4, top_p=0.5), flat) == [0, 1]
    assert sample(torch.tensor([[1.0, 3.0, 3.0]]), [SamplingParams(temperature=0)], [1], [1])[0].token_id == 1


@pytest.mark.parametrize("temperature", [1e-2, 1e-5, 1e-8, 1e-30, 1e-40, 5e-324])
def test_a_vanishing_temperature_becomes_greedy_and_stays_finite(temperature: float) -> None:
    logits = logits_of(7, 50, 64)
    logits[:, 0] = logits.amax(-1) + 1  # a clear winner
    for options in ({}, {"top_k": 3}, {"top_p": 0.9}):
        params = [SamplingParams(temperature=temperature, **options)] * 50
        for token in sample(logits, params, range(50), range(50)):
            assert token.token_id == 0
            assert token.processed_logprob == pytest.approx(0, abs=1e-6)


def test_a_huge_temperature_becomes_uniform_over_what_a_grammar_allows() -> None:
    for temperature in (1e12, 1e39, 1e300):
        params = [SamplingParams(temperature=temperature)]
        token = sample(logits_of(7, 1, 64), params, [1], [1])[0]
        assert token.processed_logprob == pytest.approx(-math.log(64), abs=1e-5)
        token = sample(logits_of(7, 1, 64), params, [1], [1], allowed=[b"\x0f" + bytes(7)])[0]
        assert token.token_id < 4 and token.processed_logprob == pytest.approx(-math.log(4), abs=1e-5)


def test_greedy_takes_the_argmax_with_processed_logprob_zero_also_in_a_mixed_batch() -> None:
    logits = logits_of(8, 9, 32)
    params = [SamplingParams(temperature=0), SamplingParams(temperature=0.5), SamplingParams()] * 3
    for i, token in enumerate(sample(logits, params, range(9), range(9))):
        if params[i].temperature == 0:
            assert token.token_id == int(logits[i].argmax())
            assert token.processed_logprob == 0
            assert token.raw_logprob == float(token_logprobs(logits[i : i + 1], torch.tensor([token.token_id])))


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.5])
def test_case_098_raw_and_processed_are_the_two_distributions_they_say(temperature: float) -> None:
    logits = logits_of(9, 200, 160)
    drawn = sample(logits, [SamplingParams(temperature=temperature)] * 200, range(200), range(200))
    ids = torch.tensor([t.token_id for t in drawn])[:, None]
    for scale, values in ((1, [t.raw_logprob for t in drawn]), (temperature, [t.processed_logprob for t in drawn])):
        wanted = torch.log_softmax(logits.double() / scale, -1).gather(-1, ids).squeeze(-1)
        assert (torch.tensor(values, dtype=torch.float64) - wanted).abs().max() < 2e-6  # fp32 of numbers up to 20


@pytest.mark.parametrize("options", TRUNCATIONS)
def test_case_099_processed_logprobs_sum_to_one_over_the_kept_ids(options: dict) -> None:
    params = SamplingParams(temperature=0.8, logprobs=20, logprobs_mode="processed_logprobs", **options)
    logits = logits_of(10, 100, 50, 4.0)
    for row, token in zip(logits, sample(logits, [params] * 100, range(100), range(100)), strict=True):
        support = kept(params, row)
        assert token.token_id in support
        shown = {i: value for i, value in token.top if value > -math.inf}
        assert set(shown) <= set(support)
        if len(support) <= 20:
            assert set(shown) == set(support)
            assert sum(map(math.exp, shown.values())) == pytest.approx(1, abs=1e-5)
            assert shown[token.token_id] == token.processed_logprob
        again = processed_logprobs(row[None], torch.tensor([token.token_id]), [params])
        assert float(again) == token.processed_logprob
        masked = (row / params.temperature)[support].double()
        wanted = torch.log_softmax(masked, 0)[support.index(token.token_id)]
        assert token.processed_logprob == pytest.approx(float(wanted), abs=1e-5)


def test_case_101_a_logprob_belongs_to_the_sampled_token_whatever_its_rank() -> None:
    logits = logits_of(11, 1000, 64)
    raw = torch.stack([token_logprobs(logits, torch.full((1000,), i)) for i in range(64)], 1)
    assert torch.allclose(raw, torch.log_softmax(logits, -1), atol=1e-6)
    drawn = sample(logits, [SamplingParams(temperature=2, logprobs=5)] * 1000, range(1000), range(1000))
    assert any(t.rank > 5 for t in drawn)
    for row, token in zip(raw, drawn, strict=True):
        assert token.raw_logprob == float(row[token.token_id])
        assert token.rank == 1 + int((row > row[token.token_id]).sum())
        values = sorted(row.tolist(), reverse=True)[:5]
        assert [value for _, value in token.top] == values
        assert all(float(row[i]) == value for i, value in token.top)
        assert (token.token_id in dict(token.top)) == (token.rank <= 5)


def test_logprobs_are_given_where_they_were_asked_for() -> None:
    logits = logits_of(12, 3, 16)
    params = [SamplingParams(), SamplingParams(logprobs=0), SamplingParams(logprobs=20)]
    none, zero, all_of_them = sample(logits, params, [1, 2, 3], [1, 2, 3])
    assert none.top == [] and none.rank == 0
    assert zero.top == [] and zero.rank >= 1
    assert sorted(i for i, _ in all_of_them.top) == list(range(16))


@pytest.mark.parametrize("u", [0.0, 2.0**-24, 1 - 2.0**-24])
def test_extreme_uniforms_never_leave_the_support(u: float) -> None:
    for seed in range(20):
        row = logits_of(seed, 1, 500, 6.0)
        for options in ({}, {"top_k": 1}, {"top_k": 3}, {"top_p": 0.5}):
            logprobs = torch.log_softmax(processed_logits(row, [SamplingParams(**options)]), -1)
            token = int(draw(logprobs, torch.tensor([u])))
            assert 0 <= token < 500 and logprobs[0, token] > -math.inf
    assert int(draw(torch.log(torch.tensor([[0.25, 0.25, 0.25, 0.25]])), torch.tensor([u]))) == (3 if u > 0.5 else 0)


def test_one_hot_logits_are_certain_for_every_uniform() -> None:
    for hot in (0, 77, 159):
        row = torch.full((1, 160), -torch.inf)
        row[0, hot] = 3.0
        for u in (0.0, 0.5, 1 - 2.0**-24):
            assert int(draw(torch.log_softmax(row, -1), torch.tensor([u]))) == hot
        for options in ({}, {"temperature": 0}, {"temperature": 0.3, "top_k": 4}, {"top_p": 0.1}):
            token = sample(row, [SamplingParams(**options)], [1], [1])[0]
            assert (token.token_id, token.raw_logprob, token.processed_logprob) == (hot, 0, 0)


def test_a_row_is_right_at_a_vocabulary_of_150_000() -> None:
    row = logits_of(13, 1, 151_936, 3.0)
    p = torch.softmax(row[0].double(), 0)
    edges = torch.cumsum(p, 0)
    for u in (0.0, 0.1, 0.5, 0.9, 1 - 2.0**-24):
        token = int(draw(torch.log_softmax(row, -1), torch.tensor([u])))
        low = float(edges[token - 1]) if token else 0.0
        assert low - 1e-5 <= u <= float(edges[token]) + 1e-5


def test_prompt_logprobs_are_those_of_the_targets() -> None:
    logits, targets = logits_of(14, 20, 50), torch.arange(20)
    wanted = token_logprobs(logits, targets).tolist()
    for i, (value, rank, top) in enumerate(prompt_logprobs(logits, targets, 4)):
        assert value == wanted[i]
        assert rank == 1 + int((logits[i] > logits[i, i]).sum())
        assert len(top) == 4 and top[0][0] == int(logits[i].argmax())
    assert all(top == [] for _, _, top in prompt_logprobs(logits, targets, 0))
    assert sampling.prompt_logprobs(logits[:0], targets[:0], 1) == []


# -- the kernels against the definition -------------------------------------------------------------------------------

kernels = pytest.mark.skipif(cpu.library() is None, reason="the kernels are switched off, or there is no compiler")


def every_kind(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=(1.0, 0.0, 0.7, 1.3)[i % 4],
            top_k=(0, 0, 5, 20, 3000)[i // 4 % 5],
            top_p=(1.0, 0.9, 0.3)[i % 3],
            min_p=0.05 if i % 5 == 0 else 0.0,
            logprobs=(None, 0, 1, 5, 20)[i % 5],
            logprobs_mode="processed_logprobs" if i % 2 else "raw_logprobs",
            return_sampling_mask=i % 3 != 0,
        )
        for i in range(count)
    ]


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [33, 320, 1024, 5000, 49152])
def test_the_kernels_draw_what_the_definition_draws(vocab: int, dtype: torch.dtype, monkeypatch) -> None:
    logits = (torch.randn(60, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).to(dtype)
    logits[7] = 0.25  # all tokens tie
    params, seeds, at = every_kind(60), range(60), [11] * 60
    found = sample(logits, params, seeds, at)
    report = token_logprobs(logits, torch.tensor([d.token_id for d in found])).tolist()
    assert report == [d.raw_logprob for d in found]
    ids = torch.tensor([d.token_id for d in found])
    assert processed_logprobs(logits, ids, params).tolist() == [d.processed_logprob for d in found]
    monkeypatch.setattr(cpu, "supports", lambda *_: False)
    for i, (ours, wanted) in enumerate(zip(found, sample(logits, params, seeds, at), strict=True)):
        assert (ours.token_id, ours.rank) == (wanted.token_id, wanted.rank), (i, params[i])
        # The definition adds a whole vocabulary in fp32: at top-p's border it may be off by the last tokens of many.
        assert len(set(ours.kept or ()) ^ set(wanted.kept or ())) <= vocab // 10_000, (i, params[i])
        assert ours.raw_logprob == pytest.approx(wanted.raw_logprob, abs=2e-5)
        assert ours.processed_logprob == pytest.approx(wanted.processed_logprob, abs=2e-5)
        assert [t for t, _ in ours.top] == [t for t, _ in wanted.top]
        assert [p for _, p in ours.top] == pytest.approx([p for _, p in wanted.top], abs=2e-5)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_104_a_draw_is_the_same_alone_in_a_batch_and_with_two_threads(dtype: torch.dtype) -> None:
    logits = (torch.randn(40, 5000, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    params = every_kind(40)
    whole = sample(logits, params, range(40), range(40))
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert sample(logits, params, range(40), range(40)) == whole
        for i in range(40):
            assert sample(logits[i : i + 1], params[i : i + 1], [i], [i]) == whole[i : i + 1]
    torch.set_num_threads(before)


@kernels
def test_case_104_a_constrained_neighbour_changes_nobody_and_bf16_means_its_fp32_value() -> None:
    """Rows bound by a grammar or a penalty go through fp32; the bits of a logprob do not depend on that."""
    logits = (torch.randn(30, 3000, generator=torch.Generator().manual_seed(4)) * 3).bfloat16()
    free = [replace(p, return_sampling_mask=False) for p in every_kind(30)]
    assert sample(logits, free, range(30), range(30)) == sample(logits.float(), free, range(30), range(30))
    bound = [replace(p, repetition_penalty=1.5) if i % 7 == 0 else p for i, p in enumerate(free)]
    mixed = sample(logits, bound, range(30), range(30), [[1, 2, 3]] * 30)
    alone = sample(logits, free, range(30), range(30))
    assert [d for i, d in enumerate(mixed) if i % 7] == [d for i, d in enumerate(alone) if i % 7]
    for i in range(0, 30, 7):
        token = torch.tensor([mixed[i].token_id])
        assert token_logprobs(logits[i : i + 1], token).item() == mixed[i].raw_logprob


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_logprob_is_that_of_the_definition(dtype: torch.dtype, monkeypatch) -> None:
    logits = (torch.randn(12, 333, generator=torch.Generator().manual_seed(5)) * 3).to(dtype)
    params = [SamplingParams(temperature=(1.0, 0.7)[i % 2], top_k=(0, 40)[i // 2 % 2]) for i in range(12)]
    ids = logits.float().topk(3).indices[:, 2]
    up = torch.linspace(-1, 1, 12)
    grads = []
    for fast in (True, False):
        if not fast:
            monkeypatch.setattr(cpu, "supports", lambda *_: False)
        leaf = logits.clone().requires_grad_()
        (processed_logprobs(leaf, ids, params) * up).sum().backward()
        assert leaf.grad is not None and leaf.grad.dtype == dtype
        grads.append(leaf.grad.float())
    assert torch.allclose(*grads, atol=1e-6 if dtype is torch.float32 else 4e-3)


@kernels
def test_no_uniform_draws_a_token_without_probability() -> None:
    """Also where rounding leaves the sum of a row short of what the uniform asks for."""
    logits = torch.full((1, 4000), -torch.inf)
    logits[0, [5, 1500, 2047]] = torch.tensor([0.0, -80.0, -90.0])
    for u in (0.0, 0.5, 1 - 2.0**-24):
        rows = np.zeros(1, cpu.ROW)
        rows["temperature"], rows["top_p"], rows["log_min_p"], rows["uniform"] = 1, 1, -math.inf, u
        assert cpu.sample(logits, logits, rows)[0]["token"][0] == 5
