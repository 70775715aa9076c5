"""The trainer's model: fp32 masters under checkpoint names, and the engine's own forward on their cast."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator

import torch
from safetensors.torch import save_file

from midstream.models.llama import Llama
from midstream.models.loader import load_weights, open_checkpoint, resolve_dtype
from midstream.models.packed import Routes, Sequences, pack, sequence_logprobs
from midstream.models.weights import assemble
from midstream.ops.numerics import fingerprint
from midstream.types import ParamMeta, SamplingParams
from midstream.weights.packing import dtype_name


class Policy:
    """A trainable model. Masters are fp32 parameters; every forward runs on their cast to ``dtype``, the bytes sent.

    It is a ``WeightSource`` with a fingerprint: the masters, announced in the engine's dtype; the sender casts.
    """

    def __init__(self, model: str | pathlib.Path, dtype: str = "auto", block_size: int = 16) -> None:
        checkpoint = open_checkpoint(model)
        self.path = checkpoint.path
        self.config = checkpoint.config
        self.dtype = resolve_dtype(dtype, checkpoint.config)
        self.block_size = block_size
        self.fingerprint = fingerprint(self.dtype, block_size)
        self.model = Llama(checkpoint.config)
        self.masters = {
            name: torch.nn.Parameter(tensor.float().clone()) for name, tensor in load_weights(checkpoint, self.dtype)
        }

    def parameters(self) -> list[torch.nn.Parameter]:
        """The masters, always in the same order."""
        return list(self.masters.values())

    def logprobs(self, sequences: Sequences, params: SamplingParams, routes: Routes | None = None) -> torch.Tensor:
        """[T] float32 of every completion token, in the order of ``sequences``, under the distribution that ``params``
        (temperature, top_k, top_p) samples from; gradients reach the masters in fp32. ``routes``: which experts tokens
        go to, instead of those that the router likes best now; how much each counts is the router's word all the same.
        """
        weights = assemble(self.config, {n: p.to(self.dtype) for n, p in self.masters.items()}, keep_plain=True)
        return sequence_logprobs(self.model, weights, pack(sequences, self.block_size, routes), params)

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, dtype_name(self.dtype), tuple(p.shape)) for name, p in self.masters.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.state().items()

    def state(self) -> dict[str, torch.Tensor]:
        """The masters by name (references, not copies)."""
        return {name: p.detach() for name, p in self.masters.items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, p in self.masters.items():
                p.copy_(state[name])

    def save(self, directory: str | pathlib.Path) -> None:
        """A model directory that transformers and the engine open, in the engine's dtype."""
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: tensor.to(self.dtype).contiguous() for name, tensor in self},
            directory / "model.safetensors",
            metadata={"format": "pt"},
        )
        if self.path.is_dir():
            for file in self.path.glob("*.json"):
                if not file.name.endswith("index.json"):
                    shutil.copy(file, directory / file.name)
        self.save_config(directory)

    def save_config(self, directory: str | pathlib.Path) -> None:
        """config.json as the checkpoint has it, with the dtype that is really stored."""
        original = self.path / "config.json"
        config = json.loads(original.read_text()) if original.is_file() else self.config.to_hf()
        config["dtype"] = dtype_name(self.dtype)
        (pathlib.Path(directory) / "config.json").write_text(json.dumps(config, indent=2) + "\n")
