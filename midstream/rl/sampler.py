"""From a group's number to a scored group: what the engine is asked for, turn by turn, and the rewards."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from midstream.errors import EnginePaused, InvalidInput, MidstreamError, TimedOut
from midstream.rl.advantage import overlong_penalty
from midstream.rl.config import TrainConfig
from midstream.rl.env import Completion, Problem, Task, TurnTask, next_turn, score
from midstream.rl.types import Rollout, RolloutGroup, derive_seed
from midstream.types import CompletionOutput, SamplingParams, WeightVersionSpan

if TYPE_CHECKING:
    from midstream.serving.client import EngineClient

T = TypeVar("T")
_RETRY_S = 0.2


async def gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


@dataclass(frozen=True)
class Sampler:
    """Turns a group's number into a scored group: one request of n samples, then for each of them, where the task has
    several turns, the later turns one by one; then their rewards. An episode ends at ``max_model_len`` too."""

    client: EngineClient
    task: Task
    config: TrainConfig
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        turns = getattr(self.task, "max_turns", 1)
        if type(turns) is not int or turns < 1:
            raise InvalidInput(f"max_turns of task {self.task.name} must be an int of at least 1, got {turns!r}")

    async def group(self, g: int) -> RolloutGroup:
        """Sample and score group g. Raises ``TimedOut`` after ``group_timeout_s``, ``RewardError``, ``EngineDead``."""
        config = self.config
        params = replace(config.sampling, seed=derive_seed(config.seed, "group", g))
        rollouts = await self._rollouts(self.task.problem("train", g), g, params, f"group-{g}")
        limits = config.max_tokens, config.overlong_buffer_tokens, config.overlong_factor
        return RolloutGroup(g, [replace(r, penalty=overlong_penalty(len(r.logprobs), *limits)) for r in rollouts])

    async def evaluate(self, problems: Sequence[Problem], temperature: float, name: str) -> list[Rollout]:
        """One completion per problem at ``temperature`` (0: greedy), with evaluation's own seeds."""
        # Raw: the processed logprob of a greedy token is 0 by definition, and says nothing.
        params = SamplingParams(
            temperature=temperature, max_tokens=self.config.max_tokens, detokenize=False, final_only=True
        )
        seeds = [derive_seed(self.config.seed, "eval", i) for i in range(len(problems))]
        groups = await gather([
            self._rollouts(problem, i, replace(params, seed=seed), f"{name}-{i}")
            for i, (problem, seed) in enumerate(zip(problems, seeds, strict=True))
        ])  # fmt: skip
        return [rollout for group in groups for rollout in group]

    async def _rollouts(self, problem: Problem, g: int, params: SamplingParams, request_id: str) -> list[Rollout]:
        limit_s = self.config.group_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                outputs = await self._generate(problem.prompt_token_ids, params, request_id)
                return await gather([
                    self._episode(problem, g, output, params, f"{request_id}-{output.index}") for output in outputs
                ])  # fmt: skip
        except TimeoutError as error:
            if isinstance(error, MidstreamError):
                raise
            raise TimedOut(
                f"{request_id} was not generated and scored within {limit_s:g} s; raise group_timeout_s, or look "
                "whether the engine is paused"
            ) from error

    async def _episode(
        self, problem: Problem, g: int, output: CompletionOutput, params: SamplingParams, request_id: str
    ) -> Rollout:
        """What follows the first turn, and the reward. Later turns draw with the seed of the first: a draw depends on
        it and the token's position in the sequence."""
        task, limit_s, left = self.task, self.config.reward_timeout_s, self.config.max_tokens
        turns: list[CompletionOutput] = []
        tokens: list[int] = []
        spans: list[WeightVersionSpan] = []
        earlier: tuple[Completion, ...] = ()
        while True:
            turns.append(output)
            at = len(tokens)
            spans += [replace(s, start=s.start + at, end=s.end + at) for s in output.weight_versions]
            tokens += output.token_ids
            left -= len(output.token_ids)
            completion = replace(task.completion(output.token_ids, output.finish_reason or "error"), earlier=earlier)
            if completion.finish_reason != "stop" or len(turns) >= getattr(task, "max_turns", 1):
                break
            reply = await next_turn(cast(TurnTask, task), problem, completion, limit_s)
            if reply is None:
                break
            context = [*problem.prompt_token_ids, *tokens, *reply]
            if left == 0 or len(context) >= (self.max_model_len or math.inf):
                completion = replace(completion, finish_reason="length")
                break
            tokens += reply
            earlier += (completion,)
            once = replace(params, n=1, seed=output.seed, max_tokens=left)
            (output,) = await self._generate(context, once, f"{request_id}-turn-{len(turns) + 1}")
        return Rollout(
            group=g,
            index=turns[0].index,
            prompt_token_ids=problem.prompt_token_ids,
            output_token_ids=tokens,
            logprobs=[logprob for turn in turns for logprob in turn.token_logprobs],
            spans=spans,
            seed=output.seed,
            finish_reason=completion.finish_reason,
            reward=await score(task, problem, completion, limit_s),
            routes=output.routed_experts,  # the last turn's context is all that came before
            kv_versions=[version for turn in turns for version in turn.kv_versions or ()] or None,
            params=params,
        )

    async def _generate(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str
    ) -> list[CompletionOutput]:
        """All n completions, whole. What an operator's pause cuts short or refuses is sampled again, from the same
        seed and the weights that stand then, so the group is never older than its launch."""
        attempt = 0
        while True:
            name = request_id if attempt == 0 else f"{request_id}-retry-{attempt}"
            with contextlib.suppress(EnginePaused):
                output = await self.client.generate_one(prompt_token_ids, params, request_id=name)
                outputs = sorted(output.outputs, key=lambda o: o.index)
                bad = [o.finish_reason for o in outputs if o.finish_reason not in ("stop", "length", "abort")]
                if bad or len(outputs) != params.n:
                    raise MidstreamError(f"{name} ended with {len(outputs)} of {params.n} completions, reasons {bad}")
                if all(o.finish_reason != "abort" for o in outputs):
                    return outputs
            attempt += 1
            await asyncio.sleep(_RETRY_S)  # the group's own time limit bounds how often
