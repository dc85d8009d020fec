"""What a check concludes: a status, a sentence, evidence and remedies. Pure.

`inconclusive` is a status of its own: a probe that timed out has not shown that something is wrong. Does not know what
is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Evidence = Mapping[str, Any]  # JSON


class Status(StrEnum):
    """From what needs a person to what does not: the order in which people read them."""

    FAIL = "fail"
    WARN = "warn"
    INCONCLUSIVE = "inconclusive"
    PASS = "pass"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one check found. `detail` is one sentence with its numbers; each fix is a sentence or a command."""

    status: Status
    detail: str
    evidence: Evidence = field(default_factory=dict)
    fixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A verdict with the name of its check."""

    id: str
    status: Status
    title: str
    detail: str
    evidence: Evidence
    fixes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As docs/control-api.md has it: fixes are objects with an id and a title, as in an error."""
        fixes = [{"id": f"{self.id}.{index}", "title": fix} for index, fix in enumerate(self.fixes)]
        return {
            "id": self.id,
            "status": str(self.status),
            "title": self.title,
            "detail": self.detail,
            "evidence": dict(self.evidence),
            "fixes": fixes,
        }


@dataclass(frozen=True, slots=True)
class Unknown:
    """A fact that could not be found out, and why."""

    reason: str


Fact: TypeAlias = T | Unknown


class Undecided(Exception):
    """Raised by a check that needs a fact which is not known; becomes `inconclusive`."""


def known(fact: T | Unknown) -> T:
    """The fact. Raises Undecided where it is not known."""
    if isinstance(fact, Unknown):
        raise Undecided(fact.reason)
    return fact


def passed(detail: str, **evidence: Any) -> Verdict:
    return Verdict(Status.PASS, detail, evidence)


def warned(detail: str, *fixes: str, **evidence: Any) -> Verdict:
    return Verdict(Status.WARN, detail, evidence, fixes)


def failed(detail: str, *fixes: str, **evidence: Any) -> Verdict:
    return Verdict(Status.FAIL, detail, evidence, fixes)


def skipped(detail: str) -> Verdict:
    return Verdict(Status.SKIPPED, detail)
