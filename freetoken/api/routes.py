"""The data API's routes in one table, and the router the daemon mounts.

Every error under /v1 has OpenAI's shape, also for paths and methods that are not in the table. Does not know who may
call (the daemon's guard) nor how large a body may be (likewise).
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route as StarletteRoute
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from freetoken.api import openai_chat, openai_completions
from freetoken.api.errors import as_known
from freetoken.api.host import ModelHost
from freetoken.api.model_list import model_list, one_model
from freetoken.api.pipeline import Ask, Limits, answer
from freetoken.api.reply import Reply, StreamReply, WholeReply, Writer, error_reply, json_reply
from freetoken.core.errors import MethodNotAllowed, RouteNotFound


@dataclass(frozen=True, slots=True)
class Call:
    """One request at the door."""

    request: Request
    id: str  # also in the x-request-id header and in the answer's own id
    host: ModelHost
    limits: Limits


Handler = Callable[[Call], Awaitable[ASGIApp]]
Parse = Callable[[bytes, str], tuple[Ask, Writer, bool]]
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    handler: Handler


async def _models(call: Call) -> ASGIApp:
    return json_reply(model_list(call.host.listing()))


async def _model(call: Call) -> ASGIApp:
    return json_reply(one_model(call.host.listing(), call.request.path_params["id"]))


def _completion(parse: Parse) -> Handler:
    async def handle(call: Call) -> ASGIApp:
        ask, writer, streams = parse(await call.request.body(), call.id)
        reply: type[Reply] = StreamReply if streams else WholeReply
        return reply(answer(call.host, ask, call.limits), writer, call.id, call.limits.stalled_client_s)

    return handle


ROUTES: tuple[Route, ...] = (
    Route("GET", "/v1/models", _models),
    Route("GET", "/v1/models/{id:path}", _model),
    Route("POST", "/v1/chat/completions", _completion(openai_chat.parse)),
    Route("POST", "/v1/completions", _completion(openai_completions.parse)),
)


async def _unknown(call: Call) -> ASGIApp:
    """Whatever else is asked of /v1: never a 200."""
    path, method = call.request.url.path, call.request.method
    allowed = sorted({route.method for route in ROUTES if compile_path(route.path)[0].match(path)})
    if not allowed:
        known = ", ".join(route.path for route in ROUTES)
        raise RouteNotFound(f"{method} {path} does not exist; there is {known}.")
    raise MethodNotAllowed(f"{path} takes {' or '.join(allowed)}, not {method}.")


class _Endpoint:
    """A handler as an ASGI application. What it raises is told to the client."""

    def __init__(self, handler: Handler, host: ModelHost, limits: Limits) -> None:
        self._handler = handler
        self._host = host
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(Request(scope, receive), uuid.uuid4().hex, self._host, self._limits)
        try:
            reply = await self._handler(call)
        except ClientDisconnect:
            return  # gone before its question was whole
        except Exception as error:  # noqa: BLE001 - the client is told, and what is unknown is logged
            reply = error_reply(as_known(error, call.id), call.id)
        await reply(scope, receive, send)


def v1_router(host: ModelHost, limits: Limits | None = None) -> APIRouter:
    """All of /v1 over `host`. To be included without a prefix."""
    router = APIRouter()
    rest = [Route(method, "/v1/{rest:path}", _unknown) for method in _METHODS]
    for route in (*ROUTES, *rest):
        endpoint = _Endpoint(route.handler, host, limits or Limits())
        router.routes.append(StarletteRoute(route.path, endpoint, methods=[route.method]))
    return router
