"""Checkpoints as strictly accounted streams of (name, tensor): safetensors directories and GGUF files.

Nothing is skipped with a warning: a name that is unknown, missing, given twice or of a wrong shape is an error that
lists them all.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from midstream.errors import ModelLoadError
from midstream.models.config import ModelConfig
from midstream.models.shards import read_tensors, tensor_files
from midstream.models.weights import EMBEDDING, HEAD, fused_experts, parameter_shapes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model at rest: its config, where its tokenizer is, and the raw stream of its tensors."""

    path: pathlib.Path
    config: ModelConfig
    stream: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    """Every tensor of the files under its checkpoint name, unchecked."""


def open_checkpoint(path: str | pathlib.Path) -> Checkpoint:
    """A safetensors directory or a GGUF file, without reading a weight. Raises ModelLoadError, naming what is wrong."""
    path = pathlib.Path(path).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"{path} is a file but not a .gguf; give a model directory or a GGUF file")
        return _open_gguf(path)
    if not path.is_dir():
        raise ModelLoadError(f"no model at {path}: give a directory with config.json and safetensors, or a .gguf file")
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{path} has no config.json")
    try:
        data = json.loads((path / "config.json").read_text())
        generation_file = path / "generation_config.json"
        generation = json.loads(generation_file.read_text()) if generation_file.is_file() else None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: config is not valid JSON: {error}") from error
    config = ModelConfig.from_hf(data, generation)
    files = tensor_files(path)
    return Checkpoint(path, config, lambda: read_tensors(files))


def resolve_dtype(requested: str, config: ModelConfig) -> torch.dtype:
    """The engine's dtype: ``auto`` takes the checkpoint's where it is served, bfloat16 for float16."""
    if requested == "auto":
        requested = "float32" if config.dtype == "float32" else "bfloat16"
    return DTYPES[requested]


def load_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors in ``dtype``, each exactly once, accounted for; a fused one as its pieces.

    Raises ModelLoadError at the end of the stream (or before a tensor of a wrong shape would be yielded) with every
    unknown, doubled, misshapen and missing name. A head that the config ties to the embedding may be present: it is
    not yielded, and must equal it.
    """
    expected, fused = parameter_shapes(checkpoint.config), fused_experts(checkpoint.config)
    shapes = expected | {name: whole.shape for name, whole in fused.items()}
    tied = checkpoint.config.tie_word_embeddings
    seen: set[str] = set()
    problems: list[str] = []
    embedding: torch.Tensor | None = None
    head: torch.Tensor | None = None
    for name, tensor in checkpoint.stream():
        made = {name, *(piece for piece, _, _ in fused[name].pieces)} if name in fused else {name}
        if twice := sorted(made & seen):
            problems += [f"{name}: given twice" for name in twice]
        elif tied and name == HEAD:
            head = tensor
        elif name not in shapes:
            problems.append(f"{name}: unknown")
        elif tuple(tensor.shape) != shapes[name]:
            problems.append(f"{name}: shape {tuple(tensor.shape)}, expected {shapes[name]}")
        elif not tensor.is_floating_point():
            problems.append(f"{name}: dtype {tensor.dtype} is not a float type")
        else:
            embedding = tensor if name == EMBEDDING else embedding
            if not problems:
                for piece, part in fused[name].split(tensor) if name in fused else ((name, tensor),):
                    yield piece, part.to(dtype)
        seen |= made
    problems += [f"{name}: missing" for name in expected if name not in seen]
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        problems.append(f"{HEAD} differs from {EMBEDDING}, but the config ties them")
    if problems:
        shown = "\n  ".join(problems)
        message = f"{checkpoint.path} does not fit {checkpoint.config.architecture}:\n  {shown}"
        raise ModelLoadError(message, names=problems)


# GGUF ----------------------------------------------------------------------------------------------------------------

_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_GGUF_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": "model.norm.weight", "output.weight": HEAD}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _open_gguf(path: pathlib.Path) -> Checkpoint:
    import gguf

    try:
        reader = gguf.GGUFReader(str(path))
    except (ValueError, IndexError, KeyError, OSError) as error:  # the reader's own words for a file cut short
        raise ModelLoadError(f"{path} is not a readable GGUF file: {error}") from error

    def field(key: str, default: Any = None) -> Any:
        found = reader.get_field(key)
        return default if found is None else found.contents()

    kind = field("general.architecture")
    if kind not in _GGUF_ARCHITECTURES:
        raise ModelLoadError(
            f"{path}: GGUF architecture {kind!r} is not supported; this build has {', '.join(_GGUF_ARCHITECTURES)}"
        )
    if field(f"{kind}.rope.scaling.type", "none") not in ("none", None):
        raise ModelLoadError(f"{path}: rope scaling in GGUF is not supported; use the safetensors checkpoint")
    shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
    if "rope_freqs.weight" in shapes:
        raise ModelLoadError(f"{path}: rope scaling in GGUF is not supported; use the safetensors checkpoint")
    heads = int(field(f"{kind}.attention.head_count"))
    hidden = int(field(f"{kind}.embedding_length"))
    eos = field("tokenizer.ggml.eos_token_id")
    config = ModelConfig(
        architecture=_GGUF_ARCHITECTURES[kind],
        hidden_size=hidden,
        intermediate_size=int(field(f"{kind}.feed_forward_length")),
        num_layers=int(field(f"{kind}.block_count")),
        num_heads=heads,
        num_kv_heads=int(field(f"{kind}.attention.head_count_kv", heads)),
        head_dim=int(field(f"{kind}.attention.key_length", hidden // heads)),
        vocab_size=shapes["token_embd.weight"][0],
        max_position_embeddings=int(field(f"{kind}.context_length", 2048)),
        rms_norm_eps=float(field(f"{kind}.attention.layer_norm_rms_epsilon", 1e-6)),
        rope_theta=float(field(f"{kind}.rope.freq_base", 10_000.0)),
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        qk_norm=kind == "qwen3",
        eos_token_ids=() if eos is None else (int(eos),),
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        dtype="bfloat16",
    )
    return Checkpoint(path, config, lambda: _read_gguf(reader, config))


def _gguf_name(name: str) -> str:
    """Checkpoint name of a GGUF tensor; a name unknown here is passed on as it is, for the accounting to list."""
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _GGUF_LAYER:
        return f"model.layers.{parts[1]}.{_GGUF_LAYER[parts[2]]}.{parts[3]}"
    return name


def _read_gguf(reader: Any, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    import gguf

    permuted = config.architecture == "LlamaForCausalLM"
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        name = _gguf_name(tensor.name)
        if permuted and ".self_attn.q_proj." in name:
            values = _unpermute(values, config.num_heads)
        elif permuted and ".self_attn.k_proj." in name:
            values = _unpermute(values, config.num_kv_heads)
        yield name, values


def _unpermute(values: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF stores Llama's q and k with rotary pairs interleaved; checkpoints hold them as two halves."""
    rows = values.shape[0] // heads // 2
    return values.view(heads, rows, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
