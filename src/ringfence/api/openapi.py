"""The OpenAPI 3.1 description, made from the table of routes and the wire types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import ringfence
from ringfence.api.routing import Route

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "hint", "details"],
            "properties": {
                "code": {"type": "string", "description": "Stable; programs may match it."},
                "message": {"type": "string"},
                "hint": {"type": "string", "description": "The remedy."},
                "details": {"type": "object"},
            },
        }
    },
}
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key with the same request again gives the same answer, for 24 hours.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[ -~]+$"},
}
_ABOUT = (
    "Sandboxes for AI agents. Every route takes a key (`Authorization: Bearer` or `X-API-Key`); what belongs "
    "to another project answers as if it did not exist. WebSockets are described in docs/PROTOCOL.md."
)


def describe(routes: Iterable[Route]) -> dict[str, Any]:
    """The whole description."""
    routes = [route for route in routes if "{rest:path}" not in route.path]
    models = _models(routes)
    named, definitions = models_json_schema(
        [(model, mode) for model, mode in models], ref_template="#/components/schemas/{model}"
    )
    schemas = dict(definitions.get("$defs", {}))
    schemas["Error"] = _ERROR
    paths: dict[str, Any] = {}
    for route in routes:
        method = "get" if route.socket else route.method.lower()
        operation = _operation(route, named)
        place = paths.setdefault(route.path.replace(":path}", "}"), {})
        if method in place:
            # A path that is a WebSocket as well: the description of GET says so.
            place[method]["description"] += "\n\nAs a WebSocket: " + route.summary
            continue
        place[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Ringfence",
            "version": ringfence.__version__,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"key": []}],
        "paths": dict(sorted(paths.items())),
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
            "schemas": dict(sorted(schemas.items())),
        },
    }


def _models(routes: Iterable[Route]) -> list[tuple[type[BaseModel], Any]]:
    found: dict[tuple[type[BaseModel], str], None] = {}
    for route in routes:
        if _is_model(route.body):
            found[route.body, "validation"] = None
        if _is_model(route.query):
            found[route.query, "validation"] = None
        if _is_model(route.answer):
            found[route.answer, "serialization"] = None
    return list(found)


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)


def _operation(route: Route, named: Any) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "description": route.description,
        "tags": [route.tag],
        "responses": {
            str(route.status): _success(route, named),
            "default": {
                "description": "An error.",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }
    if route.scope in ("", "token"):
        operation["security"] = []
    else:
        operation["description"] = f"{route.description}\n\nScope: {route.scope}.".strip()
    parameters: list[dict[str, Any]] = [
        {
            "name": name.removesuffix(":path"),
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
        }
        for name in route.names
    ]
    if _is_model(route.query):
        schema = route.query.model_json_schema(ref_template="#/components/schemas/{model}")
        required = schema.get("required", [])
        for name, shape in schema.get("properties", {}).items():
            parameters.append(
                {
                    "name": name,
                    "in": "query",
                    "required": name in required,
                    "description": shape.pop("description", ""),
                    "schema": shape,
                }
            )
    if route.creates:
        parameters.append(_KEY)
    if parameters:
        operation["parameters"] = parameters
    if _is_model(route.body):
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": named[route.body, "validation"]}},
        }
    elif route.body == "stream":
        operation["requestBody"] = {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    return operation


def _success(route: Route, named: Any) -> dict[str, Any]:
    if route.socket:
        return {"description": "A WebSocket; see docs/PROTOCOL.md."}
    if _is_model(route.answer):
        schema = named[route.answer, "serialization"]
        return {"description": "Done.", "content": {"application/json": {"schema": schema}}}
    if isinstance(route.answer, str):
        return {"description": "Done.", "content": {route.answer: {}}}
    if route.status == 204:
        return {"description": "Done."}
    return {"description": "Done.", "content": {"application/json": {"schema": {}}}}
