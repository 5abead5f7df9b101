"""The OpenAPI description of the HTTP endpoint, made from the table of operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from gracekit.admin.access import Need
from gracekit.admin.routes import (
    ACTIONS,
    LISTINGS,
    LONGEST_ID,
    PROBES,
    Operation,
    Parameter,
)
from gracekit.config.choices import choices_of
from gracekit.control.health import HealthStatus
from gracekit.version import VERSION

_PROBE: Final = {
    "type": "object",
    "required": ["status", "phase", "why"],
    "properties": {
        "status": {"enum": list(choices_of(HealthStatus))},
        "phase": {"type": "string"},
        "why": {"type": "array", "items": {"type": "string"}},
    },
}
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["class", "message"],
            "properties": {"class": {"type": "string"}, "message": {"type": "string"}},
        }
    },
}
_KEY: Final = {
    "type": "object",
    "required": ["run_id", "key", "expires_s"],
    "properties": {
        "run_id": {"type": "string"},
        "key": {"type": "string"},
        "expires_s": {"type": "number"},
    },
}
_MEANINGS: Final[Mapping[int, str]] = {
    400: "A value is wrong; the message names it, the rule and the remedy.",
    401: "A token is needed, or the token is unknown.",
    403: "The host name, the origin, the action key or the settings do not allow this.",
    404: "There is no such task.",
    409: "The run cannot do it now; the message says why.",
    413: "The body is too long.",
    415: "The body must be JSON.",
    503: "The store cannot be read, or the run is not open yet.",
}


def describe(*, read_only: bool) -> dict[str, Any]:
    """The OpenAPI document; without actions if *read_only*."""
    operations = [*PROBES, *LISTINGS, *(() if read_only else ACTIONS)]
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    if not read_only:
        key = "A key for one action on this run; it expires after a minute."
        answer = _answer("ActionKey", "A new key.")
        paths["/api/v1/action-key"] = {"get": _get("get_action_key", key, answer)}
    events = "The run's own status, once a second, as server-sent events."
    stream = {"description": "Status once a second.", "content": {"text/event-stream": {}}}
    paths["/api/v1/events"] = {"get": _get("get_events", events, stream)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "gracekit", "version": VERSION},
        "components": {
            "schemas": {"Error": _ERROR, "Probe": _PROBE, "ActionKey": _KEY},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "paths": paths,
    }


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _name_of(operation),
        "summary": operation.summary,
        "parameters": [*_in_path(operation), *map(_in_query, operation.query)],
        "responses": _responses(operation),
    }
    if operation.need is not Need.PROBE:
        described["security"] = [{"token": []}]
    if operation.need is Need.ACT:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _object(operation.body)}},
        }
    return described


def _name_of(operation: Operation) -> str:
    words = operation.path.removeprefix("/api/v1/").strip("/").replace("{task_id}", "task")
    return f"{operation.method.lower()}_{words.replace('/', '_')}"


def _in_path(operation: Operation) -> list[dict[str, Any]]:
    if not operation.takes_id:
        return []
    schema = {"type": "string", "minLength": 1, "maxLength": LONGEST_ID}
    return [{"name": "task_id", "in": "path", "required": True, "schema": schema}]


def _in_query(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": "query",
        "description": parameter.meaning,
        "required": parameter.needed,
        "schema": dict(parameter.schema),
    }


def _object(fields: Iterable[Parameter]) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": [field.name for field in fields if field.needed],
        "properties": {
            field.name: {**field.schema, "description": field.meaning} for field in fields
        },
    }


def _responses(operation: Operation) -> dict[str, Any]:
    if operation.need is Need.PROBE:
        probe = _answer("Probe", "What the probe found.")
        refused = {str(code): _answer("Error", _MEANINGS[code]) for code in (400, 401, 403)}
        return {"200": probe, "503": probe, **refused}
    codes = [400, 401, 403, 503]
    codes += [404] if operation.takes_id else []
    codes += [409, 413, 415] if operation.need is Need.ACT else []
    errors = {str(code): _answer("Error", _MEANINGS[code]) for code in sorted(codes)}
    done = {"description": "Done.", "content": {"application/json": {"schema": {"type": "object"}}}}
    return {"200": done, **errors}


def _answer(name: str, meaning: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": meaning, "content": {"application/json": {"schema": schema}}}


def _get(name: str, summary: str, answer: dict[str, Any]) -> dict[str, Any]:
    errors = {str(code): _answer("Error", _MEANINGS[code]) for code in (400, 401, 403, 503)}
    return {
        "operationId": name,
        "summary": summary,
        "security": [{"token": []}],
        "responses": {"200": answer, **errors},
    }
