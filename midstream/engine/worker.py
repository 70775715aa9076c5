"""The worker: live weights, the runner, and the staging thread that builds the next version beside the steps.

Two threads meet here and share nothing mutable: the core's thread runs steps and commits; the staging thread runs
jobs one after another (receive a chunk, settle and pack the whole) and leaves each result in a queue that the core's
thread empties between steps. The live weights are one immutable object; a commit replaces the reference.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import math
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from safetensors.torch import save_file

from midstream.config import EngineConfig
from midstream.engine.runner import ModelRunner
from midstream.errors import InvalidInput, MidstreamError, WeightUpdateError
from midstream.models.llama import Llama
from midstream.models.loader import load_weights, open_checkpoint, resolve_dtype
from midstream.models.weights import (
    EMBEDDING,
    HEAD,
    ModelWeights,
    Staging,
    fused_experts,
    parameter_shapes,
    stage_all,
)
from midstream.ops.numerics import fingerprint
from midstream.parallel.expert import GroupAllToAll
from midstream.parallel.groups import Group
from midstream.types import ModelRunnerOutput, ParamMeta, SchedulerOutput
from midstream.weights.base import TensorList, WeightTransferEngine, worker_engines
from midstream.weights.manifest import digest, digest_of_parts
from midstream.weights.packing import dtype_name
from midstream.weights.session import TensorRecord

_DEFAULT_MAX_LEN = 8192
_JOIN_S = 5.0

Check = Callable[[str, str, Sequence[int]], None]
"""``UpdateSession.check``: (name, dtype, shape), raises WeightUpdateError."""


Then = Callable[[Any], None]
"""What the core's thread does with a job's value, or with the MidstreamError that ended the job."""


class Worker:
    """One model on one device. Every method belongs to the core's thread, but for the jobs in the staging thread.

    ``experts``: the expert-parallel group. Of the experts only this rank's are held then; digests are over all of them.
    """

    def __init__(
        self,
        config: EngineConfig,
        wake: Callable[[], None] = lambda: None,
        experts: Group | None = None,
        rank: int = 0,
    ) -> None:
        checkpoint = open_checkpoint(config.model)
        self.model_config = checkpoint.config
        self.dtype = resolve_dtype(config.dtype, checkpoint.config)
        try:
            self.device = torch.empty(0, device=config.device).device
        except (RuntimeError, AssertionError) as error:
            raise InvalidInput(f"device {config.device!r} cannot be used here: {error}") from error
        size = config.block_size
        self.num_blocks = config.num_blocks or max(
            config.kv_cache_bytes // ModelRunner.block_bytes(checkpoint.config, self.dtype, size), 1
        )
        if config.max_model_len is not None and config.max_model_len > checkpoint.config.max_position_embeddings:
            raise InvalidInput(
                f"max_model_len {config.max_model_len} exceeds the model's {checkpoint.config.max_position_embeddings}"
            )
        longest = min(checkpoint.config.max_position_embeddings, _DEFAULT_MAX_LEN, self.num_blocks * size)
        self.max_model_len = config.max_model_len or longest
        self.is_collective = experts is not None
        """A step is one of all ranks of the group: one that fails here leaves the others waiting."""
        exchange = None if experts is None else GroupAllToAll(experts, checkpoint.config.num_experts)
        model = Llama(checkpoint.config, self.device, exchange)
        self._experts = model.exchange.experts
        self._fused = fused_experts(checkpoint.config)
        self.fused = {name: [piece for piece, _, _ in whole.pieces] for name, whole in self._fused.items()}
        """Tensors of all experts of a layer, and what they are cut into."""
        shapes = parameter_shapes(checkpoint.config) | {name: whole.shape for name, whole in self._fused.items()}
        self.params = {name: ParamMeta(name, dtype_name(self.dtype), shape) for name, shape in shapes.items()}
        """Every tensor that is taken, under each of its names."""
        self.tied = {HEAD: EMBEDDING} if checkpoint.config.tie_word_embeddings else {}
        self.digests: dict[str, str] = {}
        staging = self._new_staging()
        for name, tensor in load_weights(checkpoint, self.dtype):
            self.digests[name] = digest(tensor)
            staging.put(name, tensor)
        self.weights: ModelWeights | None = staging.finalize(None)
        """None between a sleep that dropped them and the update that brings them back."""
        self.runner = ModelRunner(model, self.dtype, self.device, self.num_blocks, size)
        self.transfer = worker_engines.lookup(config.weight_transfer_backend)(self.params, config.extra)
        self.transfer.rank = rank
        self.disk = worker_engines.lookup("disk")(self.params, {})
        self.fingerprint = fingerprint(self.dtype, size, model.exchange.combine_order)
        self.completed: collections.deque[Callable[[], None]] = collections.deque()
        self._offloaded: dict[str, torch.Tensor] = {}
        self._staging: Staging | None = None
        self._sources: set[WeightTransferEngine] = set()
        """What the staged chunks came through."""
        self._next: ModelWeights | None = None
        self._wake = wake
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Then] | None] = queue.SimpleQueue()
        self._num_open_jobs = 0
        self._thread = threading.Thread(target=self._run_jobs, name="weight-staging", daemon=True)
        self._thread.start()
        with contextlib.suppress(OSError, AttributeError):  # glibc keeps what loading freed: a hundred megabytes
            ctypes.CDLL(None).malloc_trim(0)

    def _new_staging(self) -> Staging:
        return Staging(self.model_config, self.dtype, self.device, self._experts)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step under the live weights."""
        assert self.weights is not None
        return self.runner.execute(plan, self.weights)

    def execute_empty(self) -> None:
        """Take part in a step of the expert-parallel group without a token. Raises ``RankLost``."""
        assert self.weights is not None
        self.runner.execute_empty(self.weights)

    # -- jobs for the staging thread -----------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """The staging thread works, or its results wait to be taken."""
        return self._num_open_jobs > 0

    def settle(self) -> None:
        """Between two steps: hand every finished job's value to its ``then``."""
        while self.completed:
            self._num_open_jobs -= 1
            self.completed.popleft()()

    def init_transfer(self, init_info: dict[str, Any], then: Then) -> None:
        self._submit(lambda: self.transfer.init_transfer_engine(self.transfer.parse_init_info(init_info)), then)

    def shutdown_transfer(self, then: Then) -> None:
        self._submit(self.transfer.shutdown, then)

    def receive(self, transfer: WeightTransferEngine, update_info: dict[str, Any], check: Check, then: Then) -> None:
        """Stage one chunk, as ``transfer`` reads it. Its value: the list of TensorRecord."""

        def read() -> Iterable[tuple[str, torch.Tensor]]:
            try:
                info = transfer.parse_update_info(update_info)
                if isinstance(info, TensorList):  # before memory is taken for what it announces
                    _require([_problem(check, meta.name, meta.dtype, meta.shape) for meta in info.metas])
                return transfer.receive_weights(info)
            except Exception:
                transfer.interrupt()  # the bytes this could not describe are nobody else's
                raise

        self._submit_stage(read, check, then)
        self._sources.add(transfer)

    def receive_zeros(self, check: Check, then: Then) -> None:
        """Stage a model of zeros. Its value: the list of TensorRecord."""
        metas = [meta for meta in self.params.values() if meta.name not in self.fused]
        read = ((meta.name, torch.zeros(meta.shape, dtype=self.dtype)) for meta in metas)
        self._submit_stage(lambda: read, check, then)

    def _submit_stage(self, read: Callable[[], Iterable[tuple[str, torch.Tensor]]], check: Check, then: Then) -> None:
        if self._staging is None:
            self._staging, self._sources = self._new_staging(), set()
        staging = self._staging
        self._submit(lambda: self._stage(staging, read(), check), then)

    def prepare(self, then: Then) -> None:
        """Settle fused, tied and packed forms of everything staged. Its value is what :meth:`prepared` takes."""
        staging, live, sources = self._staging, self.weights, self._sources
        assert staging is not None

        def settle() -> ModelWeights:
            for transfer in sources:
                transfer.require_drained()
            return staging.finalize(live)

        self._submit(settle, then)

    def hash_weights(self, then: Then) -> None:
        """Its value: the digest of every tensor really held here, by checkpoint name."""
        weights = self.weights
        assert weights is not None
        held = weights.checkpoint
        self._submit(lambda: {name: digest(tensor) for name, tensor in held(self.model_config).items()}, then)

    def save_weights(self, directory: str, then: Then) -> None:
        """Write what is held to ``directory``, which is read as any checkpoint's."""
        weights = self.weights
        assert weights is not None
        held = weights.checkpoint

        def save() -> None:
            tensors = {name: tensor.cpu() for name, tensor in held(self.model_config).items()}
            save_file(tensors, os.path.join(directory, "model.safetensors"))

        self._submit(save, then)

    def _stage(self, staging: Staging, tensors: Iterable[tuple[str, torch.Tensor]], check: Check) -> list[TensorRecord]:
        problems: list[WeightUpdateError | None] = []
        records: list[TensorRecord] = []

        def held(name: str, tensor: torch.Tensor) -> torch.Tensor:
            copy = staging.put(self.tied.get(name, name), tensor)
            # as it is held: a cast may overflow. NaN comes through min and max; no copy is made.
            if copy.numel() and not all(map(math.isfinite, torch.stack(torch.aminmax(copy)).tolist())):
                problems.append(WeightUpdateError(f"{name} has NaN or infinity as {dtype_name(copy.dtype)}", [name]))
            return copy

        def pieces(whole: Iterable[tuple[str, torch.Tensor]], parts: list[TensorRecord]) -> Iterator[torch.Tensor]:
            for name, part in whole:
                copy = held(name, part)
                parts.append(TensorRecord(name, digest(copy), 0))
                yield copy

        for name, tensor in tensors:
            problem = _problem(check, name, dtype_name(tensor.dtype), tuple(tensor.shape))
            problems.append(problem)
            if problem is not None:
                continue
            nbytes = tensor.numel() * tensor.element_size()
            # digests are of our copy: nobody else writes to that
            if name in self._fused:
                parts: list[TensorRecord] = []
                whole = digest_of_parts(self.dtype, tensor.shape, pieces(self._fused[name].split(tensor), parts))
                records.append(TensorRecord(name, whole, nbytes, tuple(parts)))
            else:
                records.append(TensorRecord(name, digest(held(name, tensor)), nbytes))
        _require(problems)
        return records

    # -- the transaction's end ---------------------------------------------------------------------------------

    def prepared(self, weights: ModelWeights) -> None:
        """The value of a :meth:`prepare` job: from now on :meth:`commit` is possible."""
        self._next = weights

    def commit(self) -> None:
        """Swap the prepared version in. Moves no weight bytes."""
        assert self._next is not None
        self.weights, self._next, self._staging = self._next, None, None

    def discard(self) -> None:
        """Drop whatever is staged. A job still running writes into memory that nobody will read."""
        self._staging, self._next = None, None

    # -- sleep ---------------------------------------------------------------------------------------------------

    @property
    def has_lost_weights(self) -> bool:
        return self.weights is None and not self._offloaded

    def drop_weights(self) -> None:
        self.weights, self._offloaded = None, {}

    def offload_weights(self) -> None:
        """Weights on a device go to host memory; those of a CPU stay."""
        if self.weights is not None and self.device.type != "cpu":
            held = self.weights.checkpoint(self.model_config)
            self._offloaded = {name: tensor.cpu() for name, tensor in held.items()}
            self.weights = None

    def restore_weights(self) -> None:
        """Undo :meth:`offload_weights`."""
        if self._offloaded:
            self.weights = stage_all(self.model_config, self._offloaded.items(), self.dtype, self.device, self._experts)
            self._offloaded = {}

    def close(self) -> None:
        """End the staging thread and the channel; bounded."""
        self._jobs.put(None)
        self.transfer.interrupt()
        self._thread.join(_JOIN_S)
        self.transfer.shutdown()

    def _submit(self, job: Callable[[], Any], then: Then) -> None:
        self._num_open_jobs += 1
        self._jobs.put((job, then))

    def _run_jobs(self) -> None:
        torch.set_num_threads(1)  # of this thread: the steps keep theirs
        with torch.inference_mode():
            while (entry := self._jobs.get()) is not None:
                job, then = entry
                value: Any
                try:
                    value = job()
                except MidstreamError as error:
                    value = error
                except Exception as error:
                    value = MidstreamError(f"{type(error).__name__}: {error}")
                    value.__cause__ = error
                self.completed.append(functools.partial(then, value))
                self._wake()


def _problem(check: Check, name: str, dtype: str, shape: Sequence[int]) -> WeightUpdateError | None:
    try:
        check(name, dtype, shape)
    except WeightUpdateError as error:
        return error
    return None


def _require(problems: Iterable[WeightUpdateError | None]) -> None:
    """Raise all of them as one."""
    found = [problem for problem in problems if problem is not None]
    if found:
        names = [name for problem in found for name in problem.tensors]
        raise WeightUpdateError("; ".join(problem.message for problem in found), names)
