"""Small real classes for the trainer's tests: a tokenizer, a task, a policy that is a table, and an engine that samples
from such a table. Engine and policy share ``next_logprobs``, so their logprobs have the same bits, as the real ones do.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from midstream.errors import EnginePaused, UpdateConflict
from midstream.rl.tasks import ExactTask
from midstream.types import (
    CompletionOutput,
    ParamMeta,
    RequestOutput,
    SamplingParams,
    WeightVersion,
    child_seed,
    extend_spans,
    mix64,
)
from midstream.weights.base import TrainerWeightTransferEngine

torch.set_num_threads(1)

LETTERS = "abcd"
EOS = len(LETTERS)
VOCAB = len(LETTERS) + 1


class LetterTokenizer:
    """One id per letter of ``LETTERS``; the id after them is the end of sequence."""

    eos_token_ids = (EOS,)

    def encode(self, text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    prompt = encode

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(LETTERS[i] for i in token_ids if i != EOS)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode(messages[-1]["content"])


class SuccessorTask(ExactTask):
    """The letter after the prompt's last one: ``cab`` → ``c``. A table over (position, previous token) can learn it."""

    name = "successor"

    def draw(self, rng: random.Random) -> tuple[str, str]:
        word = "".join(rng.choice(LETTERS) for _ in range(rng.randint(4, 7)))
        return word, LETTERS[(LETTERS.index(word[-1]) + 1) % len(LETTERS)]


def logprobs_from_bits(bits: str) -> list[float]:
    """Inverse of a run directory's ``logprob_bits``."""
    return list(struct.unpack(f">{len(bits) // 8}f", bytes.fromhex(bits)))


def next_logprobs(table: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """[T, V] from table [2 * V, V] and rows [T]. A row's bits do not depend on its neighbours."""
    return F.log_softmax(F.embedding(rows, table) / temperature, dim=-1)


def row_of(position: int, previous: int) -> int:
    """Row of the table for output token ``position``, which follows the token ``previous``.

    After an ``EOS``, which only a reply can end with, a turn begins wherever it stands: so turns can be told from the
    context alone, by an engine that sees one turn as by a policy that sees all of them.
    """
    return min(position, previous != EOS) * VOCAB + previous


class TablePolicy:
    """A policy with one parameter: logits of the next token by (first token or later one, previous token)."""

    def __init__(self, seed: int = 0) -> None:
        self.table = torch.nn.Parameter(torch.randn(2 * VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)))

    def logprobs(
        self, sequences: list[tuple[list[int], list[list[int]]]], params: SamplingParams, routes: None = None
    ) -> Tensor:
        rows, targets = [], []
        for prompt, completions in sequences:
            for completion in completions:
                before = [prompt[-1], *completion[:-1]]
                rows += [row_of(i, previous) for i, previous in enumerate(before)]
                targets += completion
        logprobs = next_logprobs(self.table, torch.tensor(rows), params.temperature)
        return logprobs.gather(1, torch.tensor(targets)[:, None])[:, 0]

    def parameters(self) -> list[Tensor]:
        return [self.table]

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta("table", "float32", tuple(self.table.shape))]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield "table", self.table.detach()

    def save(self, directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps({"model_type": "table"}))

    def state(self) -> dict[str, Tensor]:
        return {"table": self.table.detach()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            self.table.copy_(state["table"])


class FakeTransfer(TrainerWeightTransferEngine):
    """Hands the tensors over as objects; ``fail_at`` makes the n-th update fail half way."""

    def __init__(self, client: Any, source: Any, fail_at: int | None = None) -> None:
        super().__init__(client, source)
        self.fail_at = fail_at
        self.count = 0

    @classmethod
    def trainer_init(cls, init_info: Mapping[str, Any], *, client: Any, source: Any) -> FakeTransfer:
        client.init_weight_transfer_engine({"init_info": dict(init_info)})
        return cls(client, source)

    def transfer(self, session_id: str) -> None:
        self.count += 1
        for name, tensor in self.source:
            if self.count == self.fail_at:
                raise OSError("the channel broke")
            self.client.update_weights({"update_info": {name: tensor.clone()}})

    def shutdown(self) -> None: ...


class FakeEngineClient:
    """An ``EngineClient`` that samples from a table, token by token, so that commits land in the middle of requests.

    ``ticks(request_id, index, position)`` says how many turns of the event loop a token takes: it decides in which
    order requests finish. ``hold(request_id, position)`` is awaited before a token. The engine starts with weights
    nobody wants (zeros), under a label that no trainer understands.
    """

    def __init__(
        self,
        max_num_seqs: int = 64,
        ticks: Callable[[str, int, int], int] = lambda request, index, position: 1,
    ) -> None:
        self.table = torch.zeros(2 * VOCAB, VOCAB)
        self.version = WeightVersion(0, "default", "start")
        self.ticks = ticks
        self.hold: Callable[[str, int], Any] | None = None
        self.committed = asyncio.Event()
        """Set at each commit; a new one then stands here for the next."""
        self.refuse = 0
        """So many requests are refused, as in a pause."""
        self.cut_short = 0
        """So many requests end with finish reason abort, as in a pause that begins."""
        self.requests: list[str] = []
        self.prompts: dict[str, list[int]] = {}
        self.running = 0
        self.max_running = 0
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._staged: dict[str, Tensor] | None = None
        self._logprobs: dict[int, tuple[list[list[float]], list[list[float]]]] = {}

    async def generate_one(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None
    ) -> RequestOutput:
        assert request_id is not None and params.seed is not None
        if self.refuse:
            self.refuse -= 1
            raise EnginePaused("paused")
        self.requests.append(request_id)
        self.prompts[request_id] = prompt_token_ids
        outputs = await asyncio.gather(*[
            self._sample(prompt_token_ids, params, request_id, k) for k in range(params.n)
        ])  # fmt: skip
        if self.cut_short:
            self.cut_short -= 1
            outputs[-1].finish_reason = "abort"
        return RequestOutput(request_id, None, prompt_token_ids, list(outputs), finished=True)

    async def _sample(self, prompt: list[int], params: SamplingParams, request: str, index: int) -> CompletionOutput:
        assert params.seed is not None and params.max_tokens is not None
        seed = child_seed(params.seed, index)
        out = CompletionOutput(index=index, seed=seed)
        async with self._slots:
            self.running += 1
            self.max_running = max(self.max_running, self.running)
            try:
                previous = prompt[-1]
                while out.finish_reason is None:
                    position = len(out.token_ids)
                    for _ in range(self.ticks(request, index, position)):
                        await asyncio.sleep(0)
                    if self.hold is not None:
                        await self.hold(request, position)
                    token, logprob = self._draw(row_of(position, previous), params, seed, len(prompt) + position)
                    extend_spans(out.weight_versions, self.version, position)
                    out.token_ids.append(token)
                    # temperature is 1 or 0 here, so the raw and the processed one differ for greedy tokens only
                    out.token_logprobs.append(logprob)
                    out.processed_logprobs.append(logprob if params.temperature else 0.0)
                    previous = token
                    if token == EOS:
                        out.finish_reason = "stop"
                    elif len(out.token_ids) == params.max_tokens:
                        out.finish_reason = "length"
            finally:
                self.running -= 1
        return out

    def _draw(self, row: int, params: SamplingParams, seed: int, position: int) -> tuple[int, float]:
        assert params.temperature in (0, 1)
        number = self.version.number
        if number not in self._logprobs:
            every_row = next_logprobs(self.table, torch.arange(2 * VOCAB), 1.0)
            self._logprobs[number] = (every_row.tolist(), every_row.exp().cumsum(1).tolist())
        logprobs, cumulative = (rows[row] for rows in self._logprobs[number])
        if params.temperature == 0:
            best = max(logprobs)
            return logprobs.index(best), best
        uniform = mix64(seed ^ mix64(position)) / 2**64
        token = min(bisect_left(cumulative, uniform), VOCAB - 1)
        return token, logprobs[token]

    async def init_weight_transfer_engine(self, request: dict[str, Any]) -> dict[str, Any]:
        return {}

    async def start_weight_update(self, manifest: Any = None, mode: str = "full", cast: str = "deny") -> dict[str, Any]:
        if self._staged is not None:
            raise UpdateConflict("an update is open")
        self._staged = {}
        return {"session_id": "s", "lease_s": 60.0, "version": self.version.label}

    async def update_weights(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._staged is not None
        self._staged |= request["update_info"]
        await asyncio.sleep(0)
        return {"received": 1, "bytes": 4 * 2 * VOCAB * VOCAB}

    async def finish_weight_update(self, weight_version: str | None = None, kv_policy: Any = None) -> dict[str, Any]:
        assert self._staged is not None and weight_version is not None
        await asyncio.sleep(0)
        self.table, self._staged = self._staged["table"], None
        number = self.version.number + 1
        self.version = WeightVersion(number, weight_version, f"id-{number}")
        self.committed.set()
        self.committed = asyncio.Event()
        return {
            "updated": 1, "of": 1, "bytes": 4 * 2 * VOCAB * VOCAB, "version": weight_version, "number": number,
            "weights_id": self.version.weights_id, "commit_wait_ms": 0.0, "stall_ms": 0.25,
        }  # fmt: skip

    async def abort_weight_update(self) -> dict[str, Any]:
        was, self._staged = self._staged, None
        return {"aborted": None if was is None else "s"}
