"""GET /meta and /ready: what this daemon can do, and whether a model answers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from freetoken.daemon import events, listener, logbook
from freetoken.daemon.guard import CONTROL_BODY, INFERENCE_BODY, MESSAGE
from freetoken.daemon.handlers.context import LONGEST_WAIT_S, context, reply
from freetoken.daemon.state import SERVICE, EngineStatus

LIMITS = {
    "control_body_bytes": CONTROL_BODY,
    "inference_body_bytes": INFERENCE_BODY,
    "websocket_message_bytes": MESSAGE,
    "streams": events.STREAMS,
    "stream_ring_events": events.RING,
    "stream_queue_events": listener.QUEUE,
    "heartbeat_ms": round(listener.HEARTBEAT_S * 1000),
    "longest_wait_ms": round(LONGEST_WAIT_S * 1000),
    "log_page_lines": logbook.PAGE,
}


async def show(request: Request) -> Response:
    """Version, features and limits; clients test `features`, not versions."""
    here = context(request)
    return reply(
        {
            "service": SERVICE,
            "version": here.identity.version,
            "api_version": here.identity.api_version,
            "instance_id": here.identity.instance_id,
            "features": here.features,
            "limits": LIMITS,
        }
    )


async def ready(request: Request) -> Response:
    """200 when a model answers; 503 with the same body when none does."""
    engine = context(request).supervisor.state
    answers = engine.state is EngineStatus.READY
    return reply({"ready": answers, "engine": engine.state, "model": engine.model}, 200 if answers else 503)
