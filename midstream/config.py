"""Engine configuration: frozen, validated once, never written afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from midstream.errors import InvalidInput

DType = Literal["auto", "float32", "bfloat16"]
UpdateMode = Literal["full", "partial"]
CastPolicy = Literal["deny", "allow"]
DPVote = Literal["step", "interval"]


_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "str": (str, "a string"),
    "bool": (bool, "true or false"),
    "int": (int, "an integer"),
    "float": ((int, float), "a finite number"),
    "dict[str, Any]": (dict, "an object"),
    "dict[str, str]": (dict, "an object"),
    "list[str]": ((list, tuple), "a list of strings"),
}


def check_types(instance: Any) -> None:
    """Raise InvalidInput for the first field of a dataclass whose value is not of its declared plain type.

    Values come from keyword arguments, TOML and the command line, where nothing else has checked them.
    """
    for f in fields(instance):
        check_type(f.name, str(f.type), getattr(instance, f.name))


def check_type(name: str, declared: str, value: Any) -> None:
    """Raise InvalidInput unless ``value`` is of the plain type ``declared``, given as its text; others pass.

    Numbers must be finite; an int serves as a float, a bool is not a number.
    """
    declared, _, optional = declared.partition(" | ")
    if declared not in _KINDS or (value is None and optional == "None"):
        return
    kind, what = _KINDS[declared]
    is_number = declared in ("int", "float")
    wrong = not isinstance(value, kind) or (is_number and isinstance(value, bool))
    wrong = wrong or (declared == "list[str]" and not all(isinstance(item, str) for item in value))
    if wrong or (isinstance(value, float) and not math.isfinite(value)) or (is_number and abs(value) > 1e300):
        raise InvalidInput(f"{name} must be {what}, got {value!r:.80}")


def check_limits(timeout_s: Any, lease_s: Any) -> None:
    """Raise InvalidInput for what is no time limit, or no lease, of a pause."""
    check_type("timeout_s", "float | None", timeout_s)
    check_type("lease_s", "float | None", lease_s)
    if timeout_s is not None and timeout_s < 0:
        raise InvalidInput(f"timeout_s must be a number >= 0, got {timeout_s}")
    if lease_s is not None and lease_s <= 0:
        raise InvalidInput(f"lease_s must be a number > 0, got {lease_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything one engine needs to start. The command line is made from these fields and their docstrings."""

    model: str
    """A directory of safetensors in Hugging Face format, a GGUF file, or an id on the Hugging Face Hub: org/name,
    org/name@revision, org/name:file.gguf."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hub; by default main, and what the cache holds of it."""
    model_name: str | None = None
    """The id of a model from the Hub, once ``model`` is the path where it was found and ``revision`` its commit."""
    dtype: DType = "auto"
    """auto: what the checkpoint holds (float16 and quantised checkpoints: bfloat16)."""
    device: str = "cpu"
    """Any torch device; the fast kernels are for the CPU, the reference operations run everywhere."""
    tokenizer: str | None = None
    """Directory of a tokenizer; by default the model's own."""
    max_model_len: int | None = None
    """Longest prompt + output; by default the model's own limit, at most 8,192 and what the KV cache holds."""
    block_size: int = 16
    """Tokens in one KV block. Part of the numerics fingerprint: attention sums block by block."""
    num_blocks: int | None = None
    """KV blocks; by default as many as kv_cache_bytes holds."""
    kv_cache_bytes: int = 1 << 28
    """Memory for the KV cache when num_blocks is not given."""
    max_num_seqs: int = 64
    """Most requests in one step."""
    max_num_batched_tokens: int = 1024
    """Token budget of one step; bounds how long a step, and so any call, can take."""
    enable_prefix_caching: bool = True
    """Share the KV of equal prefixes under the same weight version."""
    num_threads: int | None = None
    """Torch threads of the engine process; by default torch's choice."""
    data_parallel_size: int = 1
    """Engine processes, each with a whole model, or, with enable_expert_parallel, with its share of the experts."""
    data_parallel_rank: int | None = None
    """First of the ranks that this command launches, of an engine over several nodes. 0: it owns the engine, waits for
    the others at data_parallel_address, and all front ends come to it. None beside an address: a front end alone."""
    data_parallel_size_local: int = 1
    """How many ranks this command launches, with data_parallel_rank."""
    data_parallel_address: str | None = None
    """host:port where rank 0 listens for the other nodes. No encryption, no password: for a private network."""
    enable_expert_parallel: bool = False
    """Spread the experts of a MoE model over the data-parallel ranks, which then step together."""
    dp_vote: DPVote = "step"
    """When ranks that step together agree on pauses and commits: before every step, or before every
    dp_sync_interval-th."""
    dp_sync_interval: int = 32
    """Steps between two votes with dp_vote interval."""
    dp_timeout_s: float = 60.0
    """A rank that is silent for this long in what all ranks do together is lost, and its group ends."""
    elastic: bool = False
    """Start lost data-parallel ranks again: a replica alone, while the others serve on, ranks that step together as
    one. What was started again serves once it has the weights that the engine served."""
    weight_transfer_backend: str = "ipc"
    """Registered name, or module:Class, of the WeightTransferEngine; a class is taken as its module:Class."""
    default_update_mode: UpdateMode = "full"
    """Of a weight update whose start names none. partial: an update may leave tensors as they are."""
    default_cast: CastPolicy = "deny"
    """Of a weight update whose start names none. allow: tensors may arrive in another floating dtype than the engine
    holds."""
    update_lease_s: float = 60.0
    """An open weight update that hears nothing for this long is aborted."""
    initial_version: str = "0"
    """Label of the weights loaded at start."""
    step_log: str | None = None
    """File that gets one JSON line per step and per commit."""
    extra: dict[str, Any] = field(default_factory=dict)
    """For a user's own weight transfer engine: handed to it unread."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in (
            *("block_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes"),
            *("data_parallel_size", "data_parallel_size_local", "dp_sync_interval"),
        ):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.elastic and self.data_parallel_size == 1:
            raise InvalidInput("elastic needs data_parallel_size over 1")
        self._check_nodes()
        for name in ("num_blocks", "max_model_len", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"{name} must be at least 1, got {value}")
        for name, allowed in (
            *(("default_update_mode", UpdateMode), ("default_cast", CastPolicy)),
            ("dp_vote", DPVote),
        ):
            if getattr(self, name) not in get_args(allowed):
                raise InvalidInput(f"{name} must be {' or '.join(get_args(allowed))}, got {getattr(self, name)!r}")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise InvalidInput(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        if self.block_size % 16:
            raise InvalidInput(f"block_size must be a multiple of 16, got {self.block_size}")
        for name in ("update_lease_s", "dp_timeout_s"):
            if not 0 < getattr(self, name) <= 1e6:
                raise InvalidInput(f"{name} must be positive, and at most a million seconds, got {getattr(self, name)}")

    def _check_nodes(self) -> None:
        first, count, size = self.data_parallel_rank, self.data_parallel_size_local, self.data_parallel_size
        if first is None:
            if count != 1:
                raise InvalidInput("data_parallel_size_local needs data_parallel_rank")
        elif self.data_parallel_address is None:
            raise InvalidInput("data_parallel_rank needs data_parallel_address: where rank 0 listens")
        elif not 0 <= first <= first + count <= size:
            raise InvalidInput(
                f"ranks {first} to {first + count - 1} are not of data_parallel_size {size}: lower data_parallel_rank "
                "or data_parallel_size_local"
            )
        if self.data_parallel_address is not None:
            host, _, port = self.data_parallel_address.rpartition(":")
            if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
                raise InvalidInput(f"data_parallel_address is host:port, got {self.data_parallel_address!r}")
            if self.enable_expert_parallel and host.strip("[]") in ("0.0.0.0", "::"):
                raise InvalidInput(f"with enable_expert_parallel ranks reach each other there: {host} is no address")

    @property
    def owns_engine(self) -> bool:
        """Its processes are asked here, not at another node."""
        return self.data_parallel_address is None or self.data_parallel_rank == 0

    @property
    def local_ranks(self) -> range:
        """Those that are launched here."""
        if self.data_parallel_address is None:
            return range(self.data_parallel_size)
        first = self.data_parallel_rank
        return range(0) if first is None else range(first, first + self.data_parallel_size_local)

    @property
    def node_host(self) -> str:
        """Of data_parallel_address."""
        return (self.data_parallel_address or "127.0.0.1:0").rpartition(":")[0].strip("[]")

    @property
    def node_port(self) -> int:
        return int((self.data_parallel_address or "127.0.0.1:0").rpartition(":")[2])

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """From keyword arguments; an unknown name is an error that lists the allowed ones."""
        allowed = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(allowed))
        if unknown:
            raise InvalidInput(f"unknown engine options {', '.join(unknown)}; there are {', '.join(allowed)}")
        if "model" not in options:
            raise InvalidInput("model is missing: give a model directory or a GGUF file")
        backend = options.get("weight_transfer_backend")
        if isinstance(backend, type):
            options = {**options, "weight_transfer_backend": f"{backend.__module__}:{backend.__qualname__}"}
        return cls(**options)
