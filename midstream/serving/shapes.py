"""From a completion to the JSON that clients parse: logprobs, version spans, usage. Pure; one place for each shape.

A token is named twice wherever a shape has room: "token": "token_id:N" or its text, and "token_id": N.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from midstream.types import CompletionOutput, Logprob, RequestOutput, RoutedExperts, WeightVersionSpan

_FLOOR = -9999.0
"""What an infinite or undefined logprob is on the wire: JSON has neither."""


def finite(logprob: float) -> float:
    return logprob if _FLOOR <= logprob < math.inf else _FLOOR


def token_name(token_id: int, entry: Logprob | None, as_ids: bool) -> str:
    """A token's text, or "token_id:N" where that is asked for or there is no tokenizer."""
    shown = entry.decoded_token if entry is not None else None
    return f"token_id:{token_id}" if as_ids or shown is None else shown


def _alternatives(entries: dict[int, Logprob], number: int) -> list[tuple[int, Logprob]]:
    """The ``number`` most likely candidates of one position, best first."""
    ranked = sorted(entries.items(), key=lambda pair: -pair[1].logprob)
    return ranked[:number]


def completion_logprobs(
    out: CompletionOutput, start: int, end: int, *, as_ids: bool, text_offset: int
) -> dict[str, Any] | None:
    """OpenAI's completions shape for output tokens [start, end); None where logprobs were not asked for.

    An alternative whose text another has (half a character looks like every other half) goes by "token_id:N".
    """
    if out.logprobs is None:
        return None
    tokens, logprobs, tops, offsets = [], [], [], []
    offset = text_offset
    for token_id, entries in zip(out.token_ids[start:end], out.logprobs[start:end], strict=True):
        own = entries[token_id]
        tokens.append(token_name(token_id, own, as_ids))
        logprobs.append(finite(own.logprob))
        offsets.append(offset)
        offset += len(own.decoded_token or "")
        top: dict[str, float] = {}  # the sampled token comes first, so it keeps its name
        for candidate, entry in entries.items():
            name = token_name(candidate, entry, as_ids)
            top[f"token_id:{candidate}" if name in top else name] = finite(entry.logprob)
        tops.append(top)
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def content_logprobs(
    out: CompletionOutput, start: int, end: int, *, as_ids: bool, num_top: int
) -> dict[str, Any] | None:
    """OpenAI's chat shape, with each token's id and rank, for output tokens [start, end)."""
    if out.logprobs is None:
        return None
    content = []
    for token_id, entries in zip(out.token_ids[start:end], out.logprobs[start:end], strict=True):
        top = [_named(t, entry, as_ids) for t, entry in _alternatives(entries, num_top)] if num_top else []
        content.append({**_named(token_id, entries[token_id], as_ids), "top_logprobs": top})
    return {"content": content}


def _named(token_id: int, entry: Logprob, as_ids: bool) -> dict[str, Any]:
    name = token_name(token_id, entry, as_ids)
    return {
        "token": name,
        "token_id": token_id,
        "logprob": finite(entry.logprob),
        "rank": entry.rank,
        "bytes": list(name.encode("utf-8", "replace")),
    }


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """[null, {"<id>": {logprob, rank, decoded_token}}, …]: the prompt's own token first in each."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if entries is None
        else {
            str(token_id): {"logprob": finite(e.logprob), "rank": e.rank, "decoded_token": e.decoded_token}
            for token_id, e in entries.items()
        }
        for entries in output.prompt_logprobs
    ]


def version_spans(spans: Sequence[WeightVersionSpan]) -> list[dict[str, Any]]:
    """Which weights made which output tokens, half open: [{version, number, start, end}]."""
    return [{"version": s.version, "number": s.number, "start": s.start, "end": s.end} for s in spans]


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Tokens of a whole request; a prompt counts once however many samples it has."""
    prompt = completion = cached = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        completion += sum(len(c.token_ids) for c in output.outputs)
        cached += max((c.num_cached_tokens for c in output.outputs), default=0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def record(out: CompletionOutput) -> dict[str, Any]:
    """What every finished choice says for a trainer: why it ended, its seed, and how its KV came about."""
    found: dict[str, Any] = {"finish_reason": out.finish_reason, "stop_reason": out.stop_reason, "seed": out.seed}
    if out.kv_versions is not None:
        found["kv_versions"] = [{"number": n, "start": start, "end": end} for n, start, end in out.kv_versions]
    if out.routed_experts is not None:
        found["routed_experts"] = routed_experts(out.routed_experts)
    return found


def routed_experts(routes: RoutedExperts) -> str:
    """A .npy in base64: uint16 [tokens, MoE layers, k]."""
    file = io.BytesIO()
    np.save(file, np.frombuffer(routes.data, "<u2").reshape(-1, routes.num_layers, routes.top_k))
    return base64.b64encode(file.getvalue()).decode()


def details(out: CompletionOutput) -> dict[str, Any]:
    """The logprobs under the distribution really sampled from, whatever the server shows, and how much was computed."""
    return {
        "processed_logprobs": [finite(logprob) for logprob in out.processed_logprobs],
        "num_cached_tokens": out.num_cached_tokens,
        "num_reprefilled_tokens": out.num_reprefilled_tokens,
        "num_preemptions": out.num_preemptions,
    }
