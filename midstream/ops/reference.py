"""The definition of each operation in plain torch, on any device. The fast twins are tested against these.

Shapes: T tokens, H query heads, K kv heads, F head dim, B blocks, S block size, R requests.
"""

from __future__ import annotations

import torch


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
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q [T, H, F] and both caches, in fp32, for the gradient [T, H, F] of :func:`paged_attention`.

    Dense and in any order: exactness is asked of the forward only.
    """
    num_requests, width = block_tables.shape
    num_blocks, num_kv_heads, head_dim, block_size = key_cache.shape
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

    def scattered(x: torch.Tensor) -> torch.Tensor:  # [R, K, context, F] → [B, K, S, F]
        blocks = x.view(num_requests, num_kv_heads, width, block_size, head_dim).permute(0, 2, 1, 3, 4)
        out = x.new_zeros(num_blocks, num_kv_heads, block_size, head_dim)
        return out.index_add_(0, tables.flatten(), blocks.reshape(-1, num_kv_heads, block_size, head_dim))

    shape = (num_requests, num_kv_heads, context, head_dim)
    keys = key_cache[tables].float().permute(0, 2, 1, 4, 3).reshape(shape)
    values = value_cache[tables].float().permute(0, 2, 1, 3, 4).reshape(shape)
    position = (seq_lens.long() - lengths)[:, None] + torch.arange(longest, device=q.device)
    live = torch.arange(context, device=q.device) <= position.clamp(min=0)[..., None]  # [R, longest, context]
    live = live[:, None, None].expand(-1, -1, group, -1, -1).reshape(num_requests, 1, group * longest, context)
    query, upstream = padded(q), padded(grad)
    p = torch.softmax((query @ keys.transpose(-1, -2) * scale).masked_fill(~live, -torch.inf), -1)
    grad_p = upstream @ values.transpose(-1, -2)
    grad_s = p * (grad_p - (grad_p * p).sum(-1, keepdim=True)) * scale
    grad_q = (grad_s @ keys).view(num_requests, num_kv_heads, group, longest, head_dim).permute(0, 3, 1, 2, 4)
    grad_q = grad_q[request, index].reshape(q.shape)
    grad_k = scattered(grad_s.transpose(-1, -2) @ query).transpose(-1, -2)
    return grad_q, grad_k, scattered(p.transpose(-1, -2) @ upstream)
