"""The bodies of generation requests: fields, what they mean, and what is refused. Unknown keys are ignored.

Null means the default everywhere. A known option that this engine does not have is refused when it would matter, so
that no answer pretends to have followed it.
"""

from __future__ import annotations

import json
import reprlib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from midstream.errors import InvalidInput
from midstream.serving.settings import ServerSettings
from midstream.types import MAX_N, MAX_SEED, LogprobsMode, SamplingParams, StructuredOutputs

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "best_of": (0, 1),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "features": ({}, []),
    "content_parts": ([],),
    "functions": ([],),
    "audio": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Options that are not served, with the values (beside null) under which they change nothing."""


def _whole(value: Any) -> Any:
    """4.0 is an integer in JSON; alone or in a list."""
    if isinstance(value, list):
        return [_whole(each) for each in value] if float in set(map(type, value)) else value
    return int(value) if type(value) is float and value.is_integer() else value


_WHOLE = BeforeValidator(_whole)
_TokenId = Annotated[StrictInt, Field(ge=0)]
TokenIds = Annotated[list[_TokenId], _WHOLE]
_Count = Annotated[StrictInt, Field(ge=0, le=20), _WHOLE]
_Text = Annotated[str, Field(min_length=1)]
_T = TypeVar("_T")
_Some = Annotated[list[_T], Field(min_length=1)]
_Prompt = Annotated[list[_TokenId], Field(min_length=1), _WHOLE]


class Body(BaseModel):
    """A JSON object with some known fields."""

    model_config = ConfigDict(extra="allow", strict=True)

    def refuse_unserved(self) -> None:
        """Raises InvalidInput for an option of ``_NEUTRAL`` that is asked for."""
        for name, value in (self.model_extra or {}).items():
            neutral = _NEUTRAL.get(name)
            if neutral is not None and value is not None and value not in neutral:
                hint = "; use structured_outputs" if name.startswith("guided_") else ""
                raise InvalidInput(f"{name} is not served here: leave it away{hint}")


class SamplingFields(Body):
    """How to sample: vLLM's names, OpenAI's where they differ."""

    n: Annotated[StrictInt, Field(ge=1, le=MAX_N), _WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1), _WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1), _WHOLE] | None = None
    seed: Annotated[StrictInt, Field(ge=0, le=MAX_SEED), _WHOLE] | None = None
    stop: _Text | list[_Text] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: StrictBool | _Count | None = None
    prompt_logprobs: _Count | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    return_sampling_mask: bool | None = None
    return_routed_experts: bool | None = None
    """By default the server's."""
    routed_experts_prompt_start: Annotated[StrictInt, Field(ge=0), _WHOLE] | None = None
    logprobs_mode: LogprobsMode | None = None
    """By default the server's."""

    def sampling_params(
        self,
        settings: ServerSettings,
        *,
        logprobs: int | None,
        max_tokens: int | None,
        detokenize: bool,
        is_stream: bool,
    ) -> SamplingParams:
        """The engine's parameters. ``max_tokens``: where the request gives none."""
        self.refuse_unserved()
        given = {
            name: value
            for name in (
                "n",
                "temperature",
                "top_p",
                "top_k",
                "min_p",
                "repetition_penalty",
                "seed",
                "stop",
                "stop_token_ids",
                "ignore_eos",
                "include_stop_str_in_output",
                "skip_special_tokens",
                "prompt_logprobs",
                "return_sampling_mask",
                "return_routed_experts",
                "routed_experts_prompt_start",
            )
            if (value := getattr(self, name)) is not None
        }
        given.setdefault("return_routed_experts", settings.enable_return_routed_experts)
        for name in ("stop", "stop_token_ids"):
            if name in given:
                given[name] = (given[name],) if isinstance(given[name], str) else tuple(given[name])
        return SamplingParams(
            **given,
            logprobs=logprobs,
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            logprobs_mode=self.logprobs_mode or settings.logprobs_mode,
            structured_outputs=_structured(self.structured_outputs, self.response_format),
            detokenize=detokenize or bool(given.get("stop")),
            final_only=not is_stream,
        )

    @property
    def num_logprobs(self) -> int | None:
        """``logprobs`` as a number of alternatives: true is one, false none at all."""
        if isinstance(self.logprobs, bool):
            return 1 if self.logprobs else None
        return self.logprobs


class StreamOptions(Body):
    include_usage: bool | None = None


class RequestFields(Body):
    """What every generation request may carry beside how to sample."""

    model: str | None = None
    """May be missing."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    cache_salt: str | None = None
    priority: Annotated[StrictInt, Field(ge=-(1 << 31), lt=1 << 31), _WHOLE] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """An idempotency key too."""

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def _prompt(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """One fault for four forms, instead of one for each."""
    try:
        found = check(value)
    except ValidationError:
        found = None
    if found is None:
        raise PydanticCustomError(
            "prompt",
            "a prompt is text, token ids (integers >= 0), a list of texts, or a list of lists of ids; not empty",
        )
    return found


class CompletionBody(SamplingFields, RequestFields):
    prompt: Annotated[_Text | _Prompt | _Some[_Text] | _Some[_Prompt], WrapValidator(_prompt)]


NOT_OF_A_TEMPLATE = frozenset(
    ("self", "messages", "conversation", "tools", "chat_template", "tokenize", "return_dict", "return_tensors")
    + ("time_limit_s", "max_chars")
)
"""What ``Text.apply_chat_template``, and the tokenizer's under it, call their own arguments."""


class TemplateFields(Body):
    """Messages and how the chat template turns them into a prompt."""

    messages: _Some[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template: _Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def template_arguments(self, settings: ServerSettings) -> dict[str, Any]:
        """Keyword arguments of ``Text.apply_chat_template``. Raises InvalidInput for what is not served."""
        if self.tool_choice not in (None, "none"):
            raise InvalidInput(
                f"tool_choice {self.tool_choice!r} is not served: tool calls are not parsed here; leave it away or say "
                '"none", and read them from the text'
            )
        if self.chat_template is not None and not settings.allows_request_chat_template:
            raise InvalidInput("chat_template in a request is off: start the server with --trust-request-chat-template")
        arguments = dict(self.chat_template_kwargs or {})
        if taken := sorted(NOT_OF_A_TEMPLATE & arguments.keys()):
            raise InvalidInput(f"chat_template_kwargs: {', '.join(taken)} can not be given there: choose others")
        for name in ("tools", "chat_template", "add_generation_prompt", "continue_final_message"):
            if getattr(self, name) is not None:
                arguments[name] = getattr(self, name)
        return arguments

    def plain_messages(self) -> list[dict[str, Any]]:
        """The messages with their content as text: parts of type text are joined, other parts refused."""
        found = []
        for index, message in enumerate(self.messages):
            where = f"messages.{index}"
            if not isinstance(message.get("role"), str):
                raise InvalidInput(
                    f"{where}.role: a text is needed, such as user, got {reprlib.repr(message.get('role'))}"
                )
            found.append({**message, "content": _content(message.get("content"), f"{where}.content")})
        return found


class ChatBody(TemplateFields, SamplingFields, RequestFields):
    top_logprobs: _Count | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1), _WHOLE] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """``logprobs`` is a switch here (a number counts as its truth), ``top_logprobs`` the alternatives."""
        return (self.top_logprobs or 0) if self.logprobs else None


class GenerateBody(RequestFields):
    """Tokens in, tokens out."""

    token_ids: _Prompt
    sampling_params: SamplingFields = Field(default_factory=SamplingFields)
    output_mode: Literal["tokens", "text"] | None = None
    return_details: bool | None = None
    """In an answer that is no stream: "details" in every choice, what a trainer's bookkeeping wants to know."""


class TokenizeBody(Body):
    """Text, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: _Some[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds


def _content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidInput(f"{where}: a text, a list of parts or null is needed, got {reprlib.repr(content)}")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidInput(f"{where}: a part of type {reprlib.repr(kind)} is not served: only text")
        texts.append(part["text"])
    return "".join(texts)


def _structured(wanted: dict[str, Any] | None, response_format: dict[str, Any] | None) -> StructuredOutputs | None:
    """vLLM's ``structured_outputs`` or OpenAI's ``response_format``; not both."""
    kinds = ("json", "regex", "choice")
    wanted = {k: v for k, v in (wanted or {}).items() if v is not None and (v is not False or k in kinds)}
    if response_format is not None:
        kind = response_format.get("type")
        if kind == "json_object":
            found: dict[str, Any] = {"json_object": True}
        elif kind == "json_schema":
            schema = response_format.get("json_schema")
            if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
                raise InvalidInput('response_format of type json_schema takes {"json_schema": {"schema": {…}}}')
            found = {"json": schema["schema"]}
        elif kind == "text":
            found = {}
        else:
            raise InvalidInput(f"response_format type {kind!r} is not served: text, json_object or json_schema")
        if found and wanted:
            raise InvalidInput("give response_format or structured_outputs, not both")
        wanted = found or wanted
    if not wanted:
        return None
    if len(wanted) != 1 or not set(wanted) <= {*kinds, "json_object"}:
        raise InvalidInput(f"structured_outputs takes exactly one of json, regex and choice, got {sorted(wanted)}")
    name, value = next(iter(wanted.items()))
    if name == "json_object":
        if value is not True:
            raise InvalidInput(f"structured_outputs: json_object must be true or false, got {reprlib.repr(value)}")
        name, value = "json", {"type": "object"}
    if name == "json":
        return _schema(value)
    if name == "choice":
        if not isinstance(value, list):
            raise InvalidInput(f"structured_outputs: choice is a list of texts, got {value!r}")
        return StructuredOutputs(choice=tuple(value))
    return StructuredOutputs(regex=value)


def _schema(value: Any) -> StructuredOutputs:
    """A JSON schema as an object, or as the text of one. ``true`` and ``false`` are schemas too, but no use here."""
    try:
        found = StructuredOutputs(json=value if isinstance(value, str) else json.dumps(value))
        if isinstance(json.loads(found.json or ""), dict):
            return found
    except (json.JSONDecodeError, RecursionError):
        pass
    raise InvalidInput(f"structured_outputs: json is a schema, as object or as text, got {reprlib.repr(value)}")
