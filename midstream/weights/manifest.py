"""Names for bytes: the digest of a tensor, the id of a set of weights, the manifest of a source."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from midstream.weights.columns import to_columns
from midstream.weights.packing import dtype_name, torch_dtype
from midstream.weights.source import WeightSource, paired


def digest(tensor: Tensor) -> str:
    """SHA-256, in hex, over dtype, shape and elements in row-major order (little-endian, as every machine we run on).

    Reads a contiguous CPU tensor in place, and lets other Python threads run meanwhile.
    """
    return digest_of_parts(tensor.dtype, tensor.shape, (tensor,))


def digest_of_parts(dtype: torch.dtype, shape: Sequence[int], parts: Iterable[Tensor]) -> str:
    """:func:`digest` of a tensor that is given in pieces, in the order of its elements."""
    value = hashlib.sha256(f"{dtype_name(dtype)} {list(shape)}\n".encode())
    for part in parts:
        flat = part.detach().cpu().contiguous().view(-1)
        if flat.numel():
            value.update(flat.view(torch.uint8).numpy().data)
    return value.hexdigest()


def weights_id(digests: Mapping[str, str]) -> str:
    """The id of a set of weights: SHA-256 over its (name, digest) pairs, sorted. Same bytes, same id, in any engine.

    For weights with tied names, give each storage once, under its owner's name (``UpdateSession.held_digests``).
    """
    value = hashlib.sha256()
    for name, one in sorted(digests.items()):
        value.update(f"{name}\0{one}\n".encode())
    return value.hexdigest()


def from_source(source: WeightSource) -> dict[str, list[Any]]:
    """The manifest of an update with ``source``: one pass, every tensor hashed in the dtype in which it is to be sent.

    ``start_weight_update`` takes it, and it only verifies.
    """
    digests = [digest(tensor.to(torch_dtype(meta.dtype))) for meta, tensor in paired(source)]
    return {**to_columns(source.metadata()), "digests": digests}
