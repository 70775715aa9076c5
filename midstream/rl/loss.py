"""DAPO's loss, and the two reductions it and the optimizer need.

    L = - 1/N  sum_t  w_t * min( r_t A_t,  clip(r_t, 1 - clip_low, 1 + clip_high) A_t )

over all N completion tokens of the batch (token-level mean), where

    r_t = exp(logp_t - prox_t)              the policy being trained against the proximal one: the trainer's own
                                            logprobs at the start of the step
    w_t = min(exp(prox_t - sampler_t), C)   truncated importance weight of the proximal policy against the one that
                                            drew the token, whichever version that was

This is the decoupled form: clipping is measured from where the step starts, and what staleness did to the data is
corrected by a weight, so older data is weighted and not clipped away. With one optimizer step per batch r_t is 1 in
value when the gradient is taken, and the clip bounds only callers that take several. No KL term. For a token drawn
under the weights being trained w_t is exactly 1, because engine and trainer compute the same bits.

Sources: DAPO, arXiv 2503.14476 (clip-higher, token-level mean); AReaL, arXiv 2505.24298 (decoupled objective).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from midstream.errors import InvalidInput

_ROW = 4096


def stable_sum(x: Tensor) -> Tensor:
    """Sum of all elements with the same bits for any number of threads: rows of 4,096, then the sums of the rows.

    A flat ``sum`` splits a large tensor over the threads it has, and its last bits move with their number.
    """
    x = x.reshape(-1)
    while x.numel() > _ROW:
        short = -x.numel() % _ROW
        if short:
            x = torch.cat([x, x.new_zeros(short)])
        x = x.view(-1, _ROW).sum(dim=1)
    return x.sum()


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale all gradients so that their total norm is at most ``max_norm``; returns the norm before.

    Raises ``InvalidInput`` where the norm is not finite, before any parameter has changed.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        raise InvalidInput("no parameter has a gradient; the policy's logprobs do not depend on its parameters")
    norm = torch.stack([stable_sum(g.detach().float().square()) for g in grads]).sum().sqrt().item()
    if not norm < float("inf"):
        raise InvalidInput(f"the gradient's norm is {norm}: the step was not taken; lower lr, or look at the rewards")
    if norm > max_norm:
        for grad in grads:
            grad.mul_(max_norm / (norm + 1e-6))
    return norm


def dapo_loss(
    logprobs: Tensor,
    proximal: Tensor,
    sampler: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    tis_cap: float = 2.0,
    sequence_mask: tuple[float, float] | None = None,
    lengths: list[int] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The *sum* of the loss over T tokens, and sums of what a step reports: the caller divides by the batch's N.

    All tensors are [T] float32: ``logprobs`` with gradient; ``proximal``, ``sampler`` and ``advantages`` without.
    ``sequence_mask`` (low, high) leaves out completions whose geometric mean of proximal / sampler probability is
    outside; ``lengths`` are the completions' token counts, needed for it. Left-out tokens still count in N.

    Reported are the tokens whose gradient the clip switched off (clip_fraction), whose importance weight reached the
    cap (truncated_fraction), which the sequence mask left out (masked_fraction), and importance_weight, ratio, and
    -logp: over tokens drawn from the policy itself a Monte Carlo estimate of its entropy.
    """
    if not logprobs.shape == proximal.shape == sampler.shape == advantages.shape or logprobs.dim() != 1:
        shapes = [tuple(t.shape) for t in (logprobs, proximal, sampler, advantages)]
        raise InvalidInput(f"logprobs, proximal, sampler and advantages must be four equal vectors, got {shapes}")
    proximal, sampler, advantages = proximal.detach(), sampler.detach(), advantages.detach()
    log_weight = proximal - sampler
    weight = log_weight.exp().clamp(max=tis_cap)
    truncated = weight >= tis_cap
    outside = torch.zeros_like(truncated)
    if sequence_mask is not None:
        outside = _outside(log_weight, lengths, sequence_mask)
        weight = weight.masked_fill(outside, 0.0)

    ratio = (logprobs - proximal).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages) * weight
    with torch.no_grad():
        sums = {
            "clip_fraction": (clipped * advantages < ratio * advantages).sum(),
            "truncated_fraction": truncated.sum(),
            "masked_fraction": outside.sum(),
            "importance_weight": stable_sum(weight),
            "ratio": stable_sum(ratio),
            "entropy": -stable_sum(logprobs),
        }
    return stable_sum(per_token), {name: value.item() for name, value in sums.items()}


def _outside(log_weight: Tensor, lengths: list[int] | None, bounds: tuple[float, float]) -> Tensor:
    if lengths is None or sum(lengths) != log_weight.numel():
        raise InvalidInput("sequence_mask needs the lengths of the completions, adding up to the number of tokens")
    low, high = bounds
    means = torch.tensor([float(stable_sum(part)) / part.numel() for part in torch.split(log_weight, lengths)])
    inside = [low <= mean <= high for mean in means.exp().tolist()]
    return ~torch.tensor(inside, device=log_weight.device).repeat_interleave(
        torch.tensor(lengths, device=log_weight.device)
    )
