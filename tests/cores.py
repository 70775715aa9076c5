"""An engine core driven by hand, in process: every turn is the test's, nothing runs by itself.

``ChunkTransfer`` is a weight backend whose chunks are plain lists of tensors that a test puts under a key, so that it
can send anything, in any order, and hold a chunk back on a gate.
"""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fakes import versions_of
from midstream.config import EngineConfig
from midstream.engine.core import EngineCore
from midstream.engine.protocol import Fail, Reply
from midstream.errors import InvalidInput, MidstreamError
from midstream.models.llama import Llama
from midstream.models.weights import assemble
from midstream.rl.policy import pack, sequence_logprobs
from midstream.serving.outputs import OutputBuilder
from midstream.types import RequestOutput, SamplingParams
from midstream.weights.base import WeightTransferEngine
from midstream.weights.manifest import digest

LIMIT_S = 20.0
TINY = {"num_hidden_layers": 1}


@dataclass(frozen=True)
class ChunkInitInfo:
    token: str = ""


@dataclass(frozen=True)
class ChunkUpdateInfo:
    key: int
    update: str | None = None


class ChunkTransfer(WeightTransferEngine):
    init_info_cls = ChunkInitInfo
    update_info_cls = ChunkUpdateInfo

    def init_transfer_engine(self, init_info: ChunkInitInfo) -> dict[str, Any]:
        return {"token": init_info.token}

    def receive_weights(self, update_info: ChunkUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        if update_info.key not in self.extra["chunks"]:
            raise InvalidInput(f"no chunk {update_info.key}")
        for name, tensor in self.extra["chunks"][update_info.key]:
            if name == "gate":
                assert tensor.wait(LIMIT_S), "the gate of this test was never opened"  # type: ignore[attr-defined]
            elif isinstance(tensor, Exception):
                raise tensor
            else:
                yield name, tensor

    def shutdown(self) -> None:
        pass


class Driver:
    """One EngineCore and what came out of it. Fails if a request ends twice or speaks after its end."""

    def __init__(self, model: pathlib.Path, **options: Any) -> None:
        self.turn = threading.Event()
        self.chunks: dict[int, list[tuple[str, Any]]] = {}
        defaults: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        self.config = EngineConfig(
            model=str(model),
            weight_transfer_backend="cores:ChunkTransfer",
            extra={"chunks": self.chunks},
            **{**defaults, **options},
        )
        self.core = EngineCore(self.config, wake=self.turn.set)
        self.builders: dict[str, OutputBuilder] = {}
        self.params: dict[str, SamplingParams] = {}
        self.replies: dict[int, Reply | Fail] = {}
        self.ops = 0

    # requests

    def add(self, prompt: list[int], request_id: str | None = None, **params: Any) -> str:
        name = request_id or f"r{len(self.builders)}"
        chosen = SamplingParams(**{"temperature": 1.0, "max_tokens": 12, "seed": 5, "ignore_eos": True, **params})
        self.core.add(name, prompt, chosen)
        self.compiled()
        self.builders[name] = OutputBuilder(name, None, list(prompt), chosen, None)
        self.params[name] = chosen
        return name

    def compiled(self) -> None:
        """Until the grammars of all requests wait to be taken; runs no turn."""
        left = wait([future for _, future, _ in self.core.grammars._pending], LIMIT_S).not_done
        assert not left, "a grammar does not come to its end"

    def output(self, name: str) -> RequestOutput:
        return self.builders[name].output

    def tokens(self, name: str) -> list[int]:
        return self.output(name).outputs[0].token_ids

    # turns

    def take(self) -> None:
        outputs = self.core.take_outputs()
        for increment in outputs.increments:
            builder = self.builders[increment.parent_id]
            before = builder.output.outputs[increment.index].finish_reason
            assert before is None, f"{increment.parent_id}/{increment.index} spoke after its end ({before})"
            builder.add(increment)
            out = builder.output.outputs[increment.index]
            assert len(out.token_ids) == len(out.processed_logprobs) == len(versions_of(out.weight_versions))
        for reply in outputs.replies:
            assert reply.op not in self.replies, f"call {reply.op} was answered twice"
            self.replies[reply.op] = reply

    def step(self) -> bool:
        ran = self.core.step()
        self.take()
        return ran

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def settle(self) -> None:
        """Until a staging result waits to be taken; runs no turn."""
        deadline = time.monotonic() + LIMIT_S
        while self.core.worker.is_busy and not self.core.worker.completed:
            assert time.monotonic() < deadline, "the staging thread does not answer"
            self.turn.wait(0.5)
            self.turn.clear()

    def run(self) -> None:
        """Until no request is live and no job is open."""
        for _ in range(20_000):
            if not self.core.scheduler.has_unfinished and not self.core.worker.is_busy:
                break
            if not self.core.has_work:
                self.settle()
            self.step()
        assert not self.core.scheduler.has_unfinished, "requests are left"
        self.step()
        self.check_idle()

    def until(self, condition: Callable[[], bool], limit: int = 2000) -> None:
        for _ in range(limit):
            if condition():
                return
            self.step()
        raise AssertionError("the condition never came true")

    def check_idle(self) -> None:
        scheduler = self.core.scheduler
        scheduler.check_integrity()
        assert not scheduler.live and not scheduler.running and not scheduler.waiting and not scheduler._siblings
        assert scheduler.pool.num_used == 0

    # calls

    def call(self, verb: str, **arguments: Any) -> int:
        self.ops += 1
        self.core.call(self.ops, verb, arguments)
        self.take()
        return self.ops

    def answered(self, op: int) -> bool:
        return op in self.replies

    def result(self, op: int) -> dict[str, Any]:
        reply = self.replies[op]
        if isinstance(reply, Fail):
            raise reply.error
        return reply.value

    def error(self, op: int) -> MidstreamError:
        reply = self.replies[op]
        assert isinstance(reply, Fail), f"call {op} succeeded: {reply.value}"
        return reply.error

    def wait(self, op: int) -> dict[str, Any]:
        """Turns until ``op`` is answered; no more of them than needed."""
        for _ in range(5000):
            if op in self.replies:
                return self.result(op)
            if self.core.worker.is_busy:
                self.settle()
            self.step()
        raise AssertionError(f"call {op} was never answered")

    def now(self, verb: str, **arguments: Any) -> dict[str, Any]:
        return self.wait(self.call(verb, **arguments))

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> dict[str, Any]:
        return self.now("pause_generation", mode=mode, clear_cache=clear_cache)

    def resume(self) -> dict[str, Any]:
        return self.now("resume_generation")

    # updates

    def chunk(self, *pairs: tuple[str, Any]) -> dict[str, Any]:
        key = len(self.chunks)
        self.chunks[key] = list(pairs)
        return {"update_info": {"key": key}}

    def send(self, *pairs: tuple[str, Any]) -> int:
        return self.call("update_weights", request=self.chunk(*pairs))

    def begin_update(self, tensors: Mapping[str, Tensor], num_chunks: int = 1, **start: Any) -> None:
        """Start, and every chunk on its way."""
        self.result(self.call("start_weight_update", **start))
        pairs = list(tensors.items())
        size = -(-len(pairs) // num_chunks)
        for at in range(0, len(pairs), size):
            self.send(*pairs[at : at + size])

    def update(
        self, tensors: Mapping[str, Tensor], label: str | None = None, kv_policy: str | None = None, **start: Any
    ) -> dict[str, Any]:
        self.begin_update(tensors, **start)
        return self.now("finish_weight_update", weight_version=label, kv_policy=kv_policy)

    def digests(self) -> dict[str, str]:
        return self.now("weight_digests")["digests"]  # type: ignore[no-any-return]

    def close(self) -> None:
        self.core.close()
        self.take()


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


class Teacher:
    """Teacher-forced log-probabilities by the trainer's code, under any number of versions of the weights."""

    def __init__(self, driver: Driver, versions: Mapping[int, Mapping[str, Tensor]]) -> None:
        worker = driver.core.worker
        self.config, self.dtype = worker.model_config, worker.dtype
        self.block_size = driver.config.block_size
        self.model = Llama(self.config, self.dtype)
        self.versions = versions

    def check(self, outputs: list[RequestOutput], params: SamplingParams, at_once: int = 32) -> int:
        """Every token's processed logprob is, bit for bit, what the version in its span gives. Returns how many."""
        wanted: dict[int, list[tuple[list[int], Any]]] = {}
        for output in outputs:
            for completion in output.outputs:
                for number in {span.number for span in completion.weight_versions}:
                    wanted.setdefault(number, []).append((output.prompt_token_ids, completion))
        checked = 0
        with torch.inference_mode():
            for number, entries in sorted(wanted.items()):
                weights = assemble(self.config, self.versions[number])
                for at in range(0, len(entries), at_once):
                    part = entries[at : at + at_once]
                    batch = pack([(prompt, [c.token_ids]) for prompt, c in part], self.block_size)
                    found = iter(sequence_logprobs(self.model, weights, batch, self.block_size, params).tolist())
                    for _, completion in part:
                        numbers = versions_of(completion.weight_versions)
                        for i, made_under in enumerate(numbers):
                            expected = next(found)
                            if made_under == number:
                                got = completion.processed_logprobs[i]
                                assert got == expected, (number, i, got, expected, completion)
                                checked += 1
        return checked
