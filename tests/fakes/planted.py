"""What a test plants in the real daemon process: an application that records what reaches it, a flood of events.

Imported by tests.fakes.daemon, in that process.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from freetoken.daemon import app, routes
from freetoken.daemon.events import Hub
from freetoken.daemon.handlers.context import context, reply
from freetoken.wire.remote import RemoteEngine

RAN = "/planted/ran"  # GET: what reached the application
FLOOD = f"{routes.BASE}/planted/flood"


class Recorder:
    """Stands where the application stands: answers 200 to everything, after reading the body, and remembers it."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
            return
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            raise RuntimeError("the client went away")
        if scope["path"] != RAN:
            self.ran.append(f"{scope['method']} {scope['path']}")
        body = json.dumps(self.ran).encode()
        kind = b"text/html" if scope["path"].endswith(".html") else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": body})

    async def _websocket(self, scope: Any, receive: Any, send: Any) -> None:
        """Says back what it hears."""
        self.ran.append(f"WS {scope['path']}")
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message.get("text") or "bytes"})


def plant_recorder() -> None:
    """The daemon assembles everything as ever; then the recorder takes the application's place."""
    assemble = app.assemble
    app.assemble = lambda start: replace(assemble(start), app=Recorder())  # type: ignore[assignment]


def plant_flood() -> None:
    """One more route, which publishes as many events as asked for."""
    routes.ROUTES = (*routes.ROUTES, routes.Route("POST", FLOOD, routes.Scope.TOKEN, flood))
    app.ROUTES = routes.ROUTES


def plant_clock() -> None:
    """Log frames of the engine's wire (tests.fakes.clock_worker sends its clock in them) become log.line events."""
    assemble, connect = app.assemble, RemoteEngine.connect

    def assembled(start: app.Start) -> app.Daemon:
        daemon = assemble(start)

        async def connected(*arguments: Any) -> RemoteEngine:
            remote = await connect(*arguments)
            hub = daemon.context.hub
            remote.on_log = lambda log: hub.publish("log.line", {"line": log.line}, subject="engine", source="engine")
            return remote

        RemoteEngine.connect = connected  # type: ignore[method-assign, assignment]
        return daemon

    app.assemble = assembled


async def flood(request: Request) -> Response:
    """{count, pad, pause_s, background}: see _flood. Answers when all is published, or at once."""
    wanted = await request.json()
    work = asyncio.create_task(_flood(context(request).hub, wanted))
    if wanted.get("background"):
        request.app.state.flood = work
    else:
        await work
    return reply({"publishes": wanted["count"]})


async def _flood(hub: Hub, wanted: dict[str, Any]) -> None:
    """Of a hundred events one is a state, one a diagnosis, one an error, ten are progress."""
    types = {0: "engine.state_changed", 33: "diagnosis.raised", 66: "load.failed"}
    for number in range(wanted["count"]):
        type = "load.progress" if number % 10 == 5 else types.get(number % 100, "planted.tick")
        hub.publish(type, {"n": number, "pad": "x" * wanted.get("pad", 0)}, subject="planted")
        if number % 20 == 0:
            await asyncio.sleep(wanted.get("pause_s", 0))
