from __future__ import annotations

import math

import pytest
import torch

import fakes_rl  # noqa: F401  (one torch thread)
from midstream.errors import InvalidInput
from midstream.rl.loss import clip_grad_norm, dapo_loss, stable_sum


def vectors(length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logprobs, shift, drift, advantages = torch.randn(4, length, generator=rng)
    logprobs = -logprobs.abs()
    return logprobs.requires_grad_(), logprobs.detach() - 0.3 * shift, logprobs.detach() - drift, advantages


def by_hand(logp: list[float], prox: list[float], sampler: list[float], adv: list[float]) -> float:
    total = 0.0
    for x, p, s, a in zip(logp, prox, sampler, adv, strict=True):
        ratio, weight = math.exp(x - p), min(math.exp(p - s), 2.0)
        total -= min(ratio * a, min(max(ratio, 0.8), 1.28) * a) * weight
    return total


def test_the_loss_is_the_formula() -> None:
    logprobs, proximal, sampler, advantages = vectors(200)
    loss, sums = dapo_loss(logprobs, proximal, sampler, advantages)
    lists = [t.tolist() for t in (logprobs, proximal, sampler, advantages)]
    assert loss.item() == pytest.approx(by_hand(*lists), rel=1e-4)
    assert 0 < sums["clip_fraction"] < 200 and 0 < sums["truncated_fraction"] < 200


def test_on_the_current_policy_it_is_the_plain_policy_gradient() -> None:
    """Equal bits on both sides: every weight and ratio is exactly 1, and the gradient is exactly -A."""
    logprobs, _, _, advantages = vectors(50)
    loss, sums = dapo_loss(logprobs, logprobs.detach(), logprobs.detach(), advantages)
    loss.backward()
    assert logprobs.grad is not None and torch.equal(logprobs.grad, -advantages)
    assert sums["ratio"] == sums["importance_weight"] == 50
    assert sums["clip_fraction"] == sums["truncated_fraction"] == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "has_gradient"),
    [
        (1.27, 1.0, True),
        (1.29, 1.0, False),
        (0.79, 1.0, True),
        (0.79, -1.0, False),
        (0.81, -1.0, True),
        (1.5, -1.0, True),
    ],
)
def test_clip_higher_stops_the_gradient_on_one_side_only(ratio: float, advantage: float, has_gradient: bool) -> None:
    proximal = torch.tensor([-1.0])
    logprobs = (proximal + math.log(ratio)).requires_grad_()
    loss, sums = dapo_loss(logprobs, proximal, proximal, torch.tensor([advantage]))
    loss.backward()
    assert logprobs.grad is not None and bool(logprobs.grad != 0) == has_gradient
    assert sums["clip_fraction"] == (not has_gradient)


def test_importance_weights_are_truncated_above_only() -> None:
    sampler = torch.tensor([-3.0, -1.0, -0.5])
    proximal = torch.tensor([-1.0, -1.0, -3.0])
    logprobs = proximal.clone().requires_grad_()
    loss, sums = dapo_loss(logprobs, proximal, sampler, torch.ones(3), tis_cap=2.0)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-2.0, -1.0, -math.exp(-2.5)])
    assert sums["truncated_fraction"] == 1


def test_the_sequence_mask_leaves_out_whole_completions() -> None:
    sampler = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    proximal = torch.tensor([-1.5, -0.5, -1.1, -1.0])  # geometric means: exp(0) = 1, exp(-0.05) < 0.99
    logprobs = proximal.clone().requires_grad_()
    loss, sums = dapo_loss(
        logprobs, proximal, sampler, torch.ones(4), sequence_mask=(0.99, 1.01), lengths=[2, 2]
    )  # fmt: skip
    loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad != 0).tolist() == [True, True, False, False]
    assert sums["masked_fraction"] == 2
    with pytest.raises(InvalidInput, match="lengths"):
        dapo_loss(logprobs, proximal, sampler, torch.ones(4), sequence_mask=(0.99, 1.01), lengths=[3])


def test_micro_batches_add_up_to_the_batch() -> None:
    logprobs, proximal, sampler, advantages = vectors(64)
    whole, sums = dapo_loss(logprobs, proximal, sampler, advantages)
    cuts = [(0, 20), (20, 64)]
    parts = [dapo_loss(logprobs[a:b], proximal[a:b], sampler[a:b], advantages[a:b]) for a, b in cuts]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), rel=1e-5)
    assert {name: sum(part[name] for _, part in parts) for name in sums} == pytest.approx(sums, rel=1e-5)


def test_unequal_lengths_are_an_error() -> None:
    with pytest.raises(InvalidInput, match="equal vectors"):
        dapo_loss(torch.zeros(3), torch.zeros(3), torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 1_300_000])
def test_stable_sum_has_the_same_bits_for_any_number_of_threads(size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(stable_sum(x).item())
    finally:
        torch.set_num_threads(1)
    assert results[0] == results[1] == pytest.approx(x.double().sum().item(), abs=1e-2)


def test_stable_sum_has_the_gradient_of_a_sum() -> None:
    x = torch.randn(5000, requires_grad=True)
    stable_sum(x).backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(5000))


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_grad_norm_equals_torch(max_norm: float) -> None:
    ours = [torch.nn.Parameter(torch.randn(n)) for n in (3, 5000)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn(a.shape)
        b.grad = a.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm).item()
    assert clip_grad_norm(ours, max_norm) == pytest.approx(expected, rel=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad)


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(InvalidInput, match="no parameter has a gradient"):
        clip_grad_norm([parameter], 1.0)
    parameter.grad = torch.tensor([float("nan"), 0.0])
    with pytest.raises(InvalidInput, match="nan"):
        clip_grad_norm([parameter], 1.0)
