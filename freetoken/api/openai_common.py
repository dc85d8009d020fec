"""What OpenAI's two completion APIs share: the head of every object, sampling fields, usage. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from freetoken.core.errors import UsageError
from freetoken.core.types import Usage

_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "logit_bias", "ignore_eos"),
)
_NEVER = -9999.0  # OpenAI's value for a token that cannot come: JSON has no infinity


@dataclass(frozen=True, slots=True)
class Head:
    """What every object and chunk of one answer says about itself."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))  # unix seconds

    def object(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }


def sampling(values: Mapping[str, Any], *, logprobs: int | None, max_tokens: int | None) -> dict[str, Any]:
    """The fields of SamplingParams that the caller set, out of a body that was read."""
    chosen = {name: values[name] for name in _SAMPLING if name in values}
    return {**chosen, "logprobs": logprobs, "max_tokens": max_tokens}


def check_stream_options(values: Mapping[str, Any]) -> None:
    if "stream_options" in values and not values.get("stream"):
        raise UsageError("`stream_options` needs `stream` to be true.", param="stream_options")


def usage(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object; `limited_by` beside it where something other than the caller ended the answer."""
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    return counts if usage.limited_by is None else {**counts, "limited_by": usage.limited_by}


def logprob(value: float) -> float:
    return max(value, _NEVER)
