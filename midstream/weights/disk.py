"""Weights through a directory of safetensors that both sides see.

The worker half is also what ``update_weights {"weight_dir": …}`` uses under any configured backend.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from midstream.config import check_types
from midstream.errors import InvalidInput, ModelLoadError, WeightUpdateError
from midstream.models.shards import FileChanged, read_tensors, tensor_files
from midstream.weights import packing
from midstream.weights.base import (
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferClient,
    WeightTransferEngine,
)
from midstream.weights.source import paired


@dataclass(frozen=True, slots=True)
class DiskInitInfo:
    """Nothing has to be opened."""


@dataclass(frozen=True, slots=True)
class DiskUpdateInfo:
    """One directory is one chunk."""

    weight_dir: str
    update: str | None = None
    """Session id from the reply of start; the engine refuses a chunk of another update."""

    def __post_init__(self) -> None:
        if not isinstance(self.weight_dir, str) or not self.weight_dir or "\0" in self.weight_dir:
            raise InvalidInput(f"weight_dir must be the path of a directory, got {self.weight_dir!r}")


@dataclass(frozen=True, slots=True)
class DiskTrainerInitInfo:
    directory: str
    """Existing, on a file system that the engine sees under the same path."""
    shard_bytes: int = 1 << 30
    """Of one file, if no tensor is larger: as much of the model is copied in memory at a time."""

    def __post_init__(self) -> None:
        check_types(self)
        if not Path(self.directory).is_dir():
            raise InvalidInput(f"directory {self.directory!r} does not exist on this side")
        if self.shard_bytes < 1:
            raise InvalidInput(f"shard_bytes must be at least 1, got {self.shard_bytes!r}")


class DiskWeightTransferEngine(WeightTransferEngine):
    """The worker half."""

    init_info_cls = DiskInitInfo
    update_info_cls = DiskUpdateInfo

    def init_transfer_engine(self, init_info: DiskInitInfo) -> dict[str, Any]:
        return {}

    def receive_weights(self, update_info: DiskUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        directory = Path(update_info.weight_dir)
        if not directory.is_dir():
            raise InvalidInput(f"weight_dir {str(directory)!r} is no directory on the engine's machine")
        most = 8 * max((math.prod(meta.shape) for meta in self.params.values()), default=0)  # of the widest dtype
        try:
            yield from read_tensors(tensor_files(directory), most)
        except FileChanged as error:
            raise WeightUpdateError(f"weight_dir: {error}") from error
        except ModelLoadError as error:
            raise InvalidInput(f"weight_dir: {error}") from error

    def shutdown(self) -> None:
        """Nothing is held."""


class DiskTrainerWeightTransferEngine(TrainerWeightTransferEngine):
    """The trainer half: each update is a directory of its own, removed once the engine has read it."""

    init_info_cls = DiskTrainerInitInfo

    def __init__(self, client: WeightTransferClient, source: WeightSource, info: DiskTrainerInitInfo) -> None:
        super().__init__(client, source)
        self._info = info
        self.init_channel({})

    def transfer(self, session_id: str) -> None:
        directory = Path(tempfile.mkdtemp(prefix=f"{session_id}-", dir=self._info.directory))
        try:
            metas = self.source.metadata()
            pairs = paired(self.source)
            largest = max((packing.num_bytes(meta) for meta in metas), default=1)
            for number, shard in enumerate(packing.plan(metas, max(self._info.shard_bytes, largest))):
                tensors: dict[str, Tensor] = {}
                for meta, tensor in itertools.islice(pairs, len(shard)):
                    # copied: tensors that share memory can not be saved in one file
                    tensors[meta.name] = tensor.detach().to("cpu", packing.torch_dtype(meta.dtype)).clone().contiguous()
                save_file(tensors, directory / f"model-{number:05}.safetensors")
            next(pairs, None)  # raises if the source has more than it announced
            self.client.update_weights({"update_info": {"weight_dir": str(directory), "update": session_id}})
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def shutdown(self) -> None:
        """Nothing is held between two updates."""
