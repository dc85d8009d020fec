"""From types to JSON Schema 2020-12, as the contract wants it: every field that is always sent is required. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

Schema = dict[str, Any]

_PROBLEMS = (("Operation", "error"), ("EngineState", "failure"))  # carried as plain objects inside the daemon


def of_types(types: Iterable[Any], place: str) -> tuple[list[Schema], dict[str, Schema]]:
    """The schema of each type, and the named ones they refer to; `place` is where those will stand, as `#/.../`."""
    schemas, named = msgspec.json.schema_components(types, ref_template=place + "{name}")
    for schema in named.values():
        _require_what_is_sent(schema)
    for name, field in _PROBLEMS:
        if name in named:
            named[name]["properties"][field]["anyOf"][0] = {"$ref": f"{place}Problem"}
    return list(schemas), dict(sorted(named.items()))


def _require_what_is_sent(schema: Schema) -> None:
    """A field with a default is sent all the same; one that may be left out has none."""
    fields: dict[str, Schema] = schema.get("properties", {})
    always = set(schema.get("required", ())) | {name for name, field in fields.items() if "default" in field}
    for field in fields.values():
        field.pop("default", None)
    if fields:
        schema["required"] = [name for name in fields if name in always]
