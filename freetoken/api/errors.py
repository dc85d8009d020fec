"""Errors in the shape that OpenAI's clients read. Pure, but for one log line for what nobody expected.

The body carries ours beside theirs: `freetoken_code`, the numbers and the fixes. Does not know routes or streams.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from freetoken.core.errors import FreeTokenError

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

# Errors that crossed the wire have a code and numbers; what to do about them is said here.
_REMEDIES: Mapping[str, tuple[str, ...]] = {
    "CONTEXT_LENGTH_EXCEEDED": ("Send a shorter prompt, or load the model with a longer context.",),
    "QUEUE_FULL": ("Try again in a moment, or raise --max-running-requests.",),
    "QUEUE_TIMEOUT": ("Try again when fewer requests run, or raise --max-running-requests.",),
    "ENGINE_DIED": ("Load the model again and repeat the request.",),
    "OUT_OF_MEMORY": ("Send a shorter prompt, or load the model with a shorter context.",),
}


def error_body(error: FreeTokenError) -> dict[str, Any]:
    """{"error": {...}}: `message` is the sentence with its remedy."""
    fixes = error.fixes or _REMEDIES.get(error.code, ())
    return {
        "error": {
            "message": _message(error.detail, fixes),
            "type": _type(error.http_status),
            "param": error.param,
            "code": error.openai_code,
            "freetoken_code": error.code,
            "numbers": error.numbers,
            "fixes": fixes,
        }
    }


def error_headers(error: FreeTokenError) -> dict[str, str]:
    """Retry-After in whole seconds where trying again can help."""
    if error.http_status not in (429, 503):
        return {}
    given = error.retry_after_s if error.retry_after_s is not None else error.numbers.get("retry_after_s", 1)
    seconds = given if isinstance(given, int | float) else 1
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def as_known(error: Exception, request_id: str) -> FreeTokenError:
    """`error` itself if it is of our tree; else it is logged, and the caller gets a reference and no details."""
    if isinstance(error, FreeTokenError):
        return error
    logger.error("request %s failed", request_id, exc_info=error)
    return FreeTokenError(
        f"Something went wrong inside FreeToken; the log has the details under {request_id}.",
        fixes=("Report it with those log lines.",),
    )


def _type(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def _message(detail: str, fixes: tuple[str, ...]) -> str:
    """One text for people: what is wrong, then what to do. A fix without a full stop is a command."""
    remedies = [fix if fix.endswith(".") else f"Run `{fix}`." for fix in fixes]
    return " ".join([detail.rstrip(". ") + ".", *remedies])
