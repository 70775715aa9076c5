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

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors.torch import save_file

from midstream.errors import Conflict, InvalidInput
from midstream.rl.sync import UpdateRecord
from midstream.rl.types import Rollout
from midstream.types import SamplingParams, WeightVersionSpan
from midstream.weights.packing import torch_dtype
from midstream.weights.source import WeightSource, paired


def logprob_bits(logprobs: Sequence[float]) -> str:
    """Each float32 as 8 hex digits. Raises ``InvalidInput`` for a value that is not a float32."""
    packed = np.array(logprobs, dtype=">f4")
    for value, stored in zip(logprobs, packed.tolist(), strict=True):
        if value != stored:
            raise InvalidInput(f"logprob {value!r} is not a float32 value; the engine reports float32")
    return packed.tobytes().hex()


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

    def log(self, name: str, *lines: dict[str, Any]) -> None:
        """Add to ``metrics``, ``updates`` or ``rollouts``."""
        for line in lines:
            self._files[name].write(json.dumps(line, separators=(",", ":")) + "\n")
        self._files[name].flush()

    def log_rollouts(self, kind: str, rollouts: Sequence[Rollout], step: int | None = None) -> None:
        self.num_tokens += sum(len(rollout.logprobs) for rollout in rollouts)
        self.log("rollouts", *({"kind": kind, "step": step} | _line(rollout) for rollout in rollouts))

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

    @contextlib.contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """Where the checkpoint after ``step`` optimizer steps goes; it takes its name only when all is written."""
        path = self.path / "checkpoints" / f"step-{step:06d}"
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            shutil.rmtree(path, ignore_errors=True)
            os.replace(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


_AS_THEY_ARE = ("group", "index", "seed", "kv_versions", "reward", "penalty", "finish_reason")


def _line(rollout: Rollout) -> dict[str, Any]:
    return {name: getattr(rollout, name) for name in _AS_THEY_ARE} | {
        "prompt": rollout.prompt_token_ids,
        "output": rollout.output_token_ids,
        "logprobs": logprob_bits(rollout.logprobs),
        "spans": [[span.number, span.start, span.end] for span in rollout.spans],
        "temperature": rollout.params.temperature,
        "top_p": rollout.params.top_p,
        "top_k": rollout.params.top_k,
    }


def read_rollouts(path: Path) -> Iterator[tuple[str, Rollout]]:
    """What ``rollouts.jsonl`` says: kind and rollout, whose versions are known by number alone. Raises ``ValueError``,
    ``KeyError`` or ``TypeError`` for a line that is none."""
    with path.open() as file:
        for x in map(json.loads, file):
            yield x["kind"], Rollout(
                prompt_token_ids=x["prompt"],
                output_token_ids=x["output"],
                logprobs=np.frombuffer(bytes.fromhex(x["logprobs"]), dtype=">f4").tolist(),
                spans=[WeightVersionSpan("", *span) for span in x["spans"]],
                params=SamplingParams(temperature=x["temperature"], top_p=x["top_p"], top_k=x["top_k"]),
                **{name: x[name] for name in _AS_THEY_ARE},
            )
