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

import torch

from midstream.errors import InvalidInput
from midstream.models.llama import Llama
from midstream.models.weights import LayerWeights, ModelWeights
from midstream.ops.attention import AttentionMetadata, PagedAttention, Placement
from midstream.ops.layers import split_rope
from midstream.ops.sampling import processed_logprobs
from midstream.types import SamplingParams

Sequences = Sequence[tuple[list[int], list[list[int]]]]
"""(prompt, its completions) each."""

_LOGIT_BYTES = 64 << 20
"""Logits held at once: the head runs over slices of rows, so that a batch's logits never stand whole in memory."""


@dataclass(slots=True)
class PackedBatch:
    """Prompts and completions in one flat row of tokens, for one forward.

    input_ids, positions [T]; ``placement``: which token's K and V stand in which slot of which block; rows [N]: the
    token whose hidden state predicts each target; targets [N]: every completion token, in order.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    placement: Placement
    metadata: AttentionMetadata
    rows: torch.Tensor
    targets: torch.Tensor


def pack(sequences: Sequences, block_size: int) -> PackedBatch:
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
    width = max(map(len, tables))
    slots = [b * block_size + i for b, tokens in enumerate(blocks) for i in range(len(tokens))]
    return PackedBatch(
        input_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        placement=Placement(
            torch.tensor(slots), torch.tensor(list(itertools.chain(*blocks))), len(blocks), block_size
        ),
        metadata=AttentionMetadata(
            block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
            cu_seqlens_q=torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        ),
        rows=torch.tensor(rows),
        targets=torch.tensor(targets),
    )


def sequence_logprobs(
    model: Llama, weights: ModelWeights, batch: PackedBatch, params: SamplingParams
) -> torch.Tensor:
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

    def attend(layer: int, qkv: torch.Tensor, of: LayerWeights) -> torch.Tensor:
        q, k, v = split_rope(qkv, model.rope, batch.positions, of.q_norm, of.k_norm)
        out: torch.Tensor = PagedAttention.apply(q, k, v, batch.placement, batch.metadata, model.scale)
        return out.flatten(1)

    hidden = model.forward(weights, batch.input_ids, attend)
    step = max(_LOGIT_BYTES // (4 * model.config.vocab_size), 1)
    out = []
    for rows, ids in zip(batch.rows.split(step), batch.targets.split(step), strict=True):
        logits = model.logits(weights, hidden.index_select(0, rows))
        out.append(processed_logprobs(logits, ids, [params] * len(ids)))
    return torch.cat(out)
