"""The OpenAPI document, narrowed to this engine: the model's names, its vocabulary, and how many samples fit."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from midstream.serving.frontend import Frontend

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "code": {"type": "integer"}},
        }
    },
}


def describe(app: FastAPI, front: Frontend) -> dict[str, Any]:
    """What ``/openapi.json`` gives; made once."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path in found.get("paths", {}).values():
            for operation in path.values():
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = {
                    "description": "What was wrong, and the remedy",
                    "content": {"application/json": {"schema": _ERROR}},
                }
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
        if "model" in properties:
            properties["model"] = {"anyOf": [{"type": "string", "enum": list(front.names)}, {"type": "null"}]}


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
