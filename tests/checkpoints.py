"""Tiny random checkpoints in Hugging Face format, for tests: every architecture the decoder serves."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from midstream.models.config import ModelConfig
from midstream.models.weights import parameter_shapes

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "hidden_act": "silu",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama-tied": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True},
    "llama-bias": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True},
    "llama3-rope": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
}


def config_of(variant: str, **changes: Any) -> dict[str, Any]:
    return {**BASE, **VARIANTS[variant], **changes}


def random_weights(
    variant: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> dict[str, torch.Tensor]:
    """Checkpoint name → tensor. Large enough numbers that the model's choices are not close calls."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in parameter_shapes(ModelConfig.from_hf(config_of(variant, **changes))).items():
        noise = torch.randn(shape, generator=generator)
        out[name] = (1 + 0.1 * noise if name.endswith("norm.weight") else 0.15 * noise).to(dtype)
    return out


def write_checkpoint(
    directory: pathlib.Path, variant: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> pathlib.Path:
    """A model directory; without a tokenizer (tests speak token ids)."""
    directory.mkdir(parents=True, exist_ok=True)
    config = config_of(variant, **changes)
    (directory / "config.json").write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}))
    save_file(random_weights(variant, seed, dtype, **changes), directory / "model.safetensors")
    return directory


CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if mood %}({{ mood }}){% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_text_checkpoint(
    directory: pathlib.Path, variant: str = "llama", merges: tuple[str, ...] = ("ab", "th", "the"), **changes: Any
) -> pathlib.Path:
    """A model directory with a tokenizer over bytes: id 0 is <bos>, 1 <eos>, then 256 bytes, then ``merges``."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 2)}
    for merged in merges:
        vocab[merged] = len(vocab) + 2
    tokenizer = Tokenizer(models.BPE({"<bos>": 0, "<eos>": 1, **vocab}, [(m[:-1], m[-1]) for m in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    write_checkpoint(directory, variant, vocab_size=len(vocab) + 2, **changes)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
