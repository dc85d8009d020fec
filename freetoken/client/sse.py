"""Server-sent events: from lines of text to (id, data) records (WHATWG HTML, section 9.2). Pure.

Does not know what the data mean. Comments, which keep a connection alive, give nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """One dispatched event."""

    data: str
    id: str | None = None
    event: str = "message"


def records(lines: Iterable[str]) -> Iterator[Record]:
    """The events in `lines` (without their line ends). A record that the end of the stream cuts off is dropped."""
    data: list[str] = []
    last_id: str | None = None
    event = ""
    for line in lines:
        if not line:
            if data:
                yield Record("\n".join(data), last_id, event or "message")
            data, event = [], ""
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "id" and "\0" not in value:
            last_id = value
        elif name == "event":
            event = value
