"""Server-sent events (WHATWG HTML, section 9.2), as OpenAI's clients read them. Pure.

Does not know what the events say.
"""

from __future__ import annotations

from typing import Any

import msgspec

# no-store: nothing on the way may keep an answer; x-accel-buffering: nginx must pass each event on at once
HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"  # a comment: clients skip it, proxies and timeouts see that the connection lives

_ENCODER = msgspec.json.Encoder()


def event(data: Any) -> bytes:
    """One event. JSON escapes line ends inside strings, so one data line always does."""
    return b"data: " + _ENCODER.encode(data) + b"\n\n"
