"""The two halves of a weight transfer, what they need from each other, and where they are looked up.

    trainer process                                        engine process
    WeightSource ─▶ TrainerWeightTransferEngine            WeightTransferEngine ─▶ (name, tensor) ─▶ staging
                        │  init, start, update*, finish        ▲
                        └── WeightTransferClient ── verbs ─────┘       bytes go beside the verbs, as the backend likes

A backend moves bytes and nothing else: it never sees the model, live memory or the update's state, so it can not
break the transaction. To add one, write the two classes and register them, or name them as "module:Class".
"""

from __future__ import annotations

import dataclasses
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, cast

from torch import Tensor

from midstream.errors import InvalidInput, TimedOut, WeightUpdateError
from midstream.types import KVPolicy
from midstream.types import ParamMeta as ParamMeta
from midstream.weights import packing
from midstream.weights.columns import from_columns
from midstream.weights.manifest import from_source
from midstream.weights.session import CastPolicy as CastPolicy
from midstream.weights.session import UpdateMode as UpdateMode
from midstream.weights.source import ModuleSource as ModuleSource
from midstream.weights.source import WeightSource as WeightSource

T = TypeVar("T")


class WeightTransferClient(Protocol):
    """The engine's weight verbs as a trainer calls them: synchronous, plain dicts, each under a time limit of its own.

    A verb that fails raises one of ``midstream.errors``. The trainer's threads share it: an abort may be called while
    ``update_weights`` waits.
    """

    def init_weight_transfer_engine(self, request: dict[str, Any], /) -> dict[str, Any]:
        """``{"init_info": {...}}``, and ``"fingerprint"`` if the trainer knows its own → the worker half's reply."""

    def start_weight_update(
        self, *, manifest: dict[str, Any] | None = None, mode: UpdateMode = "full", cast: CastPolicy = "deny"
    ) -> dict[str, Any]:
        """→ ``{"session_id", "lease_s", ...}``."""

    def update_weights(self, request: dict[str, Any], /) -> dict[str, Any]:
        """``{"update_info": {...}}`` → ``{"received", "bytes"}``, once the engine has read the whole chunk."""

    def finish_weight_update(
        self, *, weight_version: str | None = None, kv_policy: KVPolicy | None = None
    ) -> dict[str, Any]:
        """→ ``{"updated", "of", "bytes", "version", ...}``, once the new weights serve."""

    def abort_weight_update(self) -> dict[str, Any]:
        """→ ``{"aborted": session id or None}``."""


class WeightTransferEngine(ABC):
    """The worker half: turns an ``update_info`` into tensors. Lives in the engine process, in one thread at a time."""

    init_info_cls: ClassVar[type[Any]]
    """Dataclass of what ``init_transfer_engine`` takes; checks its own values in ``__post_init__``."""
    update_info_cls: ClassVar[type[Any]]
    """Dataclass of what ``receive_weights`` takes. A field ``update``, if it has one, names the update's session."""

    rank = 0
    """Which of the engine's workers this is."""

    def __init__(self, params: Mapping[str, ParamMeta], extra: Mapping[str, Any]) -> None:
        """``params``: what the engine holds, by checkpoint name. ``extra``: ``EngineConfig.extra``, as given."""
        self.params = params
        self.extra = extra

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> dict[str, Any]:
        """Open the channel; the reply reaches the trainer half. May be called again, by a trainer that came back."""

    @abstractmethod
    def receive_weights(self, update_info: Any) -> Iterator[tuple[str, Tensor]]:
        """The chunk's tensors, each valid until the next one is asked for: whoever keeps one copies it.

        Raises ``InvalidInput`` or ``WeightUpdateError`` for an ``update_info`` that does not describe a chunk.
        """

    def interrupt(self) -> None:  # noqa: B027 (a backend whose bytes come with the verb has nothing to do)
        """From the core's thread: an ``update_weights`` was refused, or is no longer wanted. A backend whose bytes
        travel beside the verbs ends what reads them and drops the channel, so that they reach no other update."""

    def require_drained(self) -> None:  # noqa: B027 (as above)
        """After an update's last chunk, before its commit: ``WeightUpdateError`` if bytes came that no chunk announced,
        and the channel is dropped."""

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of the channel. May be called twice."""

    @classmethod
    def parse_init_info(cls, data: Mapping[str, Any]) -> Any:
        """A dict as ``init_info_cls``; ``InvalidInput`` if it does not fit."""
        return parse_info(cls.init_info_cls, data)

    @classmethod
    def parse_update_info(cls, data: Mapping[str, Any]) -> Any:
        """A dict as ``update_info_cls``; ``InvalidInput`` if it does not fit."""
        return parse_info(cls.update_info_cls, data)


class TrainerWeightTransferEngine(ABC):
    """The trainer half. A backend writes ``__init__`` and ``transfer``; the transaction around them is here."""

    init_info_cls: ClassVar[type[Any]]
    """Dataclass of what ``trainer_init`` takes; checks its own values in ``__post_init__``."""

    def __init__(self, client: WeightTransferClient, source: WeightSource, info: Any = None) -> None:
        """Open the channel with the engine behind ``client``. ``info``: an ``init_info_cls``."""
        self.client = client
        self.source = source

    @classmethod
    def trainer_init(cls, init_info: Mapping[str, Any], *, client: WeightTransferClient, source: WeightSource) -> Self:
        """The half, its channel open; ``InvalidInput`` if ``init_info`` does not fit."""
        return cls(client, source, parse_info(cls.init_info_cls, init_info))

    def init_channel(self, init_info: dict[str, Any]) -> dict[str, Any]:
        """The verb that opens the channel. The source's ``fingerprint``, if it has one, tells the engine in which
        numerics the trainer computes."""
        fingerprint = getattr(self.source, "fingerprint", None)
        told = {} if fingerprint is None else {"fingerprint": fingerprint}
        return self.client.init_weight_transfer_engine({"init_info": init_info, **told})

    @abstractmethod
    def transfer(self, session_id: str) -> None:
        """Send every tensor of ``self.source`` in any number of ``update_weights`` calls; return when all replied."""

    def send_weights(
        self,
        weight_version: str | None = None,
        kv_policy: KVPolicy | None = None,
        mode: UpdateMode = "full",
        manifest: bool = True,
    ) -> dict[str, Any]:
        """One whole update: start, transfer, finish. Returns the reply of finish.

        ``manifest`` costs one more pass over the source and lets the engine prove that it received these very bytes.
        After any failure the update is aborted, the engine serves what it served, and the error is raised.
        """
        listed = from_source(self.source) if manifest else None
        session = self.client.start_weight_update(manifest=listed, mode=mode)
        try:
            self.transfer(session["session_id"])
            return self.client.finish_weight_update(weight_version=weight_version, kv_policy=kv_policy)
        except BaseException as error:
            try:
                self.client.abort_weight_update()
            except Exception as second:
                # The first error is the one that explains; the lease ends what the abort could not.
                error.add_note(f"the abort after it failed too ({second}): the update ends with its lease")
            raise

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of the channel. May be called twice."""


def answered(call: Future[dict[str, Any]], timeout_s: float, late: str) -> Future[dict[str, Any]]:
    """A verb that another thread calls, once the engine has answered; ``TimedOut`` beginning with ``late``."""
    if not wait([call], timeout_s).done:
        raise TimedOut(f"{late} within {timeout_s:g} s; if it does not recover, call trainer_init again")
    return call


@dataclass(frozen=True, kw_only=True)
class TensorList:
    """The part of an ``update_info`` that lists a chunk's tensors, in the order in which their bytes lie."""

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    update: str | None = None
    """Session id from the reply of start; the engine refuses a chunk of another update."""

    def __post_init__(self) -> None:
        unknown = [meta for meta in self.metas if meta.dtype not in packing.DTYPES]
        if unknown:
            shown = ", ".join(f"{meta.name} ({meta.dtype!r})" for meta in unknown)
            raise WeightUpdateError(
                f"unknown dtype of {shown}; known are {', '.join(packing.DTYPES)}", [meta.name for meta in unknown]
            )

    @property
    def metas(self) -> list[ParamMeta]:
        return from_columns({"names": self.names, "dtype_names": self.dtype_names, "shapes": self.shapes})


def parse_info(cls: type[T], data: Mapping[str, Any]) -> T:
    """``data`` as the dataclass ``cls``; ``InvalidInput`` names what is missing and what is unknown."""
    if not isinstance(data, Mapping):
        raise InvalidInput(f"{cls.__name__} is made from a dict, got {type(data).__name__}")
    known = [f for f in dataclasses.fields(cast(Any, cls)) if f.init]
    unknown = sorted(map(str, set(data) - {f.name for f in known}))
    optional = (dataclasses.MISSING, dataclasses.MISSING)
    missing = [f.name for f in known if f.name not in data and (f.default, f.default_factory) == optional]
    if unknown or missing:
        raise InvalidInput(
            f"{cls.__name__}: unknown {unknown}, missing {missing}; the fields are {[f.name for f in known]}"
        )
    try:
        return cls(**data)
    except TypeError as error:
        raise InvalidInput(f"{cls.__name__}: {error}") from error


class Registry(Generic[T]):
    """Backends of one half by name. A name that was given as "module:Class" is imported when it is first looked up."""

    def __init__(self, base: type[T], builtin: Mapping[str, str]) -> None:
        self._base = base
        self._entries: dict[str, type[T] | str] = dict(builtin)

    def register(self, name: str, entry: type[T] | str) -> None:
        """Add a class, or "module:Class". It holds in this process only: an engine that runs in a process of its own
        is configured with "module:Class" instead. ``InvalidInput`` for a name that is taken."""
        if name in self._entries:
            raise InvalidInput(
                f"{self._base.__name__} {name!r} is registered already; names are {sorted(self._entries)}"
            )
        if not name or ":" in name:
            raise InvalidInput(f"a backend's name must not be empty or hold a colon, got {name!r}")
        self._entries[name] = self._checked(entry, name) if isinstance(entry, type) else entry

    def lookup(self, key: str | type[T]) -> type[T]:
        """The class for a registered name, a class, or "module:Class"; ``InvalidInput`` if there is none."""
        entry = key if isinstance(key, type) or ":" in key else self._entries.get(key)
        if entry is None:
            raise InvalidInput(
                f"unknown {self._base.__name__} {key!r}: known are {sorted(self._entries)}, or name one as module:Class"
            )
        return self._checked(entry, key)

    def _checked(self, entry: object, key: object) -> type[T]:
        try:
            found = pkgutil.resolve_name(entry) if isinstance(entry, str) else entry
        except (ImportError, AttributeError, ValueError) as error:
            raise InvalidInput(f"{self._base.__name__} {entry!r} can not be loaded as module:Class: {error}") from error
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise InvalidInput(f"{key!r} is not a subclass of {self._base.__name__}, named as module:Class: {found!r}")
        return found


# abstract classes as arguments for a type are what a registry is about; mypy allows them to no one
worker_engines: Registry[WeightTransferEngine] = Registry(
    WeightTransferEngine,  # type: ignore[type-abstract]
    {
        "disk": "midstream.weights.disk:DiskWeightTransferEngine",
        "ipc": "midstream.weights.ipc:IPCWeightTransferEngine",
        "nccl": "midstream.weights.nccl:NCCLWeightTransferEngine",
    },
)
trainer_engines: Registry[TrainerWeightTransferEngine] = Registry(
    TrainerWeightTransferEngine,  # type: ignore[type-abstract]
    {
        "disk": "midstream.weights.disk:DiskTrainerWeightTransferEngine",
        "ipc": "midstream.weights.ipc:IPCTrainerWeightTransferEngine",
        "nccl": "midstream.weights.nccl:NCCLTrainerWeightTransferEngine",
    },
)
