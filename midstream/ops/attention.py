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
    """:func:`paged_attention` with gradients for q and both caches. The backward is dense, in fp32, in plain torch."""

    @staticmethod
    def forward(ctx, q, key_cache, value_cache, metadata: AttentionMetadata, scale: float):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(q, key_cache, value_cache)
        ctx.layout, ctx.scale = metadata, scale
        return paged_attention(q, key_cache, value_cache, metadata, scale)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, key_cache, value_cache = ctx.saved_tensors
        meta: AttentionMetadata = ctx.layout
        num_requests, width = meta.block_tables.shape
        _, num_kv_heads, head_dim, block_size = key_cache.shape
        group = q.shape[1] // num_kv_heads
        longest = meta.max_seqlen_q
        tables = meta.block_tables.long()
        lengths = (meta.cu_seqlens_q[1:] - meta.cu_seqlens_q[:-1]).long()
        request = torch.repeat_interleave(torch.arange(num_requests), lengths)
        index = torch.arange(q.shape[0]) - meta.cu_seqlens_q[:-1].long()[request]

        def padded(x: torch.Tensor) -> torch.Tensor:  # [T, H, F] → [R, K, G * longest, F]
            out = x.new_zeros(num_requests, longest, num_kv_heads, group, head_dim, dtype=torch.float32)
            out[request, index] = x.float().view(-1, num_kv_heads, group, head_dim)
            return out.permute(0, 2, 3, 1, 4).reshape(num_requests, num_kv_heads, group * longest, head_dim)

        def flat(x: torch.Tensor) -> torch.Tensor:  # inverse of padded
            out = x.view(num_requests, num_kv_heads, group, longest, head_dim).permute(0, 3, 1, 2, 4)
            return out[request, index].reshape(-1, num_kv_heads * group, head_dim)

        keys = key_cache[tables].float()  # [R, W, K, F, S]
        keys = keys.permute(0, 2, 1, 4, 3).reshape(num_requests, num_kv_heads, width * block_size, head_dim)
        values = value_cache[tables].float().permute(0, 2, 1, 3, 4).reshape_as(keys)
        position = (meta.seq_lens.long() - lengths)[:, None] + torch.arange(longest)
        live = torch.arange(width * block_size) <= position.clamp(min=0)[..., None]  # [R, longest, W * S]
        bias = torch.where(live, 0.0, -torch.inf)[:, None, None].expand(-1, -1, group, -1, -1)
        bias = bias.reshape(num_requests, 1, group * longest, width * block_size)
        query, upstream = padded(q), padded(grad)
        p = torch.softmax(query @ keys.transpose(-1, -2) * ctx.scale + bias, -1)
        grad_v = p.transpose(-1, -2) @ upstream
        grad_p = upstream @ values.transpose(-1, -2)
        grad_s = p * (grad_p - (grad_p * p).sum(-1, keepdim=True)) * ctx.scale
        grad_q = flat(grad_s @ keys).to(q.dtype)
        grad_k = grad_s.transpose(-1, -2) @ query

        def scattered(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:  # [R, K, W * S, F] → cache layout
            blocks = x.view(num_requests, num_kv_heads, width, block_size, head_dim).permute(0, 2, 1, 3, 4)
            out = blocks.new_zeros(like.shape[0], num_kv_heads, block_size, head_dim)
            out.index_add_(0, tables.flatten(), blocks.reshape(-1, num_kv_heads, block_size, head_dim))
            return out

        grad_keys = scattered(grad_k, key_cache).transpose(-1, -2).to(key_cache.dtype)
        return grad_q, grad_keys, scattered(grad_v, value_cache).to(value_cache.dtype), None, None
