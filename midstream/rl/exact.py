"""Is every logprob of a run exact? Recompute each sampled token under the weights that made it, and compare bits.

Reads only what the run wrote (``rollouts.jsonl``, ``versions/``) and uses only models and ops: no engine, no trainer.
A version's file is believed only if its tensors still hash to the ``weights_id`` that the engine reported when it
committed them.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from midstream.errors import InvalidInput
from midstream.models.config import ModelConfig
from midstream.models.llama import Llama
from midstream.models.loader import DTYPES
from midstream.models.packed import pack, sequence_logprobs
from midstream.models.weights import stage_all
from midstream.ops.numerics import difference, fingerprint
from midstream.rl.run_directory import read_rollouts
from midstream.rl.types import Rollout
from midstream.types import SamplingParams
from midstream.weights.manifest import digest, weights_id

_BATCH_TOKENS = 8192

Recorded = tuple[str, Rollout]
"""A rollout, after what a report calls it."""
Part = tuple[str, Rollout, int, int]
"""Such a rollout, and which of its output tokens one version made: start, end."""


@dataclass(slots=True)
class ExactReport:
    """What a check found. ``tokens`` = ``exact`` + len(wrong) + ``kv_kept``."""

    tokens: int = 0
    exact: int = 0
    kv_kept: int = 0
    """Tokens made on KV kept across an update: no single version gives them back, so they are not checked."""
    wrong: list[str] = field(default_factory=list)
    """Each token whose bits differ: where it stands, and both values."""
    max_gap: float = 0.0
    reason: str = ""
    """Why exactness cannot hold here at all (other numerics), or which stored version is not what was committed."""

    @property
    def is_exact(self) -> bool:
        return not self.wrong and not self.reason and 0 < self.tokens == self.exact + self.kv_kept

    def describe(self) -> str:
        checked = self.tokens - self.kv_kept
        line = f"exact: {self.exact} of {checked} tokens" if not self.reason else f"exact: no ({self.reason})"
        if self.reason and checked:
            line += f"; {self.exact} of {checked} tokens equal, largest gap {self.max_gap:.3g}"
        if self.kv_kept:
            line += f"; {self.kv_kept} not checked (kv kept)"
        shown = "".join(f"\n  {text}" for text in self.wrong[:20])
        more = f"\n  and {len(self.wrong) - 20} more" if len(self.wrong) > 20 else ""
        return line + shown + more


def check_run(
    run: str | Path, flip: str | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> ExactReport:
    """Check a run directory. ``flip`` ("logprob" or "weight") first flips one bit of what was read, in memory only:
    the check must then find exactly that.

    Raises ``InvalidInput`` where the run kept no versions. ``progress`` gets (versions done, versions).
    """
    run = Path(run)
    versions = run / "versions"
    if flip not in (None, "logprob", "weight"):
        raise InvalidInput(f"flip must be logprob or weight, got {flip!r}")
    if not (run / "rollouts.jsonl").is_file():
        raise InvalidInput(f"{run} has no rollouts.jsonl: give the directory of a finished run")
    if not (versions / "config.json").is_file():
        raise InvalidInput(f"{run} kept no versions: train with --set keep_versions=true (as the quick start does)")
    try:
        config = ModelConfig.from_hf(json.loads((versions / "config.json").read_text()))
        engine = json.loads((versions / "engine.json").read_text())
        recorded = [
            (f"{kind} rollout, group {rollout.group}, sample {rollout.index}", rollout)
            for kind, rollout in read_rollouts(run / "rollouts.jsonl")
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{run} is not a whole run: {type(error).__name__}: {error}") from error
    if not recorded:
        raise InvalidInput(f"{run} has no sampled token in rollouts.jsonl: there is nothing to check")
    if flip == "logprob":
        _flip(recorded[len(recorded) // 2][1].logprobs)
    needed = sorted({span.number for _, rollout in recorded for span in rollout.spans})
    missing = [number for number in needed if not (versions / f"{number}.safetensors").is_file()]
    if missing:
        return ExactReport(reason=f"the weights of versions {missing} are not in {versions}")
    for number in needed:  # all of them before anything is recomputed
        flipped = flip == "weight" and number == needed[len(needed) // 2]
        if fault := _verify(versions / f"{number}.safetensors", number, flipped):
            return ExactReport(reason=fault)
    dtype, block_size = DTYPES[engine["dtype"]], engine["block_size"]
    report = ExactReport(sum(len(rollout.logprobs) for _, rollout in recorded))
    report.reason = difference(fingerprint(dtype, block_size), engine)
    model = Llama(config)
    for done, number in enumerate(needed, 1):
        tensors, _ = _read_version(versions / f"{number}.safetensors")
        weights = stage_all(config, tensors.items(), dtype, torch.device("cpu"))
        check_version(report, model, weights, recorded, number, block_size)
        progress(done, len(needed))
    return report


@torch.inference_mode()
def check_version(
    report: ExactReport, model: Llama, weights: Any, recorded: list[Recorded], number: int, block_size: int
) -> None:
    """Recompute every token that version ``number`` made, and add the outcome to ``report``."""
    for params, batch in _batches(recorded, number):
        sequences = [
            (prompt, [rollout.output_token_ids[:end] for _, rollout, _, end in parts])
            for prompt, parts in itertools.groupby(batch, key=lambda part: part[1].prompt_token_ids)
        ]
        found = sequence_logprobs(model, weights, pack(sequences, block_size), params)
        ends = [end for _, _, _, end in batch]
        for (name, rollout, start, end), computed in zip(batch, found.split(ends), strict=True):
            first = rollout.sampled.index(start)
            stored = rollout.logprobs[first : first + end - start]
            for i, ours, theirs in zip(range(start, end), computed[start:].tolist(), stored, strict=True):
                if not is_checkable(rollout, i, number):
                    report.kv_kept += 1
                elif _bits(ours) == _bits(theirs):
                    report.exact += 1
                else:
                    report.max_gap = max(report.max_gap, abs(theirs - ours))
                    report.wrong.append(
                        f"{name}, token {i} (id {rollout.output_token_ids[i]}), version {number}: "
                        f"stored {theirs!r}, recomputed {ours!r}"
                    )


def is_checkable(rollout: Rollout, index: int, number: int) -> bool:
    """All KV that output token ``index`` was sampled on is of version ``number``, which made it."""
    context = len(rollout.prompt_token_ids) + index
    return all(v == number for v, start, _ in rollout.kv_versions or () if start < context)


def _batches(recorded: list[Recorded], number: int) -> Iterator[tuple[SamplingParams, list[Part]]]:
    """What version ``number`` made, in batches of a bounded size, each with the distribution of all its logprobs."""
    by_params: dict[SamplingParams, list[Part]] = defaultdict(list)
    for name, rollout in recorded:
        # A greedy token's processed logprob is 0 by definition; what is recorded for it is the raw one.
        params = rollout.params if rollout.params.temperature else SamplingParams()
        for span in rollout.spans:
            if span.number == number:
                by_params[params].append((name, rollout, span.start, span.end))
    for params, parts in by_params.items():
        batch: list[Part] = []
        size = 0
        for part in parts:
            length = len(part[1].prompt_token_ids) + part[3]
            if batch and size + length > _BATCH_TOKENS:
                yield params, batch
                batch, size = [], 0
            batch.append(part)
            size += length
        yield params, batch


def _bits(value: float) -> bytes:
    """Of a float32."""
    return struct.pack(">f", value)


def _flip(logprobs: list[float]) -> None:
    """Change one bit in the middle one."""
    one = torch.tensor([logprobs[len(logprobs) // 2]], dtype=torch.float32)
    one.view(torch.int32)[0] ^= 1
    logprobs[len(logprobs) // 2] = one.item()


def _read_version(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def _verify(path: Path, number: int, flip: bool) -> str:
    """Empty if the file's tensors hash to the id the engine committed; else which version is at fault."""
    tensors, metadata = _read_version(path)
    if flip:
        first = tensors[min(tensors)]
        first.view(-1).view(torch.uint8)[0] ^= 1
    found = weights_id({name: digest(tensor) for name, tensor in tensors.items()})
    if found == metadata["weights_id"]:
        return ""
    return (
        f"version {number} (label {metadata['label']}) is not what the engine committed: "
        f"weights_id {found[:16]}…, committed {metadata['weights_id'][:16]}…"
    )
