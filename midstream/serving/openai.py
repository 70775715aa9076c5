"""OpenAI's routes: completions, chat completions, models; and vLLM's tokenize and detokenize beside them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from midstream.errors import InvalidInput
from midstream.serving import shapes
from midstream.serving.answers import Piece, choice_record
from midstream.serving.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    RequestFields,
    TemplateFields,
    TokenizeBody,
)
from midstream.serving.frontend import Frontend
from midstream.serving.jobs import Job
from midstream.types import CompletionOutput, RequestOutput

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions; chat goes on to the model's length."""
ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One document, or events where stream is true",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {},
        },
    },
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    """What the two OpenAI shapes share: who asked for what, and the frame of a document and of an event."""

    model: str
    body: RequestFields
    kind: str
    """The document's ``object``."""

    def frame(self, job: Job, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        return {"id": job.id, "object": kind, "created": job.created, "model": self.model, "choices": choices}

    def last_event(self, job: Job, outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
        if not self.body.include_usage:
            return None
        return {**self.frame(job, [], self.event_kind), "usage": shapes.usage(outputs)}

    @property
    def event_kind(self) -> str:
        return self.kind

    @property
    def as_ids(self) -> bool:
        return bool(self.body.return_tokens_as_token_ids)

    def ending(self, out: CompletionOutput) -> dict[str, Any]:
        """The last part of a choice in a document."""
        found = choice_record(out, is_last=True, weight_versions=bool(self.body.return_weight_versions))
        if out.sampling_mask is not None:
            found["sampling_mask"] = out.sampling_mask
        if self.body.return_token_ids:
            found["token_ids"] = out.token_ids
        return found

    def piece_ending(self, piece: Piece) -> dict[str, Any]:
        """The same in an event: version spans when a new one begins and at the end."""
        versions = self.body.return_weight_versions and (piece.has_new_version or piece.is_last)
        found = choice_record(piece.out, is_last=piece.is_last, weight_versions=bool(versions))
        if piece.out.sampling_mask is not None:
            found["sampling_mask"] = piece.out.sampling_mask[piece.start : piece.end]
        if self.body.return_token_ids:
            found["token_ids"] = piece.out.token_ids[piece.start : piece.end]
        return found


class CompletionShape(_Shape):
    """text_completion, choices prompt-major: n per prompt."""

    def whole(self, job: Job, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            self._choice(i * job.work.params.n + out.index, output, out)
            for i, output in enumerate(outputs)
            for out in output.outputs
        ]
        return {**self.frame(job, choices, self.kind), "usage": shapes.usage(outputs)}

    def _choice(self, index: int, output: RequestOutput, out: CompletionOutput) -> dict[str, Any]:
        logprobs = shapes.completion_logprobs(out, 0, len(out.token_ids), as_ids=self.as_ids, text_offset=0)
        choice = {"index": index, "text": out.text, "logprobs": logprobs, **self.ending(out)}
        choice["prompt_logprobs"] = shapes.prompt_logprobs(output)
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def event(self, job: Job, piece: Piece) -> list[dict[str, Any]]:
        logprobs = shapes.completion_logprobs(
            piece.out, piece.start, piece.end, as_ids=self.as_ids, text_offset=piece.text_start
        )
        choice = {"index": piece.cursor.index, "text": piece.text, "logprobs": logprobs, **self.piece_ending(piece)}
        if piece.is_first and self.body.return_token_ids:
            choice["prompt_token_ids"] = piece.output.prompt_token_ids
        if piece.is_last and piece.output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = shapes.prompt_logprobs(piece.output)
        return [self.frame(job, [choice], self.kind)]


class ChatShape(_Shape):
    """chat.completion; the prompt's ids and logprobs at top level."""

    @property
    def event_kind(self) -> str:
        return "chat.completion.chunk"

    @property
    def num_top(self) -> int:
        return getattr(self.body, "top_logprobs", None) or 0

    def whole(self, job: Job, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        output = outputs[0]
        choices = [
            {
                "index": out.index,
                "message": {"role": "assistant", "content": out.text, "refusal": None},
                "logprobs": shapes.content_logprobs(
                    out, 0, len(out.token_ids), as_ids=self.as_ids, num_top=self.num_top
                ),
                **self.ending(out),
            }
            for out in output.outputs
        ]
        found = {**self.frame(job, choices, self.kind), "usage": shapes.usage(outputs)}
        found["prompt_logprobs"] = shapes.prompt_logprobs(output)
        if self.body.return_token_ids:
            found["prompt_token_ids"] = output.prompt_token_ids
        return found

    def event(self, job: Job, piece: Piece) -> list[dict[str, Any]]:
        events = []
        if piece.is_first:
            delta = {"role": "assistant", "content": ""}
            first = self.frame(
                job,
                [{"index": piece.cursor.index, "delta": delta, "logprobs": None, "finish_reason": None}],
                self.event_kind,
            )
            if self.body.return_token_ids:
                first["prompt_token_ids"] = piece.output.prompt_token_ids
            events.append(first)
        choice = {
            "index": piece.cursor.index,
            "delta": {"content": piece.text},
            "logprobs": shapes.content_logprobs(
                piece.out, piece.start, piece.end, as_ids=self.as_ids, num_top=self.num_top
            ),
            **self.piece_ending(piece),
        }
        found = self.frame(job, [choice], self.event_kind)
        if piece.is_last and piece.output.prompt_logprobs is not None:
            found["prompt_logprobs"] = shapes.prompt_logprobs(piece.output)
        return [*events, found]


def make_router(front: Frontend) -> APIRouter:
    """The routes of this module over ``front``."""
    router = APIRouter()

    @router.post("/v1/completions", responses=ANSWER, tags=["generation"])
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Complete prompts: text, ids, or lists of either."""
        model = front.check_model(body.model)
        params = body.sampling_params(
            front.settings,
            logprobs=body.num_logprobs,
            max_tokens=_DEFAULT_MAX_TOKENS,
            detokenize=front.has_text,
            is_stream=bool(body.stream),
        )
        work = front.work(await _prompts(front, body.prompt), body, params)
        return front.answer(request, body, work, CompletionShape(model, body, "text_completion"), "cmpl-")

    @router.post("/v1/chat/completions", responses=ANSWER, tags=["generation"])
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation by the model's chat template."""
        model = front.check_model(body.model)
        params = body.sampling_params(
            front.settings,
            logprobs=body.num_logprobs,
            max_tokens=body.max_completion_tokens,
            detokenize=True,
            is_stream=bool(body.stream),
        )
        ids = await front.chat_ids(body.plain_messages(), body.template_arguments(front.settings))
        work = front.work([ids], body, params)
        return front.answer(request, body, work, ChatShape(model, body, "chat.completion"), "chatcmpl-")

    @router.get("/v1/models", tags=["generation"])
    async def models() -> dict[str, Any]:
        """What this server has, and how long prompt and output may be together."""
        return {"object": "list", "data": [_card(front, name) for name in front.names]}

    @router.get("/v1/models/{name:path}", tags=["generation"])
    async def model_card(name: str) -> dict[str, Any]:
        return _card(front, front.check_model(name))

    @router.post("/tokenize", tags=["generation"])
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Text, or messages by the chat template, to ids."""
        front.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidInput("tokenize takes prompt or messages: give one of them")
        limit = front.settings.max_request_tokens
        if body.prompt is not None:
            [ids] = await front.encode([body.prompt], body.add_special_tokens is not False, limit)
        else:
            template = TemplateFields.model_validate({"messages": body.messages, **(body.model_extra or {})})
            ids = await front.chat_ids(template.plain_messages(), template.template_arguments(front.settings), limit)
        if len(ids) > limit:
            raise InvalidInput(f"these are {len(ids)} tokens, over the limit of {limit}: send several requests")
        found: dict[str, Any] = {"count": len(ids), "max_model_len": front.max_model_len, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = await front.beside(lambda: [front.llm.text.token(token) for token in ids])
        return found

    @router.post("/detokenize", tags=["generation"])
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        """Ids to text, special tokens included."""
        front.check_model(body.model)
        text, limit = front.llm.text, front.settings.max_request_tokens
        if len(body.tokens) > limit:
            raise InvalidInput(f"these are {len(body.tokens)} tokens, over the limit of {limit}: send several requests")
        limit = front.started["vocab_size"]
        if body.tokens and (largest := max(body.tokens)) >= limit:
            raise InvalidInput(f"tokens: {largest} is no token id of this model: they are in [0, {limit - 1}]")
        return {"prompt": await front.beside(lambda: text.decode(body.tokens, skip_special_tokens=False))}

    return router


async def _prompts(front: Frontend, prompt: str | list[Any]) -> list[list[int]]:
    """Every form of prompt as ids. Ids go through as they are."""
    texts: list[Any] = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(texts[0], str):
        limit = front.settings.max_request_sequences
        if len(texts) > limit:  # before work on them
            raise InvalidInput(f"{len(texts)} prompts are over the limit of {limit}: send several requests")
        return await front.encode(texts)
    return texts if isinstance(texts[0], list) else [texts]


def _card(front: Frontend, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "midstream",
        "root": front.llm.config.model,
        "parent": None,
        "max_model_len": front.max_model_len,
    }
