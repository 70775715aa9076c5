"""The dense forward over whole sequences: prompts with their completions, packed into one row of tokens.

This is how a trainer, or a checker, computes what the engine computed token by token: the same model code, attention
and log-probability function; only the way K and V are laid out differs. A prompt is computed once and shared by its
completions: a completion's block table starts with the prompt's full blocks and a copy of the partial one, just as
the engine forks its samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from midstream.errors import InvalidInput
from midstream.models.llama import Llama
from midstream.models.weights import LayerWeights, ModelWeights
from midstream.ops.attention import AttentionMetadata, PagedAttention, Placement
from midstream.ops.layers import split_rope
from midstream.ops.sampling import processed_logprobs
from midstream.types import RoutedExperts, SamplingParams

Sequences = Sequence[tuple[list[int], list[list[int]]]]
"""(prompt, its completions) each."""
Routes = Sequence[Sequence[RoutedExperts | None]]
"""For each completion of :data:`Sequences` the experts to take; its tokens without any choose for themselves. A prompt
takes those of its first completion."""

_LOGIT_BYTES = 64 << 20
"""Logits held at once: the head runs over slices of rows, so that a batch's logits never stand whole in memory."""


@dataclass(slots=True)
class PackedBatch:
    """Prompts and completions in one flat row of tokens, for one forward.

    input_ids, positions [T]; ``placement``: which token's K and V stand in which slot of which block; rows [N]: the
    token whose hidden state predicts each target; targets [N]: every completion token, in order; routes [T, MoE layers,
    k]: the experts to take, negative where a token chooses for itself.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    placement: Placement
    metadata: AttentionMetadata
    rows: torch.Tensor
    targets: torch.Tensor
    routes: torch.Tensor | None = None


def pack(sequences: Sequences, block_size: int, routes: Routes | None = None) -> PackedBatch:
    """Lay out a batch. A completion's last token is a target but never an input. Raises ``InvalidInput``."""
    if not all(prompt for prompt, _ in sequences) or not any(itertools.chain.from_iterable(c for _, c in sequences)):
        raise InvalidInput("sequences: each needs a prompt, and all of them together at least one completion token")
    ids: list[int] = []
    positions: list[int] = []
    blocks: list[list[int]] = []
    tables: list[list[int]] = []
    lengths: list[int] = []
    seq_lens: list[int] = []
    rows: list[int] = []
    targets: list[int] = []

    def add(tokens: list[int], start: int, shared: list[int], context: list[int]) -> list[int]:
        """Queries ``tokens`` at positions from ``start``, after ``shared`` blocks and ``context`` tokens."""
        first = len(ids)
        ids.extend(tokens)
        positions.extend(range(start, start + len(tokens)))
        own = context + list(range(first, first + len(tokens)))
        table = list(shared)
        for at in range(0, len(own), block_size):
            table.append(len(blocks))
            blocks.append(own[at : at + block_size])
        tables.append(table)
        lengths.append(len(tokens))
        seq_lens.append(start + len(tokens))
        return table

    for prompt, completions in sequences:
        first = len(ids)
        last = first + len(prompt) - 1
        num_full = len(prompt) // block_size
        table = add(prompt, 0, [], [])
        tail = list(range(first + num_full * block_size, first + len(prompt)))
        for completion in completions:
            at = len(ids)
            if len(completion) > 1:
                add(completion[:-1], len(prompt), table[:num_full], tail)
            rows += [last, *range(at, at + len(completion) - 1)][: len(completion)]  # an empty one has no target
            targets += completion
    if foreign := ({*map(type, ids), *map(type, targets)} - {int}):
        raise InvalidInput(f"sequences: token ids must be int, got {', '.join(sorted(t.__name__ for t in foreign))}")
    known = [r for of in routes or () for r in of if r is not None]
    chosen = torch.from_numpy(_chosen(sequences, routes, known[0])) if routes and known else None
    width = max(map(len, tables))
    slots = [b * block_size + i for b, tokens in enumerate(blocks) for i in range(len(tokens))]
    return PackedBatch(
        input_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        placement=Placement(torch.tensor(slots), torch.tensor(list(itertools.chain(*blocks))), len(blocks), block_size),
        metadata=AttentionMetadata(
            block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
            cu_seqlens_q=torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        ),
        rows=torch.tensor(rows),
        targets=torch.tensor(targets),
        routes=chosen,
    )


def _chosen(sequences: Sequences, routes: Routes, like: RoutedExperts) -> np.ndarray:
    """The experts [T, MoE layers, k] of every input token, ascending; -1 where there are none."""

    def part(of: RoutedExperts | None, start: int, end: int) -> np.ndarray:
        out = np.full((max(end - start, 0), like.num_layers, like.top_k), -1, np.int64)
        if of is not None and len(out):
            if (of.num_layers, of.top_k) != (like.num_layers, like.top_k):
                raise InvalidInput("routed experts: all must be of one model's layers and number of experts a token")
            ids = np.frombuffer(of.part(start, end).data, "<u2").reshape(-1, like.num_layers, like.top_k)
            at = max(of.start - start, 0)
            out[at : at + len(ids)] = np.sort(ids, -1)
        return out

    parts = []
    for (prompt, completions), given in zip(sequences, routes, strict=True):
        parts.append(part(given[0] if given else None, 0, len(prompt)))
        for completion, of in zip(completions, given, strict=True):
            parts.append(part(of, len(prompt), len(prompt) + len(completion) - 1))
    return np.concatenate(parts)


def sequence_logprobs(model: Llama, weights: ModelWeights, batch: PackedBatch, params: SamplingParams) -> torch.Tensor:
    """Log-probability [N] (fp32) of every completion token under the distribution ``params`` samples from.

    Differentiable where the weights are. Bit for bit what the engine reports as processed logprobs; with default
    params, the raw ones. Raises ``InvalidInput`` for a repetition penalty or a grammar (they need more than logits),
    and for ids or lengths that the model does not have.
    """
    if params.repetition_penalty != 1 or params.structured_outputs is not None:
        raise InvalidInput("logprobs of whole sequences: repetition_penalty must be 1 and structured_outputs None")
    vocab, longest = model.config.vocab_size, model.config.max_position_embeddings
    outside = [t for t in torch.cat((batch.input_ids, batch.targets)).unique().tolist() if not 0 <= t < vocab]
    if outside:
        raise InvalidInput(f"sequences: token ids {outside[:8]} are not in [0, {vocab})")
    if int(batch.positions.max()) >= longest:
        raise InvalidInput(f"sequences: {int(batch.positions.max()) + 2} tokens; the model has {longest} positions")

    c, given = model.config, batch.routes
    if given is not None and given.numel():
        shape = (len(c.moe_layers), c.num_experts_per_tok)
        if given.shape[1:] != shape or int(given.max()) >= c.num_experts:
            raise InvalidInput(
                f"routed experts: ids up to {int(given.max())} in {tuple(given.shape[1:])} (layers, experts a token); "
                f"the model has {c.num_experts} experts in {shape}"
            )

    def attend(layer: int, qkv: torch.Tensor, of: LayerWeights) -> torch.Tensor:
        q, k, v = split_rope(qkv, model.rope, batch.positions, of.q_norm, of.k_norm)
        out: torch.Tensor = PagedAttention.apply(q, k, v, batch.placement, batch.metadata, model.scale)
        return out.flatten(1)

    hidden = model.forward(weights, batch.input_ids, attend, given=given)
    step = max(_LOGIT_BYTES // (4 * model.config.vocab_size), 1)
    out = []
    for rows, ids in zip(batch.rows.split(step), batch.targets.split(step), strict=True):
        logits = model.logits(weights, hidden.index_select(0, rows))
        out.append(processed_logprobs(logits, ids, [params] * len(ids)))
    return torch.cat(out)
