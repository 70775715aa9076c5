"""One decoder for Llama, SmolLM2, Qwen2, Qwen3 and Qwen3-MoE; the config decides. Engine and trainer run this code.

The forward is a function of (weights, tokens, attend). ``attend`` turns, splits and attends, and is the only difference
between the two callers: the engine's writes K and V into its cache, the trainer's lays them out in blocks of that size.
The engine's forward of a dense model has a twin in the kernels, which is the same operations in one call. Where a layer
has experts, an ``AllToAll`` brings tokens to them and outputs back: within this process, or over a group of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from midstream.models.config import ModelConfig
from midstream.models.weights import LayerWeights, ModelWeights
from midstream.ops import cpu, moe
from midstream.ops.attention import AttentionMetadata, paged_attention, write_kv
from midstream.ops.layers import MAX_HALF, Rope, add_rms_norm, linear, silu_and_mul, split_rope
from midstream.parallel.expert import AllToAll, OneRank

Attend = Callable[[int, torch.Tensor, LayerWeights], torch.Tensor]
"""(layer, qkv [T, (H + 2K) F], its weights for the norms of q and k) → [T, H F]"""


class Llama:
    """The decoder's arithmetic; holds no weights, only the config and the rotary tables made from it, and the way to
    the experts (``exchange``; by default all are here)."""

    def __init__(
        self, config: ModelConfig, device: torch.device | str = "cpu", exchange: AllToAll | None = None
    ) -> None:
        self.config = config
        self.exchange = OneRank(config.num_experts) if exchange is None else exchange
        self.scale = 1.0 / math.sqrt(config.head_dim)
        angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float32), _frequencies(config))
        self.rope = Rope(
            config.num_heads,
            config.num_kv_heads,
            angles.cos().to(device),
            angles.sin().to(device),
            config.rms_norm_eps,
        )

    def forward(
        self,
        weights: ModelWeights,
        input_ids: torch.Tensor,
        attend: Attend,
        routes: list[torch.Tensor] | None = None,
        given: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids [T] → final hidden states [T, D], normalised. ``routes`` receives the experts [T, k] of each layer
        that has some; ``given`` [T, such layers, k] decides them, but for tokens where it is negative."""
        eps = self.config.rms_norm_eps
        x = F.embedding(input_ids, weights.embed)
        y: torch.Tensor | None = None
        for i, layer in enumerate(weights.layers):
            x, h = add_rms_norm(x, y, layer.input_norm, eps)
            y = linear(attend(i, linear(h, layer.qkv, layer.qkv_bias), layer), layer.o, layer.o_bias)
            x, h = add_rms_norm(x, y, layer.post_norm, eps)
            if layer.gate_up is not None and layer.down is not None:
                y = linear(silu_and_mul(linear(h, layer.gate_up)), layer.down)
                continue
            chosen = None if given is None else given[:, self.config.moe_layers.index(i)]
            y, experts = self._mix(h, layer, chosen)
            if routes is not None:
                routes.append(experts)
        return add_rms_norm(x, y, weights.norm, eps)[1]

    def _mix(
        self, h: torch.Tensor, layer: LayerWeights, given: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs [T, D] of the experts of h [T, D], weighted and added, and which they were [T, k]."""
        assert layer.router is not None
        logits = linear(h, layer.router)
        ids, shares = moe.route(logits, self.config.num_experts_per_tok, self.config.norm_topk_prob, given)
        rows, counts, back = self.exchange.dispatch(h, ids)
        made = moe.run_experts(rows, counts, [layer.experts[e] for e in self.exchange.experts])
        return moe.combine(self.exchange.combine(made, back), shares), ids

    def attend_empty(self, weights: ModelWeights) -> None:
        """Take part in a step of the expert-parallel group without a token: every dispatch and combine, in order."""
        for layer in weights.layers:
            if layer.router is not None:
                self._mix(weights.embed.new_empty(0, self.config.hidden_size), layer)

    def serve(
        self,
        weights: ModelWeights,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        routes: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """:meth:`forward` of the newest tokens of some requests, whose K and V go into, and whose context comes from,
        caches [layers, B, K, F, S] and [layers, B, K, S, F]. One call where the kernels serve the model."""
        half, inner, size = self.rope.cos.shape[1], self.config.intermediate_size, key_cache.shape[-1]
        fits = half <= MAX_HALF and cpu.supports(key_cache, half, inner, size, self.config.hidden_size)
        if fits and weights.table is not None:
            x = F.embedding(input_ids, weights.embed)
            caches = (key_cache, value_cache, metadata, self.scale)
            return cpu.decode(x, weights.table, inner, weights.norm, self.rope, positions, *caches)

        def attend(layer: int, qkv: torch.Tensor, of: LayerWeights) -> torch.Tensor:
            q, k, v = split_rope(qkv, self.rope, positions, of.q_norm, of.k_norm)
            assert metadata.slot_mapping is not None
            write_kv(key_cache[layer], value_cache[layer], k, v, metadata.slot_mapping)
            return paged_attention(q, key_cache[layer], value_cache[layer], metadata, self.scale).flatten(1)

        return self.forward(weights, input_ids, attend, routes)

    def logits(self, weights: ModelWeights, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, D] → logits [R, V]."""
        return linear(hidden, weights.head)


def _frequencies(config: ModelConfig) -> torch.Tensor:
    """Inverse rotary frequencies [F/2], with Llama 3's scaling where the config asks for it."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inverse = 1.0 / (config.rope_theta**exponent)
    s = config.rope_scaling
    if s is None:
        return inverse
    wavelength = 2 * math.pi / inverse
    longest = s.original_max_position_embeddings / s.low_freq_factor
    shortest = s.original_max_position_embeddings / s.high_freq_factor
    smooth = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    scaled = torch.where(wavelength > longest, inverse / s.factor, inverse)
    blended = (1 - smooth) * inverse / s.factor + smooth * inverse
    return torch.where((wavelength <= longest) & (wavelength >= shortest), blended, scaled)
