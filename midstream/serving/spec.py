"""The OpenAPI document, narrowed to this engine: what it takes beyond types, so that what it calls valid works.

What depends on the moment (an update that is not open, an owner's pause) can not be said in a schema: such requests are
answered 4xx.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from midstream.serving.bodies import NOT_OF_A_TEMPLATE
from midstream.serving.frontend import Frontend
from midstream.serving.rl import WeightRoutes
from midstream.types import MAX_SEED
from midstream.weights.base import worker_engines

_TEXT = {"type": "string", "minLength": 1}
_NULL = {"type": "null"}


def _object(required: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **more}}


def _only(required: dict[str, Any]) -> dict[str, Any]:
    return {**_object(required), "additionalProperties": False}


_ERROR = _object(
    {"error": _object({"message": {"type": "string"}, "type": {"type": "string"}, "code": {"type": "integer"}})}
)
_RESPONSES = {
    "4XX": "What was wrong, and the remedy",
    "503": "Not now: paused, or too many requests (both with Retry-After); or the engine is gone",
    "504": "A time limit that the request or the server set has passed",
}
_GRAMMAR = _object({"type": {"enum": ["object", "array", "string", "integer", "number", "boolean", "null"]}})
_DIGEST = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_SHAPES = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}
_MANIFEST = {"names": _TEXTS, "dtype_names": _TEXTS, "shapes": _SHAPES, "digests": {"type": "array", "items": _DIGEST}}
_CHOICE = {"type": "array", "items": _TEXT, "minItems": 1}
_PARTS = {"type": "array", "items": _object({"type": {"const": "text"}, "text": {"type": "string"}})}
_MESSAGE = _object(
    {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, _PARTS]},
    }
)
_FORMATS = [
    _object({"type": {"enum": ["text", "json_object"]}}),
    _object({"type": {"const": "json_schema"}, "json_schema": _object({"schema": _GRAMMAR})}),
]
_PROPERTIES: dict[str, dict[str, Any]] = {
    "seed": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_SEED}, _NULL]},  # get_openapi rounds it up
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "chat_template_kwargs": {
        "anyOf": [{"type": "object", "propertyNames": {"not": {"enum": sorted(NOT_OF_A_TEMPLATE)}}}, _NULL]
    },
    "structured_outputs": {
        "anyOf": [_only({"json": _GRAMMAR}), _only({"regex": _TEXT}), _only({"choice": _CHOICE}), _NULL]
    },
    "response_format": {"anyOf": [*_FORMATS, _NULL]},
    "tool_choice": {"enum": ["none", None]},
    "manifest": {"anyOf": [_only(_MANIFEST), _NULL]},
    "is_checkpoint_format": {"enum": [True, None]},
}
"""Fields of bodies whose schema says more than their type does."""


def describe(app: FastAPI, front: Frontend) -> dict[str, Any]:
    """What ``/openapi.json`` gives; made once."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        content = {"application/json": {"schema": _ERROR}}
        for path in found.get("paths", {}).values():
            for operation in path.values():
                operation["responses"].pop("422", None)
                for status, text in _RESPONSES.items():
                    operation["responses"][status] = {"description": text, "content": content}
                for parameter in operation.get("parameters", ()):
                    if parameter["in"] == "path":
                        parameter["schema"] = {"type": "string", "enum": list(front.names)}
        _narrow(found.get("components", {}).get("schemas", {}), front)
        app.openapi_schema = found
    return app.openapi_schema


def _narrow(schemas: dict[str, Any], front: Frontend) -> None:
    last_token = {"maximum": front.started.get("vocab_size", 1) - 1}
    bounds: dict[str, dict[str, Any]] = {
        "n": {"maximum": front.llm.config.max_num_seqs},
        "prompt": last_token,
        "token_ids": last_token,
        "tokens": last_token,
        "stop_token_ids": last_token,
    }
    for schema in schemas.values():
        properties = schema.get("properties", {})
        for name in bounds.keys() & properties.keys():
            _bound(properties[name], bounds[name])
        for name in _PROPERTIES.keys() & properties.keys():
            properties[name] = _PROPERTIES[name]
        if "model" in properties:
            properties["model"] = {"anyOf": [{"type": "string", "enum": list(front.names)}, _NULL]}
    _one_of(schemas.get("TokenizeBody"), prompt={"type": "string"}, messages=_PROPERTIES["messages"])
    _narrow_control(schemas, front)


def _narrow_control(schemas: dict[str, Any], front: Frontend) -> None:
    """The bodies of the weight routes, where they are served: what this engine's backend takes."""
    if "InitBody" not in schemas:
        return
    config = front.llm.config
    backend = worker_engines.lookup(config.weight_transfer_backend)
    schemas["InitBody"]["properties"]["init_info"] = _info(backend.init_info_cls)
    directory = {"type": "string", "examples": [config.model]}
    _one_of(schemas["UpdateBody"], update_info=_info(backend.update_info_cls), weight_dir=directory)
    schemas["RpcBody"]["properties"]["method"]["enum"] = sorted(WeightRoutes(front.llm).aliases())
    baseline = {"type": "object", "additionalProperties": _DIGEST, "minProperties": 1}
    schemas["CheckerBody"]["oneOf"] = [
        _object({"action": {"enum": ["checksum", "reset"]}}),
        _object({"action": {"const": "compare"}, "baseline": baseline}),
    ]


def _one_of(schema: dict[str, Any] | None, **choices: dict[str, Any]) -> None:
    """Exactly one of two fields is given, the other is missing or null."""
    if schema is not None:
        del schema["properties"][next(iter(choices))]
        schema["oneOf"] = [
            _object({name: wanted}, **dict.fromkeys(choices.keys() - {name}, _NULL)) for name, wanted in choices.items()
        ]


def _info(kind: type[Any]) -> dict[str, Any]:
    """A backend's dataclass as a schema; unknown keys are refused."""
    assert dataclasses.is_dataclass(kind)
    schema = TypeAdapter(kind).json_schema()
    for wanted in schema["properties"].values():
        _bound(wanted, {"minimum": 0, "maximum": (1 << 63) - 1})
    return {**schema, "additionalProperties": False}


def _bound(schema: Any, bounds: dict[str, Any]) -> None:
    """Put ``bounds`` on every integer inside ``schema``."""
    if isinstance(schema, list):
        for part in schema:
            _bound(part, bounds)
    elif isinstance(schema, dict):
        if schema.get("type") == "integer":
            schema.update(bounds)
        for key in ("items", "anyOf", "oneOf", "allOf"):
            _bound(schema.get(key), bounds)
