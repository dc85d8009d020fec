"""A Plan as JSON (for the wire, the API and --json) and as lines for people. Pure.

Does not decide anything. The JSON's shape is fixed: docs/contracts.md, Plan JSON.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from freetoken.plan.choices import Resolved
from freetoken.plan.placement import Plan

SCHEMA = 1


def to_json(plan: Plan) -> dict[str, Any]:
    """Everything in `plan`; unknown quantities are null."""
    context = plan.resolved.max_seq_len if plan.resolved else None
    return {
        "schema": SCHEMA,
        "verdict": plan.verdict,
        "code": plan.code,
        "machine": {name: int(value) for name, value in asdict(plan.machine).items()},
        "requested": {name: value for name, value in asdict(plan.requested).items() if value is not None},
        "resolved": {name: asdict(choice) for name, choice in plan.choices.items()} if plan.resolved else {},
        "ledger": [asdict(line) | {"bytes": int(line.bytes)} for line in plan.ledger],
        "budget_bytes": int(plan.budget),
        "total_bytes": int(plan.total),
        "shortfall_bytes": max(0, plan.total - plan.budget),
        "context": {
            "effective_tokens": context,
            "window_tokens": plan.window_tokens,
            "bytes_per_token": int(plan.kv_token_bytes),
            "price": None,
        },
        "expected": {"decode_tok_s": None, "prefill_tok_s": None, "basis": None},
        "fixes": [{"id": flag.lstrip("-"), "set": {flag: value}} for flag, value in plan.fixes],
    }


def resolved_from_json(document: dict[str, Any]) -> Resolved:
    """The decisions out of to_json's document, as the engine receives them."""
    return Resolved(**{name: choice["value"] for name, choice in document["resolved"].items()})


def lines(plan: Plan) -> list[str]:
    """The ledger as an aligned table, then the verdict and the context."""
    width = max(len(line.line) for line in plan.ledger)
    rows = [f"{line.line:<{width}}  {line.bytes!s:>11}  {line.detail}" for line in plan.ledger]
    rows.append(f"{'total':<{width}}  {plan.total!s:>11}  of {plan.budget} that may be used")
    if plan.resolved:
        rows.append(f"effective context {plan.resolved.max_seq_len:,} of window {plan.window_tokens:,} tokens")
    return rows
