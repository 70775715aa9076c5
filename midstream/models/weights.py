"""From checkpoint names to the engine's own layout: fused, packed, derived. And the next version in the making.

A *slot* is one tensor the forward uses; its *pieces* are the checkpoint tensors it is made of (q, k and v of one
fused product; the embedding behind a tied head). Checkpoint names are the only names outside this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from midstream.errors import WeightUpdateError
from midstream.models.config import ModelConfig
from midstream.ops.layers import LinearWeight

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Slot:
    """``pieces``: (checkpoint name, shape) stacked along dimension 0. ``is_linear``: a product's weight."""

    name: str
    pieces: tuple[tuple[str, tuple[int, ...]], ...]
    is_linear: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(shape[0] for _, shape in self.pieces), *self.pieces[0][1][1:])


def layout(config: ModelConfig) -> list[Slot]:
    """Every slot of the decoder, in forward order. A tied head is a slot of its own made of the embedding."""
    d, f = config.hidden_size, config.head_dim
    q, kv, inter = config.num_heads * f, config.num_kv_heads * f, config.intermediate_size
    slots = [Slot("embed", ((EMBEDDING, (config.vocab_size, d)),), False)]

    def add(name: str, linear: bool, *pieces: tuple[str, tuple[int, ...]]) -> None:
        slots.append(Slot(name, pieces, linear))

    for i in range(config.num_layers):
        at, to = f"model.layers.{i}.", f"{i}."
        add(to + "input_norm", False, (at + "input_layernorm.weight", (d,)))
        attention = [("q", q), ("k", kv), ("v", kv)]
        add(to + "qkv", True, *((f"{at}self_attn.{n}_proj.weight", (size, d)) for n, size in attention))
        if config.attention_bias:
            add(to + "qkv_bias", False, *((f"{at}self_attn.{n}_proj.bias", (size,)) for n, size in attention))
        if config.qk_norm:
            add(to + "q_norm", False, (at + "self_attn.q_norm.weight", (f,)))
            add(to + "k_norm", False, (at + "self_attn.k_norm.weight", (f,)))
        add(to + "o", True, (at + "self_attn.o_proj.weight", (d, q)))
        if config.output_bias:
            add(to + "o_bias", False, (at + "self_attn.o_proj.bias", (d,)))
        add(to + "post_norm", False, (at + "post_attention_layernorm.weight", (d,)))
        add(to + "gate_up", True, *((f"{at}mlp.{n}_proj.weight", (inter, d)) for n in ("gate", "up")))
        add(to + "down", True, (at + "mlp.down_proj.weight", (d, inter)))
    add("norm", False, ("model.norm.weight", (d,)))
    add("head", True, (EMBEDDING if config.tie_word_embeddings else HEAD, (config.vocab_size, d)))
    return slots


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Checkpoint name → shape of every tensor the model is made of; a tied head is not one of them."""
    return {name: shape for slot in layout(config) for name, shape in slot.pieces}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer's slots; a bias or norm the architecture lacks is None."""

    input_norm: torch.Tensor
    qkv: LinearWeight
    o: LinearWeight
    post_norm: torch.Tensor
    gate_up: LinearWeight
    down: LinearWeight
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


class ModelWeights:
    """One complete version of the weights in the engine's layout. Immutable: a commit replaces the whole object.

    ``slots`` maps slot name to a tensor or a LinearWeight.
    """

    def __init__(self, config: ModelConfig, slots: Mapping[str, torch.Tensor | LinearWeight]) -> None:
        self.slots = dict(slots)
        grouped: list[dict[str, torch.Tensor | LinearWeight]] = [{} for _ in range(config.num_layers)]
        for name, value in self.slots.items():
            index, _, part = name.partition(".")
            if part:
                grouped[int(index)][part] = value
        self.layers = [LayerWeights(**parts) for parts in grouped]  # type: ignore[arg-type]
        self.embed: torch.Tensor = self.slots["embed"]  # type: ignore[assignment]
        self.norm: torch.Tensor = self.slots["norm"]  # type: ignore[assignment]
        self.head: LinearWeight = self.slots["head"]  # type: ignore[assignment]

    def checkpoint(self, config: ModelConfig) -> dict[str, torch.Tensor]:
        """The weights under their checkpoint names, as they are really held (copies)."""
        out: dict[str, torch.Tensor] = {}
        for slot in layout(config):
            value = self.slots[slot.name]
            whole = value.dense() if isinstance(value, LinearWeight) else value
            for (name, _), part in zip(slot.pieces, whole.split([s[0] for _, s in slot.pieces]), strict=True):
                if name not in out:
                    out[name] = part.clone()
        return out


def assemble(config: ModelConfig, tensors: Mapping[str, torch.Tensor], keep_plain: bool = False) -> ModelWeights:
    """Weights from checkpoint tensors, differentiably: gradients of the slots reach the tensors given.

    keep_plain: for a trainer, whose backward needs the plain form beside the packed one.
    """
    slots: dict[str, torch.Tensor | LinearWeight] = {}
    for slot in layout(config):
        parts = [tensors[name] for name, _ in slot.pieces]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        slots[slot.name] = LinearWeight(whole, keep_plain) if slot.is_linear else whole
    return ModelWeights(config, slots)


class Staging:
    """The next version, built beside the steps from any number of chunks in any order.

    Owns its memory: what a backend yields is copied once, into the slots. Used by the staging thread only; the live
    weights are read (for the parts a partial update leaves alone), never written.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self._slots = {slot.name: slot for slot in layout(config)}
        self._places: dict[str, list[tuple[str, int, int]]] = {}
        for slot in self._slots.values():
            at = 0
            for name, shape in slot.pieces:
                self._places.setdefault(name, []).append((slot.name, at, shape[0]))
                at += shape[0]
        self._buffers: dict[str, torch.Tensor] = {}
        self._filled: dict[str, set[str]] = {}

    def put(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy one checkpoint tensor (its shape already checked), cast, into every slot it is a piece of.

        Returns it as it is held now: a view of staging.
        """
        places = self._places[name]
        if name == EMBEDDING and len(places) == 2:
            places = places[:1]  # the tied head packs the embedding's own buffer at finalize
        for slot_name, start, rows in places:
            if slot_name not in self._buffers:
                shape = self._slots[slot_name].shape
                self._buffers[slot_name] = torch.empty(shape, dtype=self.dtype, device=self.device)
                self._filled[slot_name] = set()
            held = self._buffers[slot_name][start : start + rows]
            held.copy_(tensor)
            self._filled[slot_name].add(name)
        return held

    def finalize(self, live: ModelWeights | None) -> ModelWeights:
        """The complete next version: staged slots settled and packed, every other slot taken from ``live`` as it is.

        Raises WeightUpdateError where a slot is incomplete and there is no live one to take the rest from.
        """
        ready: dict[str, torch.Tensor | LinearWeight] = dict(live.slots) if live else {}
        for slot in self._slots.values():
            buffer = self._buffers.get("embed" if self._is_tied_head(slot) else slot.name)
            if buffer is None:
                continue
            if not self._is_tied_head(slot):
                missing = [n for n, _ in slot.pieces if n not in self._filled[slot.name]]
                if missing and live is None:
                    raise WeightUpdateError(f"{slot.name} lacks {', '.join(missing)}", missing)
                if missing and live is not None:
                    old = live.slots[slot.name]
                    held = old.dense() if isinstance(old, LinearWeight) else old
                    for name in missing:
                        for at, start, rows in self._places[name]:
                            if at == slot.name:
                                buffer[start : start + rows].copy_(held[start : start + rows])
            ready[slot.name] = LinearWeight(buffer) if slot.is_linear else buffer
        absent = [slot.name for slot in self._slots.values() if slot.name not in ready]
        if absent:
            raise WeightUpdateError(f"no weights for {', '.join(absent)}", absent)
        self._buffers, self._filled = {}, {}
        return ModelWeights(self.config, ready)

    def _is_tied_head(self, slot: Slot) -> bool:
        return slot.name == "head" and slot.pieces[0][0] == EMBEDDING


def stage_all(
    config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """A first version from an accounted-for stream of (checkpoint name, tensor)."""
    staging = Staging(config, dtype, device)
    for name, tensor in tensors:
        staging.put(name, tensor)
    return staging.finalize(None)
