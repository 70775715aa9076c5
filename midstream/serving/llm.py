"""LLM: the engine in this process, synchronous, vLLM's shapes; several ranks are processes behind it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

import torch
from rich.progress import Progress

from midstream.config import EngineConfig
from midstream.engine.core import EngineCore
from midstream.engine.protocol import Fail, Reply
from midstream.errors import Conflict, EngineDead, InvalidInput, MidstreamError, TimedOut
from midstream.models.hub import located
from midstream.serving.async_llm import AsyncLLM
from midstream.serving.outputs import OutputBuilder, Prompt, core_params, prompt_ids
from midstream.serving.text import Text
from midstream.types import KVPolicy, PauseMode, RequestOutput, SamplingParams

T = TypeVar("T")
_TURN_WAIT_S = 0.02
_VERB_TIMEOUT_S = 300.0


class LLM:
    """An engine without a server or a second process: for scripts, evaluation and tests.

    ``LLM(model=…, dtype=…)`` takes the fields of EngineConfig; a model of the Hub is fetched first. Threads may share
    it: whoever waits for an answer runs the turns, one at a time, and hands everyone what is theirs. With
    data_parallel_size over 1 the engine runs in that many processes, driven by a thread of its own.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = located(EngineConfig.from_options({"model": model, **options}))
        self.text = Text(self.config.tokenizer or self.config.model)
        is_spread = self.config.data_parallel_size > 1 or self.config.data_parallel_address is not None
        self._ranks = _Ranks(self.config) if is_spread else None
        if self._ranks is not None:
            return
        if self.config.num_threads:
            torch.set_num_threads(self.config.num_threads)
        self._turn = threading.Event()
        self.core = EngineCore(self.config, wake=self._turn.set)
        self._ops = itertools.count(1)
        self._ids = itertools.count()
        self._answers: dict[int, Reply | Fail] = {}
        self._open: dict[str, OutputBuilder] = {}
        self._failed: dict[str, MidstreamError] = {}
        self._lock = threading.Lock()  # around every use of the core and of these two

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_step: Callable[[int], None] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs in the order of the prompts.

        ``on_step`` is called between two steps with the number of steps so far: the place to pause, resume or update
        weights midstream (not with several ranks, whose steps are their own). A refused prompt raises before any of the
        others has run (with several ranks: and ends the others), a grammar that does not compile
        as soon as that is known. In an abort or wait pause this raises EnginePaused, in a keep pause, or where
        ``on_step`` leaves the engine paused, Conflict. ``use_tqdm`` (vLLM's name): a progress bar where the output is
        a terminal and there is more than one prompt. ``priority``: one for each prompt, a lower number is more urgent.
        """
        if isinstance(prompts, (str, dict)) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            prompts = cast(list[Prompt], [prompts])
        if not isinstance(sampling_params, (list, tuple)):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)  # type: ignore[list-item]
        if len(sampling_params) != len(prompts):
            raise InvalidInput(f"{len(prompts)} prompts but {len(sampling_params)} sampling_params; give one for each")
        priority = [0] * len(prompts) if priority is None else priority
        if len(priority) != len(prompts):
            raise InvalidInput(f"{len(prompts)} prompts but {len(priority)} priorities; give one for each")
        if self._ranks is not None:
            if on_step is not None:
                raise InvalidInput("on_step: the steps of several ranks are not run here; call the verbs from a thread")
            if (status := self.status())["mode"] == "keep":
                raise Conflict(f"the engine is {status['state']} (mode 'keep'): call resume_generation() first")
            return self._ranks.generate(prompts, sampling_params, priority, use_tqdm)  # type: ignore[arg-type]
        self.core.admit()
        self._check_running()
        if any(p.structured_outputs is not None for p in sampling_params) and not self.core.grammars.is_loaded:
            self._call("load_grammar_tokenizer", text=self.text.to_json())
        builders: dict[str, OutputBuilder] = {}
        try:
            with self._lock:
                for prompt, params, urgency in zip(prompts, sampling_params, priority, strict=True):
                    text, ids = prompt_ids(prompt, self.text)  # type: ignore[arg-type]
                    request_id = str(next(self._ids))
                    tokenizer = self.text if self.text.exists else None
                    builder = OutputBuilder(request_id, text, ids, params, tokenizer)
                    # Nobody sees what is not finished, unless a stop text is looked for in it.
                    silent = core_params(dataclasses.replace(params, final_only=True))
                    self.core.add(request_id, ids, silent, priority=urgency)
                    self._open[request_id] = builders[request_id] = builder
            steps = 0
            with _progress(use_tqdm, len(builders)) as bar:
                task = bar.add_task("generating", total=len(builders))
                while (left := sum(not b.output.finished for b in builders.values())) > 0:
                    bar.update(task, completed=len(builders) - left)
                    ran = self._advance()
                    if failed := [request_id for request_id in builders if request_id in self._failed]:
                        raise self._failed[failed[0]]
                    if ran and on_step is not None:
                        steps += 1
                        on_step(steps)
                        self._check_running()
        finally:
            with self._lock:
                self.core.abort(list(builders))  # those that an error has left
                self._take()
                for request_id in builders:
                    self._open.pop(request_id, None)
                    self._failed.pop(request_id, None)
        return [b.output for b in builders.values()]

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template, which gets
        ``template_kwargs`` (add_generation_prompt, continue_final_message, tools, enable_thinking, …)."""
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        prompts = [self.text.apply_chat_template(c, **template_kwargs) for c in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def pause_generation(
        self,
        mode: PauseMode = "abort",
        clear_cache: bool = True,
        timeout_s: float | None = None,
        owner: str | None = None,
        lease_s: float | None = None,
    ) -> dict[str, Any]:
        options = {"mode": mode, "clear_cache": clear_cache, "timeout_s": timeout_s}
        return self._call("pause_generation", **options, owner=owner, lease_s=lease_s)

    def resume_generation(self, owner: str | None = None, force: bool = False) -> dict[str, Any]:
        return self._call("resume_generation", owner=owner, force=force)

    def is_paused(self) -> bool:
        return bool(self._call("is_paused")["is_paused"])

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"init_info": {…}}: open the channel; the reply is what the trainer's half needs, and our fingerprint."""
        return self._call("init_weight_transfer_engine", request=request)

    def start_weight_update(
        self, manifest: dict[str, Any] | None = None, mode: str | None = None, cast: str | None = None
    ) -> dict[str, Any]:
        return self._call("start_weight_update", manifest=manifest, mode=mode, cast=cast)

    def update_weights(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"update_info": {…}} or {"weight_dir": path}: one chunk; without a start, a whole update."""
        return self._call("update_weights", request=request)

    def finish_weight_update(
        self, weight_version: str | None = None, kv_policy: KVPolicy | None = None
    ) -> dict[str, Any]:
        return self._call("finish_weight_update", weight_version=weight_version, kv_policy=kv_policy)

    def abort_weight_update(self) -> dict[str, Any]:
        return self._call("abort_weight_update")

    def shutdown_weight_transfer_engine(self) -> dict[str, Any]:
        return self._call("shutdown_weight_transfer_engine")

    def update_weight_version(self, new_version: str) -> dict[str, Any]:
        return self._call("update_weight_version", new_version=new_version)

    def weight_checker(self, action: str, baseline: dict[str, str] | None = None) -> dict[str, Any]:
        return self._call("weight_checker", action=action, baseline=baseline)

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> dict[str, Any]:
        return self._call("sleep", level=level, mode=mode)

    def wake_up(self, tags: list[str] | None = None) -> dict[str, Any]:
        return self._call("wake_up", tags=tags)

    def is_sleeping(self) -> bool:
        return bool(self._call("is_sleeping")["is_sleeping"])

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> dict[str, Any]:
        return self._call("reset_prefix_cache", reset_running_requests=reset_running_requests)

    def status(self) -> dict[str, Any]:
        return self._call("status")

    def close(self) -> None:
        """End the engine's threads and processes, and free its memory."""
        if self._ranks is not None:
            self._ranks.close()
        else:
            self.core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _advance(self) -> bool:
        """One turn of the core; waits a little where it had nothing to do. True if a step ran."""
        with self._lock:
            ran = self.core.step()
            self._take()
            is_idle = not ran and not self.core.has_work
        if is_idle:
            self._turn.wait(_TURN_WAIT_S)
            self._turn.clear()
        return ran

    def _take(self) -> None:
        outputs = self.core.take_outputs()
        stopped = []
        for increment in outputs.increments:
            if increment.parent_id in self._open and (name := self._open[increment.parent_id].add(increment)):
                stopped.append(name)
        if stopped:
            self.core.abort(stopped)  # their last words come with the next turn's
        for request_id, error in outputs.failed:
            self._failed[request_id] = error
        for reply in outputs.replies:
            self._answers[reply.op] = reply

    def _check_running(self) -> None:
        if self.core.protocol.is_paused:
            raise Conflict(f"the engine is paused (mode {self.core.protocol.mode!r}): call resume_generation() first")

    def _call(self, verb: str, **arguments: Any) -> dict[str, Any]:
        if self._ranks is not None:
            return self._ranks.call(verb, arguments)
        op = next(self._ops)
        with self._lock:
            self.core.call(op, verb, arguments)
        deadline = time.monotonic() + _VERB_TIMEOUT_S
        while op not in self._answers:
            self._advance()
            if time.monotonic() > deadline:
                raise TimedOut(f"{verb} did not end within {_VERB_TIMEOUT_S} s")
        reply = self._answers.pop(op)
        if isinstance(reply, Fail):
            raise reply.error
        return reply.value


class _Ranks:
    """AsyncLLM on an event loop in a thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ranks", daemon=True)
        self._thread.start()
        options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        self._llm = AsyncLLM(**options)
        try:
            self._run(self._llm.start())
        except BaseException:
            self.close()
            raise

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise EngineDead("the engine was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # also of whoever waits: Ctrl-C
            future.cancel()
            raise

    def call(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return self._run(self._llm.call(verb, arguments, _VERB_TIMEOUT_S))

    def generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], priority: Sequence[int], use_tqdm: bool
    ) -> list[RequestOutput]:
        """One that fails ends the others."""

        async def one(prompt: Prompt, p: SamplingParams, urgency: int, done: Callable[[], None]) -> RequestOutput:
            outputs: list[RequestOutput] = []
            await self._llm.follow(outputs.append, prompt, dataclasses.replace(p, final_only=True), priority=urgency)
            done()
            return outputs[-1]

        async def all_of_them(done: Callable[[], None]) -> list[RequestOutput]:
            try:
                async with asyncio.TaskGroup() as tasks:
                    found = [tasks.create_task(one(*of, done)) for of in zip(prompts, params, priority, strict=True)]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            return [task.result() for task in found]

        with _progress(use_tqdm, len(prompts)) as bar:
            task = bar.add_task("generating", total=len(prompts))
            return self._run(all_of_them(lambda: bar.advance(task)))

    def close(self) -> None:
        if self._thread.is_alive():
            self._run(self._llm.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def _progress(is_wanted: bool, total: int) -> Progress:
    return Progress(transient=True, disable=not is_wanted or total < 2 or not sys.stderr.isatty())
