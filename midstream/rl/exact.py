"""Is every logprob of a run exact? Recompute each sampled token under the weights that made it, and compare bits.

Reads only what the run wrote (``rollouts.jsonl``, ``versions/``) and uses only models and ops: no engine, no trainer.
A version's file is believed only if its tensors still hash to the ``weights_id`` that the engine reported when it
committed them.
"""

from __future__ import annotations

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
from midstream.rl.types import covers
from midstream.types import SamplingParams
from midstream.weights.manifest import digest, weights_id

_BATCH_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion as it was recorded."""

    name: str
    prompt: list[int]
    output: list[int]
    bits: dict[int, int]
    """By place in the output: the float32 bits of a sampled token's logprob, as an integer."""
    spans: list[tuple[int, int, int]]
    """(version, start, end); what no span covers is an environment's, and is not checked."""
    params: SamplingParams
    kv_versions: list[tuple[int, int, int]] | None = None
    """What the engine reported where KV was kept across an update: (version, start, end) over prompt + output."""

    def is_checkable(self, index: int, number: int) -> bool:
        """All KV that output token ``index`` was sampled on is of version ``number``, which made it."""
        context = len(self.prompt) + index
        return all(v == number for v, start, _ in self.kv_versions or () if start < context)


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
    if flip not in (None, "logprob", "weight"):
        raise InvalidInput(f"flip must be logprob or weight, got {flip!r}")
    if not (run / "rollouts.jsonl").is_file():
        raise InvalidInput(f"{run} has no rollouts.jsonl: give the directory of a finished run")
    if not (run / "versions" / "config.json").is_file():
        raise InvalidInput(f"{run} kept no versions: train with --set keep_versions=true (as the quick start does)")
    try:
        config = ModelConfig.from_hf(json.loads((run / "versions" / "config.json").read_text()))
        engine = json.loads((run / "versions" / "engine.json").read_text())
        samples = _read_samples(run / "rollouts.jsonl")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{run} is not a whole run: {type(error).__name__}: {error}") from error
    if not samples:
        raise InvalidInput(f"{run} has no sampled token in rollouts.jsonl: there is nothing to check")
    if flip == "logprob":
        samples = _flip_logprob(samples)
    files = {int(p.stem): p for p in (run / "versions").glob("*.safetensors") if p.stem.isdigit()}
    needed = sorted({number for sample in samples for number, _, _ in sample.spans})
    report = ExactReport(tokens=sum(len(s.bits) for s in samples))
    missing = [number for number in needed if number not in files]
    if missing:
        report.reason = f"the weights of versions {missing} are not in {run / 'versions'}"
        return report
    for number in needed:  # all of them before anything is recomputed
        fault = _verify(files[number], number, flip == "weight" and number == needed[len(needed) // 2])
        if fault:
            report.reason = fault
            report.tokens = 0
            return report
    dtype = DTYPES[engine["dtype"]]
    ours = fingerprint(dtype, engine["block_size"])
    report.reason = difference(ours, engine)
    model = Llama(config)
    for done, number in enumerate(needed):
        weights = stage_all(config, _read_version(files[number])[0].items(), dtype, torch.device("cpu"))
        check_version(report, model, weights, samples, number, engine["block_size"])
        progress(done + 1, len(needed))
    return report


@torch.inference_mode()
def check_version(
    report: ExactReport, model: Llama, weights: Any, samples: list[Sample], number: int, block_size: int
) -> None:
    """Recompute every token that version ``number`` made, and add the outcome to ``report``."""
    for batch in _batches(samples, number):
        sequences: list[tuple[list[int], list[list[int]]]] = []
        for sample, _, end in batch:
            if sequences and sequences[-1][0] == sample.prompt:
                sequences[-1][1].append(sample.output[:end])
            else:
                sequences.append((sample.prompt, [sample.output[:end]]))
        found = sequence_logprobs(model, weights, pack(sequences, block_size), batch[0][0].params)
        bits = found.view(torch.int32).tolist()
        at = 0
        for sample, start, end in batch:
            for i in range(start, end):
                if not sample.is_checkable(i, number):
                    report.kv_kept += 1
                    continue
                if bits[at + i] & 0xFFFFFFFF == sample.bits[i]:
                    report.exact += 1
                    continue
                stored, computed = as_float(sample.bits[i]), as_float(bits[at + i] & 0xFFFFFFFF)
                report.max_gap = max(report.max_gap, abs(stored - computed))
                report.wrong.append(
                    f"{sample.name}, token {i} (id {sample.output[i]}), version {number}: "
                    f"stored {stored!r}, recomputed {computed!r}"
                )
            at += end


def _batches(samples: list[Sample], number: int) -> Iterator[list[tuple[Sample, int, int]]]:
    """(sample, start, end) of version ``number``, in batches of one set of sampling parameters and a bounded size."""
    by_params: dict[SamplingParams, list[tuple[Sample, int, int]]] = defaultdict(list)
    for sample in samples:
        for version, start, end in sample.spans:
            if version == number:
                by_params[sample.params].append((sample, start, end))
    for entries in by_params.values():
        batch: list[tuple[Sample, int, int]] = []
        size = 0
        for entry in entries:
            length = len(entry[0].prompt) + entry[2]
            if batch and size + length > _BATCH_TOKENS:
                yield batch
                batch, size = [], 0
            batch.append(entry)
            size += length
        yield batch


def as_float(bits: int) -> float:
    return float(struct.unpack(">f", struct.pack(">I", bits))[0])


def as_bits(value: float) -> int:
    return int(struct.unpack(">I", struct.pack(">f", value))[0])


def _read_samples(path: Path) -> list[Sample]:
    samples = []
    with path.open() as file:
        for line in file:
            data = json.loads(line)
            text, spans = data["logprobs"], [(n, start, end) for n, start, end in data["spans"]]
            sampled = [i for _, start, end in spans for i in range(start, end)]
            bits = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
            # A greedy token's processed logprob is 0 by definition; what is recorded for it is the raw one.
            params = SamplingParams(
                temperature=data["temperature"] or 1.0,
                top_p=data["top_p"] if data["temperature"] else 1.0,
                top_k=data["top_k"] if data["temperature"] else 0,
            )
            samples.append(
                Sample(
                    name=f"{data['kind']} rollout, group {data['group']}, sample {data['index']}",
                    prompt=data["prompt"],
                    output=data["output"],
                    bits=dict(zip(sampled, bits, strict=False)),
                    spans=spans,
                    params=params,
                    kv_versions=data["kv_versions"],
                )
            )
            if not covers([(start, end) for _, start, end in spans], len(data["output"]), len(bits)):
                raise ValueError(f"{samples[-1].name}: not every sampled token has a logprob and a version")
    return samples


def _flip_logprob(samples: list[Sample]) -> list[Sample]:
    bits = samples[len(samples) // 2].bits
    bits[sorted(bits)[len(bits) // 2]] ^= 1
    return samples


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
