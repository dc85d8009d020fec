"""THE table of request fields and how a body is read through it. Pure.

Three classes (docs/architecture.md, "`/v1` fields"): `Honoured` fields do what their API says, `Ignored` ones are
accepted without effect, for the reason beside them, and `Fixed` ones are accepted at the values that ask for nothing. A
field that is null counts as absent. Everything else is refused by name: nobody shall believe in a setting that does
nothing. Facts: the OpenAI API reference (chat completions, completions); top_k, min_p, repetition_penalty, ignore_eos
and chat_template_kwargs are the extensions that local servers share. Does not know what the values are used for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from freetoken.core.errors import MalformedBody, UnsupportedField, UsageError

Reader = Callable[[str, object], Any]  # (field name, JSON value) -> checked value; raises UsageError

MAX_STOPS = 16
MAX_LOGPROBS = 20
_DECODE = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class Honoured:
    read: Reader


@dataclass(frozen=True, slots=True)
class Ignored:
    why: str


@dataclass(frozen=True, slots=True)
class Fixed:
    """Accepted at these values only: they are the API's defaults, or say that nothing is wanted."""

    values: tuple[object, ...]


Field = Honoured | Ignored | Fixed


# ── readers ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _wrong(name: str, want: str, got: object) -> UsageError:
    return UsageError(f"`{name}` must be {want}, not {_shown(got)}.", param=name)


def _shown(value: object) -> str:
    """A JSON value in a sentence: short ones as they are, others by kind."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def number(low: float, high: float, *, above: bool = False) -> Reader:
    """A JSON number in [low, high], or in (low, high] where `above`."""
    want = f"a number above {low:g} and up to {high:g}" if above else f"a number from {low:g} to {high:g}"

    def read(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(name, want, value)
        if not low <= value <= high or (above and value == low):
            raise _wrong(name, want, value)
        return float(value)

    return read


def integer(low: int, high: int) -> Reader:
    """A JSON integer in [low, high]."""
    want = f"an integer from {low} to {high}"

    def read(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _wrong(name, want, value)
        return value

    return read


def boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def string(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(name, "a string that is not empty", value)
    return value


def top_k(name: str, value: object) -> int:
    """0 and -1 both mean no limit: clients of other servers send either."""
    return max(0, int(integer(-1, 1 << 31)(name, value)))


def stops(name: str, value: object) -> tuple[str, ...]:
    """One stop string, or a list of up to MAX_STOPS."""
    listed = [value] if isinstance(value, str) else value
    want = f"a string or a list of up to {MAX_STOPS} strings, none of them empty"
    if not isinstance(listed, list) or len(listed) > MAX_STOPS:
        raise _wrong(name, want, value)
    if not all(isinstance(stop, str) and stop for stop in listed):
        raise _wrong(name, want, value)
    return tuple(listed)


def logit_bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """{"token id": bias}: JSON has string keys only. Returned by ascending token id."""
    if not isinstance(value, dict):
        raise _wrong(name, "an object of token ids and biases", value)
    bias = number(-100, 100)
    pairs = []
    for key, amount in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise _wrong(f"{name}.{key}"[:80], "keyed by a token id", key)
        pairs.append((int(key), bias(f"{name}.{key}", amount)))
    return tuple(sorted(pairs))


def stream_options(name: str, value: object) -> bool:
    """Whether the stream ends with a usage chunk. include_obfuscation is padding, which a local stream never has."""
    if not isinstance(value, dict):
        raise _wrong(name, "an object", value)
    for key in value.keys() - {"include_usage", "include_obfuscation"}:
        raise UnsupportedField(f"`{name}.{key}` is not supported.", param=f"{name}.{key}")
    wanted = value.get("include_usage")
    return wanted is not None and boolean(f"{name}.include_usage", wanted)


def template_kwargs(name: str, value: object) -> dict[str, Any]:
    """Variables for the chat template. The names that the server sets itself are not the caller's."""
    if not isinstance(value, dict):
        raise _wrong(name, "an object", value)
    for key in value.keys() & {"messages", "tools", "add_generation_prompt", "self"}:
        raise UsageError(f"`{name}.{key}` is set by the server and cannot be given.", param=f"{name}.{key}")
    return value


def messages(name: str, value: object) -> tuple[Mapping[str, Any], ...]:
    """A conversation of at least one object. What is in the objects is for text.messages to judge."""
    if not isinstance(value, list) or not value:
        raise _wrong(name, "a list with at least one message", value)
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise _wrong(f"{name}[{i}]", "an object with `role` and `content`", message)
    return tuple(value)


def prompt(name: str, value: object) -> str | tuple[int, ...]:
    """A string or token ids, bare or as the one element of a list."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    elif isinstance(value, list) and len(value) > 1 and all(isinstance(one, str | list) for one in value):
        detail = f"`{name}` holds {len(value)} prompts; one request takes one."
        raise UnsupportedField(detail, param=name, fixes=["Send a request for each prompt."])
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        read = integer(0, (1 << 31) - 1)
        return tuple(read(f"{name}[{i}]", token) for i, token in enumerate(value))
    raise _wrong(name, "a string or a list of token ids", value)


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────────────
_COMMON: dict[str, Field] = {
    "model": Honoured(string),
    "stream": Honoured(boolean),
    "stream_options": Honoured(stream_options),
    "stop": Honoured(stops),
    "max_tokens": Honoured(integer(1, (1 << 31) - 1)),
    "temperature": Honoured(number(0, 2)),
    "top_p": Honoured(number(0, 1)),
    "top_k": Honoured(top_k),
    "min_p": Honoured(number(0, 1)),
    "repetition_penalty": Honoured(number(0, 10, above=True)),
    "presence_penalty": Honoured(number(-2, 2)),
    "frequency_penalty": Honoured(number(-2, 2)),
    "logit_bias": Honoured(logit_bias),
    "seed": Honoured(integer(-(1 << 63), (1 << 63) - 1)),
    "ignore_eos": Honoured(boolean),
    "user": Ignored("names the end user of a shared service; there is one user here"),
    "metadata": Ignored("labels stored answers; nothing is stored"),
    "store": Ignored("nothing is stored, whatever it says"),
    "service_tier": Ignored("there is one tier"),
    "safety_identifier": Ignored("names the end user of a shared service"),
    "prompt_cache_key": Ignored("the prefix cache finds shared prefixes by itself"),
    "n": Fixed((1,)),
}

CHAT: Mapping[str, Field] = {
    **_COMMON,
    "messages": Honoured(messages),
    "max_completion_tokens": Honoured(integer(1, (1 << 31) - 1)),
    "logprobs": Honoured(boolean),
    "top_logprobs": Honoured(integer(0, MAX_LOGPROBS)),
    "chat_template_kwargs": Honoured(template_kwargs),
    "tools": Fixed(([],)),
    "tool_choice": Fixed(("none", "auto")),
    "parallel_tool_calls": Fixed((True,)),
    "functions": Fixed(([],)),
    "function_call": Fixed(("none", "auto")),
    "response_format": Fixed(({"type": "text"},)),
    "modalities": Fixed((["text"],)),
    "verbosity": Fixed(("medium",)),
}

COMPLETIONS: Mapping[str, Field] = {
    **_COMMON,
    "prompt": Honoured(prompt),
    "logprobs": Honoured(integer(0, MAX_LOGPROBS)),
    "best_of": Fixed((1,)),
    "echo": Fixed((False,)),
    "suffix": Fixed(("",)),
}


def read_body(body: bytes, table: Mapping[str, Field], *, required: tuple[str, ...]) -> dict[str, Any]:
    """The honoured fields of a JSON body, checked. Raises MalformedBody, UnsupportedField or UsageError."""
    values: dict[str, Any] = {}
    for name, value in _decode(body).items():
        if value is None:
            continue
        field = table.get(name)
        if isinstance(field, Honoured):
            values[name] = field.read(name, value)
        elif not isinstance(field, Ignored):
            _refuse_unless_fixed(name, value, field)
    for name in required:
        if name not in values:
            raise UsageError(f"`{name}` is missing.", param=name)
    return values


def _decode(body: bytes) -> dict[str, object]:
    try:
        decoded = _DECODE.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedBody(f"The body of {len(body)} bytes is not JSON: {error}.") from None
    if not isinstance(decoded, dict):
        raise MalformedBody(f"The body must be a JSON object, not {_shown(decoded)}.")
    return decoded


def _refuse_unless_fixed(name: str, value: object, field: Fixed | None) -> None:
    if field is None:
        raise UnsupportedField(f"`{name}` is not supported.", param=name, fixes=["Leave it out."])
    # the type too: in Python True == 1
    if not any(type(value) is type(only) and value == only for only in field.values):
        accepted = " or ".join(msgspec.json.encode(only).decode() for only in field.values)
        raise UnsupportedField(
            f"`{name}` is supported only as {accepted}.", param=name, fixes=["Leave it out, or send that value."]
        )
