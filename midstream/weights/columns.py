"""Tensors as messages list them: a column each of names, dtype names and shapes, and maybe others. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from midstream.errors import InvalidInput
from midstream.types import ParamMeta


def to_columns(metas: Sequence[ParamMeta]) -> dict[str, list[Any]]:
    return {
        "names": [meta.name for meta in metas],
        "dtype_names": [meta.dtype for meta in metas],
        "shapes": [list(meta.shape) for meta in metas],
    }


def from_columns(columns: Mapping[str, Any], where: str = "") -> list[ParamMeta]:
    """Inverse of :func:`to_columns`. Any further column holds strings.

    Raises ``InvalidInput``, beginning with ``where``, for anything else.
    """
    for key, column in columns.items():
        if not isinstance(column, (list, tuple)):
            raise InvalidInput(f"{where}{key} must be a list, got {type(column).__name__}")
    lengths = [len(column) for column in columns.values()]
    if len(set(lengths)) > 1:
        raise InvalidInput(f"{where}{', '.join(columns)} must be equally long, got {lengths}")
    for key, column in columns.items():
        if key == "shapes" and not all(map(_is_shape, column)):
            raise InvalidInput(f"{where}shapes must be a list of lists of integers >= 0")
        if key != "shapes" and not all(isinstance(value, str) for value in column):
            raise InvalidInput(f"{where}{key} must be a list of strings")
    rows = zip(columns["names"], columns["dtype_names"], columns["shapes"], strict=True)
    return [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in rows]


def _is_shape(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(type(n) is int and n >= 0 for n in value)
