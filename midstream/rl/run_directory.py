"""The files of a run. Everything a run says of itself is here, as text that other programs can read.

    config.json             the TrainConfig
    metrics.jsonl           one line per optimizer step
    updates.jsonl           one line per committed weight update
    rollouts.jsonl          one line per sampled completion, each token with its logprob's bits and its version
    steps.jsonl             the engine's own log of steps and commits (the engine writes it)
    versions/N.safetensors  the weights of commit number N, in the dtype sent; weights_id, label and number as metadata
    checkpoints/step-N/     a model directory that transformers opens, and trainer.pt to resume from
    summary.json            the figures of the whole run
    report.png              the same as a picture

A line of rollouts.jsonl::

    {"kind": "train" | "useless" | "left over" | "eval before" | "greedy before" | "eval after" | "greedy after",
     "step": 3 or null, "group": 50, "index": 2, "seed": 1234, "prompt": [ids], "output": [ids],
     "logprobs": "be9a3c01…" (8 hex digits per sampled token: the float32's bits, most significant first; of the
                 distribution sampled from, and for greedy tokens of the model's own, at temperature 1),
     "spans": [[number, start, end], …] (commit number of each sampled token; output tokens between two spans that none
                 covers are an environment's reply, and a turn of the model begins after them),
     "kv_versions": null or [[number, start, end], …],
     "temperature": 1.0, "top_p": 1.0, "top_k": 0, "reward": 1.0, "penalty": 0.0, "finish_reason": "stop"}
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from safetensors.torch import save_file

from midstream.errors import Conflict, InvalidInput
from midstream.rl.sync import UpdateRecord
from midstream.rl.types import Rollout
from midstream.types import SamplingParams
from midstream.weights.packing import torch_dtype
from midstream.weights.source import WeightSource, paired


def logprob_bits(logprobs: Sequence[float]) -> str:
    """Each float32 as 8 hex digits. Raises ``InvalidInput`` for a value that is not a float32."""
    packed = struct.pack(f">{len(logprobs)}f", *logprobs)
    back = struct.unpack(f">{len(logprobs)}f", packed)
    for value, stored in zip(logprobs, back, strict=True):
        if value != stored:
            raise InvalidInput(f"logprob {value!r} is not a float32 value; the engine reports float32")
    return packed.hex()


class RunDirectory:
    """Writes a run's files. One thread per file: the trainer's, except updates and versions (the update's thread)."""

    def __init__(self, path: str | Path) -> None:
        """A new or empty run. Raises ``Conflict`` where another run has left its metrics."""
        self.path = Path(path)
        if (self.path / "metrics.jsonl").exists():
            raise Conflict(f"{self.path} holds another run; choose a new directory, or delete it")
        for name in ("versions", "checkpoints"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        self._files: dict[str, IO[str]] = {
            name: (self.path / f"{name}.jsonl").open("a") for name in ("metrics", "updates", "rollouts")
        }
        self.num_tokens = 0
        """Sampled tokens written so far."""

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        partial = self.path / f".{name}.partial"
        partial.write_text(json.dumps(value, indent=2) + "\n")
        os.replace(partial, self.path / name)

    def log_step(self, metrics: dict[str, Any]) -> None:
        self._line("metrics", metrics)

    def log_update(self, record: UpdateRecord) -> None:
        self._line("updates", record.to_dict())

    def log_rollouts(self, kind: str, rollouts: Iterable[Rollout], params: SamplingParams, step: int | None) -> None:
        """``params``: what they were drawn with (temperature, top_p and top_k count)."""
        for rollout in rollouts:
            self.num_tokens += len(rollout.logprobs)
            line = {
                "kind": kind,
                "step": step,
                "group": rollout.group,
                "index": rollout.index,
                "seed": rollout.seed,
                "prompt": rollout.prompt_token_ids,
                "output": rollout.output_token_ids,
                "logprobs": logprob_bits(rollout.logprobs),
                "spans": [[span.number, span.start, span.end] for span in rollout.spans],
                "kv_versions": rollout.kv_versions,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "reward": rollout.reward,
                "penalty": rollout.penalty,
                "finish_reason": rollout.finish_reason,
            }
            self._line("rollouts", line)
        self._files["rollouts"].flush()

    def save_version(self, record: UpdateRecord, source: WeightSource) -> None:
        """The weights of a commit, as they were sent. Call while they are at rest."""
        tensors = {
            meta.name: tensor.detach().to("cpu", torch_dtype(meta.dtype), copy=True).contiguous()
            for meta, tensor in paired(source)
        }
        metadata = {
            "weights_id": record.weights_id,
            "label": str(record.policy_version),
            "number": str(record.number),
        }
        path = self.path / "versions" / f"{record.number}.safetensors"
        save_file(tensors, path.with_suffix(".partial"), metadata=metadata)
        os.replace(path.with_suffix(".partial"), path)

    def checkpoint(self, step: int) -> Checkpoint:
        """Where the checkpoint after ``step`` optimizer steps goes. Used with ``with``; appears whole or not at all."""
        return Checkpoint(self.path / "checkpoints" / f"step-{step:06d}")

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _line(self, name: str, value: dict[str, Any]) -> None:
        self._files[name].write(json.dumps(value, separators=(",", ":")) + "\n")
        if name != "rollouts":
            self._files[name].flush()


class Checkpoint:
    """A directory that takes its name only when all of it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial")

    def __enter__(self) -> Path:
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        return self._partial

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.replace(self._partial, self.path)
