"""A Plan as JSON (for the wire, the API and --json) and as lines for people. Pure.

Does not decide anything. The JSON's shape is fixed: docs/contracts.md, Plan JSON.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from freetoken.core.errors import PlanError, from_code
from freetoken.core.units import Bytes
from freetoken.plan.choices import Resolved, Value
from freetoken.plan.ledger import NOT_OURS, Diagnosis, Fix, Plan
from freetoken.settings.schema import KNOBS

SCHEMA = 1
_OF_EXPERTS = ("moe_backend", "expert_slots", "staging_buffers")


def flag(option: str) -> str:
    """The command line flag of one of Requested's fields."""
    return KNOBS[option].flag or option


# ── for programs ────────────────────────────────────────────────────────────────────────────────────────────────────
def to_json(plan: Plan) -> dict[str, Any]:
    """Everything in `plan`; unknown quantities are null, bytes are plain integers."""
    found, context = plan.diagnosis, plan.context
    document: dict[str, Any] = _plain(
        {
            "schema": SCHEMA,
            "verdict": plan.verdict,
            "code": plan.code,
            "detail": found.detail if found else None,
            "numbers": found.numbers if found else {},
            "machine": asdict(plan.machine),
            "requested": {name: value for name, value in asdict(plan.requested).items() if value is not None},
            "resolved": {name: asdict(choice) for name, choice in plan.choices.items()} if plan.resolved else {},
            "ledger": [asdict(line) for line in plan.ledger],
            "budget_bytes": plan.budget,
            "total_bytes": plan.total,
            "shortfall_bytes": plan.shortfall,
            "host": _host(plan),
            "context": {
                "effective_tokens": context.effective_tokens,
                "window_tokens": context.window_tokens,
                "bytes_per_token": context.bytes_per_token,
                "price": asdict(context.price) if context.price else None,
            },
            "expected": {
                "decode_tok_s": plan.expected.decode_tok_s,
                "prefill_tok_s": plan.expected.prefill_tok_s,
                "basis": plan.expected.basis,
            },
            "fixes": [_fix_json(fix) for fix in plan.fixes],
            "notices": [_notice(notice) for notice in plan.notices],
        }
    )
    return document


def _fix_json(fix: Fix) -> dict[str, Any]:
    """`set` is for command lines, `options` for the API: the same changes; null takes an option back."""
    return {
        "id": fix.id,
        "title": fix.title,
        "set": {flag(name): value for name, value in fix.changes.items()},
        "options": fix.changes,
        "effect_bytes": fix.effect,
        "price": fix.price or None,
        "total_bytes": fix.total,
    }


def plan_error(plan: Plan) -> PlanError | None:
    """The refusal as an error with its numbers, remedies and plan JSON; None where the plan holds."""
    found = plan.diagnosis
    if found is None:
        return None
    error = from_code(found.code, found.detail, _plain(found.numbers), fixes=[_remedy(fix) for fix in found.fixes])
    if not isinstance(error, PlanError):
        raise TypeError(f"{found.code} is no PlanError")
    error.plan = to_json(plan)
    return error


def resolved_from_json(document: Mapping[str, Any]) -> Resolved:
    """The decisions out of to_json's document, as the engine receives them."""
    return Resolved(**{name: choice["value"] for name, choice in document["resolved"].items()})


def _host(plan: Plan) -> dict[str, Bytes] | None:
    host = plan.host
    return None if host is None else {f"{name}_bytes": value for name, value in asdict(host).items()}


def _notice(notice: Diagnosis) -> dict[str, Any]:
    return {"code": notice.code, "detail": notice.detail, "numbers": notice.numbers}


def _plain(value: Any) -> Any:
    """`value` with Bytes as integers and tuples as lists."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, Bytes) else value


def summary(document: Mapping[str, Any]) -> list[str]:
    """Two lines for a log, of to_json's document: the memory and the choices."""
    parts = ", ".join(f"{line['line']} {Bytes(line['bytes'])}" for line in document.get("ledger", ()))
    total, budget = (Bytes(document.get(name, 0)) for name in ("total_bytes", "budget_bytes"))
    choices = ", ".join(f"{name} {choice['value']}" for name, choice in document["resolved"].items())
    return [f"plan: {total} of {budget}: {parts}", f"plan: {choices}"]


# ── for people ──────────────────────────────────────────────────────────────────────────────────────────────────────
def lines(plan: Plan, command: str = "ft load MODEL") -> list[str]:
    """The ledger as an aligned table, the verdict, the context, what was chosen, and fixes to append to `command`."""
    return [*_table(plan), "", *_verdict(plan), *_choices(plan), *_notices(plan), *_fixes(plan, command)]


def _table(plan: Plan) -> list[str]:
    name = max(len(line.line) for line in plan.ledger)
    basis = max(len(line.basis) for line in plan.ledger)
    ours = [line for line in plan.ledger if line.line not in NOT_OURS]
    others = [line for line in plan.ledger if line.line in NOT_OURS]
    total = f"{'total':<{name}}  {plan.total!s:>11}  {'':<{basis}}  of {plan.budget} that may be used"
    rows = [f"{line.line:<{name}}  {line.bytes!s:>11}  {line.basis:<{basis}}  {line.detail}" for line in ours + others]
    return [*rows[: len(ours)], total, *rows[len(ours) :]]


def _verdict(plan: Plan) -> list[str]:
    if plan.diagnosis is not None:
        return [f"{plan.diagnosis.code}: {plan.diagnosis.detail}"]
    rows = ["fits, with less than the defaults" if plan.verdict == "fits_changed" else "fits"]
    context = plan.context
    rows.append(f"effective context {context.effective_tokens:,} of window {context.window_tokens:,} tokens")
    if context.price is not None:
        price = context.price
        slots = f"{price.expert_slots:,} expert slots fewer and " if price.expert_slots else ""
        rows[-1] += (
            f"; all of it would cost {slots}an expected {price.decode_tok_s:.3g} tok/s (--num-tokens {price.tokens})"
        )
    expected = plan.expected
    rows.append(
        f"expected at most {expected.decode_tok_s:.3g} tok/s decode, {expected.prefill_tok_s:.4g} tok/s prefill "
        "(computed from assumed rates, not measured)"
    )
    if plan.host is not None:
        pageable = f", {plan.host.pageable} pageable" if plan.host.pageable else ""
        rows.append(f"host memory {plan.host.needed} of {plan.host.allowed}{pageable}")
    return rows


def _choices(plan: Plan) -> list[str]:
    """What was worked out or asked for; defaults are not news."""
    if plan.resolved is None:
        return []
    routed = any(line.line == "expert_slots" for line in plan.ledger)
    news = {name: choice for name, choice in plan.choices.items() if choice.source != "default" and choice.value != ""}
    shown = {name: choice for name, choice in news.items() if routed or name not in _OF_EXPERTS}
    width = max(map(len, shown))
    return ["", *(f"{name:<{width}}  {choice.value!s:<10}  {choice.reason}" for name, choice in shown.items())]


def _notices(plan: Plan) -> list[str]:
    return [f"note: {notice.detail}" for notice in plan.notices]


def _fixes(plan: Plan, command: str) -> list[str]:
    if plan.diagnosis is None:
        return []
    if not plan.fixes:
        return ["no change of up to three options makes it fit"]
    return ["", "what helps:", *(f"  {_fix(fix, command)}" for fix in plan.fixes)]


def _remedy(fix: Fix) -> str:
    return _fix(fix, "load with")


def _fix(fix: Fix, command: str) -> str:
    """`command` with the changes as flags, and what they mean."""
    if not fix.changes:
        return fix.title
    flags = " ".join(_argument(name, value) for name, value in fix.changes.items() if value is not None)
    left_out = ", ".join(flag(name) for name, value in fix.changes.items() if value is None)
    without = f" without {left_out}" if left_out else ""
    return f"{command} {flags}".rstrip() + f"{without}   # {fix.title}"


def _argument(option: str, value: Value) -> str:
    return f"{flag(option)} {shlex.quote(str(value))}"
