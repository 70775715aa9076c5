"""A weight transfer of your own, in two classes: the weights go through one safetensors file per update.

Any directory that both sides see will do, a network share too. Configure the engine with the worker half and drive
the other one from the trainer:

    EngineConfig(model=…, weight_transfer_backend="my_transfer_engine:FileWeightTransferEngine")

    from my_transfer_engine import FileTrainerWeightTransferEngine
    sync = FileTrainerWeightTransferEngine.trainer_init({"directory": "/mnt/share"}, client=client, source=source)
    sync.send_weights(weight_version="step-1")

Neither class knows the model, or when an update is whole, or how to undo one: that is the engine's affair, so nothing
here can leave it with half an update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from midstream.errors import Conflict, InvalidInput
from midstream.weights.base import (
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferClient,
    WeightTransferEngine,
)
from midstream.weights.packing import torch_dtype
from midstream.weights.source import paired


@dataclass(frozen=True)
class FileInitInfo:
    directory: str

    def __post_init__(self) -> None:
        if not Path(self.directory).is_dir():
            raise InvalidInput(f"directory {self.directory!r} does not exist on this side")


@dataclass(frozen=True)
class FileUpdateInfo:
    file: str
    update: str | None = None

    def __post_init__(self) -> None:
        if Path(self.file).name != self.file:
            raise InvalidInput(f"file must be a plain file name, got {self.file!r}")


class FileWeightTransferEngine(WeightTransferEngine):
    """Worker half."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    directory: Path | None = None

    def init_transfer_engine(self, init_info: FileInitInfo) -> dict[str, Any]:
        self.directory = Path(init_info.directory)
        return {}

    def receive_weights(self, update_info: FileUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        if self.directory is None:
            raise Conflict("call init_weight_transfer_engine first")
        try:
            with safe_open(self.directory / update_info.file, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InvalidInput(f"{update_info.file} can not be read: {error}") from error

    def shutdown(self) -> None:
        self.directory = None


class FileTrainerWeightTransferEngine(TrainerWeightTransferEngine):
    """Trainer half."""

    init_info_cls = FileInitInfo

    def __init__(self, client: WeightTransferClient, source: WeightSource, info: FileInitInfo) -> None:
        super().__init__(client, source)
        self.directory = Path(info.directory)
        self.init_channel({"directory": info.directory})

    def transfer(self, session_id: str) -> None:
        path = self.directory / f"{session_id}.safetensors"
        try:
            save_file({m.name: t.to(torch_dtype(m.dtype)).contiguous() for m, t in paired(self.source)}, path)
            self.client.update_weights({"update_info": {"file": path.name, "update": session_id}})
        finally:
            path.unlink(missing_ok=True)

    def shutdown(self) -> None:
        """Nothing is held between two updates."""
