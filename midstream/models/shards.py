"""A directory of safetensors in Hugging Face's layout: one file, or the shards that an index names. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from midstream.errors import ModelLoadError

INDEX = "model.safetensors.index.json"
_DERIVED = "rotary_emb.inv_freq"  # old exports carry this table; the config decides it


def shard_names(index: Path) -> list[str]:
    """The files that an index names."""
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is not an index of shards: {error!r}") from error


def tensor_files(directory: Path) -> list[Path]:
    """Every file that holds tensors; ModelLoadError if there are none, or if one of the index is missing."""
    index = directory / INDEX
    if index.is_file():
        files = [directory / name for name in shard_names(index)]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ModelLoadError(f"{directory} lacks the shards {', '.join(absent)} named by {INDEX}")
        return files
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{directory} has no *.safetensors; convert the weights first")
    return files


def read_tensors(files: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """(checkpoint name, torch tensor) of every tensor, unchecked."""
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (not a dict)
                    if not name.endswith(_DERIVED):
                        yield name, handle.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{file} can not be read: {error}") from error
