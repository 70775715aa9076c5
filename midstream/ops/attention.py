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
    including the queries, which are its last tokens.
    """

    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor | None = None


def write_kv(
    key_cache: torch.Tensor, value_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write key, value [T, K, F] into cache slots [T]; caches [B, K, F, S] and [B, K, S, F]."""
    if cpu.supports(key_cache, key.shape[2], key_cache.shape[3]):  # in a layout of the kernels' own, of the same size
        cpu.write_kv(key_cache, value_cache, key.contiguous(), value.contiguous(), slots)
    else:
        reference.write_kv(key_cache, value_cache, key, value, slots)


def paged_attention(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, metadata: AttentionMetadata, scale: float
) -> torch.Tensor:
    """q [T, H, F] over the caches → [T, H, F] in q's dtype; sums in fp32."""
    if cpu.supports(q, q.shape[2], key_cache.shape[3]):
        q, twin = q.contiguous(), cpu.paged_attention
    else:
        twin = reference.paged_attention
    tables = (metadata.block_tables, metadata.cu_seqlens_q, metadata.seq_lens)
    return twin(q, key_cache, value_cache, *tables, scale)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where keys and values of a flat row of tokens stand: slot ``slots[i]`` of ``num_blocks`` blocks of ``block_size``
    holds token ``tokens[i]`` (both [N] int64). A token may stand in several slots: a copied block."""

    slots: torch.Tensor
    tokens: torch.Tensor
    num_blocks: int
    block_size: int


class PagedAttention(torch.autograd.Function):
    """:func:`paged_attention` of q [T, H, F] over k, v [T, K, F], laid out by a Placement; gradients in fp32 sums."""

    @staticmethod
    def forward(ctx, q, k, v, placement: Placement, metadata: AttentionMetadata, scale: float):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(q, k, v)
        ctx.placement, ctx.layout, ctx.scale = placement, metadata, scale
        p, (_, kv_heads, dim) = placement, k.shape
        keys = k.new_empty(p.num_blocks, kv_heads, dim, p.block_size)
        values = v.new_empty(p.num_blocks, kv_heads, p.block_size, dim)
        write_kv(keys, values, k[p.tokens], v[p.tokens], p.slots)
        return paged_attention(q, keys, values, metadata, scale)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v = ctx.saved_tensors
        p: Placement = ctx.placement
        meta: AttentionMetadata = ctx.layout
        twin = cpu.paged_attention_backward if cpu.supports(q, q.shape[2]) else reference.paged_attention_backward
        shape = (p.num_blocks, p.block_size, *k.shape[1:])

        def placed(x: torch.Tensor) -> torch.Tensor:  # [T, K, F] → [B, S, K, F]
            out = x.new_zeros(p.num_blocks * p.block_size, *x.shape[1:])
            return out.index_copy_(0, p.slots, x[p.tokens]).view(shape)

        tables = (meta.block_tables, meta.cu_seqlens_q, meta.seq_lens)
        grad_q, *grads = twin(grad.contiguous(), q.contiguous(), placed(k), placed(v), *tables, ctx.scale)
        grad_k, grad_v = (
            torch.zeros_like(k, dtype=torch.float32).index_add_(0, p.tokens, g.flatten(0, 1)[p.slots]).to(k.dtype)
            for g in grads
        )
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None
