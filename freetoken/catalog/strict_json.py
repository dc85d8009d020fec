"""Reads a JSON object that somebody else wrote: bounded, without duplicate keys, every fault a FileCorrupt. Pure.

Does not know what the objects mean.
"""

from __future__ import annotations

import json
from pathlib import Path

from freetoken.core.errors import FileCorrupt

JsonObject = dict[str, object]

LIMIT = 100 << 20  # bytes; safetensors allows headers of up to 100 MB, everything else is far smaller


def read_object(path: Path, limit: int = LIMIT) -> JsonObject:
    """The object in a file. Raises FileCorrupt; OSError where the file cannot be read at all."""
    with path.open("rb") as file:
        raw = file.read(min(limit, path.stat().st_size) + 1)  # a read takes room for all that it is asked for
    if len(raw) > limit:
        raise FileCorrupt(f"{path.name} is larger than {limit} bytes", numbers={"limit_bytes": limit})
    return parse_object(raw, path.name)


def parse_object(raw: bytes, where: str) -> JsonObject:
    """The object in `raw`; `where` names it in errors. Raises FileCorrupt."""
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as fault:
        raise FileCorrupt(f"{where} is not valid JSON: {fault}") from fault
    if not isinstance(parsed, dict):
        raise FileCorrupt(f"{where} is not a JSON object")
    return parsed


def _without_duplicates(pairs: list[tuple[str, object]]) -> JsonObject:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} is there twice")
    return values
