"""Sampling and THE log-probability function, shared by the engine and the trainer.

Randomness is a function of (seed, absolute position): one uniform per token, inverse transform in the order of token
ids. Nothing else (neighbours, time, preemption, pause) can change what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from midstream.errors import MidstreamError
from midstream.types import SampledToken, SamplingParams, mix64

_COLDEST, _HOTTEST = 1e-6, 1e30
"""Bounds of the temperatures used. Logits divided by less overflow, and the lower one is greedy but for exact ties;
divided by infinity, what a grammar forbids would be NaN."""


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """One uniform in [0, 1) per (seed, position), fp32 with 24 random bits: SplitMix64 as a counter-based generator."""
    x = np.array([mix64(seed) for seed in seeds], dtype=np.uint64) ^ np.array(positions, dtype=np.uint64)
    for _ in range(2):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return torch.from_numpy((x >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24))


def truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Logits [R, V] with everything outside top-k and top-p (both [R]) at -inf; ties go to the lower id.

    top_p keeps the smallest set of most likely tokens whose probability reaches it, counted within the top k.
    """
    ranked, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    limit = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    rank = torch.arange(vocab, device=logits.device)
    ranked = ranked.masked_fill(rank >= limit[:, None], -torch.inf)
    p = torch.softmax(ranked, -1)
    before = torch.cumsum(p, -1) - p
    keep = (before < top_p[:, None]) | (rank == 0) | (top_p >= 1)[:, None]
    ranked = ranked.masked_fill(~keep, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(-1, order, ranked)


def processed_logits(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    history: Sequence[Sequence[int] | None] | None = None,
    allowed: Sequence[bytes | None] | None = None,
) -> torch.Tensor:
    """Logits [R, V] of the distribution really sampled from: what the grammar allows, repetition penalty, temperature,
    min-p, top-k, then top-p. T = 0 rows: only the first two.

    ``history``: each row's token ids so far, prompt included; needed for rows with a repetition penalty. ``allowed``:
    a bit for each token id, the least significant first.
    """
    vocab = logits.shape[-1]
    masks = list(allowed) if allowed is not None else [None] * len(params)
    if any(masks) or any(p.repetition_penalty != 1 for p in params):
        logits = logits.clone()
        for row, p, bits, ids in zip(logits, params, masks, history or masks, strict=True):
            if bits is not None:
                flags = np.unpackbits(np.frombuffer(bits, np.uint8), count=vocab, bitorder="little")
                row[torch.from_numpy(flags == 0).to(row.device)] = -torch.inf
            if p.repetition_penalty != 1:
                assert history is not None and ids is not None, "a repetition penalty needs the tokens so far"
                index = torch.tensor(ids, device=row.device).unique()
                values = row[index]
                row[index] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if any(p.temperature not in (0, 1) for p in params):
        divisors = [min(max(p.temperature, _COLDEST), _HOTTEST) if p.temperature else 1.0 for p in params]
        temperature = torch.tensor(divisors, dtype=logits.dtype, device=logits.device)
        logits = logits / temperature[:, None]
    if any(p.min_p and p.temperature for p in params):
        floors = [math.log(p.min_p) if p.min_p and p.temperature else -math.inf for p in params]
        floor = torch.tensor(floors, dtype=logits.dtype, device=logits.device)[:, None]
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + floor, -torch.inf)
    rows = [i for i, p in enumerate(params) if p.temperature and (p.top_k > 0 or p.top_p < 1)]
    if rows:
        index = torch.tensor(rows, device=logits.device)
        top_k = torch.tensor([min(params[i].top_k, vocab) for i in rows], device=logits.device)
        top_p = torch.tensor([params[i].top_p for i in rows], dtype=logits.dtype, device=logits.device)
        logits = logits.index_copy(0, index, truncate(logits[index], top_k, top_p))
    return logits


def is_plain(p: SamplingParams) -> bool:
    """The distribution sampled from is the model's own: raw and processed logprobs are the same."""
    return p.temperature == 1 and p.top_k <= 0 and p.top_p >= 1 and not p.min_p and p.repetition_penalty == 1


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Log-probability [R] of token_ids [R] under logits [R, V] (fp32). The one function both sides use."""
    return torch.log_softmax(logits, -1).gather(-1, token_ids[:, None]).squeeze(-1)


def processed_logprobs(logits: torch.Tensor, ids: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Log-probability [R] of ids under the distribution sampled from; greedy rows are certain: 0."""
    out = token_logprobs(processed_logits(logits, params), ids)
    if any(p.temperature == 0 for p in params):
        greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
        out = torch.where(greedy, 0.0, out)
    return out


def draw(logprobs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Inverse transform: first id [R] whose cumulative probability exceeds u [R], in the order of ids."""
    cumulative = torch.cumsum(torch.exp(logprobs), -1)
    total = cumulative[:, -1:]
    target = torch.minimum(u[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def _top(logprobs: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """The ``count`` most likely (id, logprob), ties in the order of ids."""
    values, ids = torch.sort(logprobs, descending=True, stable=True)
    return list(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    history: Sequence[Sequence[int] | None] | None = None,
    allowed: Sequence[bytes | None] | None = None,
) -> list[SampledToken]:
    """Draw one token per row of logits [R, V] (fp32).

    ``positions`` are the absolute positions (prompt + output) of the tokens to be drawn; ``history`` and ``allowed``
    as in :func:`processed_logits`. Every result carries the raw and the processed log-probability of that very token.
    """
    raw = torch.log_softmax(logits, -1)
    plain = all(map(is_plain, params)) and not any(allowed or ())
    chosen_from = logits if plain else processed_logits(logits, params, history, allowed)
    processed = raw if plain else torch.log_softmax(chosen_from, -1)
    ids = draw(processed, uniforms(seeds, positions).to(logits.device))
    if not plain:
        greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
        ids = torch.where(greedy, chosen_from.argmax(-1), ids)
    if not bool(torch.isfinite(raw.amax(-1)).all()):
        raise MidstreamError("the logits are not finite: the weights hold NaN or infinity; send good ones")
    column = ids[:, None]
    raw_values = raw.gather(-1, column).squeeze(-1).tolist()
    values = raw_values
    if not plain:
        values = torch.where(greedy, 0.0, processed.gather(-1, column).squeeze(-1)).tolist()
    drawn = [SampledToken(*row) for row in zip(ids.tolist(), raw_values, values, strict=True)]
    wanted = [i for i, p in enumerate(params) if p.logprobs is not None]
    if wanted:
        index = torch.tensor(wanted, device=logits.device)
        ranks = ((logits[index] > logits[index].gather(-1, column[index])).sum(-1) + 1).tolist()
        for i, rank in zip(wanted, ranks, strict=True):
            drawn[i].rank = rank
            count = params[i].logprobs
            if count and params[i].logprobs_mode == "raw_logprobs":
                drawn[i].top = _top(raw[i], count)
            elif count and params[i].temperature == 0:
                drawn[i].top = [(drawn[i].token_id, 0.0)]  # a greedy distribution has one token
            elif count:
                drawn[i].top = _top(processed[i], count)
    for i, p in enumerate(params):
        if p.return_sampling_mask:
            kept = chosen_from[i].isfinite().nonzero().flatten().tolist()
            drawn[i].kept = kept if p.temperature else [drawn[i].token_id]
    return drawn


def prompt_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, count: int
) -> list[tuple[float, int, list[tuple[int, float]]]]:
    """(raw logprob, rank, top ``count``) of each target [R] under its logits row [R, V]."""
    logprobs = torch.log_softmax(logits, -1)
    column = targets[:, None]
    values = logprobs.gather(-1, column).squeeze(-1).tolist()
    ranks = ((logits > logits.gather(-1, column)).sum(-1) + 1).tolist()
    return [
        (value, rank, _top(row, count) if count else [])
        for value, rank, row in zip(values, ranks, logprobs, strict=True)
    ]
