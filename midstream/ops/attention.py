"""Paged attention: one signature for prefill, decode and the trainer's forward.

A query at position p attends to positions [0, p] of its request, read from fixed blocks in block order. The engine
writes K and V into its cache first; the trainer lays its K and V out in blocks of the same size. Both then call the
same function, so both get the same bits (the block size belongs to the numerics fingerprint).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from midstream.ops import cpu, reference


@dataclass(slots=True)
class AttentionMetadata:
    """Which tokens attend to what. An argument of the forward, never a global.

    slot_mapping [T] int64: cache slot of each token (engine only); block_tables [R, max blocks] int32;
    cu_seqlens_q [R + 1] int32: query tokens of request r are [cu[r], cu[r + 1]); seq_lens [R] int32: context length
    including the queries, which are its last tokens; max_seqlen_q: longest query.
    """

    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_seqlen_q: int
    slot_mapping: torch.Tensor | None = None


def write_kv(
    key_cache: torch.Tensor, value_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write key, value [T, K, F] into cache slots [T]; caches [B, K, F, S] and [B, K, S, F]."""
    if cpu.supports(key_cache, key.shape[2], key_cache.shape[3]):
        cpu.write_kv(key_cache, value_cache, key.contiguous(), value.contiguous(), slots)
    else:
        reference.write_kv(key_cache, value_cache, key, value, slots)


def paged_attention(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, metadata: AttentionMetadata, scale: float
) -> torch.Tensor:
    """q [T, H, F] over the caches → [T, H, F] in q's dtype; sums in fp32."""
    if cpu.supports(q, q.shape[2], key_cache.shape[3]):
        q = q.contiguous()
        out = torch.empty_like(q)
        cpu.paged_attention(
            out,
            q,
            key_cache,
            value_cache,
            metadata.block_tables,
            metadata.cu_seqlens_q,
            metadata.seq_lens,
            scale,
        )
        return out
    return reference.paged_attention(
        q, key_cache, value_cache, metadata.block_tables, metadata.cu_seqlens_q, metadata.seq_lens, scale
    )


class PagedAttention(torch.autograd.Function):
    """:func:`paged_attention` with gradients for q and both caches, computed in fp32."""

    @staticmethod
    def forward(ctx, q, key_cache, value_cache, metadata: AttentionMetadata, scale: float):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(q, key_cache, value_cache)
        ctx.layout, ctx.scale = metadata, scale
        return paged_attention(q, key_cache, value_cache, metadata, scale)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, key_cache, value_cache = ctx.saved_tensors
        meta: AttentionMetadata = ctx.layout
        fast = cpu.supports(q, q.shape[2], key_cache.shape[3])
        twin = cpu.paged_attention_backward if fast else reference.paged_attention_backward
        tables = (meta.block_tables, meta.cu_seqlens_q, meta.seq_lens)
        grads = twin(grad.contiguous(), q, key_cache, value_cache, *tables, ctx.scale)
        return *(g.to(x.dtype) for g, x in zip(grads, ctx.saved_tensors, strict=True)), None, None
