"""From the core's increments to the outputs people see: one RequestOutput that grows."""

from __future__ import annotations

from typing import Any

from midstream.errors import InvalidInput
from midstream.serving.text import Detokenizer, Text
from midstream.types import CompletionOutput, Logprob, RequestIncrement, RequestOutput, SamplingParams


class OutputBuilder:
    """Collects one request's increments. ``output`` is cumulative and complete at any time."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_ids: list[int], params: SamplingParams, text: Text | None
    ) -> None:
        self.output = RequestOutput(
            request_id, prompt, prompt_ids, [CompletionOutput(index=k) for k in range(params.n)]
        )
        self._params = params
        self._num_open = params.n
        self._text = text if params.detokenize else None
        self._detokenizers = [Detokenizer(text) if text and params.detokenize else None for _ in range(params.n)]
        if params.logprobs is not None:
            for completion in self.output.outputs:
                completion.logprobs = []

    def add(self, increment: RequestIncrement) -> None:
        out = self.output.outputs[increment.index]
        out.token_ids += increment.token_ids
        processed = self._params.logprobs_mode == "processed_logprobs"
        chosen = [pair[1 if processed else 0] for pair in increment.logprobs]
        out.token_logprobs += chosen
        out.processed_logprobs += [pair[1] for pair in increment.logprobs]
        if out.logprobs is not None:
            tops = increment.top_logprobs or [[]] * len(chosen)
            for token, logprob, rank, top in zip(increment.token_ids, chosen, increment.ranks, tops, strict=True):
                out.logprobs.append(self._entry(token, logprob, rank, top))
        out.weight_versions = increment.weight_versions
        out.kv_versions = increment.kv_versions
        out.seed = increment.seed
        out.num_cached_tokens = increment.num_cached_tokens
        out.num_reprefilled_tokens = increment.num_reprefilled_tokens
        out.num_preemptions = increment.num_preemptions
        detokenizer = self._detokenizers[increment.index]
        if detokenizer is not None:
            detokenizer.add(increment.token_ids)
            out.text = detokenizer.out
        if increment.prompt_logprobs is not None and self.output.prompt_logprobs is None:
            ids = self.output.prompt_token_ids[1:]
            self.output.prompt_logprobs = [
                None,
                *(self._entry(token, *found) for token, found in zip(ids, increment.prompt_logprobs, strict=False)),
            ]
        if increment.finish_reason is not None:
            out.finish_reason = increment.finish_reason
            out.stop_reason = increment.stop_token_id
            if detokenizer is not None:
                out.text = detokenizer.finish()
            self._num_open -= 1
            self.output.finished = self._num_open == 0

    def _entry(self, token: int, logprob: float, rank: int, top: list[tuple[int, float]]) -> dict[int, Logprob]:
        """The token itself first, then the most likely ones with their ranks."""
        found = {token: Logprob(logprob, rank, self._show(token))}
        for place, (candidate, value) in enumerate(top, 1):
            found.setdefault(candidate, Logprob(value, place, self._show(candidate)))
        return found

    def _show(self, token: int) -> str | None:
        return self._text.token(token) if self._text else None


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
