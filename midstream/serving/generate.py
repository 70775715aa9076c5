"""POST /inference/v1/generate: tokens in, tokens out; every choice says which weights made which token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from midstream.serving import shapes
from midstream.serving.answers import Piece, choice_record
from midstream.serving.bodies import GenerateBody
from midstream.serving.frontend import Frontend
from midstream.serving.jobs import Job
from midstream.serving.openai import ANSWER
from midstream.types import CompletionOutput, RequestOutput


@dataclasses.dataclass(frozen=True, slots=True)
class GenerateShape:
    """vLLM's generate answer: tokens named by id, text only where it was asked for."""

    model: str
    body: GenerateBody

    def _frame(self, job: Job, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "request_id": job.id,
            "object": "inference.generate",
            "created": job.created,
            "model": self.model,
            "output_mode": self.body.output_mode or "tokens",
            "choices": choices,
        }

    def _choice(self, index: int, out: CompletionOutput, start: int, end: int) -> dict[str, Any]:
        num_top = self.body.sampling_params.num_logprobs or 0
        choice: dict[str, Any] = {
            "index": index,
            "token_ids": out.token_ids[start:end],
            "logprobs": shapes.content_logprobs(out, start, end, as_ids=True, num_top=num_top),
        }
        if out.sampling_mask is not None:
            choice["sampling_mask"] = out.sampling_mask[start:end]
        return choice

    def whole(self, job: Job, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        output = outputs[0]
        choices = []
        for out in output.outputs:
            choice = self._choice(out.index, out, 0, len(out.token_ids))
            if self.body.output_mode == "text":
                choice["text"] = out.text
            if self.body.return_details:
                choice["details"] = shapes.details(out)
            choices.append({**choice, **choice_record(out, is_last=True, weight_versions=True)})
        found = {**self._frame(job, choices), "usage": shapes.usage(outputs)}
        found["prompt_logprobs"] = shapes.prompt_logprobs(output)
        found["prompt_token_ids"] = output.prompt_token_ids if self.body.return_token_ids else None
        return found

    def event(self, job: Job, piece: Piece) -> list[dict[str, Any]]:
        choice = self._choice(piece.cursor.index, piece.out, piece.start, piece.end)
        if self.body.output_mode == "text":
            choice["text"] = piece.text
        versions = piece.has_new_version or piece.is_last
        choice.update(choice_record(piece.out, is_last=piece.is_last, weight_versions=versions))
        found = self._frame(job, [choice])
        if piece.is_first and self.body.return_token_ids:
            found["prompt_token_ids"] = piece.output.prompt_token_ids
        if piece.is_last and piece.output.prompt_logprobs is not None:
            found["prompt_logprobs"] = shapes.prompt_logprobs(piece.output)
        return [found]

    def last_event(self, job: Job, outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
        return {**self._frame(job, []), "usage": shapes.usage(outputs)} if self.body.include_usage else None


def make_router(front: Frontend) -> APIRouter:
    """The route of this module over ``front``."""
    router = APIRouter()

    @router.post("/inference/v1/generate", responses=ANSWER, tags=["generation"])
    async def generate(body: GenerateBody, request: Request) -> Response:
        """One prompt of ids; without max_tokens it goes on to the model's length."""
        model = front.check_model(body.model)
        body.refuse_unserved()
        params = body.sampling_params.sampling_params(
            front.settings,
            logprobs=body.sampling_params.num_logprobs,
            max_tokens=None,
            detokenize=body.output_mode == "text",
            is_stream=bool(body.stream),
        )
        work = front.work([body.token_ids], body, params)
        return front.answer(request, body, work, GenerateShape(model, body), "")

    return router
