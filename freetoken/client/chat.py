"""Reads the stream of POST /v1/chat/completions: from data records to pieces of an answer. Pure.

Shapes: OpenAI's chat.completion.chunk, ended by [DONE]; an error is one record with `error` and no [DONE] after it
(docs/contracts.md, Streams). Does not know HTTP or terminals.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from freetoken.client.views import Problem
from freetoken.core.errors import EngineError, FreeTokenError

DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text, or at the end why it ended and what it took."""

    text: str = ""
    finish: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


def pieces(data: Iterable[str]) -> Iterator[Piece]:
    """The pieces of one answer. Raises what the server reports, and EngineError for a stream without an end."""
    for record in data:
        if record == DONE:
            return
        body = json.loads(record)
        if "error" in body:
            raise error_in(body["error"])
        yield from _pieces_of(body)
    raise EngineError("the answer ended early: the connection closed before its end", fixes=("ft status",))


def error_in(error: dict[str, Any]) -> FreeTokenError:
    """The typed error in OpenAI's error object; our own code is in `freetoken_code`.

    `message` repeats the fixes as a sentence at its end, for clients that show nothing else; we have them apart.
    """
    fixes = error.get("fixes") or []
    message = error.get("message") or ""
    return Problem(
        code=error.get("freetoken_code") or error.get("code") or EngineError.code,
        detail=_without(message, fixes),
        numbers=error.get("numbers") or {},
        fixes=fixes,
    ).error()


def _without(message: str, fixes: Iterable[str]) -> str:
    """`message` without the remedies at its end, each as it is or as "Run `it`."."""
    for fix in reversed(tuple(fixes)):
        said = next((text for text in (f"Run `{fix}`.", fix) if message.endswith(text)), "")
        message = message.removesuffix(said).rstrip()
    return message


def _pieces_of(body: dict[str, Any]) -> Iterator[Piece]:
    for choice in body.get("choices", ()):
        text = choice.get("delta", {}).get("content") or ""
        if text or choice.get("finish_reason"):
            yield Piece(text=text, finish=choice.get("finish_reason"))
    usage = body.get("usage")
    if usage:
        details = usage.get("prompt_tokens_details") or {}
        yield Piece(
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            cached_tokens=details.get("cached_tokens"),
        )
