"""What a decoder needs to know of its checkpoint: one frozen dataclass, read from config.json or from GGUF metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midstream.errors import ModelLoadError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency scaling (Llama 3.1 model card): long wavelengths slowed, a smooth band between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry and switches of one decoder, dense or with experts."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool = False
    """Bias on q, k and v (Qwen2; Llama's switch)."""
    output_bias: bool = False
    """Bias on the attention output too (Llama's and Qwen3's attention_bias has it, Qwen2 not)."""
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"
    num_experts: int = 0
    """In each layer of ``moe_layers``; 0: the model is dense."""
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    """The weights of a token's experts are scaled to add up to 1."""
    moe_layers: tuple[int, ...] = ()
    """The layers whose MLP is a choice of experts, ascending."""

    @classmethod
    def from_hf(cls, data: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """From a Hugging Face config.json (and generation_config.json, whose eos ids are added).

        Raises ModelLoadError for an architecture or a feature that is not here, naming it.
        """
        if not isinstance(data, Mapping):
            raise ModelLoadError(f"config.json holds {type(data).__name__}, not an object")

        def number(kind: type[Any], key: str, default: Any = None, source: Mapping[str, Any] = data) -> Any:
            value = source.get(key)
            try:
                return kind(default if value is None else value)
            except (TypeError, ValueError):
                raise ModelLoadError(f"config.json: {key} must be a number, got {value!r}") from None

        names = data.get("architectures") or []
        architecture = names[0] if names else f"(none; model_type {data.get('model_type')!r})"
        if architecture not in ARCHITECTURES:
            raise ModelLoadError(
                f"architecture {architecture} is not supported; this build has {', '.join(ARCHITECTURES)}"
            )
        if data.get("hidden_act", "silu") != "silu":
            raise ModelLoadError(f"hidden_act {data['hidden_act']!r} is not supported; this build has silu")
        if data.get("mlp_bias"):
            raise ModelLoadError("mlp_bias is not supported")
        if data.get("use_sliding_window"):
            raise ModelLoadError("use_sliding_window is not supported; export the model without it")
        if data.get("quantization_config"):
            raise ModelLoadError("quantised checkpoints are not supported; give the unquantised one")
        required = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        missing = [key for key in required if data.get(key) is None]
        if missing:
            raise ModelLoadError(f"config.json lacks {', '.join(missing)}")
        rope = dict(data.get("rope_scaling") or data.get("rope_parameters") or {})
        theta = number(float, "rope_theta", rope.get("rope_theta") or 10_000.0)
        kind = rope.get("rope_type", rope.get("type", "default"))
        scaling = None
        if kind == "llama3":
            scaling = RopeScaling(
                number(float, "factor", source=rope),
                number(float, "low_freq_factor", source=rope),
                number(float, "high_freq_factor", source=rope),
                number(int, "original_max_position_embeddings", source=rope),
            )
        elif kind != "default":
            raise ModelLoadError(f"rope scaling {kind!r} is not supported; this build has default and llama3")
        heads = number(int, "num_attention_heads")
        kv_heads = number(int, "num_key_value_heads", heads)
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ModelLoadError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        hidden = number(int, "hidden_size")
        qwen2, moe = architecture == "Qwen2ForCausalLM", architecture == "Qwen3MoeForCausalLM"
        bias = bool(data.get("attention_bias", qwen2))
        eos: list[int] = []
        for source in (data, generation or {}):
            value = source.get("eos_token_id")
            eos += [value] if isinstance(value, int) else list(value or [])
        dtype = data.get("dtype") or data.get("torch_dtype") or "float32"
        layers = number(int, "num_hidden_layers")
        experts: dict[str, Any] = {}
        if moe:
            count = "num_experts" if data.get("num_experts") is not None else "num_local_experts"
            sizes = [number(int, key, 0) for key in (count, "num_experts_per_tok", "moe_intermediate_size")]
            step, dense = number(int, "decoder_sparse_step", 1), data.get("mlp_only_layers") or []
            if not (1 <= sizes[1] <= sizes[0] and sizes[2] >= 1 and step >= 1 and set(map(type, dense)) <= {int}):
                raise ModelLoadError(
                    "config.json: experts need 1 <= num_experts_per_tok <= num_experts, moe_intermediate_size >= 1, "
                    f"decoder_sparse_step >= 1 and a list of layers mlp_only_layers, got {sizes}, {step} and {dense!r}"
                )
            experts = dict(zip(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), sizes, strict=True))
            experts["norm_topk_prob"] = bool(data.get("norm_topk_prob", False))
            experts["moe_layers"] = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
        return cls(
            architecture=architecture,
            hidden_size=hidden,
            intermediate_size=number(int, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=number(int, "head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // heads),
            vocab_size=number(int, "vocab_size"),
            max_position_embeddings=number(int, "max_position_embeddings", 2048),
            rms_norm_eps=number(float, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            attention_bias=bias,
            output_bias=bias and not qwen2,
            qk_norm=moe or architecture == "Qwen3ForCausalLM",
            rope_scaling=scaling,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            bos_token_id=data.get("bos_token_id"),
            dtype=str(dtype).removeprefix("torch."),
            **experts,
        )

    def to_hf(self) -> dict[str, Any]:
        """A config.json that :meth:`from_hf` and transformers read back as this config."""
        rope: dict[str, Any] = {}
        if self.rope_scaling is not None:
            rope["rope_scaling"] = {"rope_type": "llama3", **dataclasses.asdict(self.rope_scaling)}
        experts: dict[str, Any] = {}
        if self.num_experts:
            names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
            experts = {name: getattr(self, name) for name in names}
            experts["mlp_only_layers"] = [i for i in range(self.num_layers) if i not in self.moe_layers]
        eos = list(self.eos_token_ids)
        return {
            "architectures": [self.architecture],
            "model_type": self.architecture.removesuffix("ForCausalLM").lower().replace("moe", "_moe"),
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            **rope,
            **experts,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "eos_token_id": eos[0] if len(eos) == 1 else eos,
            "bos_token_id": self.bos_token_id,
            "dtype": self.dtype,
        }
