"""What the control API answers, as frozen structs: the parts a client reads. Pure.

A field this build does not know is ignored and a field that is absent is None: both sides may be one version apart.
Bytes are integers, durations end in `_ms`. Does not know HTTP.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from freetoken.core.errors import DaemonError, FreeTokenError, leaves

OperationState = Literal["queued", "running", "succeeded", "failed", "cancelled", "superseded", "interrupted"]
TERMINAL: frozenset[str] = frozenset({"succeeded", "failed", "cancelled", "superseded", "interrupted"})


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a phase is. `total` 0 means: not known."""

    done: int = 0
    total: int = 0
    unit: str = ""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """RFC 9457 problem+json as /api/v1 and failed operations carry it."""

    code: str = DaemonError.code
    title: str = ""
    detail: str = ""
    numbers: dict[str, int | float | str] = {}
    fixes: list[Any] = []  # sentences, or {id, title, effect, risk, action}

    def error(self) -> FreeTokenError:
        """The typed error that this problem stands for; DaemonError for a code this build does not know."""
        kind = leaves().get(self.code, DaemonError)
        detail = self.detail or self.title or self.code
        return kind(detail, numbers=self.numbers, fixes=tuple(map(_fix_text, self.fixes)))


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """GET /live: is it ours?"""

    service: str = ""
    api_version: str | int | None = None
    instance_id: str | None = None


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """A long piece of work of the daemon, such as a load."""

    id: str
    kind: str = ""
    state: OperationState = "queued"
    phase: str | None = None
    progress: Progress | None = None
    eta_ms: int | None = None
    error: Problem | None = None

    @property
    def done(self) -> bool:
        return self.state in TERMINAL


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the stream; `data` depends on `type`."""

    type: str
    seq: int = 0
    epoch: str | int = ""
    time: str = ""
    source: str | None = None
    subject: str | None = None
    corr: str | None = None
    data: Any = None


def _fix_text(fix: Any) -> str:
    """A fix as one line: a changed option as the flags that a user can copy, with what they mean."""
    if not isinstance(fix, dict):
        return str(fix)
    title = str(fix.get("title") or fix.get("id") or "")
    flags = fix.get("set")
    if not isinstance(flags, dict) or not flags:
        return title
    return " ".join(f"{flag} {value}" if value is not None else f"no {flag}" for flag, value in flags.items()) + (
        f" ({title})" if title else ""
    )
