"""Mixture of experts: the definition against a plain loop, and a token's bits against company, order and chunking."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from midstream.ops import cpu, moe
from midstream.ops.layers import LinearWeight
from midstream.parallel.expert import OneRank

EXPERTS, HIDDEN, INNER = 8, 64, 48


@pytest.fixture(autouse=True, params=["fast", "reference"])
def twins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "reference":
        monkeypatch.setattr(cpu, "library", lambda: None)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def layer(dtype: torch.dtype, grad: bool = False) -> tuple[list[torch.Tensor], list[moe.Expert]]:
    """gate_up and down of each expert, plain; and as the product likes them."""
    generator = torch.Generator().manual_seed(3)
    plain = []
    for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER)) * EXPERTS:
        plain.append((0.2 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_(grad))
    pairs = zip(plain[::2], plain[1::2], strict=True)
    return plain, [moe.Expert(LinearWeight(a, keep_plain=grad), LinearWeight(b, keep_plain=grad)) for a, b in pairs]


def mix(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, experts: list[moe.Expert]) -> torch.Tensor:
    exchange = OneRank(EXPERTS)
    rows, counts, back = exchange.dispatch(x, ids)
    return moe.combine(exchange.combine(moe.run_experts(rows, counts, experts), back), shares)


def inputs(tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, HIDDEN, generator=generator).to(dtype),
        torch.randn(tokens, EXPERTS, generator=generator).to(dtype),
    )


@pytest.mark.parametrize("normalise", [True, False])
def test_the_most_likely_are_chosen_and_ties_go_to_the_lower_id(normalise: bool) -> None:
    logits = torch.tensor(
        [[0.0, 2, 1, 2, 2, 0, 0, 0], [5, 0, 0, 0, 0, 0, 0, 5], [0] * 8, [-200, 0, -300, -250] + [-300] * 4]
    )
    ids, shares = moe.route(logits, 3, normalise)
    assert ids.tolist() == [[1, 3, 4], [0, 1, 7], [0, 1, 2], [0, 1, 2]]  # -200 and less: all of them 0 in fp32
    likely = torch.softmax(logits, -1).gather(1, ids)
    assert torch.allclose(shares, likely / likely.sum(1, keepdim=True) if normalise else likely)
    assert shares.dtype == torch.float32 and moe.route(logits.bfloat16(), 3, normalise)[1].dtype == torch.float32


def test_given_experts_are_taken_and_weighed_by_the_routers_own_logits() -> None:
    _, logits = inputs(6, torch.float32)
    own, shares = moe.route(logits, 2, True)
    again = moe.route(logits, 2, True, own)
    assert torch.equal(again[0], own) and torch.equal(again[1], shares)
    given = own.clone()
    given[2:4] = torch.tensor([0, 5])
    given[4:] = -1
    ids, other = moe.route(logits, 2, True, given)
    assert torch.equal(ids[2:4], given[2:4])
    rows = [0, 1, 4, 5]
    assert torch.equal(ids[rows], own[rows]) and torch.equal(other[rows], shares[rows])
    wanted = torch.softmax(logits[2:4][:, [0, 5]], -1)
    assert torch.allclose(other[2:4], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_that_of_a_plain_loop_over_experts_in_order(dtype: torch.dtype) -> None:
    plain, experts = layer(dtype)
    x, logits = inputs(40, dtype)
    ids, shares = moe.route(logits, 3, True)
    found = mix(x, ids, shares, experts)
    wanted = torch.zeros(40, HIDDEN, dtype=torch.float64)
    for e, (gate_up, down) in enumerate(zip(plain[::2], plain[1::2], strict=True)):
        gate, up = (x.double() @ gate_up.double().t()).chunk(2, -1)
        share = torch.where(ids == e, shares, 0.0).sum(1, keepdim=True).double()
        wanted += share * ((torch.nn.functional.silu(gate) * up) @ down.double().t())
    assert (found.double() - wanted).abs().max() < (1e-5 if dtype == torch.float32 else 0.05)
    assert found.dtype == dtype


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_bits_depend_on_that_token_alone(dtype: torch.dtype) -> None:
    _, experts = layer(dtype)
    x, logits = inputs(130, dtype)
    ids, shares = moe.route(logits, 3, True)
    whole = mix(x, ids, shares, experts)
    for rows in (slice(0, 1), slice(5, 6), slice(3, 20), slice(64, 130), slice(129, 130)):
        part_ids, part_shares = moe.route(logits[rows], 3, True)
        assert torch.equal(part_ids, ids[rows]) and torch.equal(part_shares, shares[rows])
        assert torch.equal(mix(x[rows], part_ids, part_shares, experts), whole[rows])
    order = torch.randperm(130, generator=torch.Generator().manual_seed(1))
    assert torch.equal(mix(x[order], ids[order], shares[order], experts), whole[order])
    one_expert = torch.zeros(130, 3, dtype=torch.int64) + torch.tensor([2, 3, 7])
    assert torch.equal(mix(x, one_expert, shares, experts)[7:8], mix(x[7:8], one_expert[7:8], shares[7:8], experts))
    assert mix(x[:0], ids[:0], shares[:0], experts).shape == (0, HIDDEN)


def test_gradients_are_those_of_the_plain_loop() -> None:
    plain, experts = layer(torch.float32, grad=True)
    x, logits = (t.requires_grad_() for t in inputs(17, torch.float32))
    ids, shares = moe.route(logits, 2, True)
    upstream = torch.randn(17, HIDDEN, generator=torch.Generator().manual_seed(9))
    wrt = [x, logits, *plain]
    found = torch.autograd.grad((mix(x, ids, shares, experts) * upstream).sum(), wrt, allow_unused=True)
    out = torch.zeros(17, HIDDEN)
    likely = torch.softmax(logits, -1)
    for e, (gate_up, down) in enumerate(zip(plain[::2], plain[1::2], strict=True)):
        gate, up = (x @ gate_up.t()).chunk(2, -1)
        taken = (ids == e).any(1, keepdim=True)
        share = torch.where(taken, likely[:, e : e + 1], 0.0) / likely.gather(1, ids).sum(1, keepdim=True)
        out = out + share * ((torch.nn.functional.silu(gate) * up) @ down.t())
    wanted = torch.autograd.grad((out * upstream).sum(), wrt)
    for a, b in zip(found, wanted, strict=True):
        assert (torch.zeros_like(b) if a is None else a).sub(b).norm() <= 1e-4 * b.norm() + 1e-6


def test_outputs_are_added_in_order_in_fp32_and_rounded_once() -> None:
    ones = torch.ones(1, 3)
    in_order = torch.tensor([[[1e8], [1.0], [-1e8]]])
    assert moe.combine(in_order, ones).item() == 0 and moe.combine(in_order.flip(1)[:, [0, 2, 1]], ones).item() == 1
    small = torch.tensor([[[256.0], [1.0], [1.0]]], dtype=torch.bfloat16)
    assert moe.combine(small, ones).item() == 258 and (small[0, 0] + small[0, 1]).item() == 256
    assert moe.combine(small, torch.full((1, 3), 1 / 3)).dtype == torch.bfloat16
