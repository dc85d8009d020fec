"""GET /problems: every error code there is, so that an app can translate and group them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from freetoken.core.errors import FreeTokenError, leaves
from freetoken.daemon.errors import problem
from freetoken.daemon.handlers.context import reply

_SHARED = ("type", "title", "status", "code", "retryable")


async def index(request: Request) -> Response:
    """The codes in alphabetical order, with their HTTP status and exit code."""
    return reply({"problems": [_row(kind) for _, kind in sorted(leaves().items())]})


def _row(kind: type[FreeTokenError]) -> dict[str, object]:
    shown = problem(kind(kind.title))
    own = {"exit_code": kind.exit_code, "openai_code": kind.openai_code}
    return {**{name: shown[name] for name in _SHARED}, **own}
