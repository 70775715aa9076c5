"""From checkpoint names to the engine's own layout: fused, packed, derived. And the next version in the making.

A *slot* is one tensor the forward uses; its *pieces* are the checkpoint tensors it is made of (q, k and v of one
fused product; the embedding behind a tied head). Checkpoint names are the only names outside this file. Experts are
named one by one there; a tensor of all experts of a layer at once, as transformers holds them, is split on arrival.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from midstream.errors import WeightUpdateError
from midstream.models.config import ModelConfig
from midstream.ops import cpu
from midstream.ops.layers import LinearWeight
from midstream.ops.moe import Expert

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Slot:
    """``pieces``: (checkpoint name, shape) stacked along dimension 0. ``is_linear``: a product's weight. ``expert``:
    whose it is, if it is one expert's."""

    name: str
    pieces: tuple[tuple[str, tuple[int, ...]], ...]
    is_linear: bool
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(shape[0] for _, shape in self.pieces), *self.pieces[0][1][1:])


def layout(config: ModelConfig) -> list[Slot]:
    """Every slot of the decoder, in forward order. A tied head is a slot of its own made of the embedding."""
    d, f = config.hidden_size, config.head_dim
    q, kv, inter = config.num_heads * f, config.num_kv_heads * f, config.intermediate_size
    slots = [Slot("embed", ((EMBEDDING, (config.vocab_size, d)),), False)]

    def add(name: str, linear: bool, *pieces: tuple[str, tuple[int, ...]], expert: int | None = None) -> None:
        slots.append(Slot(name, pieces, linear, expert))

    def add_mlp(to: str, at: str, inter: int, expert: int | None = None) -> None:
        add(to + "gate_up", True, *((f"{at}{n}_proj.weight", (inter, d)) for n in ("gate", "up")), expert=expert)
        add(to + "down", True, (at + "down_proj.weight", (d, inter)), expert=expert)

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
        if i not in config.moe_layers:
            add_mlp(to, at + "mlp.", inter)
            continue
        add(to + "router", True, (at + "mlp.gate.weight", (config.num_experts, d)))
        for e in range(config.num_experts):
            add_mlp(f"{to}experts.{e}.", f"{at}mlp.experts.{e}.", config.moe_intermediate_size, e)
    add("norm", False, ("model.norm.weight", (d,)))
    add("head", True, (EMBEDDING if config.tie_word_embeddings else HEAD, (config.vocab_size, d)))
    return slots


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Checkpoint name → shape of every tensor the model is made of; a tied head is not one of them."""
    return {name: shape for slot in layout(config) for name, shape in slot.pieces}


@dataclass(frozen=True, slots=True)
class Fused:
    """A tensor of all experts of a layer; ``pieces``: (checkpoint name, expert, rows) in the order of its elements."""

    shape: tuple[int, ...]
    pieces: tuple[tuple[str, int, slice], ...]

    def split(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Checkpoint name and part, for every part."""
        for name, expert, rows in self.pieces:
            yield name, tensor[expert, rows]


def fused_experts(config: ModelConfig) -> dict[str, Fused]:
    """The other form of the experts, by name: ``gate_up_proj`` [E, 2I, D], gate first, and ``down_proj`` [E, D, I]."""
    count, inter, d = config.num_experts, config.moe_intermediate_size, config.hidden_size
    found = {}
    for i in config.moe_layers:
        at = f"model.layers.{i}.mlp.experts."
        halves = (("gate", slice(0, inter)), ("up", slice(inter, 2 * inter)))
        gate_up = tuple((f"{at}{e}.{n}_proj.weight", e, rows) for e in range(count) for n, rows in halves)
        down = tuple((f"{at}{e}.down_proj.weight", e, slice(0, d)) for e in range(count))
        found[at + "gate_up_proj"] = Fused((count, 2 * inter, d), gate_up)
        found[at + "down_proj"] = Fused((count, d, inter), down)
    return found


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer's slots; a bias or norm the architecture lacks is None. It has gate_up and down, or a router
    and experts: by id, those that are held here."""

    input_norm: torch.Tensor
    qkv: LinearWeight
    o: LinearWeight
    post_norm: torch.Tensor
    gate_up: LinearWeight | None = None
    down: LinearWeight | None = None
    router: LinearWeight | None = None
    experts: Mapping[int, Expert] = field(default_factory=dict)
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
        grouped: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
        experts: list[dict[int, dict[str, Any]]] = [{} for _ in range(config.num_layers)]
        for name, value in self.slots.items():
            match name.split("."):
                case index, part:
                    grouped[int(index)][part] = value
                case index, _, expert, part:
                    experts[int(index)].setdefault(int(expert), {})[part] = value
        self.layers = [
            LayerWeights(**parts, experts={e: Expert(**own) for e, own in sorted(of.items())})
            for parts, of in zip(grouped, experts, strict=True)
        ]
        self.embed: torch.Tensor = self.slots["embed"]  # type: ignore[assignment]
        self.norm: torch.Tensor = self.slots["norm"]  # type: ignore[assignment]
        self.head: LinearWeight = self.slots["head"]  # type: ignore[assignment]

    @functools.cached_property
    def table(self) -> ctypes.Array[Any] | None:
        """All layers as the kernels' decoder wants them; None where a product has no kernel, or a layer has experts."""
        if any(layer.router is not None for layer in self.layers):
            return None
        found = [[getattr(layer, name) for name in cpu.LAYER] for layer in self.layers]
        if not all(value.packed is not None for row in found for value in row if isinstance(value, LinearWeight)):
            return None
        return cpu.layer_table([[v.packed if isinstance(v, LinearWeight) else v for v in row] for row in found])

    def checkpoint(self, config: ModelConfig) -> dict[str, torch.Tensor]:
        """The weights under their checkpoint names, as they are really held (copies); experts held here alone."""
        out: dict[str, torch.Tensor] = {}
        for slot in layout(config):
            if slot.name not in self.slots:
                continue
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
    """The next version, built beside the steps from any number of chunks in any order. ``experts``: those to hold, by
    default all.

    Owns its memory: what a backend yields is copied once, into the slots. Used by the staging thread only; the live
    weights are read (for the parts a partial update leaves alone), never written.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, experts: range | None = None
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        held = range(config.num_experts) if experts is None else experts
        self._slots = {s.name: s for s in layout(config) if s.expert is None or s.expert in held}
        if config.tie_word_embeddings:
            del self._slots["head"]  # made of the embedding's own buffer at finalize
        self._places: dict[str, tuple[str, slice]] = {}
        for slot in self._slots.values():
            at = 0
            for name, shape in slot.pieces:
                self._places[name] = (slot.name, slice(at, at + shape[0]))
                at += shape[0]
        self._buffers: dict[str, torch.Tensor] = {}
        self._filled: set[str] = set()

    def put(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy one checkpoint tensor (its shape already checked), cast, to its place; returns it as it is held now, or
        would be where it belongs to an expert that is held elsewhere."""
        if name not in self._places:
            return tensor.to(self.dtype, copy=True)
        slot_name, rows = self._places[name]
        if slot_name not in self._buffers:
            shape = self._slots[slot_name].shape
            self._buffers[slot_name] = torch.empty(shape, dtype=self.dtype, device=self.device)
        held = self._buffers[slot_name][rows]
        held.copy_(tensor)
        self._filled.add(name)
        return held

    def finalize(self, live: ModelWeights | None) -> ModelWeights:
        """The complete next version: what was put, settled and packed; all that was not is taken from ``live``.

        Raises WeightUpdateError where something is missing and there is no live version.
        """
        missing = [name for name in self._places if name not in self._filled]
        if missing and live is None:
            raise WeightUpdateError(f"no weights for {', '.join(missing)}", missing)
        ready = {} if live is None else dict(live.slots)
        for name in missing:
            slot_name, rows = self._places[name]
            if slot_name in self._buffers:  # other pieces of the slot are new
                old = ready[slot_name]
                whole = old.dense() if isinstance(old, LinearWeight) else old
                self._buffers[slot_name][rows].copy_(whole[rows])
        if self.config.tie_word_embeddings and "embed" in self._buffers:
            ready["head"] = LinearWeight(self._buffers["embed"])
        for slot_name, buffer in self._buffers.items():
            ready[slot_name] = LinearWeight(buffer) if self._slots[slot_name].is_linear else buffer
        self._buffers, self._filled = {}, set()
        return ModelWeights(self.config, ready)


def stage_all(
    config: ModelConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    experts: range | None = None,
) -> ModelWeights:
    """A first version from an accounted-for stream of (checkpoint name, tensor), with ``experts`` (by default all)."""
    staging = Staging(config, dtype, device, experts)
    for name, tensor in tensors:
        staging.put(name, tensor)
    return staging.finalize(None)
