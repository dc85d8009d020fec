"""What the daemon and the engine say to each other: msgspec structs, tagged by `type`. Pure.

Does not know sockets or frames (codec.py, channel.py). The shapes are fixed in docs/contracts.md, Wire; another
PROTO on the other side ends the connection.
"""

from __future__ import annotations

import msgspec

from freetoken.core.types import FinishReason, SamplingParams, TokenLogprob

PROTO = 1
Value = int | float | str | bool | None


class Message(msgspec.Struct, tag=str.lower, tag_field="type", frozen=True, kw_only=True):
    """Base of every message; the tag is the class name in lower case."""


class Hello(Message, frozen=True, kw_only=True):
    """The first frame each way."""

    proto: int
    instance_id: str
    nonce: str
    build: str


# ── down: daemon to engine ──────────────────────────────────────────────────────────────────────────────────────────
class Load(Message, frozen=True, kw_only=True):
    """Build the model. `plan` is the plan JSON (plan/report.py); `files` what catalog.checkpoint opened."""

    plan: dict[str, object]
    files: dict[str, str]  # role -> absolute path: {"model": folder or .gguf file}


class Submit(Message, frozen=True, kw_only=True):
    id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    eos_ids: tuple[int, ...] = ()
    deadline_ms: int | None = None


class Cancel(Message, frozen=True, kw_only=True):
    id: str


class Status(Message, frozen=True, kw_only=True):
    """Asks for a Stats now."""


class Drain(Message, frozen=True, kw_only=True):
    """Take no new request; finish those that run within the deadline, then cancel them."""

    deadline_ms: int


class Shutdown(Message, frozen=True, kw_only=True):
    """Free everything and exit."""


# ── up: engine to daemon ────────────────────────────────────────────────────────────────────────────────────────────
class Phase(Message, frozen=True, kw_only=True):
    """Load progress: resolve, verify, plan, spawn, import, read_weights, place_gpu, pin_host, build_kv,
    compile_kernels, capture_graphs, warmup."""

    name: str
    done: int = 0
    total: int = 0
    unit: str = ""


class Ready(Message, frozen=True, kw_only=True):
    """The model answers. `plan` is the plan as resolved, `measured` bytes and seconds as they came out."""

    plan: dict[str, object]
    measured: dict[str, Value]


class Tokens(Message, frozen=True, kw_only=True):
    id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    cached: int | None = None
    finish: FinishReason | None = None
    limited_by: str | None = None


class Progress(Message, frozen=True, kw_only=True):
    """Prefill progress of one request, in tokens."""

    id: str
    done: int
    total: int


class Failed(Message, frozen=True, kw_only=True):
    """One request failed (`id`), or the load did (`id` None)."""

    code: str
    detail: str
    id: str | None = None
    numbers: dict[str, int | float | str] = {}


class Stats(Message, frozen=True, kw_only=True):
    """Counters, once a second and on Status."""

    running: int
    queued: int
    pages_total: int
    pages_free: int
    pages_cached: int  # held by the prefix cache alone: free on demand
    prompt_tokens: int  # totals since ready
    output_tokens: int
    cached_tokens: int
    decode_tok_s: float  # over the last second
    prefill_tok_s: float
    rss_bytes: int
    layers_routed: int = 0
    experts: int = 0  # a layer
    expert_tokens: tuple[tuple[int, ...], ...] = ()  # tokens routed, by routed layer and expert, since ready
    hits: dict[str, int] = {}  # slot cache counters; empty where all experts are resident


class Beat(Message, frozen=True, kw_only=True):
    """Once a second from a thread of its own, so that a stuck step shows."""

    step: int
    step_age_ms: int  # since the running step began; 0 when idle


class Log(Message, frozen=True, kw_only=True):
    level: str
    line: str


Down = Hello | Load | Submit | Cancel | Status | Drain | Shutdown
Up = Hello | Phase | Ready | Tokens | Progress | Failed | Stats | Beat | Log
