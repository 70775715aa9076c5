"""From the core's increments to the outputs people see: one RequestOutput that grows."""

from __future__ import annotations

import dataclasses
from typing import Any

from midstream.errors import InvalidInput
from midstream.serving.text import Detokenizer, Text
from midstream.types import (
    CompletionOutput,
    Logprob,
    RequestIncrement,
    RequestOutput,
    SamplingParams,
    WeightVersionSpan,
    child_id,
)


class StopTexts:
    """Finds the first stop text in a text that grows, however it is cut into pieces.

    The first is the one that is complete first; of two that end together, the longer.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._num_seen = 0

    def find(self, text: str) -> tuple[str, int] | None:
        """(stop text, where it ends) in ``text``, which continues the text of the calls before."""
        since = max(self._num_seen - self._longest + 1, 0)
        self._num_seen = len(text)
        found = [(at + len(s), -len(s), s) for s in self._stop if (at := text.find(s, since)) >= 0]
        return (min(found)[2], min(found)[0]) if found else None

    def num_held(self, text: str) -> int:
        """How many characters at the end of ``text`` may yet turn out to begin a stop text."""
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            if any(s.startswith(text[-count:]) for s in self._stop):
                return count
        return 0


class _Sample:
    """One completion's text in the making."""

    __slots__ = ("detokenizer", "is_cut", "is_over", "stops")

    def __init__(self, detokenizer: Detokenizer | None, stop: tuple[str, ...]) -> None:
        self.detokenizer = detokenizer
        self.stops = StopTexts(stop)
        self.is_cut = False
        """A stop text was found: what else the core makes is dropped."""
        self.is_over = False
        """The core has said its last word."""


class OutputBuilder:
    """Collects one request's increments. ``output`` is cumulative and complete at any time.

    Stop texts are found here. Text that may become one is held back, so that what was shown is never taken back.
    """

    def __init__(
        self, request_id: str, prompt: str | None, prompt_ids: list[int], params: SamplingParams, text: Text | None
    ) -> None:
        """Raises ``InvalidInput`` for stop texts without a tokenizer (``text`` is None)."""
        if params.stop and text is None:
            raise InvalidInput("stop texts need a tokenizer, and the model has none: give stop_token_ids or tokenizer=")
        self.output = RequestOutput(
            request_id, prompt, prompt_ids, [CompletionOutput(index=k) for k in range(params.n)]
        )
        self._params = params
        self._num_open = params.n
        self._text = text if params.detokenize else None
        skip = params.skip_special_tokens
        self._samples = [
            _Sample(Detokenizer(self._text, skip) if self._text else None, params.stop) for _ in range(params.n)
        ]
        for completion in self.output.outputs:
            completion.logprobs = None if params.logprobs is None else []
            completion.sampling_mask = [] if params.return_sampling_mask else None

    @property
    def is_over(self) -> bool:
        """The core has nothing more to say about this request; may be later than ``output.finished``."""
        return all(sample.is_over for sample in self._samples)

    def add(self, increment: RequestIncrement) -> str | None:
        """Take what the core made. Returns the core's id of a sample that is to be aborted: a stop text ended it."""
        sample, out = self._samples[increment.index], self.output.outputs[increment.index]
        sample.is_over = increment.finish_reason is not None
        if sample.is_cut:
            return None
        is_processed = self._params.logprobs_mode == "processed_logprobs"
        for token in increment.tokens:
            logprob = token.processed_logprob if is_processed else token.raw_logprob
            out.token_ids.append(token.token_id)
            out.token_logprobs.append(logprob)
            out.processed_logprobs.append(token.processed_logprob)
            if out.logprobs is not None:
                out.logprobs.append(self._entry(token.token_id, logprob, token.rank, token.top))
            if out.sampling_mask is not None:
                out.sampling_mask.append(token.kept or [])
        if (routes := increment.routes) is not None:
            routes = routes.part(self._params.routed_experts_prompt_start)
            if out.routed_experts is None:
                out.routed_experts = routes
            else:
                out.routed_experts.put(routes)
        out.weight_versions = increment.weight_versions
        out.kv_versions = increment.kv_versions
        out.seed = increment.seed
        out.num_cached_tokens = increment.num_cached_tokens
        out.num_reprefilled_tokens = increment.num_reprefilled_tokens
        out.num_preemptions = increment.num_preemptions
        if increment.prompt_logprobs is not None and self.output.prompt_logprobs is None:
            ids = self.output.prompt_token_ids[1:]
            self.output.prompt_logprobs = [
                None,
                *(self._entry(token, *found) for token, found in zip(ids, increment.prompt_logprobs, strict=False)),
            ]
        if increment.finish_reason is not None:
            out.finish_reason, out.stop_reason = increment.finish_reason, increment.stop_reason
        is_cut = self._add_text(sample, out, increment)
        if out.finish_reason is not None:
            self._num_open -= 1
            self.output.finished = self._num_open == 0
        if is_cut and increment.finish_reason is None:
            return child_id(self.output.request_id, out.index, self._params.n)
        return None

    def _add_text(self, sample: _Sample, out: CompletionOutput, increment: RequestIncrement) -> bool:
        """Bring the text up to date. True if a stop text ended the output."""
        detokenizer, stops = sample.detokenizer, sample.stops
        if detokenizer is None:
            return False
        ids, keep_stop = increment.token_ids, self._params.include_stop_str_in_output
        if increment.finish_reason == "stop" and not keep_stop:
            ids = ids[:-1]  # as with stop texts: what ended it is a token of the output, and no part of its text
        if not self._params.stop:
            detokenizer.add(ids)
            out.text = detokenizer.out if out.finish_reason is None else detokenizer.finish()
            return False
        before = len(out.token_ids) - len(increment.tokens)
        for count, token in enumerate(ids, before + 1):  # one by one: the output ends with the token that completed it
            detokenizer.add([token])
            if (found := stops.find(detokenizer.out)) is not None:
                self._cut(sample, out, count, *found)
                return True
        if out.finish_reason is None:
            held = 0 if keep_stop else stops.num_held(detokenizer.out)
            out.text = detokenizer.out[: len(detokenizer.out) - held]
            return False
        out.text = detokenizer.finish()
        if (found := stops.find(out.text)) is not None:  # in the bytes of a character that was never finished
            self._cut(sample, out, len(out.token_ids), *found)
        return found is not None

    def _cut(self, sample: _Sample, out: CompletionOutput, num_tokens: int, stop: str, end: int) -> None:
        """The output ends with its token ``num_tokens``; its text before, or after, the stop text."""
        assert sample.detokenizer is not None
        sample.is_cut = True
        out.finish_reason, out.stop_reason = "stop", stop
        out.text = sample.detokenizer.out[: end if self._params.include_stop_str_in_output else end - len(stop)]
        for per_token in (out.token_ids, out.token_logprobs, out.processed_logprobs, out.logprobs, out.sampling_mask):
            if per_token is not None:
                del per_token[num_tokens:]
        if out.routed_experts is not None:
            out.routed_experts = out.routed_experts.part(0, len(self.output.prompt_token_ids) + num_tokens - 1)
        out.weight_versions = [
            WeightVersionSpan(span.version, span.number, span.start, min(span.end, num_tokens))
            for span in out.weight_versions
            if span.start < num_tokens
        ]
        if out.kv_versions is not None:
            total = len(self.output.prompt_token_ids) + num_tokens
            out.kv_versions = [(v, start, min(end, total)) for v, start, end in out.kv_versions if start < total]

    def _entry(self, token: int, logprob: float, rank: int, top: list[tuple[int, float]]) -> dict[int, Logprob]:
        """The token itself first, then the most likely ones with their ranks."""
        found = {token: Logprob(logprob, rank, self._show(token))}
        for place, (candidate, value) in enumerate(top, 1):
            found.setdefault(candidate, Logprob(value, place, self._show(candidate)))
        return found

    def _show(self, token: int) -> str | None:
        return self._text.token(token) if self._text else None


def core_params(params: SamplingParams) -> SamplingParams:
    """What the core is to do for ``params``: stop texts are found here, so their tokens must come as they are made."""
    return dataclasses.replace(params, final_only=False) if params.final_only and params.stop else params


Prompt = str | list[int] | dict[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""


def prompt_ids(prompt: Prompt, text: Text) -> tuple[str | None, list[int]]:
    """(text or None, ids) of any form of prompt. Raises InvalidInput for another form."""
    if isinstance(prompt, dict):
        if "prompt_token_ids" in prompt:
            prompt = prompt["prompt_token_ids"]
        elif "prompt" in prompt:
            prompt = prompt["prompt"]
    if isinstance(prompt, str):
        return prompt, text.encode(prompt)
    if isinstance(prompt, (list, tuple)) and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
        return None, list(prompt)
    raise InvalidInput(
        f"a prompt is text, a list of token ids, {{'prompt': …}} or {{'prompt_token_ids': …}}; "
        f"got {type(prompt).__name__}"
    )
