"""Many tensors in few buffers: where each one lies, and how it is written and read in place.

Every tensor starts at a multiple of 64 bytes, so a view of any dtype is legal whatever lies before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.errors import InvalidInput
from midstream.types import ParamMeta

ALIGNMENT = 64
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name used in every message: torch's own, without its prefix."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Inverse of :func:`dtype_name`; ``InvalidInput`` for a name that can not be transferred."""
    dtype = DTYPES.get(name)
    if dtype is None:
        raise InvalidInput(f"unknown dtype {name!r}; known are {', '.join(DTYPES)}")
    return dtype


def num_bytes(meta: ParamMeta) -> int:
    """Bytes of the tensor's elements, without padding."""
    return math.prod(meta.shape) * torch_dtype(meta.dtype).itemsize


def aligned(nbytes: int) -> int:
    """Rounded up to where the next tensor may start."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place in a buffer, in bytes."""

    meta: ParamMeta
    offset: int
    nbytes: int


def plan(metas: Iterable[ParamMeta], buffer_bytes: int) -> list[list[Slot]]:
    """Cut the tensors, in their order, into chunks that each fit a buffer. ``InvalidInput`` if one tensor does not."""
    chunks: list[list[Slot]] = []
    offset = 0
    for meta in metas:
        nbytes = num_bytes(meta)
        if nbytes > buffer_bytes:
            raise InvalidInput(
                f"{meta.name} has {nbytes} bytes, a buffer {buffer_bytes}: raise packed_buffer_size_bytes to {nbytes}"
            )
        if not chunks or offset + nbytes > buffer_bytes:
            chunks.append([])
            offset = 0
        chunks[-1].append(Slot(meta, offset, nbytes))
        offset = aligned(offset + nbytes)
    return chunks


def read(buffer: Tensor, slot: Slot) -> Tensor:
    """The tensor that lies in ``slot``: a view, no copy. ``buffer`` is one-dimensional uint8."""
    flat = buffer[slot.offset : slot.offset + slot.nbytes]
    return flat.view(torch_dtype(slot.meta.dtype)).view(slot.meta.shape)


def write(buffer: Tensor, tensor: Tensor, slot: Slot) -> None:
    """Write ``tensor`` into its slot in one pass, cast to the slot's dtype on the way.

    ``InvalidInput`` for another shape, or for a cast between a floating and an integer dtype.
    """
    if tuple(tensor.shape) != slot.meta.shape:
        raise InvalidInput(f"{slot.meta.name} has shape {list(tensor.shape)}, declared was {list(slot.meta.shape)}")
    target = read(buffer, slot)
    if target.is_floating_point() != tensor.is_floating_point():
        raise InvalidInput(
            f"{slot.meta.name} has dtype {dtype_name(tensor.dtype)}, which is not cast to {slot.meta.dtype}"
        )
    target.copy_(tensor)
