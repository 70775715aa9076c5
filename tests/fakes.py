"""Small real classes that stand in for the heavy ones. No torch.

``FakeRunner`` is a model whose next token is a function of (prefix, weight version, seed), computed from a simulated
KV store, as a real one does. So a wrong block table shows twice: as another token, and as a ``KVError`` on the spot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from midstream.engine.scheduler import Scheduler
from midstream.kv.block_pool import BlockPool
from midstream.types import (
    KVPolicy,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    SampledToken,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    WeightVersion,
    WeightVersionSpan,
    child_seed,
    mix64,
)

VOCAB_SIZE = 97
_ROOT = 1


class KVError(AssertionError):
    """A step read KV that is stale, foreign or was never written."""


def extend_key(key: int, token: int) -> int:
    """Identity of a context one token longer: two contexts have one key only if all their tokens are equal."""
    return mix64(key ^ mix64(token + 2))


def context_keys(token_ids: Iterable[int]) -> list[int]:
    """The key of every prefix that ends in each of these tokens."""
    keys, key = [], _ROOT
    for token in token_ids:
        key = extend_key(key, token)
        keys.append(key)
    return keys


def next_token(key: int, version: int, seed: int) -> int:
    """What the fake model samples after the context ``key``."""
    return mix64(key ^ mix64(version * 1_000_003 + seed)) % VOCAB_SIZE


def score(key: int, version: int, token: int) -> float:
    """The fake model's logprob of ``token`` after the context ``key``."""
    return -(mix64(key ^ mix64(version * 7919 + token)) % 10_000) / 1000


class FakeRunner:
    """Executes plans on a store that has, for every slot, (context key, version); a key holds token and position.

    ``requests`` is the truth to check against, the scheduler's live requests. A step copies blocks, writes all its
    positions, then reads every context: each slot must hold the request's own prefix, computed under the version that
    the request claims for it, and that is the current one unless its KV was kept across a commit.
    """

    def __init__(self, requests: Mapping[str, Request], block_size: int, version: int = 0) -> None:
        self.requests = requests
        self.block_size = block_size
        self.version = version
        self._keys: dict[int, list[int | None]] = {}
        self._versions: dict[int, list[int | None]] = {}
        self._truth: dict[str, tuple[Request, list[int]]] = {}

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for source, destination in plan.block_copies:
            if source not in self._keys:
                raise KVError(f"block {source} is copied before anything was written to it")
            self._keys[destination] = list(self._keys[source])
            self._versions[destination] = list(self._versions[source])
        for scheduled in plan.requests:
            self._write(scheduled)
        result = ModelRunnerOutput()
        for scheduled in plan.requests:
            if scheduled.request_id in self.requests:
                self._check(scheduled, self.requests[scheduled.request_id])
            keys = self._read(self._keys, scheduled, scheduled.start + len(scheduled.token_ids))
            if scheduled.sample:
                token = next_token(keys[-1], self.version, scheduled.seed)
                logprob = score(keys[-1], self.version, token)
                result.sampled[scheduled.request_id] = SampledToken(token, logprob, logprob / 2, 1, [(token, logprob)])
            if scheduled.prompt_targets:
                result.prompt_logprobs[scheduled.request_id] = [
                    (score(keys[scheduled.start + i], self.version, token), 1, [])
                    for i, token in enumerate(scheduled.prompt_targets)
                ]
        return result

    def _write(self, scheduled: ScheduledRequest) -> None:
        key = _ROOT
        if scheduled.start:
            last = scheduled.start - 1
            block = self._keys.get(scheduled.block_ids[last // self.block_size])
            stored = block[last % self.block_size] if block else None
            if stored is None:
                raise KVError(f"{scheduled.request_id}: position {last} was never written")
            key = stored
        for position, token in enumerate(scheduled.token_ids, scheduled.start):
            key = extend_key(key, token)
            block_id, slot = scheduled.block_ids[position // self.block_size], position % self.block_size
            self._keys.setdefault(block_id, [None] * self.block_size)[slot] = key
            self._versions.setdefault(block_id, [None] * self.block_size)[slot] = self.version

    def _read(self, store: Mapping[int, list[int | None]], scheduled: ScheduledRequest, end: int) -> list[int]:
        values: list[int | None] = []
        for block_id in scheduled.block_ids[: -(-end // self.block_size)]:
            values += store.get(block_id, [None] * self.block_size)
        return values[:end]  # type: ignore[return-value]

    def _check(self, scheduled: ScheduledRequest, request: Request) -> None:
        start, end = scheduled.start, scheduled.start + len(scheduled.token_ids)
        known, truth = self._truth.get(request.request_id, (request, []))
        if known is not request:  # the id was used before
            truth = []
        self._truth[request.request_id] = (request, truth)
        for token in request.token_ids[len(truth) : end]:
            truth.append(extend_key(truth[-1] if truth else _ROOT, token))
        keys = self._read(self._keys, scheduled, end)
        if keys != truth[:end]:
            wrong = next(i for i in range(end) if keys[i] != truth[i])
            what = "was never written" if keys[wrong] is None else "holds the KV of another context"
            raise KVError(f"{request.request_id}: position {wrong} of {end} {what}")
        claimed = [number for number, first, last in request.kv_spans for _ in range(first, last)]
        if len(claimed) != start:
            raise KVError(f"{request.request_id}: kv_spans cover {len(claimed)} positions, the cursor is at {start}")
        if self._read(self._versions, scheduled, start) != claimed:
            raise KVError(f"{request.request_id}: the KV was not computed under the versions of {request.kv_spans}")
        if not request.kv_kept and set(claimed) - {self.version}:
            raise KVError(f"{request.request_id}: reads KV of versions {set(claimed)} under version {self.version}")


class FakeEngine:
    """A scheduler and a fake runner, stepped by hand. Checks every plan and every ended request."""

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 256,
        max_model_len: int = 2048,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_caching)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            version=WeightVersion(0, "v0"),
        )
        self.runner = FakeRunner(self.scheduler.live, block_size)
        self.ended: list[Request] = []
        self.num_steps = 0
        self._num_added = 0

    def add(
        self,
        prompt: Sequence[int],
        n: int = 1,
        *,
        max_tokens: int = 8,
        seed: int = 7,
        parent_id: str | None = None,
        stop_token_ids: Iterable[int] = (),
        cache_salt: str = "",
        priority: int = 0,
        prompt_logprobs: int | None = None,
    ) -> list[Request]:
        parent_id = parent_id or f"r{self._num_added}"
        params = SamplingParams(n=n, max_tokens=max_tokens, logprobs=1, prompt_logprobs=prompt_logprobs)
        requests = [
            Request(
                request_id=parent_id if n == 1 else f"{parent_id}/{index}",
                prompt_token_ids=list(prompt),
                params=params,
                seed=child_seed(seed, index),
                max_total_tokens=len(prompt) + max_tokens,
                stop_token_ids=frozenset(stop_token_ids),
                parent_id=parent_id,
                index=index,
                cache_salt=cache_salt,
                priority=priority,
            )
            for index in range(n)
        ]
        self.scheduler.add(requests)
        self._num_added += 1
        return requests

    def step(self) -> SchedulerOutput:
        """One step; it must do something while requests are unfinished."""
        plan = self.scheduler.schedule()
        assert plan.num_tokens == sum(len(scheduled.token_ids) for scheduled in plan.requests)
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len({scheduled.request_id for scheduled in plan.requests}) == len(plan.requests)
        assert self.scheduler.has_unfinished != plan.is_empty, "an empty step while requests are unfinished"
        changed = self.scheduler.update(plan, self.runner.execute(plan))
        sampled = [scheduled.request_id for scheduled in plan.requests if scheduled.sample]
        assert [request.request_id for request in changed] == sampled
        self.end(request for request in changed if request.status.is_finished)
        self.num_steps += 1
        return plan

    def run(self, max_steps: int = 5000) -> None:
        """Steps until nothing is unfinished; then nothing may be held."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.scheduler.has_unfinished, f"unfinished after {max_steps} steps"
        self.scheduler.check_integrity()
        assert self.pool.num_used == 0

    def abort(self, ids: Iterable[str] | None = None) -> list[Request]:
        ended = self.scheduler.end(ids, RequestStatus.FINISHED_ABORTED)
        self.end(ended)
        return ended

    def commit(self, policy: KVPolicy) -> None:
        number = self.scheduler.version.number + 1
        self.scheduler.commit(WeightVersion(number, f"v{number}"), policy)
        self.runner.version = number

    def end(self, requests: Iterable[Request]) -> None:
        for request in requests:
            check_record(request)
            self.ended.append(request)


def versions_of(spans: Iterable[WeightVersionSpan]) -> list[int]:
    """The version number of every token the spans cover, token by token."""
    return [span.number for span in spans for _ in range(span.start, span.end)]


def check_record(request: Request) -> None:
    """Every output token, logprob and prompt logprob is what the fake model gives for its prefix and its version."""
    num_output, num_prompt = request.num_output_tokens, request.num_prompt_tokens
    versions = versions_of(request.version_spans)
    assert len(versions) == len(request.sampled) == num_output
    assert [span.start for span in request.version_spans] == [0, *(s.end for s in request.version_spans)][:-1]
    keys = context_keys(request.token_ids)
    for i, (token, version) in enumerate(zip(request.output_token_ids, versions, strict=True)):
        key = keys[num_prompt + i - 1]
        assert token == next_token(key, version, request.seed), (request.request_id, i, version)
        raw = score(key, version, token)
        assert request.sampled[i] == SampledToken(token, raw, raw / 2, 1, [(token, raw)])
    if request.params.prompt_logprobs is None:
        assert not request.prompt_logprobs
    elif num_output:
        assert len(request.prompt_logprobs) == num_prompt - 1


def reference_tokens(prompt: Sequence[int], seed: int, num_tokens: int, version: int = 0) -> list[int]:
    """What the fake model generates, with no engine at all."""
    key, tokens = context_keys(prompt)[-1], []
    for _ in range(num_tokens):
        tokens.append(next_token(key, version, seed))
        key = extend_key(key, tokens[-1])
    return tokens
