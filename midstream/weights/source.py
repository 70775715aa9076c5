"""Where a trainer's weights come from: names and shapes at any time, tensors in as many passes as wanted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from midstream.errors import InvalidInput
from midstream.types import ParamMeta
from midstream.weights.packing import dtype_name


class WeightSource(Protocol):
    """A trainer's weights under checkpoint names.

    ``metadata`` says in which dtype each tensor is to be sent; iterating gives (name, tensor) in the same order, a
    fresh pass each time. A tensor may come in another floating dtype (an fp32 master for a bf16 engine): whoever
    sends it casts while copying, so that no second copy of the model is made.

    A source whose trainer computes log-probabilities with this package's forward has an attribute ``fingerprint`` too
    (``ops.numerics.fingerprint``); only then can the engine say whether the two sides are exact.
    """

    def metadata(self) -> list[ParamMeta]: ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class ModuleSource:
    """The parameters of a module under the module's own names, tied ones once. ``dtype``: what floats are sent as."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        self._module = module
        self._dtype = dtype

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, dtype_name(self._sent_as(param)), tuple(param.shape))
            for name, param in self._module.named_parameters()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, param in self._module.named_parameters():
            yield name, param.detach()

    def _sent_as(self, param: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and param.is_floating_point() else param.dtype


def paired(source: WeightSource) -> Iterator[tuple[ParamMeta, Tensor]]:
    """One pass over ``source``, each tensor with its metadata.

    Raises ``InvalidInput`` at the first tensor that is not the one the metadata announces, and if one is missing.
    """
    tensors = iter(source)
    for meta in source.metadata():
        pair = next(tensors, None)
        if pair is None:
            raise InvalidInput(f"the weight source ended before {meta.name}, which its metadata announces")
        name, tensor = pair
        if name != meta.name or tuple(tensor.shape) != meta.shape:
            raise InvalidInput(
                f"the weight source gave {name} {list(tensor.shape)} where its metadata announces "
                f"{meta.name} {list(meta.shape)}"
            )
        yield meta, tensor
    extra = next(tensors, None)
    if extra is not None:
        raise InvalidInput(f"the weight source gave {extra[0]}, which its metadata does not announce")
