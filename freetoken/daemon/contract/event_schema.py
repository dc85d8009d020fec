"""The JSON Schema 2020-12 of the event stream: the envelope, and the data of each type that is known. Pure."""

from __future__ import annotations

from freetoken.daemon.contract import schemas
from freetoken.daemon.contract.happenings import EVENTS
from freetoken.daemon.contract.schemas import Schema
from freetoken.daemon.listener import Event

_PLACE = "#/$defs/"


def document() -> Schema:
    """The schema of one event. Types it does not know are valid with any data."""
    types = list(dict.fromkeys([Event, *(shape for shapes in EVENTS.values() for shape in shapes)]))
    found, named = schemas.of_types(types, _PLACE)
    schema_of = dict(zip(types, found, strict=True))
    envelope = named.pop(Event.__name__)
    rules = [_rule(type, [schema_of[shape] for shape in shapes]) for type, shapes in EVENTS.items()]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "FreeToken event",
        **{key: envelope[key] for key in ("description", "type", "properties", "required")},
        "x-types": sorted(EVENTS),
        "allOf": rules,
        "$defs": named,
    }


def _rule(type: str, data: list[Schema]) -> Schema:
    schema = data[0] if len(data) == 1 else {"anyOf": data}
    return {"if": {"properties": {"type": {"const": type}}}, "then": {"properties": {"data": schema}}}
