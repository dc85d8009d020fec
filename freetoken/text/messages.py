"""A conversation as clients send it -> as chat templates were written for: plain turns, one system message first. Pure.

Clients send back what they were given (reasoning, null fields, tool calls) and their own additions; templates were
tried with none of it and fail, or worse, render half. Only what a template may rely on is kept. Errors name the
message. Does not know templates or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from freetoken.core.errors import MalformedBody, UnsupportedContent

SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
MERGED_ROLES = ("user", "assistant")

Message = dict[str, Any]


def prepare(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Cleaned copies of `messages`: role, content as one string and, where set, name, tool_calls and tool_call_id.

    System and developer messages become one first system message, joined by blank lines (many templates accept only
    that). Neighbouring user or assistant messages become one, joined by a line break (many templates insist on turns).
    Raises MalformedBody for a shape that is not a message and UnsupportedContent for content that is not text.
    """
    if not messages:
        raise MalformedBody("messages is empty; a chat needs at least one message.", param="messages")
    cleaned = [_clean(message, f"messages[{i}]") for i, message in enumerate(messages)]
    system = [message["content"] for message in cleaned if message["role"] in SYSTEM_ROLES and message["content"]]
    turns: list[Message] = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    for message in cleaned:
        if message["role"] in SYSTEM_ROLES:
            continue
        if turns and turns[-1]["role"] == message["role"] in MERGED_ROLES:
            turns[-1] = _merged(turns[-1], message)
        else:
            turns.append(message)
    return turns


def _merged(first: Message, second: Message) -> Message:
    content = "\n".join(text for text in (first["content"], second["content"]) if text)
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return {**first, **second, "content": content} | ({"tool_calls": calls} if calls else {})


def _clean(message: Mapping[str, Any], place: str) -> Message:
    if not isinstance(message, Mapping):
        raise MalformedBody(f"{place} is not an object.", param=place)
    role = message.get("role")
    if role not in ROLES:
        raise MalformedBody(f"{place}.role is {role!r}; roles are {', '.join(ROLES)}.", param=f"{place}.role")
    cleaned: Message = {"role": role, "content": _text(message.get("content"), f"{place}.content")}
    cleaned |= {key: value for key in ("name", "tool_call_id") if isinstance(value := message.get(key), str)}
    if calls := message.get("tool_calls"):
        cleaned["tool_calls"] = _calls(calls, f"{place}.tool_calls")
    return cleaned


def _text(content: object, place: str) -> str:
    """The content as one string: null is empty, text parts are joined by line breaks."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise MalformedBody(f"{place} is neither text nor a list of parts.", param=place)
    return "\n".join(_part(part, f"{place}[{i}]") for i, part in enumerate(content))


def _part(part: object, place: str) -> str:
    if not isinstance(part, Mapping):
        raise MalformedBody(f"{place} is not an object with a type.", param=place)
    if part.get("type") != "text":
        raise UnsupportedContent(
            f"{place} is of type {part.get('type')!r}; the loaded model reads text only.",
            fixes=("Send text parts only.",),
            param=place,
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise MalformedBody(f"{place}.text is not a string.", param=f"{place}.text")
    return text


def _calls(calls: object, place: str) -> list[Message]:
    """Tool calls with their arguments as objects: APIs carry them as JSON text, templates write them out as JSON."""
    if not isinstance(calls, Sequence) or not all(
        isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls
    ):
        raise MalformedBody(f"{place} is not a list of objects with a function.", param=place)
    return [{**call, "function": _function(call["function"])} for call in calls]


def _function(function: Mapping[str, Any]) -> Message:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(function)
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return dict(function)  # what a model wrote need not be JSON; the template gets its words
    return {**function, "arguments": parsed if isinstance(parsed, dict) else arguments}
