"""The definition of each operation in plain torch, on any device. The fast twins are tested against these.

Shapes: T tokens, H query heads, K kv heads, F head dim, B blocks, S block size, R requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from midstream.ops.layers import Rope


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract of ``ops.layers.add_rms_norm``."""
    total = x if y is None else x + y
    return total, F.rms_norm(total, weight.shape, weight, eps)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Contract of ``ops.layers.silu_and_mul``."""
    gate, up = x.float().chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


_MAX_ROWS = 8192


def linear(x: torch.Tensor, weight: torch.Tensor, tile: int = 0) -> torch.Tensor:
    """x [T, K] @ weight [N, K]^T, in calls of exactly ``tile`` rows; 0: all rows at once, at most 8,192; -1: so too,
    but a row alone, which takes another path in the library, gets company."""
    rows = x.shape[0]
    if tile > 0:
        padded = F.pad(x, (0, 0, 0, -rows % tile))
        return torch.cat([F.linear(part.contiguous(), weight) for part in padded.split(tile)])[:rows]
    if rows > _MAX_ROWS:
        return torch.cat([linear(part, weight, tile) for part in x.split(_MAX_ROWS)])
    if tile < 0 and rows == 1:
        return F.linear(F.pad(x, (0, 0, 0, 1)), weight)[:1]
    return F.linear(x, weight)


def split_rope(
    qkv: torch.Tensor,
    rope: Rope,
    positions: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contract of ``ops.layers.split_rope``."""
    heads = (rope.num_heads, rope.num_kv_heads, rope.num_kv_heads)
    q, k, v = qkv.view(len(qkv), sum(heads), -1).split(heads, 1)
    if q_norm is not None and k_norm is not None:
        q = F.rms_norm(q, q_norm.shape, q_norm, rope.eps)
        k = F.rms_norm(k, k_norm.shape, k_norm, rope.eps)
    cos, sin = rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1)
    a, b = torch.cat((q, k), 1).float().chunk(2, -1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(qkv.dtype)
    q, k = rotated.split(heads[:2], 1)
    return q, k, v


def write_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Put key, value [T, K, F] into slots [T] (block * S + offset) of the caches [B, K, F, S] and [B, K, S, F]."""
    block_size = key_cache.shape[3]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    key_cache[block, :, :, offset] = key
    value_cache[block, :, offset, :] = value


def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention [T, H, F] of each request's newest tokens over its cached context.

    Sums run over whole blocks in block order; positions beyond a query's own are replaced (never multiplied by zero,
    so that whatever an unwritten slot holds cannot reach the result). A batch with longer neighbours only adds
    exact zeros at the end.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, _, block_size = key_cache.shape
    group = num_heads // num_kv_heads
    lengths = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).long()
    request = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), lengths)
    index = torch.arange(num_tokens, device=q.device) - cu_seqlens_q[:-1].long()[request]
    valid = seq_lens.long()[request] - lengths[request] + index + 1
    tables = block_tables.long()[request]
    num_blocks = int((int(valid.max()) + block_size - 1) // block_size) if num_tokens else 0
    query = (q.float() * scale).view(num_tokens, num_kv_heads, group, head_dim)
    lane = torch.arange(block_size, device=q.device)
    scores = []
    for j in range(num_blocks):
        keys = key_cache[tables[:, j]].float()  # [T, K, F, S]
        products = (query.unsqueeze(-1) * keys.unsqueeze(2)).sum(3)  # [T, K, G, S]
        live = (j * block_size + lane < valid[:, None])[:, None, None, :]
        scores.append(torch.where(live, products, -torch.inf))
    stacked = torch.stack(scores, -2) if scores else query.new_empty(num_tokens, num_kv_heads, group, 0, block_size)
    peak = stacked.amax((-1, -2), keepdim=True) if scores else 0.0
    weights = torch.exp(stacked - peak)
    out = torch.zeros_like(query)
    total = query.new_zeros(num_tokens, num_kv_heads, group, 1)
    for j in range(num_blocks):
        values = value_cache[tables[:, j]].float()  # [T, K, S, F]
        live = (j * block_size + lane < valid[:, None])[:, None, :, None]
        values = torch.where(live, values, 0.0)
        p = weights[..., j, :]
        total += p.sum(-1, keepdim=True)
        out += (p.unsqueeze(-1) * values.unsqueeze(2)).sum(3)
    return (out / total).view(num_tokens, num_heads, head_dim).to(q.dtype)


def paged_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q [T, H, F] and of keys and values [B, S, K, F] (a block's tokens, in order), all in fp32, for the
    gradient [T, H, F] of :func:`paged_attention`.

    Dense and in any order: exactness is asked of the forward only.
    """
    num_requests, width = block_tables.shape
    num_blocks, block_size, num_kv_heads, head_dim = keys.shape
    group, context = q.shape[1] // num_kv_heads, width * block_size
    tables = block_tables.long()
    lengths = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).long()
    longest = int(lengths.max())
    request = torch.repeat_interleave(torch.arange(num_requests, device=q.device), lengths)
    index = torch.arange(q.shape[0], device=q.device) - cu_seqlens_q[:-1].long()[request]

    def padded(x: torch.Tensor) -> torch.Tensor:  # [T, H, F] → [R, K, G * longest, F]
        out = x.new_zeros(num_requests, longest, num_kv_heads, group, head_dim, dtype=torch.float32)
        out[request, index] = x.float().view(-1, num_kv_heads, group, head_dim)
        return out.permute(0, 2, 3, 1, 4).reshape(num_requests, num_kv_heads, group * longest, head_dim)

    def gathered(x: torch.Tensor) -> torch.Tensor:  # [B, S, K, F] → [R, K, context, F]
        return x[tables].float().reshape(num_requests, context, num_kv_heads, head_dim).transpose(1, 2)

    def scattered(x: torch.Tensor) -> torch.Tensor:  # and back, summed
        blocks = x.transpose(1, 2).reshape(-1, block_size, num_kv_heads, head_dim)
        out = x.new_zeros(num_blocks, block_size, num_kv_heads, head_dim)
        return out.index_add_(0, tables.flatten(), blocks)

    keys, values = gathered(keys), gathered(values)
    position = (seq_lens.long() - lengths)[:, None] + torch.arange(longest, device=q.device)
    live = torch.arange(context, device=q.device) <= position.clamp(min=0)[..., None]  # [R, longest, context]
    live = live[:, None, None].expand(-1, -1, group, -1, -1).reshape(num_requests, 1, group * longest, context)
    query, upstream = padded(q), padded(grad)
    p = torch.softmax((query @ keys.transpose(-1, -2) * scale).masked_fill(~live, -torch.inf), -1)
    grad_p = upstream @ values.transpose(-1, -2)
    grad_s = p * (grad_p - (grad_p * p).sum(-1, keepdim=True)) * scale
    grad_q = (grad_s @ keys).view(num_requests, num_kv_heads, group, longest, head_dim).permute(0, 3, 1, 2, 4)
    grad_q = grad_q[request, index].reshape(q.shape)
    return grad_q, scattered(grad_s.transpose(-1, -2) @ query), scattered(p.transpose(-1, -2) @ upstream)
