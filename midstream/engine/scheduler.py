"""Which requests take part in a step, and with how many tokens.

Requests are served by place: the lower priority number first, among equals the earlier arrival. Those that run stand
in that order, and so do those that wait. The head of the queue is admitted when there is room; who runs gives way to
somebody more urgent only where that one runs too and its KV needs the blocks, and then the last in order gives way.
So the first of those that run always runs and comes to its end. Where all priorities are equal that is the oldest:
running followed by waiting is the order of arrival, preempting moves the border one to the left, admitting to the
right, and nobody is overtaken. With unequal ones a steady stream of urgent requests keeps the others waiting: that
is what they ask for.

    waiting  ──admit──▶  running  ──update──▶  finished
        ◀────preempt────

A step has one budget of tokens, handed out in that order. A request is missing the tokens between its cursor
(``num_computed_tokens``) and its end; it gets all of them, or fewer: that is chunked prefill. Decode is missing one.
A request that gets its last one samples the next.

The n samples of a prompt compute it once: the first prefills all but the prompt's last token, the others wait for it,
then share its full blocks, copy the partial one and go on from there. The same holds whenever their KV is gone.

The scheduler knows nothing of pauses or updates: it is asked for a step, or it is not. Its calls never overlap.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Sequence

from midstream.errors import InvalidInput
from midstream.kv.block_pool import BlockPool
from midstream.kv.manager import KVManager
from midstream.types import (
    KVPolicy,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    ScheduledRequest,
    SchedulerOutput,
    WeightVersion,
    extend_spans,
)


class Scheduler:
    """Owner of every live request and its status."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        version: WeightVersion,
    ) -> None:
        self.pool = pool
        self.kv = KVManager(pool)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.version = version
        self.live: dict[str, Request] = {}
        """Every request that has not ended, in order of arrival."""
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._siblings: dict[str, list[Request]] = {}
        """The live requests of each parent."""
        self._num_arrived = 0
        self._is_sorted = True  # ``running`` by place; an admission may end that until the next step
        self.num_sampled_tokens = 0
        self._oldest_has_progressed = True  # a latch, reset by each commit
        self.num_reprefilled_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Those that are held until they are ready, too."""
        return len(self.live) - len(self.running)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.live)

    @property
    def has_ready(self) -> bool:
        """There is a request that a step may serve."""
        return bool(self.running or self.waiting)

    # ---- requests come and go -------------------------------------------------------------------------------------

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the n samples of one prompt, all or none; those that are not ready once they are released.

        They have one parent, salt, priority, prompt and limit, and an id each.
        Raises ``InvalidInput`` for ids in use and for what could never run, however long it waited.
        """
        self._check_admissible(requests)
        for request in requests:
            request.arrival = self._num_arrived
            self._num_arrived += 1
            self.live[request.request_id] = request
            if request.is_ready:
                self._wait(request)
        self._siblings[requests[0].parent_id] = list(requests)

    def release(self, requests: Sequence[Request]) -> None:
        """Live requests that were held are ready: to the others it is as if they arrived now."""
        for request in requests:
            request.is_ready = True
            request.arrival = self._num_arrived
            self._num_arrived += 1
            self.live[request.request_id] = self.live.pop(request.request_id)
            self._wait(request)

    def _check_admissible(self, requests: Sequence[Request]) -> None:
        first, n, size, blocks = requests[0], len(requests), self.pool.block_size, self.pool.num_blocks
        num_prompt, total = first.num_prompt_tokens, first.max_total_tokens
        for name in (first.parent_id, *(request.request_id for request in requests)):
            if name in self.live or name in self._siblings:
                raise InvalidInput(f"request id {name!r} is in use; wait for its end, or choose another")
        if num_prompt < 1:
            raise InvalidInput("the prompt is empty: give at least one token")
        if num_prompt + 1 > self.max_model_len:
            raise InvalidInput(
                f"a prompt of {num_prompt} tokens leaves no room in max_model_len {self.max_model_len}: shorten it"
            )
        if n > self.max_num_seqs:
            raise InvalidInput(f"n = {n} samples never run together: max_num_seqs is {self.max_num_seqs}; lower n")
        # The last token is sampled and never computed, so it needs no KV.
        needed = max(self.pool.blocks_for(total - 1), self.pool.blocks_for(num_prompt) + n - 1)
        if needed > blocks:
            raise InvalidInput(
                f"request {first.parent_id!r} needs {needed} KV blocks of {size} tokens for a prompt of {num_prompt}, "
                f"n = {n} and up to {total} tokens, the cache has {blocks}: shorten it, lower n, or raise num_blocks"
            )

    def end(self, ids: Iterable[str] | None, status: RequestStatus) -> list[Request]:
        """End requests by parent or child id (None: all) and return them in order of arrival; unknown ids are ignored.

        They keep the tokens made so far. The step in flight may still contain them: ``update`` then skips them.
        """
        names = None if ids is None else set(ids)
        ended = [r for r in self.live.values() if names is None or r.request_id in names or r.parent_id in names]
        for request in ended:
            self._finish(request, status)
        if ended:
            self._forget_finished()
        return ended

    def _finish(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        self.kv.release(request)
        del self.live[request.request_id]
        siblings = self._siblings[request.parent_id]
        siblings.remove(request)
        if not siblings:
            del self._siblings[request.parent_id]

    def _forget_finished(self) -> None:
        self.running = [request for request in self.running if not request.status.is_finished]
        self.waiting = deque(request for request in self.waiting if not request.status.is_finished)

    # ---- one step -------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan one step. It must be run and handed to ``update`` (or its requests ended) before the next is planned.

        The plan shares block tables with the requests: read them, and only until the next call.
        """
        if not self._is_sorted:  # the last step admitted somebody more urgent than others that run
            self.running.sort(key=lambda request: request.place)
            self._is_sorted = True
        plan = SchedulerOutput()
        num_promised = 0  # blocks of samples that wait for their prompt; an admission must leave them alone
        index = 0
        while plan.num_tokens < self.max_num_batched_tokens:
            if index == len(self.running) and not self._admit(num_promised):
                break
            request = self.running[index]
            if not self._schedule_request(request, plan):
                if request.status is RequestStatus.PREEMPTED:
                    break  # it was the latest itself
                shared = (request.num_prompt_tokens - 1) // self.pool.block_size
                num_promised += self.pool.blocks_for(request.num_tokens) - shared
            index += 1
        return plan

    def _schedule_request(self, request: Request, plan: SchedulerOutput) -> bool:
        """Give ``request`` its share of the step. False if it gets none: it waits for a sibling, or was preempted."""
        start, num_tokens, num_prompt = request.num_computed_tokens, request.num_tokens, request.num_prompt_tokens
        reuse = None
        if start == 0:
            reuse = self.kv.find_reuse(request, self._siblings[request.parent_id], self.version.number)
            if reuse is None:
                return False
            self.kv.share(request, reuse)
            start = reuse.num_tokens
        end = min(num_tokens, start + self.max_num_batched_tokens - plan.num_tokens)
        siblings = self._siblings[request.parent_id]
        if start < num_prompt - 1 < end and self.kv.is_awaited(request, siblings, self.version.number):
            end = num_prompt - 1  # next step the siblings go on from here too, all at once

        # The last one gives way. It is not in the plan yet, nor is it the source of a copy: both are earlier than
        # this request.
        while not self.kv.grow(request, end):
            latest = self.running.pop()
            self._preempt(latest)
            if latest is request:
                return False

        if reuse is not None:
            plan.block_copies += self.kv.adopt(request, reuse, self.version.number)
        num_again = max(min(end, request.num_dropped_tokens) - start, 0)
        plan.num_reprefilled_tokens += num_again
        plan.num_tokens += end - start
        scheduled = ScheduledRequest(
            request_id=request.request_id,
            token_ids=request.token_ids[start:end],
            start=start,
            num_again=num_again,
            block_ids=request.block_ids,
            sample=end == num_tokens,
            seed=request.seed,
            params=request.params,
            history=request.token_ids if request.params.repetition_penalty != 1 else None,
            allowed=request.grammar.allowed if request.grammar is not None else None,
        )
        if request.params.return_routed_experts:  # what was found computed has them too
            scheduled.routes_from = start if reuse is None else 0
        if request.params.prompt_logprobs is not None and len(request.prompt_logprobs) < num_prompt - 1:
            scheduled.prompt_targets = request.token_ids[start + 1 : min(end + 1, num_prompt)]
        plan.requests.append(scheduled)
        return True

    def _preempt(self, request: Request) -> None:
        self.kv.drop(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._wait(request)

    def _wait(self, request: Request) -> None:
        """Queue a request at its place: mostly one of the two ends."""
        waiting = self.waiting
        if not waiting or waiting[-1].place < request.place:
            waiting.append(request)
        elif request.place < waiting[0].place:
            waiting.appendleft(request)
        else:
            bisect.insort(waiting, request, key=lambda other: other.place)

    def _admit(self, num_promised: int) -> bool:
        """Let the head of the queue run if there is room: one preempted request, or all n samples of a new one."""
        if not self.waiting:
            return False
        head = self.waiting[0]
        siblings = self._siblings[head.parent_id]
        group = [head] if head.status is RequestStatus.PREEMPTED else siblings
        reuse = self.kv.find_reuse(head, siblings, self.version.number)
        if reuse is None or len(self.running) + len(group) > self.max_num_seqs:
            return False
        # Cached blocks that nobody holds are free too, until this request takes them.
        num_new = self.pool.blocks_for(head.num_tokens) - len(reuse.block_ids) + self.pool.count_free(reuse.block_ids)
        if num_new + len(group) - 1 > self.pool.num_free - num_promised:
            return False
        self._is_sorted = self._is_sorted and (not self.running or self.running[-1].place < head.place)
        for request in group:
            self.waiting.popleft()
            self.running.append(request)
            request.status = RequestStatus.RUNNING
        return True

    # ---- what a step made -----------------------------------------------------------------------------------------

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[Request]:
        """Take a step's results. Returns the requests that got a token or finished, each once.

        A request that was ended after ``schedule`` is skipped, also if its id is in use again.
        """
        changed = []
        num_finished = 0
        in_order = self.running[:1] if self._is_sorted else self.running
        first = min(in_order, key=lambda request: request.place, default=None)
        version = self.version
        for scheduled in plan.requests:
            request = self.live.get(scheduled.request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            start = scheduled.start
            end = start + len(scheduled.token_ids)
            self.kv.computed(request, version.number, start, end)
            request.num_reprefilled_tokens += scheduled.num_again
            self.num_reprefilled_tokens += scheduled.num_again
            if scheduled.prompt_targets:
                num_known = len(request.prompt_logprobs) - start
                request.prompt_logprobs += result.prompt_logprobs[request.request_id][max(0, num_known) :]
            if scheduled.routes_from is not None:
                new = result.routes[request.request_id]
                if request.routes is None:
                    request.routes = new
                else:
                    request.routes.put(new)
                request.num_sent_routes = min(request.num_sent_routes, new.start)
            if not scheduled.sample:
                continue
            token = result.sampled[request.request_id]
            extend_spans(request.version_spans, version, request.num_output_tokens)
            request.token_ids.append(token.token_id)
            request.sampled.append(token)
            self.num_sampled_tokens += 1
            changed.append(request)
            if request is first:
                self._oldest_has_progressed = True
            ending = self._ending(request, token.token_id)
            if ending is not None:
                self._finish(request, ending)
                num_finished += 1
        if num_finished:
            self._forget_finished()
        return changed

    @staticmethod
    def _ending(request: Request, token_id: int) -> RequestStatus | None:
        """Whether the token just appended is the last one; the grammar, if any, takes it. Tokens made never change, so
        neither a pause nor a preemption has to tell the grammar anything."""
        if token_id in request.stop_token_ids:
            return RequestStatus.FINISHED_STOPPED
        if request.grammar is not None:
            if not request.grammar.advance(token_id):
                return RequestStatus.FINISHED_ERROR
            if request.grammar.is_over:
                return RequestStatus.FINISHED_STOPPED
        return RequestStatus.FINISHED_LENGTH if request.num_tokens == request.max_total_tokens else None

    # ---- the weights change ---------------------------------------------------------------------------------------

    def commit(self, version: WeightVersion, policy: KVPolicy) -> None:
        """From the next step on the weights are ``version``. Live requests go on: ``recompute`` drops their KV,
        ``keep`` lets them continue on it. The prefix cache needs nothing: no later request looks under the old number.
        """
        assert version.number > self.version.number
        for request in self.live.values():
            if policy == "recompute":
                self.kv.drop(request)
            else:
                self.kv.keep(request)
        self.version = version
        self._oldest_has_progressed = False

    def drop_kv(self) -> None:
        """Every live request loses its KV and the prefix cache is emptied. The version stays."""
        for request in self.live.values():
            self.kv.drop(request)
        self.pool.reset_cache()

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and nothing done, while a live request holds blocks."""
        if self.pool.num_used:
            return False
        self.pool.reset_cache()
        return True

    def oldest_has_progressed(self) -> bool:
        """No request is ready to run, or the then first of those that run has sampled a token since the last commit.

        Whoever commits only when this holds lets that request, and so every request, come to its end.
        """
        return self._oldest_has_progressed or not self.has_ready

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` with the reason unless all state agrees. Call between steps, not within one."""
        requests = list(self.live.values())
        ready = [request for request in requests if request.is_ready]
        if sorted([*self.running, *self.waiting], key=lambda request: request.arrival) != ready:
            raise AssertionError("running and waiting together are not the ready requests, in order of arrival")
        if list(self.live) != [r.request_id for r in requests]:
            raise AssertionError("the table of live requests has a wrong name")
        for queue in (self.running if self._is_sorted else [], self.waiting):
            if sorted(queue, key=lambda request: request.place) != list(queue):
                raise AssertionError("a queue is not in order of place")
        if len({r.priority for r in requests}) < 2 and [*self.running, *self.waiting] != ready:
            raise AssertionError("of equal priorities, a later arrival runs before an earlier one")
        if any(request.status is not RequestStatus.RUNNING for request in self.running):
            raise AssertionError("a request that does not run is among the running ones")
        if len(self.running) > self.max_num_seqs:
            raise AssertionError(f"{len(self.running)} requests run, max_num_seqs is {self.max_num_seqs}")
        for request in self.waiting:
            if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED) or request.block_ids:
                raise AssertionError(f"{request.request_id} waits as {request.status} and holds {request.block_ids}")
        groups: dict[str, list[Request]] = {}
        for request in requests:
            groups.setdefault(request.parent_id, []).append(request)
        if groups != self._siblings:
            raise AssertionError("the table of siblings is not that of the live requests")
        self.kv.check_integrity(requests)
