"""A directory of safetensors in Hugging Face's layout: one file, or the shards that an index names. No torch."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from midstream.errors import ModelLoadError

INDEX = "model.safetensors.index.json"
_DERIVED = "rotary_emb.inv_freq"  # old exports carry this table; the config decides it
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {  # torch's name, bytes
    **{"F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)},
    **{"F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "BOOL": ("bool", 1), "U8": ("uint8", 1)},
    **{"I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1)},
}


class FileChanged(ModelLoadError):
    """A file was written, cut or replaced while it was read."""


def shard_names(index: Path) -> list[str]:
    """The files that an index names."""
    try:
        return sorted({"".join([name]) for name in json.loads(index.read_text())["weight_map"].values()})
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


def read_tensors(files: Sequence[Path], max_bytes: float = math.inf) -> Iterator[tuple[str, Any]]:
    """(checkpoint name, torch tensor) of every tensor, in the files' order and otherwise unchecked.

    Read, never mapped: a mapped file that another process cuts short kills the reader. ``FileChanged`` if any of the
    files is not at the end what it was at the start: what was yielded until then may be a mix. No tensor may have more
    than ``max_bytes``.
    """
    before = {file: _identity(file) for file in files}
    for file in files:
        try:
            # Non-blocking: should a pipe have taken the file's place, nobody waits for its writer.
            fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ModelLoadError(f"{file} can not be read: {error}") from error
        try:
            _require_same(file, before[file], fd)
            yield from _read_file(file, fd, before[file][0], max_bytes)
        finally:
            os.close(fd)
    for file in files:
        _require_same(file, before[file], file)


def _identity(file: Path | int) -> tuple[int, ...]:
    """Size first."""
    try:
        found = os.stat(file)
    except OSError as error:
        raise ModelLoadError(f"{file} can not be read: {error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ModelLoadError(f"{file} can not be read: it is no regular file")
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev


def _require_same(file: Path, before: tuple[int, ...], now: Path | int) -> None:
    try:
        is_same = _identity(now) == before
    except ModelLoadError:
        is_same = False
    if not is_same:
        raise FileChanged(f"{file} was changed while it was read: write the whole of it first, under a name of its own")


def _read_file(file: Path, fd: int, size: int, max_bytes: float) -> Iterator[tuple[str, Any]]:
    import torch

    def fill(buffer: Any, at: int) -> Any:
        done = 0
        while done < len(buffer):  # one call reads 2 GiB at most; other threads run meanwhile
            try:
                got = os.preadv(fd, [buffer[done:]], at + done)
            except OSError as error:
                raise ModelLoadError(f"{file} can not be read: {error}") from error
            if not got:
                raise FileChanged(f"{file} ended at byte {at + done} while it was read, it had {size}")
            done += got
        return buffer

    prefix = bytes(fill(memoryview(bytearray(min(8, size))), 0))
    start = 8 + int.from_bytes(prefix, "little")
    if len(prefix) < 8 or start > min(size, _MAX_HEADER_BYTES):
        raise ModelLoadError(f"{file} can not be read: {size} bytes with a header of {start - 8} are no safetensors")
    try:
        entries = _entries(bytes(fill(memoryview(bytearray(start - 8)), 8)), size - start)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{file} can not be read: its header is no safetensors' ({repr(error)[:300]})") from error
    for name, dtype, shape, begin, nbytes in entries:
        if name.endswith(_DERIVED):
            continue
        if nbytes > max_bytes:
            raise ModelLoadError(f"{file}: {name} of shape {shape} is larger than any tensor of the model")
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8)
            tensor = memory.view(getattr(torch, dtype)).view(shape)
        except (RuntimeError, TypeError, OverflowError) as error:
            why = str(error).partition("\n")[0]
            raise ModelLoadError(f"{file}: {name} of shape {shape} has no place in memory: {why}") from error
        fill(memory.numpy().data, start + begin)
        yield name, tensor


def _entries(header: bytes, num_bytes: int) -> list[tuple[str, str, list[int], int, int]]:
    """(name, dtype, shape, first byte, bytes) of every tensor, in the order in which they fill ``num_bytes``."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key is given twice")
        return dict(pairs)

    found = []
    for name, entry in json.loads(header, object_pairs_hook=once).items():
        if name == "__metadata__":
            continue
        (dtype, itemsize), shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)):
            raise ValueError(f"{name}: shape and data_offsets must be integers >= 0")
        if end - begin != math.prod(shape) * itemsize:
            raise ValueError(f"{name}: bytes {begin} to {end} are no {dtype} of shape {shape}")
        found.append((begin, end, name, dtype, list(shape)))
    at = 0
    for begin, end, name, *_ in sorted(found):
        if begin != at:
            raise ValueError(f"{name} begins at {begin}, what is before it ends at {at}")
        at = end
    if at != num_bytes:
        raise ValueError(f"the tensors have {at} bytes, the file {num_bytes}")
    return [(name, dtype, shape, begin, end - begin) for begin, end, name, dtype, shape in sorted(found)]
