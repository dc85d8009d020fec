"""The one stream vocabulary: what a generation says on its way, between any backend and the API layer. Pure.

Does not know how it travels (wire/ has the encoded twins) nor what the tokens mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from freetoken.core.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Progress:
    """Prefill so far: `done` of `total` prompt tokens have their KV."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """New output tokens, in order. The last event of a good stream carries `finish`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # one a token where asked for, else empty
    cached: int | None = None  # on the first event: prompt tokens found in the prefix cache
    finish: FinishReason | None = None
    limited_by: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error; `code` is one of core.errors, `numbers` what its sentence needs."""

    code: str
    detail: str
    numbers: Mapping[str, int | float | str] = field(default_factory=dict)


GenerationEvent = Progress | Tokens | Failed
