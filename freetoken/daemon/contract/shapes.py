"""What the control API answers, field by field, for the contract that is written from it. Pure.

Where a value is made from a type of the daemon, that type stands here; where handlers put a plain object together, its
fields are written down once more, and tests hold real answers to them. Every field is always there; unknown is null.
Bytes are integers, durations end in `_ms`, times are RFC 3339. Is not imported by a running daemon.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from freetoken.daemon.logbook import Line
from freetoken.daemon.state import EngineStatus, Operation

Json = dict[str, Any]
Number = int | float | str


class Live(msgspec.Struct):
    """Is it ours, and this one?"""

    service: Literal["freetoken"]
    api_version: str
    instance_id: str


class Ready(msgspec.Struct):
    """`ready`: a model answers."""

    ready: bool
    engine: EngineStatus
    model: str | None


class Limits(msgspec.Struct):
    control_body_bytes: int
    inference_body_bytes: int
    websocket_message_bytes: int
    streams: int
    stream_ring_events: int
    stream_queue_events: int
    heartbeat_ms: int
    longest_wait_ms: int
    log_page_lines: int


class Meta(msgspec.Struct):
    """Clients test `features`, not versions."""

    service: Literal["freetoken"]
    version: str
    api_version: str
    instance_id: str
    features: list[str]
    limits: Limits


class ProblemKind(msgspec.Struct):
    """One error code. `exit_code` is that of the command line."""

    type: str
    title: str
    status: int
    code: str
    retryable: bool
    exit_code: int
    openai_code: str | None


class Problems(msgspec.Struct):
    problems: list[ProblemKind]


class ProblemFix(msgspec.Struct):
    """Something to do. `options` are load options to send again; null takes one back."""

    id: str
    title: str
    action: Json | UnsetType = UNSET
    options: Json | UnsetType = UNSET
    set: Json | UnsetType = UNSET
    effect_bytes: int | UnsetType = UNSET
    total_bytes: int | UnsetType = UNSET
    price: str | UnsetType | None = UNSET


class Problem(msgspec.Struct):
    """RFC 9457 problem+json; `detail` is one sentence with its numbers. `plan` is that of a load that does not fit."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    instance: str | None
    request_id: str | None
    retryable: bool
    retry_after_ms: int | None
    param: str | None
    numbers: dict[str, Number]
    fixes: list[ProblemFix]
    plan: Json | UnsetType | None = UNSET


class Stopping(msgspec.Struct):
    stopping: bool
    pid: int


class EngineCounters(msgspec.Struct):
    running: int
    queued: int
    pages_total: int
    pages_free: int
    pages_cached: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    decode_tok_s: float
    prefill_tok_s: float


class Experts(msgspec.Struct):
    """`tokens`: sent by the router since ready, by routed layer and expert."""

    layers: int
    experts: int
    tokens: list[list[int]]
    hits: dict[str, int]


class LedgerLine(msgspec.Struct):
    line: str
    bytes: int
    basis: str
    detail: str


class EngineMemory(msgspec.Struct):
    rss_bytes: int | None
    budget_bytes: int | None
    total_bytes: int | None
    ledger: list[LedgerLine] | None


class Restart(msgspec.Struct):
    """The engine died, and is started again then."""

    attempt: int
    in_ms: int
    model: str


class Diagnosis(msgspec.Struct):
    """Something that is wrong and stays so until it is cleared."""

    id: str
    status: str
    code: str
    title: str
    detail: str
    evidence: list[str]
    fixes: list[ProblemFix]


class Engine(msgspec.Struct):
    """The engine and the model in it; what is below `diagnoses` is null while none runs."""

    state: EngineStatus
    since: str
    model: str | None
    options: Json
    operation: str | None
    pid: int | None
    failure: Problem | None
    restart: Restart | None
    diagnoses: list[Diagnosis]
    context_tokens: int | None
    uptime_ms: int | None
    plan: Plan | None
    measured: Json | None
    stats: EngineCounters | None
    experts: Experts | None
    memory: EngineMemory | None
    step_age_ms: int | None


class PlanFix(msgspec.Struct):
    """A change that was planned again and fits: `set` for command lines, `options` for the API."""

    id: str
    title: str
    set: Json
    options: Json
    effect_bytes: int
    price: str | None
    total_bytes: int


class PlanContext(msgspec.Struct):
    effective_tokens: int | None
    window_tokens: int
    bytes_per_token: int
    price: Json | None


class PlanNotice(msgspec.Struct):
    code: str
    detail: str
    numbers: dict[str, Number]


class PlanExpected(msgspec.Struct):
    decode_tok_s: float | None
    prefill_tok_s: float | None
    basis: str | None


class Plan(msgspec.Struct):
    """What a load takes, line by line, and whether it fits (docs/contracts.md, Plan JSON)."""

    schema: int
    verdict: Literal["fits", "fits_changed", "does_not_fit", "cannot_estimate"]
    code: str | None
    detail: str | None
    numbers: dict[str, Number]
    machine: Json
    requested: Json
    resolved: dict[str, Json]
    ledger: list[LedgerLine]
    budget_bytes: int
    total_bytes: int
    shortfall_bytes: int
    host: dict[str, int] | None
    context: PlanContext
    expected: PlanExpected
    fixes: list[PlanFix]
    notices: list[PlanNotice]


class Operations(msgspec.Struct):
    """Oldest first."""

    operations: list[Operation]


class Logs(msgspec.Struct):
    """Oldest first; `newest` is the number of the newest line there is."""

    lines: list[Line]
    newest: int
