"""The OpenAPI 3.1 document of the control API, out of the route table.

Paths, parameters and bodies are those that FastAPI reads from the handlers, so they are what really is enforced;
answers are those of answers.py; load options come from the settings schema. Does not know files.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from freetoken.daemon.contract import schemas
from freetoken.daemon.contract.answers import ANSWERS, HEADERS, PREFER, Answers, EventStream
from freetoken.daemon.contract.schemas import Schema
from freetoken.daemon.contract.shapes import Problem
from freetoken.daemon.errors import MEDIA_TYPE
from freetoken.daemon.handlers.delivery import GOING_AWAY, TOO_MANY, TOO_SLOW
from freetoken.daemon.handshake import PROTOCOL, REFUSED
from freetoken.daemon.routes import ROUTES, SOCKET, Route, Scope
from freetoken.daemon.state import API_VERSION
from freetoken.settings.schema import KNOBS, Knob

_PLACE = "#/components/schemas/"
_PROBLEM = "#/components/responses/Problem"
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "The content of the file `token`."},
    "header": {"type": "apiKey", "in": "header", "name": "x-freetoken-token"},
}
_CLOSE_CODES = {
    str(GOING_AWAY): "The daemon ends.",
    "1009": "A message of the client was too large.",
    str(REFUSED): "The token did not come as the first message, or is wrong.",
    str(TOO_SLOW): "The client reads too slowly: connect again with `after`.",
    str(TOO_MANY): "Too many streams are open.",
}
_KINDS: dict[str, Schema] = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bytes": {"type": ["integer", "string"]},
    "seconds": {"type": ["number", "string"]},
    "switch": {"type": "boolean"},
}


def document() -> Schema:
    """The whole document. KeyError where a route has no answers."""
    routes = [route for route in ROUTES if route.method != SOCKET]
    paths, bodies = _requests()
    shapes, named = _shapes(routes)
    for route in routes:
        _complete(paths[route.path][route.method.lower()], route, shapes)
    return {
        "openapi": "3.1.0",
        "info": {"title": "FreeToken control API", "version": API_VERSION, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": "http://127.0.0.1:1919"}],
        "paths": paths,
        "x-websockets": _sockets(),
        "components": {
            "schemas": dict(sorted({**named, **bodies, "LoadOptions": _load_options()}.items())),
            "responses": {"Problem": _content(MEDIA_TYPE, shapes[Problem], "What is wrong, and what to do.")},
            "securitySchemes": _SECURITY,
        },
    }


def _requests() -> tuple[dict[str, Any], dict[str, Schema]]:
    """Paths with parameters and bodies, and the schemas of those."""
    app = FastAPI()
    for route in ROUTES:
        if route.method != SOCKET:
            app.add_api_route(route.path, route.handler, methods=[route.method], response_model=None)
    found = get_openapi(title="", version="", routes=app.routes)
    bodies: dict[str, Schema] = found.get("components", {}).get("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        bodies.pop(unused, None)
    for body in bodies.values():
        if "options" in body.get("properties", {}):
            body["properties"]["options"] = {"$ref": _PLACE + "LoadOptions"}
    return found["paths"], bodies


def _shapes(routes: list[Route]) -> tuple[dict[Any, Schema], dict[str, Schema]]:
    answered = [shape for route in routes for shape in _answers(route).by_status.values()]
    types = [*dict.fromkeys(shape for shape in answered if shape is not EventStream), Problem]
    found, named = schemas.of_types(types, _PLACE)
    return dict(zip(types, found, strict=True)), named


def _answers(route: Route) -> Answers:
    return ANSWERS[route.method, route.path]


def _complete(operation: dict[str, Any], route: Route, shapes: dict[Any, Schema]) -> None:
    answers = _answers(route)
    operation["operationId"] = operation_id(route)
    operation["summary"] = _summary(route)
    operation.pop("description", None)
    operation["security"] = [] if route.scope is Scope.OPEN else [{name: []} for name in _SECURITY]
    operation["responses"] = {
        **{str(status): _answer(status, shape, shapes) for status, shape in answers.by_status.items()},
        "default": {"$ref": _PROBLEM},
    }
    if answers.headers:
        operation.setdefault("parameters", []).extend(_header(name) for name in answers.headers)


def operation_id(route: Route) -> str:
    """`post_engine_load`: stable, and a name in any language."""
    names = route.path.replace("{", "").replace("}", "").replace("/api/v1/", "/").strip("/").split("/")
    root = [] if route.path.startswith("/api/") else ["root"]
    return "_".join([route.method.lower(), *root, *names])


def _answer(status: int, shape: Any, shapes: dict[Any, Schema]) -> Schema:
    if shape is EventStream:
        return _content("text/event-stream", {"type": "string"}, "Events: events.schema.json.")
    answer = _content("application/json", shapes[shape], {202: "Accepted: it goes on."}.get(status, "The answer."))
    if status == 202 and shape.__name__ == "Operation":
        answer["headers"] = {"Location": {"schema": {"type": "string"}, "description": "Path of the operation."}}
    return answer


def _content(media_type: str, schema: Schema, description: str) -> Schema:
    return {"description": description, "content": {media_type: {"schema": schema}}}


def _header(name: str) -> Schema:
    pattern = {"pattern": "^wait=[0-9]{1,3}$"} if name == PREFER else {}
    schema = {"type": "string", "maxLength": 255, **pattern}
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": HEADERS[name]}


def _load_options() -> Schema:
    options = {knob.name: _option(knob) for knob in KNOBS.values() if knob.scope == "load"}
    return {"type": "object", "title": "LoadOptions", "properties": options, "additionalProperties": False}


def _option(knob: Knob) -> Schema:
    schema: Schema = {**_KINDS.get(knob.kind, {"type": "string"}), "description": knob.help}
    if knob.choices:
        schema["enum"] = list(knob.choices)
    for name, bound in (("minimum", knob.minimum), ("maximum", knob.maximum)):
        if bound is not None:
            schema[name] = bound
    return schema


def _sockets() -> Schema:
    """WebSockets, which OpenAPI has no words for."""
    common = {
        "subprotocols": [PROTOCOL, "freetoken.token.<token>"],
        "firstMessage": {"token": "<token>"},
        "closeCodes": _CLOSE_CODES,
    }
    return {route.path: {"summary": _summary(route), **common} for route in ROUTES if route.method == SOCKET}


def _summary(route: Route) -> str:
    return ((route.handler.__doc__ or "").strip().splitlines() or [""])[0]
