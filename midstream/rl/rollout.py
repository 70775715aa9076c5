"""Generation and rewards, beside the optimizer: a thread with its own event loop drives the engine.

Two sources of groups, one contract (``GroupSource``):

* ``RolloutWorker`` keeps the engine busy: it launches groups whenever the buffer has a free slot, scores each as soon
  as it is finished, and hands the trainer's thread the groups of its next step.
* ``SyncRollouts`` is the synchronous algorithm in ten lines: sample G groups, wait for all, refill the useless ones.
  It shares no logic with the buffer, so that "max_staleness 0 equals the synchronous algorithm" is a test and not a
  definition.

::

    trainer's thread                         engine thread (event loop)
      take() ── waits on a condition ◄──────── resolve ◄── rewards ◄── generate_one(group g, n samples, seed f(g))
      release(step) ─ after the commit ──────► pump: while buffer.can_launch: launch(g)
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from midstream.errors import EnginePaused, MidstreamError, TimedOut
from midstream.rl.advantage import is_useless, overlong_penalty
from midstream.rl.buffer import RolloutBuffer
from midstream.rl.engine_thread import CLOSE_S
from midstream.rl.engine_thread import EngineThread as EngineThread
from midstream.rl.env import Completion, Problem, Task, TurnTask, next_turn, score
from midstream.rl.types import EvalResult, Rollout, RolloutGroup, TakenGroups, eval_seed, group_seed
from midstream.types import CompletionOutput, SamplingParams, WeightVersionSpan

if TYPE_CHECKING:
    from midstream.rl.config import TrainConfig
    from midstream.serving.client import EngineClient

T = TypeVar("T")
_RETRY_S = 0.2
_USELESS_WARNING = 64
_log = logging.getLogger(__name__)


async def _gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure cancels the others and is raised as it is."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


@dataclass(frozen=True)
class Sampler:
    """Turns a group's number into a scored group: one request of n samples, then for each of them, where the task has
    several turns, the later turns one by one; then their rewards."""

    client: EngineClient
    task: Task
    params: SamplingParams
    """Of the training rollouts; n is the group's size."""
    run_seed: int
    reward_timeout_s: float = 10.0
    group_timeout_s: float = 300.0
    overlong_buffer_tokens: int = 0
    overlong_factor: float = 1.0
    max_model_len: int | None = None

    @classmethod
    def from_config(
        cls, client: EngineClient, task: Task, config: TrainConfig, max_model_len: int | None = None
    ) -> Sampler:
        return cls(
            client,
            task,
            sampling_params(config),
            config.seed,
            config.reward_timeout_s,
            config.group_timeout_s,
            config.overlong_buffer_tokens,
            config.overlong_factor,
            max_model_len,
        )

    async def group(self, g: int) -> RolloutGroup:
        """Sample and score group g. Raises ``TimedOut`` after ``group_timeout_s``, ``RewardError``, ``EngineDead``."""
        problem = self.task.problem("train", g)
        params = replace(self.params, seed=group_seed(self.run_seed, g))
        rollouts = await self._rollouts(problem, g, params, f"group-{g}")
        assert isinstance(self.params.max_tokens, int)
        shaped = [
            replace(
                rollout,
                penalty=overlong_penalty(
                    len(rollout.logprobs),
                    self.params.max_tokens,
                    self.overlong_buffer_tokens,
                    self.overlong_factor,
                ),
            )
            for rollout in rollouts
        ]
        return RolloutGroup(g, shaped)

    async def evaluate(self, problems: Sequence[Problem], temperature: float, name: str) -> EvalResult:
        """One completion per problem at ``temperature`` (0: greedy), with evaluation's own seeds."""
        start = time.monotonic()
        # Raw: the processed logprob of a greedy token is 0 by definition, and says nothing.
        params = replace(self.params, n=1, temperature=temperature, top_p=1.0, top_k=0, logprobs_mode="raw_logprobs")
        groups = await _gather([
            self._rollouts(problem, i, replace(params, seed=eval_seed(self.run_seed, i)), f"{name}-{i}")
            for i, problem in enumerate(problems)
        ])  # fmt: skip
        rollouts = [group[0] for group in groups]
        count = max(len(rollouts), 1)
        return EvalResult(
            accuracy=sum(r.reward >= 1.0 for r in rollouts) / count,
            reward=sum(r.reward for r in rollouts) / count,
            num_problems=len(rollouts),
            seconds=time.monotonic() - start,
            rollouts=rollouts,
        )

    async def _rollouts(self, problem: Problem, g: int, params: SamplingParams, request_id: str) -> list[Rollout]:
        try:
            async with asyncio.timeout(self.group_timeout_s):
                outputs = await self._generate(problem.prompt_token_ids, params, request_id)
                return await _gather([
                    self._episode(problem, g, output, params, f"{request_id}-{output.index}") for output in outputs
                ])  # fmt: skip
        except TimeoutError as error:
            if isinstance(error, MidstreamError):
                raise
            raise TimedOut(
                f"{request_id} was not generated and scored within {self.group_timeout_s:g} s; raise group_timeout_s, "
                "or look whether the engine is paused"
            ) from error

    async def _episode(
        self, problem: Problem, g: int, output: CompletionOutput, params: SamplingParams, request_id: str
    ) -> Rollout:
        """What follows the first turn, and the reward. Later turns draw with the seed of the first: a draw depends on
        it and the token's position in the sequence."""
        task, index, budget = self.task, output.index, params.max_tokens or 0
        tokens: list[int] = []
        logprobs: list[float] = []
        spans: list[WeightVersionSpan] = []
        kv_versions: list[tuple[int, int, int]] = []
        reprefilled = 0
        earlier: tuple[Completion, ...] = ()
        while True:
            at = len(tokens)
            spans += [replace(s, start=s.start + at, end=s.end + at) for s in output.weight_versions]
            tokens += output.token_ids
            logprobs += output.token_logprobs
            kv_versions += output.kv_versions or []
            reprefilled += output.num_reprefilled_tokens
            completion = replace(task.completion(output.token_ids, output.finish_reason or "error"), earlier=earlier)
            if completion.finish_reason != "stop" or len(earlier) + 1 >= getattr(task, "max_turns", 1):
                break
            reply = await next_turn(cast(TurnTask, task), problem, completion, self.reward_timeout_s)
            if reply is None:
                break
            context = [*problem.prompt_token_ids, *tokens, *reply]
            left = budget - len(logprobs)
            if left == 0 or len(context) >= (self.max_model_len or math.inf):
                completion = replace(completion, finish_reason="length")
                break
            tokens += reply
            earlier += (completion,)
            once = replace(params, n=1, seed=output.seed, max_tokens=left)
            (output,) = await self._generate(context, once, f"{request_id}-turn-{len(earlier) + 1}")
        return Rollout(
            group=g,
            index=index,
            prompt_token_ids=problem.prompt_token_ids,
            output_token_ids=tokens,
            logprobs=logprobs,
            spans=spans,
            seed=output.seed,
            finish_reason=completion.finish_reason,
            reward=await score(task, problem, completion, self.reward_timeout_s),
            kv_versions=kv_versions or None,
            num_reprefilled_tokens=reprefilled,
        )

    async def _generate(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str
    ) -> list[CompletionOutput]:
        """All n completions, whole. What an operator's pause cuts short or refuses is sampled again, from the same
        seed and the weights that stand then, so the group is never older than its launch."""
        attempt = 0
        while True:
            name = request_id if attempt == 0 else f"{request_id}-retry-{attempt}"
            try:
                output = await self.client.generate_one(prompt_token_ids, params, request_id=name)
            except EnginePaused:
                pass
            else:
                outputs = sorted(output.outputs, key=lambda o: o.index)
                bad = [o.finish_reason for o in outputs if o.finish_reason not in ("stop", "length", "abort")]
                if bad or len(outputs) != params.n:
                    raise MidstreamError(f"{name} ended with {len(outputs)} of {params.n} completions, reasons {bad}")
                if all(o.finish_reason != "abort" for o in outputs):
                    return outputs
            attempt += 1
            await asyncio.sleep(_RETRY_S)  # the group's own time limit bounds how often


def sampling_params(config: TrainConfig) -> SamplingParams:
    """How training rollouts are drawn; the trainer's logprobs are of the same distribution."""
    return SamplingParams(
        n=config.samples_per_group,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_tokens,
        logprobs_mode="processed_logprobs",
        detokenize=False,
        final_only=True,
    )


class Streak:
    """How many groups in a row had nothing to teach. Says so at 64, 128, 256, …: a run must not spin in silence."""

    def __init__(self) -> None:
        self.length = 0

    def add(self, group: RolloutGroup, useful: bool) -> None:
        self.length = 0 if useful else self.length + 1
        if self.length >= _USELESS_WARNING and self.length.bit_count() == 1:
            _log.warning(
                "%d groups in a row have nothing to teach: within each, all rewards are equal (last: %g). Look at the "
                "reward function and at rollouts (is max_tokens long enough?), take easier problems, or raise "
                "samples_per_group or temperature; dynamic_sampling=false trains on such groups too",
                self.length,
                group.rewards[0],
            )


class GroupSource(Protocol):
    """Where the trainer's steps get their groups. All methods are called from outside the engine thread."""

    def start(self) -> None: ...

    def take(self, timeout_s: float) -> TakenGroups:
        """The next step's groups. Raises ``TimedOut``, or the first error of generation, rewards or ``fail``."""

    def release(self, step: int) -> None:
        """The engine holds the weights that ``step`` produced."""

    def fail(self, error: BaseException) -> None:
        """Something else went wrong: whoever waits in ``take`` shall hear of it."""

    def close(self) -> list[RolloutGroup]:
        """End what is in flight, within some seconds; returns the finished groups that no step took."""


class RolloutWorker:
    """The asynchronous source. See the module docstring; the rules are the buffer's."""

    def __init__(self, sampler: Sampler, buffer: RolloutBuffer, engine: EngineThread) -> None:
        self._sampler = sampler
        self._buffer = buffer
        self._streak = Streak()
        self._engine = engine
        self._changed = threading.Condition()  # guards the buffer, the error and the flag
        self._error: BaseException | None = None
        self._running = False
        self._tasks: set[asyncio.Task[None]] = set()  # touched on the engine thread only

    def start(self) -> None:
        with self._changed:
            self._running = True
        self._engine.loop.call_soon_threadsafe(self._pump)

    def take(self, timeout_s: float) -> TakenGroups:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                taken = self._buffer.take()
                if taken is not None:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimedOut(f"no batch within {timeout_s:g} s: {self._buffer.describe()}")
                self._changed.wait(left)
        return taken

    def release(self, step: int) -> None:
        with self._changed:
            self._buffer.release(step)
            self._changed.notify_all()
        self._engine.loop.call_soon_threadsafe(self._pump)

    def fail(self, error: BaseException) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def close(self) -> list[RolloutGroup]:
        with self._changed:
            self._running = False
        self._engine.run(self._cancel(), CLOSE_S, "closing the rollout worker")
        with self._changed:
            return self._buffer.leftovers()

    # -- on the engine thread ----------------------------------------------------------------------------------------

    def _pump(self) -> None:
        with self._changed:
            if not self._running or self._error is not None:
                return
            launched = []
            while self._buffer.can_launch:
                launched.append(self._buffer.launch())
        for g in launched:
            task = self._engine.loop.create_task(self._group(g), name=f"group-{g}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _group(self, g: int) -> None:
        try:
            group = await self._sampler.group(g)
            with self._changed:
                self._streak.add(group, self._buffer.resolve(group))
                self._changed.notify_all()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.fail(error)
            return
        self._pump()

    async def _cancel(self) -> None:
        tasks = list(self._tasks)  # a cancelled generate_one aborts its request in the engine
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S / 2)


class SyncRollouts:
    """The synchronous source: generation happens inside ``take``, and nothing is in flight outside of it."""

    def __init__(
        self,
        sampler: Sampler,
        groups_per_step: int,
        engine: EngineThread,
        *,
        dynamic_sampling: bool = True,
        next_group: int = 0,
        next_step: int = 0,
    ) -> None:
        self._sampler = sampler
        self._groups_per_step = groups_per_step
        self._engine = engine
        self._dynamic_sampling = dynamic_sampling
        self._streak = Streak()
        self._next_group = next_group
        self._next_step = next_step
        self._may_go = threading.Event()  # the engine holds the weights of the last step
        self._may_go.set()
        self._error: BaseException | None = None

    def start(self) -> None: ...

    def take(self, timeout_s: float) -> TakenGroups:
        deadline = time.monotonic() + timeout_s
        if not self._may_go.wait(timeout_s):
            raise TimedOut(f"step {self._next_step - 1} was not released within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        useful: list[RolloutGroup] = []
        useless: list[RolloutGroup] = []
        while len(useful) < self._groups_per_step:
            first = self._next_group
            self._next_group += self._groups_per_step - len(useful)
            left = max(deadline - time.monotonic(), 0.0)
            try:
                groups = self._engine.run(self._all(first), left, f"sampling groups {first} to {self._next_group - 1}")
            except TimedOut as error:
                raise TimedOut(
                    f"{error}: step {self._next_step} has {len(useful)} of {self._groups_per_step} useful groups, "
                    f"{len(useless)} useless (all rewards equal), and {timeout_s:g} s for a batch"
                ) from error
            for group in groups:
                drop = self._dynamic_sampling and is_useless(group.rewards)
                (useless if drop else useful).append(group)
                self._streak.add(group, not drop)
        step = self._next_step
        self._next_step += 1
        self._may_go.clear()
        return TakenGroups(step, useful, useless)

    async def _all(self, first: int) -> list[RolloutGroup]:
        return await _gather([self._sampler.group(g) for g in range(first, self._next_group)])

    def release(self, step: int) -> None:
        self._may_go.set()

    def fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._may_go.set()

    def close(self) -> list[RolloutGroup]:
        return []
