"""What a recipe would need, without loading a weight: shapes on the meta device, memory, bytes per update."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.filesize import decimal

from midstream.errors import InvalidInput
from midstream.models.config import ModelConfig
from midstream.models.loader import open_checkpoint, resolve_dtype
from midstream.models.weights import layout, parameter_shapes
from midstream.rl.config import TrainConfig


def model_config(model: str) -> ModelConfig:
    """From a checkpoint, or from a directory that holds only a config.json."""
    path = Path(model)
    if path.is_dir() and (path / "config.json").is_file() and not list(path.glob("*.safetensors")):
        return ModelConfig.from_hf(json.loads((path / "config.json").read_text()))
    if not path.exists():
        raise InvalidInput(f"no model at {model}: a dry run needs at least a directory with its config.json")
    return open_checkpoint(path).config


def describe(config: TrainConfig) -> str:
    """A text for people: parameters, engine and trainer memory, KV, and what one optimizer step moves."""
    c = model_config(config.model)
    dtype = resolve_dtype(config.dtype, c)
    meta = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in parameter_shapes(c).items()}
    count = sum(t.numel() for t in meta.values())
    update = sum(t.numel() * t.element_size() for t in meta.values())
    packed = sum(torch.Size(slot.shape).numel() for slot in layout(c)) * dtype.itemsize
    kv_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * dtype.itemsize
    in_flight = min(config.num_ranks * config.max_num_seqs, (config.max_staleness + 1) * config.rollouts_per_step)
    rows = [
        ("model", f"{c.architecture}, {c.num_layers} layers, hidden {c.hidden_size}, {c.num_heads} query and "
                  f"{c.num_kv_heads} kv heads of {c.head_dim}, vocabulary {c.vocab_size:,}"),
        ("parameters", f"{count:,} in {len(meta)} tensors, {str(dtype).removeprefix('torch.')}"),
        ("bytes per update", f"{decimal(update)} ({update:,} bytes: every tensor once, in the engine's dtype)"),
        ("engine weights", f"{decimal(packed)} packed; {decimal(2 * packed)} while an update is staged"),
        ("engine KV cache", f"{decimal(kv_token)} a token; {decimal(kv_token * config.max_tokens * in_flight)} for "
                            f"{in_flight} completions of {config.max_tokens} tokens"),
        ("trainer", f"{decimal(16 * count)} (fp32 masters, gradients, two AdamW moments) and "
                    f"{decimal(packed)} of cast weights"),
        ("one step", f"{config.groups_per_step} groups x {config.samples_per_group} completions, at most "
                     f"{config.rollouts_per_step * config.max_tokens:,} tokens"),
        ("in flight", f"at most {(config.max_staleness + 1) * config.groups_per_step} groups, "
                      f"{in_flight} completions at once; staleness <= {config.max_staleness}"),
        ("run", f"{config.steps} steps, {decimal(update * config.steps)} moved in all"),
    ]  # fmt: skip
    first = [name for name in meta if ".layers." not in name or ".layers.0." in name]
    first = [name for name in first if ".experts." not in name or ".experts.0." in name]
    shapes = [f"    {name:58} {list(meta[name].shape)}" for name in first]
    head = "\n".join(f"  {name:18} {text}" for name, text in rows)
    return f"{head}\n  shapes (layer 0 stands for all {c.num_layers}, expert 0 for all)\n" + "\n".join(shapes)
