"""Errors as RFC 9457 problem+json, for /api/v1, failed operations and events. Pure.

No stack trace and no secret gets in: only what the typed error says of itself. Does not know requests.
"""

from __future__ import annotations

from typing import Any

from freetoken.core.errors import FreeTokenError, PlanError

MEDIA_TYPE = "application/problem+json"


def problem(error: FreeTokenError, *, instance: str | None = None, request_id: str | None = None) -> dict[str, Any]:
    """`error` as the members of docs/control-api.md, Errors; `instance` is the path that was asked for."""
    wait_ms = None if error.retry_after_s is None else round(error.retry_after_s * 1000)
    plan = error.plan if isinstance(error, PlanError) else None
    texts = [{"id": f"{error.code.lower()}.{index}", "title": text} for index, text in enumerate(error.fixes)]
    return {
        "type": f"urn:freetoken:problem:{error.code.lower().replace('_', '-')}",
        "title": error.title,
        "status": error.http_status,
        "code": error.code,
        "detail": error.detail,
        "instance": instance,
        "request_id": request_id,
        "retryable": error.retryable,
        "retry_after_ms": wait_ms,
        "param": error.param,
        "numbers": error.numbers,
        "fixes": texts if plan is None else [fix | {"action": {"options": fix["options"]}} for fix in plan["fixes"]],
    } | ({} if plan is None else {"plan": plan})


def unexpected(error: BaseException) -> FreeTokenError:
    """A fault of ours, named by its class only: its text may hold anything."""
    return FreeTokenError(
        f"The daemon failed in a way it should not ({type(error).__name__}); its log has the details.",
        fixes=("Look into logs/daemon.log in the state folder", "Try again; if it repeats, report it"),
    )
