"""Divide the memory: Requested and a machine in, a Plan out, with a reason for each choice. Pure.

The ledger of a CPU engine: weights (all experts resident), KV pages, the transients of one step, a reserve. Explicit
sizes are requirements; only defaults shrink. Does not know processes, files or formats for people (report.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Literal

from freetoken.catalog.checkpoint import Checkpoint
from freetoken.catalog.spec import ModelSpec
from freetoken.core.errors import HostRamTooSmall, KvTooLarge, PlanError
from freetoken.core.units import Bytes
from freetoken.plan import memory
from freetoken.plan.choices import Requested, Resolved
from freetoken.plan.hardware import Machine

MEMORY_RATIO = 0.95
RESERVE = Bytes(256 << 20)
RUNTIME = Bytes(320 << 20)  # interpreter and torch, before any tensor
RUNNING = 4
PAGE = 16
CHUNK = 512
CONTEXT = 32_768  # tokens a request, by default
MIN_CONTEXT = 2_048  # a default plan that leaves less is refused: an agent's first prompt would not fit
MAX_QUEUED = 64
QUEUE_DEADLINE_S = 600.0

Verdict = Literal["fits", "fits_changed", "does_not_fit"]


@dataclass(frozen=True, slots=True)
class LedgerLine:
    line: str
    bytes: Bytes
    basis: Literal["measured", "computed", "assumed"]
    detail: str


@dataclass(frozen=True, slots=True)
class Choice:
    value: int | float | str
    source: Literal["requested", "default", "computed"]
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided and what it costs. `resolved` is None exactly where the verdict is does_not_fit."""

    verdict: Verdict
    code: str | None
    machine: Machine
    requested: Requested
    resolved: Resolved | None
    choices: Mapping[str, Choice]
    ledger: tuple[LedgerLine, ...]
    budget: Bytes
    window_tokens: int
    kv_token_bytes: Bytes
    fixes: tuple[tuple[str, int | float | str], ...] = ()  # (flag, value) pairs that were re-planned and fit
    numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> Bytes:
        return Bytes(sum(line.bytes for line in self.ledger))

    def error(self) -> PlanError | None:
        """The refusal as an error with numbers and remedies, or None where the plan holds."""
        if self.verdict != "does_not_fit":
            return None
        fixes = [f"{flag} {value}" for flag, value in self.fixes]
        if self.code == KvTooLarge.code:
            largest = self.numbers["largest_tokens"]
            detail = (
                f"{self.numbers['asked_tokens']:,} tokens of context were asked for; {largest:,} fit beside the rest"
            )
            return KvTooLarge(detail, numbers=self.numbers, fixes=fixes)
        detail = f"Needs {self.total} of memory; {self.budget} may be used ({self.machine.ram_free} are free)"
        return HostRamTooSmall(
            detail, numbers=self.numbers, fixes=fixes or ("Close other programs or choose a smaller model",)
        )


def make_plan(checkpoint: Checkpoint, requested: Requested, machine: Machine) -> Plan:
    """Decide everything that `requested` leaves open. Never raises for what does not fit: see Plan.error()."""
    draft = _Draft(checkpoint.spec, checkpoint.dtype, requested, machine)
    room = draft.room_tokens()
    asked = draft.asked_tokens()
    if asked is not None and asked > room >= PAGE:
        fix = ("--num-tokens", room)
        return draft.plan(asked, KvTooLarge.code, fixes=(fix,), numbers={"asked_tokens": asked, "largest_tokens": room})
    if room < draft.least_tokens():
        return draft.plan(draft.least_tokens(), HostRamTooSmall.code, fixes=draft.smaller())
    wanted = asked if asked is not None else draft.wanted_tokens()
    return draft.plan(min(wanted, room), None)


@dataclass(frozen=True)
class _Draft:
    """The decisions that do not depend on the size of the KV pool, and the arithmetic on it."""

    spec: ModelSpec
    checkpoint_dtype: str
    requested: Requested
    machine: Machine

    @property
    def weight_dtype(self) -> Literal["float32", "bfloat16"]:
        return self.requested.dtype or ("bfloat16" if self.checkpoint_dtype == "BF16" else "float32")

    @property
    def running(self) -> int:
        return self.requested.max_running_requests or RUNNING

    @property
    def window(self) -> int:
        asked = self.requested.max_seq_len
        return min(asked, self.spec.max_positions) if asked else self.spec.max_positions

    @property
    def chunk(self) -> int:
        return self.requested.max_prefill_tokens or CHUNK

    @property
    def budget(self) -> Bytes:
        ratio = self.requested.memory_ratio or MEMORY_RATIO
        return Bytes(max(0, min(int(ratio * self.machine.ram_free), self.machine.ram_free - RESERVE)))

    @cached_property
    def fixed(self) -> tuple[LedgerLine, ...]:
        """Every line but the KV pool's. Kept: it goes over the names of all tensors."""
        dtype, spec = self.weight_dtype, self.spec
        experts = memory.expert_bytes(spec, dtype)
        detail = f"{dtype}, {experts} of it routed experts" if experts else dtype
        rows = self.chunk + self.running  # a step may hold a whole chunk and a token of every running request
        chunk = f"one step of {rows} tokens behind {self.window} cached"
        return (
            LedgerLine("weights", memory.weight_bytes(spec, dtype), "computed", detail),
            LedgerLine("prefill_transient", memory.prefill_bytes(spec, rows, self.window, dtype), "computed", chunk),
            LedgerLine("logits", memory.logits_bytes(spec, self.running), "computed", f"{self.running} rows"),
            LedgerLine("allocator", RUNTIME, "assumed", "interpreter and libraries of the engine process"),
        )

    def room_tokens(self) -> int:
        """The largest KV pool beside everything else, in whole pages; may be 0."""
        free = self.budget - sum(line.bytes for line in self.fixed)
        pages = free // (memory.kv_token_bytes(self.spec) * PAGE) - 1  # one dummy page
        return max(0, pages) * PAGE

    def asked_tokens(self) -> int | None:
        asked = [_pages(self.requested.num_tokens or 0) * PAGE, (self.requested.num_pages or 0) * PAGE]
        return max(asked) or None

    def wanted_tokens(self) -> int:
        return _pages(min(CONTEXT, self.window)) * PAGE * self.running

    def least_tokens(self) -> int:
        return self.asked_tokens() or _pages(min(MIN_CONTEXT, self.window)) * PAGE

    def smaller(self) -> tuple[tuple[str, int | float | str], ...]:
        """Single changes that make it fit, tried out."""
        tried: list[tuple[str, int | float | str, Requested]] = []
        if self.weight_dtype == "float32":
            tried.append(("--dtype", "bfloat16", _with(self.requested, dtype="bfloat16")))
        if self.chunk > 128:
            tried.append(("--max-prefill-length", 128, _with(self.requested, max_prefill_tokens=128)))
        drafts = [(flag, value, _Draft(self.spec, self.checkpoint_dtype, r, self.machine)) for flag, value, r in tried]
        return tuple((flag, value) for flag, value, draft in drafts if draft.room_tokens() >= draft.least_tokens())

    def plan(
        self,
        tokens: int,
        code: str | None,
        fixes: tuple[tuple[str, int | float | str], ...] = (),
        numbers: Mapping[str, int] | None = None,
    ) -> Plan:
        per_token = memory.kv_token_bytes(self.spec)
        pages = tokens // PAGE
        kv = LedgerLine(
            "kv_pages", Bytes((pages + 1) * PAGE * per_token), "computed", f"{pages} pages of {PAGE} tokens, 1 dummy"
        )
        fixed = self.fixed
        choices = self.choices(tokens)
        facts = {name: choice.value for name, choice in choices.items()}
        shrunk = self.asked_tokens() is None and tokens < self.wanted_tokens()
        fits: Verdict = "fits_changed" if shrunk else "fits"
        return Plan(
            verdict="does_not_fit" if code else fits,
            code=code,
            machine=self.machine,
            requested=self.requested,
            resolved=None if code else Resolved(**facts),  # type: ignore[arg-type]
            choices=choices,
            ledger=(fixed[0], kv, *fixed[1:]),
            budget=self.budget,
            window_tokens=self.spec.max_positions,
            kv_token_bytes=per_token,
            fixes=fixes,
            numbers=numbers or {"budget_bytes": self.budget},
        )

    def choices(self, tokens: int) -> dict[str, Choice]:
        asked = self.requested
        threads = self.machine.cores
        context = min(self.window, tokens)
        pool = (
            "asked for" if self.asked_tokens() else f"{self.running} requests of up to {CONTEXT} tokens, or what fits"
        )
        dtype = f"the checkpoint is {self.checkpoint_dtype}"
        return {
            "device": Choice("cpu", "computed", "this build computes on the CPU"),
            "weight_dtype": _choice(asked.dtype, self.weight_dtype, dtype),
            "page_size": Choice(PAGE, "default", "tokens"),
            "num_pages": Choice(tokens // PAGE, "requested" if self.asked_tokens() else "computed", pool),
            "max_running_requests": _choice(asked.max_running_requests, self.running, "default"),
            "max_prefill_tokens": _choice(asked.max_prefill_tokens, self.chunk, "default on a CPU"),
            "max_seq_len": Choice(context, "computed", f"least of the window {self.window} and the pool {tokens}"),
            "max_queued": _choice(asked.max_queued, asked.max_queued or MAX_QUEUED, "default"),
            "queue_deadline_s": _choice(asked.queue_deadline_s, asked.queue_deadline_s or QUEUE_DEADLINE_S, "default"),
            "threads": _choice(asked.threads, asked.threads or threads, "physical cores"),
        }


def _choice(asked: int | float | str | None, value: int | float | str, reason: str) -> Choice:
    return Choice(value, "requested", "asked for") if asked is not None else Choice(value, "default", reason)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def _with(requested: Requested, **changes: object) -> Requested:
    return Requested(**{**asdict(requested), **changes})
