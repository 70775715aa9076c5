"""The engine core: one loop, one thread. Commands are taken between two steps; nothing interrupts a step.

    ┌─▶ finished staging jobs ─▶ protocol.boundary ─▶ actions ─▶ time limits ─▶ one step (if allowed) ─▶ outputs ─┐
    └───────────────────────────────── commands (add, abort, verbs) between two turns ◀──────────────────────────┘

In a lockstep group the boundary is a vote, and a step is one of all ranks: with an empty batch where there is nothing.
A replica of several says when it is due, and its boundary comes with the group's answer.

``protocol`` decides pauses and commits, ``scheduler`` owns the requests, ``session`` the update, ``worker`` weights
and memory. The core carries messages between them and keeps the clock.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, cast

from midstream.config import EngineConfig, check_type
from midstream.engine import protocol as p
from midstream.engine.data_parallel import Lockstep
from midstream.engine.grammar import GrammarCompiler
from midstream.engine.pauses import Pauses
from midstream.engine.scheduler import Scheduler
from midstream.engine.sleep import Sleep
from midstream.engine.updates import WeightUpdates
from midstream.engine.vote import StepFacts, verdict
from midstream.engine.worker import Worker
from midstream.errors import Conflict, InvalidInput, MidstreamError
from midstream.kv.block_pool import BlockPool
from midstream.ops.numerics import difference
from midstream.types import (
    FinishReason,
    Request,
    RequestIncrement,
    RequestStatus,
    SamplingParams,
    WeightVersion,
    child_id,
    child_seed,
)
from midstream.weights.manifest import weights_id
from midstream.weights.session import UpdateSession

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CoreOutputs:
    """What turns produced, in this order: increments first, then the requests that failed, then the replies."""

    increments: list[RequestIncrement] = field(default_factory=list)
    failed: list[tuple[str, MidstreamError]] = field(default_factory=list)
    """(parent id, why): requests ended by an error of a step, or whose grammar does not compile; nothing more comes
    for them."""
    replies: list[p.Reply | p.Fail] = field(default_factory=list)
    prepared: list[Any] = field(default_factory=list)
    """Calls whose update this rank of several could commit now."""
    due: int | None = None
    """This replica of several could settle its open call, at this position of the log."""


class EngineCore:
    """Owns everything of one engine. Not thread-safe: one caller, who alternates commands and :meth:`step`."""

    def __init__(
        self,
        config: EngineConfig,
        wake: Callable[[], None] = lambda: None,
        lockstep: Lockstep | None = None,
        rank: int = 0,
        number: int = 0,
    ) -> None:
        """``rank``: of data_parallel_size. ``lockstep``: its ties to its group; one of several without is a replica.
        ``number``: the commit number of an engine that was started again, which goes on counting there."""
        self.config = config
        self.rank = rank
        self._lockstep = lockstep
        self.is_one_of_many = config.data_parallel_size > 1
        self.worker = Worker(config, wake, None if lockstep is None else lockstep.experts, rank)
        digests = self.worker.digests
        version = WeightVersion(number, config.initial_version, weights_id(digests))
        pool = BlockPool(self.worker.num_blocks, config.block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(
            pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.worker.max_model_len,
            version=version,
        )
        model = self.worker.model_config
        self.grammars = GrammarCompiler(model.vocab_size, model.eos_token_ids, wake)
        self.protocol = p.Protocol(config.dp_sync_interval if lockstep and config.dp_vote == "interval" else 1)
        self.outputs = CoreOutputs()
        self.is_over = False
        """All ranks have taken the shutdown: there is no next turn."""
        self._said_due = -1
        self.num_steps = 0
        self._once_paused: dict[Any, Callable[[], None]] = {}
        self._is_checked = True
        self._log = _open_log(config.step_log)
        self._last_step: dict[str, Any] | None = None
        """Not in the log so far: what it made is sent before."""
        session = UpdateSession(self.worker.params, self.worker.tied, config.update_lease_s, digests, self.worker.fused)
        self.updates = WeightUpdates(self, session)
        self.pauses = Pauses(self)
        self.sleep = Sleep(self)
        self._verbs: dict[str, Callable[..., None]] = {
            "pause_generation": self.pauses.pause,
            "pause_timed_out": self.pauses.timed_out,
            "resume_generation": self.pauses.resume,
            "is_paused": lambda op: self.reply(op, {"is_paused": self.is_paused}),
            "sleep": self.sleep.sleep,
            "wake_up": self.sleep.wake_up,
            "is_sleeping": lambda op: self.reply(op, {"is_sleeping": self.sleep.level is not None}),
            "init_weight_transfer_engine": self.updates.init_transfer,
            "start_weight_update": self.updates.start,
            "update_weights": self.updates.update,
            "finish_weight_update": self.updates.finish,
            "finish": self.updates.all_prepared,
            "cancel": self.updates.cancel,
            "shutdown": lambda op: self.act(self.protocol.shutdown(op)),
            "abort_weight_update": self.updates.abort,
            "shutdown_weight_transfer_engine": self.updates.shutdown_transfer,
            "update_weight_version": self.updates.relabel,
            "weight_checker": self.updates.check,
            "reset_prefix_cache": self._reset_prefix_cache,
            "abort_requests": self._abort_requests,
            "status": lambda op: self.reply(op, self.status()),
            "load_grammar_tokenizer": self._load_grammar_tokenizer,
            "weight_digests": self.updates.digests,
            "save_weights": self.updates.save,
            "adopt": self.updates.adopt,
        }
        self._signatures = {verb: inspect.signature(handler) for verb, handler in self._verbs.items()}

    # -- commands ----------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Raises what :meth:`add` would raise now for any request: Conflict while asleep, or EnginePaused."""
        self.sleep.admit()
        self.protocol.admit()

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        cache_salt: str = "",
        priority: int = 0,
    ) -> None:
        """Accept a request (its n samples at once). Raises InvalidInput, or EnginePaused in an abort or wait pause.

        One with structured outputs waits until its grammar is compiled; what can not be compiled is in
        ``CoreOutputs.failed`` later.
        """
        self.admit()
        check_type("priority", "int", priority)
        self._check_prompt(prompt_token_ids, params)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        prompt = list(prompt_token_ids)
        longest = self.worker.max_model_len
        limit = longest if params.max_tokens is None else min(len(prompt) + params.max_tokens, longest)
        eos = () if params.ignore_eos else self.worker.model_config.eos_token_ids
        stop = frozenset((*params.stop_token_ids, *eos))
        wanted = params.structured_outputs
        if wanted is not None:
            self.grammars.require_tokenizer()
        requests = [
            Request(
                request_id=child_id(request_id, k, params.n),
                prompt_token_ids=prompt,
                params=params,
                seed=child_seed(seed, k),
                max_total_tokens=limit,
                stop_token_ids=stop,
                is_ready=wanted is None,
                parent_id=request_id,
                index=k,
                cache_salt=cache_salt,
                priority=priority,
            )
            for k in range(params.n)
        ]
        self.scheduler.add(requests)
        if wanted is not None:
            self.grammars.start(wanted, requests)

    def _settle_grammars(self) -> None:
        """Requests whose grammars are made since the last step are ready; those that have none, or ended, are over."""
        for requests, error in self.grammars.settle():
            live = [request for request in requests if not request.status.is_finished]
            if error is None:
                self.scheduler.release(live)
            elif self.scheduler.end([request.request_id for request in live], RequestStatus.FINISHED_ERROR):
                self.outputs.failed.append((requests[0].parent_id, error))

    def _check_prompt(self, prompt: Sequence[int], params: SamplingParams) -> None:
        vocab = self.worker.model_config.vocab_size
        bad = next((t for t in prompt if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab), None)
        if bad is not None:
            raise InvalidInput(f"prompt token id {bad!r} is not in [0, {vocab})")
        outside = [t for t in params.stop_token_ids if t >= vocab]
        if outside:
            raise InvalidInput(f"stop_token_ids {outside} are not in [0, {vocab})")
        if params.return_routed_experts and not self.worker.model_config.moe_layers:
            raise InvalidInput("return_routed_experts: the model has no experts; leave it away")

    def abort(self, ids: Sequence[str] | None) -> int:
        """End requests by id (None: all) with their partial tokens; unknown ids are ignored. Returns how many."""
        ended = self.scheduler.end(ids, RequestStatus.FINISHED_ABORTED)
        self._report(ended)
        return len(ended)

    def call(self, op: int, verb: str, arguments: dict[str, Any], position: int | None = None) -> None:
        """Take a verb; its one Reply or Fail comes in ``outputs``, now or after later turns. ``position``: its place in
        the log of the group."""
        if position is not None:
            self.protocol.take(position)
        try:
            handler = self._verbs.get(verb)
            if handler is None:
                raise InvalidInput(f"unknown verb {verb!r}; the engine has {', '.join(sorted(self._verbs))}")
            signature = self._signatures[verb]
            try:
                signature.bind(op, **arguments)
            except TypeError as error:
                raise InvalidInput(f"{verb}: {error}") from error
            for name, value in arguments.items():
                check_type(name, str(signature.parameters[name].annotation), value)
            handler(op, **arguments)
        except MidstreamError as error:
            self.fail(op, error)
        except (TypeError, ValueError, AttributeError, KeyError) as error:  # an argument of a shape no handler expects
            _log.exception("midstream: %s failed", verb)
            self.fail(op, InvalidInput(f"{verb}: {type(error).__name__}: {error}"))

    @property
    def session(self) -> UpdateSession:
        """The weight update, owned by ``updates``."""
        return self.updates.session

    # -- one turn ----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """The next turn has something to do: staging results to take, or a step to run."""
        if self._lockstep is not None and self.protocol.turn(self._facts()) != "idle":
            return True
        return bool(self.worker.completed) or (self.may_step and self.scheduler.has_ready)

    @property
    def may_step(self) -> bool:
        """Neither paused nor asleep."""
        return self.protocol.may_step and self.sleep.may_step

    @property
    def is_paused(self) -> bool:
        return self.protocol.is_paused

    @property
    def is_waiting(self) -> bool:
        """Something is under way that needs turns though no step runs: staging jobs, time limits, open updates."""
        return bool(self.worker.is_busy or self.pauses.is_waiting or self.session.is_open)

    def step(self) -> bool:
        """One turn: settle what is due between two steps, then run one step if there is one. True if a step ran."""
        self.record()
        self.worker.settle()
        self._settle_grammars()
        if self._lockstep is not None:
            return self._step_together(self._lockstep)
        if not self.is_one_of_many:
            self.act(self.protocol.boundary(self._facts()))
        elif (due := self.protocol.due(self._facts())) is not None and due != self._said_due:
            self._said_due = self.outputs.due = due
        self._watch_clock()  # after the boundary: what is complete now is not late
        if not self.may_step or not self.scheduler.has_ready:
            self._check_idle()
            return False
        return self._run()

    def agree(self, position: int) -> None:
        """All replicas were due at ``position``."""
        self._said_due = -1  # what is open now, or comes at this very position, has a boundary of its own
        self.act(self.protocol.agree(position))

    def _step_together(self, group: Lockstep) -> bool:
        """One turn in a lockstep group: vote where a vote is due, and take part in the step that follows from it."""
        facts = self._facts()
        turn = self.protocol.turn(facts)
        self._watch_clock()
        if turn == "wake":
            group.wake(self.protocol.wave)
        if turn in ("wake", "vote"):
            actions, outcome = self.protocol.conclude(verdict(group.exchange(self.protocol.vote(facts))))
            self.act(actions)
            self.is_over = outcome == "stop"
            if outcome != "step":
                return False
        elif turn == "idle":
            self._check_idle()
            return False
        if not (self.may_step and self.scheduler.has_ready and self._run()):
            self.worker.execute_empty()
            self.num_steps += 1
        self.protocol.stepped()
        return True

    def _facts(self) -> StepFacts:
        # Without weights nothing can progress before the commit that brings them.
        progressed = self.sleep.weights_lost or self.scheduler.oldest_has_progressed()
        has_ready = self.sleep.may_step and self.scheduler.has_ready
        return StepFacts(len(self.scheduler.live), progressed, has_ready, self.scheduler.version.number)

    def _check_idle(self) -> None:
        if not self.scheduler.has_unfinished and not self._is_checked:
            self.scheduler.check_integrity()
            self._is_checked = True

    def _run(self) -> bool:
        """Plan and run a step. False if there was nothing to plan."""
        self._is_checked = False
        start = time.monotonic()
        plan = self.scheduler.schedule()
        if plan.is_empty:
            return False
        try:
            result = self.worker.execute(plan)
        except Exception as error:
            if self.worker.is_collective:
                raise  # the group ends as one
            # Its requests are over; the engine, and everyone who was not in this step, goes on.
            _log.exception("midstream: a step failed")
            reason = MidstreamError(f"the step failed: {type(error).__name__}: {error}")
            parents = [self.scheduler.live[r.request_id].parent_id for r in plan.requests]
            ended = self.scheduler.end(parents, RequestStatus.FINISHED_ERROR)
            self.outputs.failed += [(parent_id, reason) for parent_id in dict.fromkeys(r.parent_id for r in ended)]
            return True
        self._report(self.scheduler.update(plan, result))
        self.num_steps += 1
        if self._log:
            self._last_step = {
                "event": "step",
                "t0": start,
                "t1": time.monotonic(),
                "running": len(plan.requests),
                "tokens": plan.num_tokens,
                "reprefill": plan.num_reprefilled_tokens,
                "version": self.scheduler.version.number,
            }
        return True

    def take_outputs(self) -> CoreOutputs:
        """What has been produced since the last call."""
        taken, self.outputs = self.outputs, CoreOutputs()
        return taken

    def close(self) -> None:
        """End threads and channels. Requests still live are ended with what they have."""
        self.abort(None)
        self.grammars.close()
        self.worker.close()
        self.record()
        if self._log:
            self._log.close()
            self._log = None

    def _watch_clock(self) -> None:
        if self.pauses.is_waiting or self.session.is_open:
            now = time.monotonic()
            self.pauses.watch(now)
            self.updates.watch_lease(now)

    def _report(self, requests: Sequence[Request]) -> None:
        """Turn what the scheduler changed into increments: tokens not sent yet, and the end."""
        for request in requests:
            finished = request.status.is_finished
            if request.params.final_only and not finished:
                continue
            new = request.sampled[request.num_sent_tokens :]
            request.num_sent_tokens += len(new)
            last = request.token_ids[-1]
            why: int | str | None = None
            if request.status is RequestStatus.FINISHED_STOPPED and last in request.params.stop_token_ids:
                why = last
            elif request.grammar is not None and request.grammar.error:
                why = f"structured_outputs: {request.grammar.error}"
            wants_prompt = request.params.prompt_logprobs is not None
            reason = cast(FinishReason, request.status.value) if finished else None
            routes = request.routes
            if routes is not None:
                routes, request.num_sent_routes = routes.part(request.num_sent_routes), routes.end
            self.outputs.increments.append(
                RequestIncrement(
                    parent_id=request.parent_id,
                    index=request.index,
                    tokens=new,
                    weight_versions=list(request.version_spans),
                    seed=request.seed,
                    finish_reason=reason,
                    stop_reason=why,
                    prompt_logprobs=request.prompt_logprobs if wants_prompt and finished else None,
                    kv_versions=list(request.kv_history) or None,
                    routes=routes,
                    num_cached_tokens=request.num_cached_tokens,
                    num_reprefilled_tokens=request.num_reprefilled_tokens,
                    num_preemptions=request.num_preemptions,
                )
            )

    # -- protocol actions --------------------------------------------------------------------------------------

    def act(self, actions: Sequence[p.Action]) -> None:
        for action in actions:
            match action:
                case p.AbortAll():
                    self.abort(None)
                case p.DropKV():
                    self.scheduler.drop_kv()
                case p.Commit(op, policy):
                    self.updates.commit(op, policy)
                case p.Reply(op, value):
                    if (then := self._once_paused.pop(op, None)) is not None:
                        then()
                    else:
                        self.reply(op, value)
                case p.Fail(op, error):
                    self.updates.finish_refused(op)
                    self.fail(op, error)
        self.pauses.settle()

    def once_paused(self, op: Any, then: Callable[[], None]) -> None:
        """The protocol's reply to the pause ``op`` calls ``then``, which answers instead."""
        self._once_paused[op] = then

    def reply(self, op: Any, value: dict[str, Any]) -> None:
        self.pauses.answered(op)
        self.outputs.replies.append(p.Reply(op, value))

    def fail(self, op: Any, error: MidstreamError) -> None:
        self._once_paused.pop(op, None)
        self.pauses.answered(op, failed=True)
        self.outputs.replies.append(p.Fail(op, error))

    def _abort_requests(self, op: int, request_ids: list[str] | None = None) -> None:
        self.reply(op, {"status": "aborted", "aborted": self.abort(request_ids)})

    def _load_grammar_tokenizer(self, op: int, text: str) -> None:
        self.grammars.load_tokenizer(text)
        self.reply(op, {"loaded": True})

    def _reset_prefix_cache(self, op: int, reset_running_requests: bool = False) -> None:
        held = sum(1 for r in self.scheduler.live.values() if r.block_ids)
        if reset_running_requests:
            self.scheduler.drop_kv()  # they are computed again
        elif not self.scheduler.reset_prefix_cache():
            raise Conflict(f"{held} requests hold KV blocks: reset_running_requests, pause with clear_cache, or abort")
        self.reply(op, {"success": True, "reset_requests": held})

    # -- what stands -------------------------------------------------------------------------------------------

    def version(self) -> dict[str, Any]:
        version = self.scheduler.version
        return {"version": version.label, "number": version.number, "weights_id": version.weights_id}

    def status(self) -> dict[str, Any]:
        """State one can see: pause, requests, weights, the open update, numerics, counters."""
        s = self.scheduler
        return {
            "state": self.protocol.phase,
            "mode": self.protocol.mode,
            "clear_cache": self.protocol.clear_cache,
            "paused_since": self.pauses.since,
            "owner": self.pauses.owner,
            "lease_left_s": self.pauses.lease_left_s,
            "sleep": self.sleep.state(),
            "device_idle": not (self.may_step and s.has_ready),
            "running": len(s.running),
            "waiting": s.num_waiting,
            "held": len(s.live) if not self.may_step else 0,
            **self.version(),
            "model": self.config.model_name or self.config.model,
            "revision": self.config.revision,
            "update": self.session.progress(time.monotonic()),
            "exact": self._exact(),
            "fingerprint": self.worker.fingerprint,
            "dtype": self.worker.fingerprint["dtype"],
            "max_model_len": self.worker.max_model_len,
            "max_num_seqs": self.config.max_num_seqs,
            "vocab_size": self.worker.model_config.vocab_size,
            "num_blocks": self.worker.num_blocks,
            "num_free_blocks": s.pool.num_free,
            "num_steps": self.num_steps,
            "num_sampled_tokens": s.num_sampled_tokens,
            "num_reprefilled_tokens": s.num_reprefilled_tokens,
        }

    def _exact(self) -> str:
        """Whether the trainer computes, bit for bit, the log-probabilities that this engine reports."""
        theirs, ours = self.updates.trainer_fingerprint, self.worker.fingerprint
        if theirs is None:
            return "no (trainer numerics unknown)"
        gap = difference(ours, theirs)
        return f"no (engine and trainer differ in {gap})" if gap else "yes"

    def record(self, **entry: Any) -> None:
        """To the step log, after the step before it."""
        entries, self._last_step = [line for line in (self._last_step, entry) if line], None
        if self._log and entries:
            with contextlib.suppress(OSError):  # a full disk must not stop the engine
                self._log.writelines(json.dumps(line | {"rank": self.rank}) + "\n" for line in entries)


def _open_log(path: str | None) -> IO[str] | None:
    try:
        return open(path, "a", buffering=1) if path else None  # whole lines: whoever got an answer finds its commit
    except OSError as error:
        raise InvalidInput(f"step_log {path!r} cannot be written: {error.strerror}") from error
