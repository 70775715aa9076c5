"""One dense decoder for Llama, SmolLM2, Qwen2 and Qwen3; the config decides. Engine and trainer run this very code.

The forward is a function of (weights, tokens, positions, attend). ``attend`` is the only difference between the two
callers: the engine's writes K and V into its cache, the trainer's lays them out in blocks of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from midstream.models.config import ModelConfig
from midstream.models.weights import ModelWeights
from midstream.ops.layers import linear, rms_norm, rope, silu_and_mul

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [T, H, F], k [T, K, F], v [T, K, F]) → [T, H, F]"""


class Llama:
    """The decoder's arithmetic; holds no weights, only the config and the rotary tables made from it."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.scale = 1.0 / math.sqrt(config.head_dim)
        angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float32), _frequencies(config))
        self._cos = angles.cos().to(dtype).unsqueeze(1).to(device)  # [positions, 1, F/2]
        self._sin = angles.sin().to(dtype).unsqueeze(1).to(device)

    def forward(
        self, weights: ModelWeights, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """input_ids, positions [T] → final hidden states [T, D], normalised."""
        c = self.config
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        cos, sin = self._cos[positions], self._sin[positions]
        x = F.embedding(input_ids, weights.embed)
        for i, layer in enumerate(weights.layers):
            h = rms_norm(x, layer.input_norm, c.rms_norm_eps)
            qkv = linear(h, layer.qkv, layer.qkv_bias)
            if layer.q_norm is None or layer.k_norm is None:
                qk, v = qkv.split((q_size + kv_size, kv_size), -1)
                qk = rope(qk.view(-1, c.num_heads + c.num_kv_heads, c.head_dim), cos, sin)
            else:
                q, k, v = qkv.split((q_size, kv_size, kv_size), -1)
                q = rms_norm(q.view(-1, c.num_heads, c.head_dim), layer.q_norm, c.rms_norm_eps)
                k = rms_norm(k.view(-1, c.num_kv_heads, c.head_dim), layer.k_norm, c.rms_norm_eps)
                qk = rope(torch.cat((q, k), 1), cos, sin)
            q, k = qk.split((c.num_heads, c.num_kv_heads), 1)
            y = attend(i, q, k, v.view(-1, c.num_kv_heads, c.head_dim))
            x = x + linear(y.reshape(-1, q_size), layer.o, layer.o_bias)
            h = rms_norm(x, layer.post_norm, c.rms_norm_eps)
            x = x + linear(silu_and_mul(linear(h, layer.gate_up)), layer.down)
        return rms_norm(x, weights.norm, c.rms_norm_eps)

    def logits(self, weights: ModelWeights, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, D] → logits [R, V] in fp32."""
        return linear(hidden, weights.head).float()


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
