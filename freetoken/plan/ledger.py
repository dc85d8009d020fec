"""The plan as data: lines, verdict, diagnosis, fixes. Pure.

Does not decide anything (placement.py, diagnosis.py) and does not print (report.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from freetoken.core.errors import Number
from freetoken.core.units import Bytes
from freetoken.plan.choices import Choice, Requested, Resolved, Value
from freetoken.plan.footprint import Basis
from freetoken.plan.hardware import Machine

Verdict = Literal["fits", "fits_changed", "does_not_fit", "cannot_estimate"]
NOT_OURS = frozenset({"other_processes", "reserve"})


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One named part of the memory. Those in NOT_OURS are shown, and are not part of the plan's total."""

    line: str
    bytes: Bytes
    basis: Basis
    detail: str


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that was planned again and fits. `changes` are Requested's fields; None takes an option back.

    Empty changes are something to do outside: `title` says what.
    """

    id: str
    title: str
    changes: Mapping[str, Value | None]
    effect: Bytes  # how much less is needed, or how much more may be used
    price: str  # what it costs, in words
    total: Bytes  # of the plan with it


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why the plan does not hold, or a warning about one that does."""

    code: str
    detail: str  # one sentence with numbers
    numbers: Mapping[str, Number]
    fixes: tuple[Fix, ...] = ()


@dataclass(frozen=True, slots=True)
class Price:
    """What more context would cost."""

    tokens: int  # KV pool that this is the price of
    expert_slots: int  # slots fewer
    decode_tok_s: float  # expected then


@dataclass(frozen=True, slots=True)
class Context:
    effective_tokens: int | None  # None: nothing fits
    window_tokens: int
    bytes_per_token: int
    price: Price | None = None  # of the whole window; None where it is had, or can not be had


@dataclass(frozen=True, slots=True)
class Expected:
    """Speed of one request, at 8 000 tokens of context. Limits of the hardware at assumed rates, not measurements."""

    decode_tok_s: float | None
    prefill_tok_s: float | None
    turn_s: float | None  # 8 000 new tokens in, 400 out: what the choice was made by
    basis: Literal["computed"] | None


@dataclass(frozen=True, slots=True)
class Host:
    """Memory of the host that a plan for a GPU needs beside it."""

    needed: Bytes
    allowed: Bytes
    pinned: Bytes  # of the experts' banks
    pageable: Bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided and what it costs. `resolved` is None exactly where nothing can be started."""

    verdict: Verdict
    machine: Machine
    requested: Requested
    resolved: Resolved | None
    choices: Mapping[str, Choice]
    ledger: tuple[LedgerLine, ...]  # of the least that was asked for where it does not fit
    budget: Bytes  # what may be used
    context: Context
    expected: Expected
    diagnosis: Diagnosis | None = None  # why not; None where it fits
    notices: tuple[Diagnosis, ...] = ()  # what to know about a plan that fits
    host: Host | None = None  # None on a CPU: its ledger is the host's memory

    @property
    def total(self) -> Bytes:
        """What the engine will take."""
        return Bytes(sum(line.bytes for line in self.ledger if line.line not in NOT_OURS))

    @property
    def shortfall(self) -> Bytes:
        return Bytes(max(0, self.total - self.budget))

    @property
    def code(self) -> str | None:
        return self.diagnosis.code if self.diagnosis else None

    @property
    def fixes(self) -> tuple[Fix, ...]:
        return self.diagnosis.fixes if self.diagnosis else ()
