"""The worker: live weights, the runner, and the staging thread that builds the next version beside the steps.

Two threads meet here and share nothing mutable: the core's thread runs steps and commits; the staging thread runs
jobs one after another (receive a chunk, settle and pack the whole) and hands each result back through a queue that
the core empties between steps. The live weights are one immutable object; a commit replaces the reference.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from midstream.config import EngineConfig
from midstream.engine.runner import ModelRunner
from midstream.errors import InvalidInput, WeightUpdateError
from midstream.models.llama import Llama
from midstream.models.loader import load_weights, open_checkpoint, resolve_dtype
from midstream.models.weights import EMBEDDING, HEAD, ModelWeights, Staging, parameter_shapes
from midstream.ops.numerics import fingerprint
from midstream.types import ModelRunnerOutput, ParamMeta, SchedulerOutput
from midstream.weights.base import worker_engines
from midstream.weights.manifest import digest
from midstream.weights.packing import dtype_name
from midstream.weights.session import TensorRecord

_DEFAULT_MAX_LEN = 8192
_JOIN_S = 5.0

Check = Callable[[str, str, Sequence[int]], None]
"""``UpdateSession.check``: (name, dtype, shape), raises WeightUpdateError."""


@dataclass(frozen=True, slots=True)
class Done:
    """A finished staging job: its result, or its error."""

    job: int
    value: Any = None
    error: BaseException | None = None


class Worker:
    """One model on one device. Every method belongs to the core's thread, but for the jobs in the staging thread."""

    def __init__(self, config: EngineConfig, wake: Callable[[], None] = lambda: None) -> None:
        checkpoint = open_checkpoint(config.model)
        self.model_config = checkpoint.config
        self.dtype = resolve_dtype(config.dtype, checkpoint.config)
        try:
            self.device = torch.empty(0, device=config.device).device
        except (RuntimeError, AssertionError) as error:
            raise InvalidInput(f"device {config.device!r} cannot be used here: {error}") from error
        longest = min(checkpoint.config.max_position_embeddings, _DEFAULT_MAX_LEN)
        if config.max_model_len is not None and config.max_model_len > checkpoint.config.max_position_embeddings:
            raise InvalidInput(
                f"max_model_len {config.max_model_len} exceeds the model's {checkpoint.config.max_position_embeddings}"
            )
        self.max_model_len = config.max_model_len or longest
        model = Llama(checkpoint.config, self.dtype, self.device)
        shapes = parameter_shapes(checkpoint.config)
        self.params = {name: ParamMeta(name, dtype_name(self.dtype), shape) for name, shape in shapes.items()}
        self.tied = {HEAD: EMBEDDING} if checkpoint.config.tie_word_embeddings else {}
        self.digests: dict[str, str] = {}
        staging = self._new_staging()
        for name, tensor in load_weights(checkpoint, self.dtype):
            self.digests[name] = digest(tensor)
            staging.put(name, tensor)
        self.weights = staging.finalize(None)
        size = config.block_size
        self.num_blocks = config.num_blocks or max(
            config.kv_cache_bytes // ModelRunner.block_bytes(checkpoint.config, self.dtype, size), 1
        )
        self.runner = ModelRunner(model, self.dtype, self.device, self.num_blocks, size)
        self.transfer = worker_engines.lookup(config.weight_transfer_backend)(self.params, config.extra)
        self.fingerprint = fingerprint(self.dtype, size)
        self.completed: collections.deque[Done] = collections.deque()
        self._staging: Staging | None = None
        self._next: ModelWeights | None = None
        self._wake = wake
        self._jobs: queue.SimpleQueue[tuple[int, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._num_jobs = 0
        self._thread = threading.Thread(target=self._run_jobs, name="weight-staging", daemon=True)
        self._thread.start()

    def _new_staging(self) -> Staging:
        return Staging(self.model_config, self.dtype, self.device)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step under the live weights."""
        return self.runner.execute(plan, self.weights)

    # -- jobs for the staging thread; each returns its number, its Done comes through ``completed`` --------------

    def init_transfer(self, init_info: dict[str, Any]) -> int:
        return self._submit(lambda: self.transfer.init_transfer_engine(self.transfer.parse_init_info(init_info)))

    def receive(self, update_info: dict[str, Any], check: Check) -> int:
        """Stage one chunk. Its value: the list of TensorRecord."""
        if self._staging is None:
            self._staging = self._new_staging()
        staging = self._staging
        return self._submit(lambda: self._stage(staging, update_info, check))

    def prepare(self) -> int:
        """Settle fused, tied and packed forms of everything staged. Its value: None; then :meth:`commit` may follow."""
        staging, live = self._staging, self.weights
        assert staging is not None
        return self._submit(lambda: staging.finalize(live))

    def _stage(self, staging: Staging, update_info: dict[str, Any], check: Check) -> list[TensorRecord]:
        info = self.transfer.parse_update_info(update_info)
        problems: list[WeightUpdateError] = []
        records: list[TensorRecord] = []
        for name, tensor in self.transfer.receive_weights(info):
            try:
                check(name, dtype_name(tensor.dtype), tuple(tensor.shape))
            except WeightUpdateError as error:
                problems.append(error)
                continue
            nbytes = tensor.numel() * tensor.element_size()
            held = staging.put(self.tied.get(name, name), tensor)
            records.append(TensorRecord(name, digest(held), nbytes))  # of our copy: nobody else writes to that
        if problems:
            tensors = [name for error in problems for name in error.tensors]
            raise WeightUpdateError("; ".join(error.message for error in problems), tensors)
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

    def shutdown_transfer(self) -> int:
        return self._submit(self.transfer.shutdown)

    def close(self) -> None:
        """End the staging thread and the channel; bounded."""
        self._jobs.put(None)
        self._thread.join(_JOIN_S)
        self.transfer.shutdown()

    def checkpoint(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The live weights under checkpoint names, as really held (copies)."""
        return self.weights.checkpoint(self.model_config).items()

    def _submit(self, job: Callable[[], Any]) -> int:
        self._num_jobs += 1
        self._jobs.put((self._num_jobs, job))
        return self._num_jobs

    def _run_jobs(self) -> None:
        torch.set_num_threads(1)  # of this thread: the steps keep theirs
        with torch.inference_mode():
            while (entry := self._jobs.get()) is not None:
                number, job = entry
                try:
                    done = Done(number, job())
                except Exception as error:
                    done = Done(number, error=error)
                self.completed.append(done)
                self._wake()
