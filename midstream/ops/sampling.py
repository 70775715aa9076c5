"""Sampling and THE log-probability function, shared by the engine and the trainer.

The torch operations here are the definition; on a CPU the kernels of ``ops.cpu`` do the same without copies of the
logits. Dtype and device decide which, so both sides get the same bits.

Randomness is a function of (seed, absolute position): one uniform per token, inverse transform in the order of token
ids. Nothing else (neighbours, time, preemption, pause) can change what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from midstream.errors import MidstreamError
from midstream.ops import cpu
from midstream.types import SampledToken, SamplingParams

_PLAIN = SamplingParams()
_MAX_COUNT = 1 << 30
_COLDEST, _HOTTEST = 1e-6, 1e38
"""Bounds of the temperatures used: logits divided by less overflow (and this one is greedy but for exact ties), and
more is no fp32 number (and this one is uniform)."""


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """One uniform in [0, 1) per (seed, position), fp32 with 24 random bits: SplitMix64 as a counter-based generator."""
    x = np.array(seeds, dtype=np.uint64)
    for mixed_with in (np.array(positions, dtype=np.uint64), np.uint64(0), np.uint64(0)):
        x = x + np.uint64(0x9E3779B97F4A7C15)  # ``mix64`` of many
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31)) ^ mixed_with
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


def constrained_logits(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    history: Sequence[Sequence[int] | None],
    allowed: Sequence[bytes | None],
) -> torch.Tensor:
    """A copy of logits [R, V] with what the grammar does not allow at -inf, and repetition penalties taken.

    ``history``: each row's token ids so far, prompt included; needed for rows with a repetition penalty. ``allowed``:
    a bit for each token id, the least significant first; None: all are.
    """
    logits, vocab = logits.clone(), logits.shape[-1]
    for row, p, bits, ids in zip(logits, params, allowed, history, strict=True):
        if bits is not None:
            flags = np.unpackbits(np.frombuffer(bits, np.uint8), count=vocab, bitorder="little")
            row[torch.from_numpy(flags == 0).to(row.device)] = -torch.inf
        if p.repetition_penalty != 1:
            assert ids is not None, "a repetition penalty needs the tokens so far"
            index = torch.tensor(ids, device=row.device).unique()
            values = row[index]
            row[index] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    return logits


def processed_logits(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    history: Sequence[Sequence[int] | None] | None = None,
    allowed: Sequence[bytes | None] | None = None,
) -> torch.Tensor:
    """Logits [R, V] of the distribution really sampled from: :func:`constrained_logits`, then temperature, min-p, top-k
    and top-p. T = 0 rows: only the first."""
    vocab = logits.shape[-1]
    nothing: list[None] = [None] * len(params)
    if any(allowed or ()) or any(p.repetition_penalty != 1 for p in params):
        logits = constrained_logits(logits, params, history or nothing, allowed or nothing)
    if any(p.temperature not in (0, 1) for p in params):
        temperature = torch.tensor([_divisor(p) for p in params], dtype=logits.dtype, device=logits.device)
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


def _divisor(p: SamplingParams) -> float:
    return min(max(p.temperature, _COLDEST), _HOTTEST) if p.temperature else 1.0


def _rows(params: Sequence[SamplingParams]) -> np.ndarray:
    """How the kernels shall draw from each row; a greedy row's distribution is not truncated."""
    places: dict[int, int] = {}
    which = [places.setdefault(id(p), len(places)) for p in params]
    if len(places) < len(params):  # the samples of a prompt, and often all prompts of a call, have theirs in common
        firsts = {place: p for place, p in zip(which, params, strict=True)}
        return _rows([firsts[place] for place in range(len(places))])[which]
    rows = np.zeros(len(params), cpu.ROW)
    rows["temperature"] = [_divisor(p) for p in params]
    rows["greedy"] = [p.temperature == 0 for p in params]
    rows["top_k"] = [min(p.top_k, _MAX_COUNT) if p.temperature else 0 for p in params]
    rows["top_p"] = [p.top_p if p.temperature else 1.0 for p in params]
    rows["log_min_p"] = [math.log(p.min_p) if p.min_p and p.temperature else -math.inf for p in params]
    rows["wants_rank"] = [p.logprobs is not None for p in params]
    rows["num_top"] = [min(p.logprobs or 0, _MAX_COUNT) for p in params]
    rows["top_of_processed"] = [p.logprobs_mode == "processed_logprobs" for p in params]
    return rows


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ids, rows):  # type: ignore[no-untyped-def]
        logits, ids = logits.contiguous(), ids.contiguous()
        out, kept = cpu.logprobs(logits, ids, rows)
        ctx.save_for_backward(logits, ids, *kept)
        ctx.rows = rows
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        logits, ids, *kept = ctx.saved_tensors
        return cpu.logprobs_backward(grad.contiguous(), logits, ids, ctx.rows, kept), None, None


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Log-probability [R], fp32, of token_ids [R] under logits [R, V]. The one function both sides use."""
    if cpu.supports(logits):
        return _Logprobs.apply(logits, token_ids, _rows([_PLAIN] * len(token_ids)))  # type: ignore[no-any-return]
    return torch.log_softmax(logits.float(), -1).gather(-1, token_ids[:, None]).squeeze(-1)


def processed_logprobs(logits: torch.Tensor, ids: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Log-probability [R] of ids under the distribution sampled from; greedy rows are certain: 0."""
    if cpu.supports(logits):
        out: torch.Tensor = _Logprobs.apply(logits, ids, _rows(params))
    else:
        out = token_logprobs(processed_logits(logits.float(), params), ids)
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
    """Draw one token per row of logits [R, V].

    ``positions`` are the absolute positions (prompt + output) of the tokens to be drawn; ``history`` and ``allowed``
    as in :func:`processed_logits`. Every result carries the raw and the processed log-probability of that very token.
    """
    u = uniforms(seeds, positions)
    masks = list(allowed) if allowed is not None else [None] * len(params)
    if not cpu.supports(logits):
        drawn = _sample(logits.float(), params, u, history, masks)
    else:
        logits = logits.contiguous()
        bound = [i for i, p in enumerate(params) if masks[i] is not None or p.repetition_penalty != 1]
        drawn = _sample_fast(logits, logits, params, u)
        if bound:  # their logits depend on more than the model: drawn again, from a copy that says so
            index = torch.tensor(bound)
            raw, some = logits[index].float(), [params[i] for i in bound]
            past = [history[i] if history is not None else None for i in bound]
            chosen_from = constrained_logits(raw, some, past, [masks[i] for i in bound])
            for i, token in zip(bound, _sample_fast(chosen_from, raw, some, u[index]), strict=True):
                drawn[i] = token
    if not all(math.isfinite(token.raw_logprob) for token in drawn):
        raise MidstreamError("the logits are not finite: the weights hold NaN or infinity; send good ones")
    return drawn


def _sample_fast(
    logits: torch.Tensor, raw: torch.Tensor, params: Sequence[SamplingParams], u: torch.Tensor
) -> list[SampledToken]:
    rows = _rows(params)
    rows["uniform"] = u.numpy()
    rows["num_top"] = np.minimum(rows["num_top"], logits.shape[-1])
    found, ids, logprobs = cpu.sample(logits, raw, rows)
    drawn = [
        SampledToken(token, raw_logprob, processed, rank)
        for raw_logprob, processed, _, _, _, token, rank in found.tolist()
    ]
    if ids.shape[1]:
        for token, p, top_ids, top_logprobs in zip(drawn, params, ids.tolist(), logprobs.tolist(), strict=True):
            pairs = zip(top_ids[: p.logprobs], top_logprobs, strict=False) if p.logprobs else ()
            token.top = [(i, value) for i, value in pairs if i >= 0]
            if p.logprobs and p.temperature == 0 and p.logprobs_mode == "processed_logprobs":
                token.top = [(token.token_id, 0.0)]  # a greedy distribution has one token
    for i, p in enumerate(params):
        if p.return_sampling_mask:
            row, least = logits[i].float() / float(found["temperature"][i]), float(found["least"][i])
            id_of = torch.arange(len(row))
            kept = (row > least) | ((row == least) & (id_of <= int(found["last"][i]))) & row.isfinite()
            drawn[i].kept = kept.nonzero().flatten().tolist() if p.temperature else [drawn[i].token_id]
    return drawn


def _sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    u: torch.Tensor,
    history: Sequence[Sequence[int] | None] | None,
    allowed: Sequence[bytes | None],
) -> list[SampledToken]:
    """The definition of :func:`sample`, for fp32 logits and one uniform [R] for each row."""
    raw = torch.log_softmax(logits, -1)
    chosen_from = processed_logits(logits, params, history, allowed)
    processed = torch.log_softmax(chosen_from, -1)
    greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
    ids = torch.where(greedy, chosen_from.argmax(-1), draw(processed, u.to(logits.device)))
    column = ids[:, None]
    raw_values = raw.gather(-1, column).squeeze(-1).tolist()
    values = torch.where(greedy, 0.0, processed.gather(-1, column).squeeze(-1)).tolist()
    drawn = [SampledToken(*row) for row in zip(ids.tolist(), raw_values, values, strict=True)]
    for i, p in enumerate(params):
        if p.logprobs is not None:
            drawn[i].rank = int((logits[i] > logits[i, ids[i]]).sum()) + 1
        if p.logprobs and p.logprobs_mode == "raw_logprobs":
            drawn[i].top = _top(raw[i], p.logprobs)
        elif p.logprobs and p.temperature == 0:
            drawn[i].top = [(drawn[i].token_id, 0.0)]
        elif p.logprobs:
            drawn[i].top = [pair for pair in _top(processed[i], p.logprobs) if math.isfinite(pair[1])]
        if p.return_sampling_mask:
            kept = chosen_from[i].isfinite().nonzero().flatten().tolist()
            drawn[i].kept = kept if p.temperature else [drawn[i].token_id]
    return drawn


def prompt_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, count: int
) -> list[tuple[float, int, list[tuple[int, float]]]]:
    """(raw logprob, rank, top ``count``) of each target [R] under its logits row [R, V]."""
    values = token_logprobs(logits, targets).tolist()
    ranks = ((logits > logits.gather(-1, targets[:, None])).sum(-1) + 1).tolist()
    tops: list[list[tuple[int, float]]] = [[] for _ in values]
    if count and cpu.supports(logits):
        params = [SamplingParams(temperature=0, logprobs=count)] * len(values)
        logits = logits.contiguous()
        tops = [token.top for token in _sample_fast(logits, logits, params, torch.zeros(len(values)))]
    elif count:
        tops = [_top(row, count) for row in torch.log_softmax(logits.float(), -1)]
    return list(zip(values, ranks, tops, strict=True))
