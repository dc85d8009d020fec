"""GET /engine, POST /engine/load and /engine/unload."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from freetoken.daemon.handlers.context import accepted, context, reply
from freetoken.daemon.supervisor.view import engine_view


class LoadBody(BaseModel):
    """`model` is an id, or the absolute path of a folder or .gguf file on this machine.

    A path is taken here because the token proves that the caller can read the user's files anyway; it becomes the id
    `local/<name>`. `options` are the load settings of docs/settings.md, none of which is a path or a command.
    """

    model_config = ConfigDict(extra="forbid")
    model: str = Field(min_length=1, max_length=4096)
    options: dict[str, Any] = Field(default_factory=dict)


class UnloadBody(BaseModel):
    """`drain` lets what runs finish within the deadline, `abort` ends it."""

    model_config = ConfigDict(extra="forbid")
    mode: Literal["drain", "abort"] = "drain"
    deadline_ms: int = Field(default=10_000, ge=0, le=600_000)


async def show(request: Request) -> Response:
    """All that is known of the engine and its model; unknown is null."""
    return reply(engine_view(context(request).supervisor))


async def load(request: Request, body: LoadBody) -> Response:
    """202 and the operation, or 200 and the engine where that model is loaded with these options."""
    operation = context(request).supervisor.load(body.model, body.options)
    return await show(request) if operation is None else await accepted(request, operation)


async def unload(request: Request, body: UnloadBody | None = None) -> Response:
    """202 and the operation, or 200 and the engine where there is nothing to end."""
    wanted = body or UnloadBody()
    drain_s = wanted.deadline_ms / 1000 if wanted.mode == "drain" else 0.0
    operation = context(request).supervisor.unload(drain_s=drain_s)
    return await show(request) if operation is None else await accepted(request, operation)
