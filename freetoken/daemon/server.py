"""uvicorn as the daemon wants it: nothing switched on that is not used, signals left alone, WebSockets when needed.

Does not know what it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from uvicorn.config import Config
from uvicorn.server import Server

from freetoken.daemon.guard import MESSAGE
from freetoken.daemon.listener import HEARTBEAT_S

REQUESTS_S = 2  # what is in flight at the end gets this long
UNREAD_MS = 60_000  # a connection whose peer takes nothing for so long is dropped, where the OS can do that


class Quiet(Server):
    """A server that leaves signals to its owner, and wakes once a second instead of ten times."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        """No new connection; what is in flight gets REQUESTS_S."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # which renews the Date header
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: Any) -> Quiet:
    """For a socket that is bound already."""
    return Quiet(
        Config(
            app,
            http="h11",
            ws=_websocket,  # type: ignore[arg-type]  # called like the class that it stands for
            ws_max_size=MESSAGE,
            ws_ping_interval=HEARTBEAT_S,
            ws_per_message_deflate=False,  # on this machine bytes cost less than the CPU time to save them
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=REQUESTS_S,
        )
    )


def drop_unread(listening: socket.socket) -> None:
    """Connections that `listening` accepts end when their peer reads nothing any more (Linux: inherited option)."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)


def _websocket(**connection: Any) -> Any:
    """The protocol of one WebSocket; its library is imported with the first."""
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

    return WebSocketsSansIOProtocol(**connection)
